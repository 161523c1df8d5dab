"""Attention in plain PyTorch, one block of queries after the other, so that all Tq x Tk weights are never in memory."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

QUERY_BLOCK = 128  # queries a block; the fastest of 64, 128 and 256 on a CPU
LONGEST_COMPILED = 8192  # queries; the compiler unrolls a loop over blocks, and would take hours for 65,536


def in_query_blocks(attend_block: Callable, q: Tensor, recompute: bool) -> Tensor:
    """Return the outputs of all queries, (B, H, Tq, D), from q (B, H, Tq, D).

    attend_block(queries, start, stop) returns the outputs of queries start..stop-1. recompute: the backward pass calls
    it again, so that no attention weights are stored.
    """
    loop = uncompiled_loop if q.shape[2] > LONGEST_COMPILED else loop_over_blocks
    return loop(attend_block, q, recompute and torch.is_grad_enabled())


def loop_over_blocks(attend_block: Callable, q: Tensor, recompute: bool) -> Tensor:
    outputs, stop = [], 0
    for queries in q.split(QUERY_BLOCK, dim=2):
        start, stop = stop, stop + queries.shape[2]
        if recompute:
            outputs.append(checkpoint(attend_block, queries, start, stop, use_reentrant=False))
        else:
            outputs.append(attend_block(queries, start, stop))
    return torch.cat(outputs, dim=2)


uncompiled_loop = torch.compiler.disable(loop_over_blocks)

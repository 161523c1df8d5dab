"""FlexAttention, compiled: methods that change the score, on CUDA where our kernel cannot run.

On a CPU it has no gradients, and it always is compiled: its eager form computes all pairs of queries and keys.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from model.backends.base import Call
from model.methods.base import Method, ScoreChange

BLOCK = 128  # queries and keys of a block of the mask


def find_problem(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    if method.replacement is not None:
        return f"{method.name} is not a softmax over changed scores, and FlexAttention computes nothing else"
    if device.type == "cuda" and not find_spec("triton"):
        return "it is compiled by Triton, which is not installed"
    return None


def prepare(score_change: ScoreChange | None, call: Call, earlier: dict | None = None) -> dict:
    """Return the arguments score_mod and block_mask of flex_attention."""
    if earlier:
        block_mask = earlier["block_mask"]
    else:
        block_mask = causal_block_mask(call.query_length, call.key_length, call.q_offset, call.device)
    return dict(score_mod=make_score_mod(score_change, call), block_mask=block_mask)


def make_score_mod(score_change: ScoreChange | None, call: Call) -> Callable | None:
    """Return a_t S + m_t as FlexAttention asks for it; None for S itself."""
    if score_change is None:
        return None
    q_offset = call.q_offset
    first_head = 0 if call.context is None else call.context.rank() * call.num_heads // call.context.size()

    def score_mod(score, batch, head, q_index, kv_index):
        # Clamped: diagonal tiles are evaluated above the diagonal too, where a NaN would survive in the gradient.
        distance = (q_index + q_offset - kv_index).clamp(min=0).float()
        scale, bias = score_change.coefficients(distance, head + first_head)
        return scale * score + bias

    return score_mod


def causal_block_mask(query_length: int, key_length: int, q_offset: int, device) -> BlockMask:
    """Return the causal mask, built analytically: create_block_mask would materialise queries x keys."""
    first_query = q_offset + torch.arange(0, query_length, BLOCK, device=device)  # of each block of queries
    last_query = (first_query + BLOCK).clamp(max=q_offset + query_length) - 1
    num_key_blocks = -(-key_length // BLOCK)
    seen = last_query // BLOCK + 1  # blocks with any visible key; they come first
    full = ((first_query + 1) // BLOCK).clamp(max=seen)  # blocks that every query of the block sees whole
    index = torch.arange(num_key_blocks, device=device).expand(len(first_query), -1)
    partial_index = (index + full.unsqueeze(-1)) % num_key_blocks  # the partial ones, first in their list
    counts_and_indices = (seen - full, partial_index, full, index)
    return BlockMask.from_kv_blocks(
        *(x[None, None].to(torch.int32).contiguous() for x in counts_and_indices),  # (1, 1, ...)
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, q_index, kv_index: q_index + q_offset >= kv_index,
        seq_lengths=(query_length, key_length),
    )


def run(q: Tensor, k: Tensor, v: Tensor, *, q_offset: int = 0, prepared: dict) -> Tensor:
    if q.device.type == "cpu" and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("FlexAttention has no backward pass on a CPU: use attention_backend auto or blocks")
    if torch.compiler.is_compiling() and q.device.type != "cpu":  # the whole model is being compiled
        return flex_attention(q, k, v, **prepared)
    return run_alone(q, k, v, prepared)


# Never traced into a larger graph: there, torch 2.13's CPU kernel reads q, k, v that the same graph computes with wrong
# strides, and returns wrong numbers without a word (tests/test_attention.py looks whether it still does).
@torch.compiler.disable
def run_alone(q: Tensor, k: Tensor, v: Tensor, prepared: dict) -> Tensor:
    if q.device.type == "cpu":  # where flex refuses what requires a gradient even when none is computed
        q, k, v = q.detach(), k.detach(), v.detach()
    return compiled_flex(q, k, v, **prepared)


def compiled_flex(q: Tensor, k: Tensor, v: Tensor, **prepared) -> Tensor:
    if q.device.type == "cpu" and k.shape[2] < BLOCK:  # torch 2.13 reads past their end: NaN, now and then
        raise ValueError(f"FlexAttention on a CPU needs at least {BLOCK} keys, got {k.shape[2]}: use auto")
    return inductor_flex(q, k, v, **prepared)


# Never the silent L x L computation: with fullgraph, failing to compile (or doing so too often) is an error.
@functools.partial(torch.compile, dynamic=False, fullgraph=True)
def inductor_flex(*args, **kwargs):
    if not torch.compiler.is_compiling():
        raise RuntimeError("FlexAttention must be compiled, but torch.compile is switched off: use blocks or sdpa")
    return flex_attention(*args, **kwargs)

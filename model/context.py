"""Context parallelism: sequences that do not fit one GPU, split over the c ranks of a context group.

The way of DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509). Rank r holds the tokens r T/c to (r + 1) T/c - 1 of
every sequence. All but attention looks at one token at a time, and stays as it is; around attention, two all-to-alls
trade tokens for heads and back:

    to_heads: (B, H, T/c, D) -> (B, H/c, T, D)        to_tokens: (B, H/c, T, D) -> (B, H, T/c, D)

What depends on a token's position alone (rotation, query scale) is done before the first, so each method and kernel
sees whole sequences of some heads, of which it needs its own part of what differs between heads. Gradients of
parameters are those of a rank's tokens and heads: their sum over the group is that of one process.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

from errors import require


def check_context(num_heads: int, lengths: Sequence[int], size: int):
    """Raise ValueError, naming the sizes that can be used, if `size` ranks cannot split these heads and lengths."""
    parts = {f"the {num_heads} heads": num_heads} | {f"the length {n}": n for n in lengths}
    *usable, largest = [str(c) for c in range(1, num_heads + 1) if not any(n % c for n in parts.values())]
    uneven = " and ".join(name for name, n in parts.items() if size < 1 or n % size)
    sizes = f"{', '.join(usable)} or {largest}" if usable else largest
    require(not uneven, f"context_parallel {size} does not divide {uneven}: use {sizes}")


def context_bytes(batch: int, length: int, model_dim: int, size: int, itemsize: int) -> int:
    """Return the bytes that a rank hands to its all-to-alls in one forward and backward pass of one layer.

    q, k, v go and the output comes back, and the same again for their gradients: 8 vectors a token, 12 with a
    Replacement, which takes q and k unrotated too; what a method takes of x is not counted. 1 / size of the bytes are
    for the rank itself, and do not travel.
    """
    return 8 * batch * (length // size) * model_dim * itemsize


def local_shard(x: Tensor | float | None, dim: int, group: ProcessGroup | None):
    """Return this rank's part of the heads or tokens along dim; x without a group, or where one entry serves all."""
    if group is None or not isinstance(x, Tensor) or x.shape[dim] == 1:
        return x
    return x.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def to_heads(vectors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Return n tensors (B, H, T/c, D) of a rank's tokens as n tensors (B, H/c, T, D) of its heads, in one all-to-all.

    In memory the tokens come first, (T, n, B, H/c, D), where the parts of all ranks form one sequence as they arrive.
    """
    by_rank = [x.unflatten(1, (group.size(), -1)).permute(1, 3, 0, 2, 4) for x in vectors]  # (c, T/c, B, H/c, D)
    parts = AllToAll.apply(torch.stack(by_rank, dim=2), group)  # (c, T/c, n, B, H/c, D)
    return [x.permute(1, 2, 0, 3) for x in parts.flatten(0, 1).unbind(1)]


def to_tokens(y: Tensor, group: ProcessGroup) -> Tensor:
    """Return (B, H/c, T, D) of a rank's heads as (B, H, T/c, D) of its tokens; in memory (B, T/c, H, D)."""
    by_rank = y.permute(2, 0, 1, 3).unflatten(0, (group.size(), -1))  # (c, T/c, B, H/c, D)
    parts = AllToAll.apply(by_rank.contiguous(), group)
    return parts.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)


class AllToAll(torch.autograd.Function):
    """Exchanges x (c, ...), contiguous: x[s] goes to rank s of the group; in its place comes what rank s has for this.

    PyTorch's own differentiable form returns before the data are there, in a tensor that waits when an operator reads
    it; what looks into its memory otherwise does not wait.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return wait_tensor(all_to_all_single(x, None, None, group))

    @staticmethod
    def backward(ctx, dy: Tensor):
        return wait_tensor(all_to_all_single(dy.contiguous(), None, None, ctx.group)), None

"""All processes hold the same parameters. Whether they do is compared here, by a checksum of the bits."""

import functools
import platform
from collections import Counter

import torch
from torch import Tensor

from errors import exit_on_user_error
from optim.sharded import Optimizers
from runtime.processes import World, fail_together, gather

PIECE = 2**18  # elements that are multiplied at once, for the memory that the products take


@functools.cache
def odd_factors(device: torch.device) -> Tensor:
    """Return random odd numbers, (PIECE,) int64, the same in all processes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (PIECE,), generator=generator).bitwise_or_(1).to(device)


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of the tensor's bits in their order, an int64 scalar on its device.

    It is the sum of all elements, read as integers, each times an odd number of its own, modulo 2^64. Any change within
    one element is seen, as an odd number times what is not 0 is not 0. Changes of several cancel by chance alone, the
    factors being random, at most one time in 2^32 (in the two highest bits of two elements; an element of 8 bytes, in
    which these would cancel for certain, is read as two).
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    elements = tensor.detach().contiguous().flatten().view(integers)
    factors, total = odd_factors(tensor.device), torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in elements.split(PIECE):
        total = total * 0x9E3779B97F4A7C5 + (piece * factors[: len(piece)]).sum()  # odd, so that pieces have an order
    return total


def differing_ranks(optimizers: Optimizers, world: World) -> list[int]:
    """Return the ranks on which some parameter is not what it is on the others. All ranks call this.

    Of each share of the parameters there are the copies on all ranks and what its owner updates. The value that most
    of them have counts as right, so that of two ranks, too, it is known which one differs.
    """
    copies, owned = [], []
    for bucket in optimizers.all_buckets():
        full = bucket.pack([p.detach() for p in bucket.params])
        copies += [checksum(share) for share in full.split(bucket.share)]
        owned.append(checksum(bucket.shard) if bucket.divided else copies[-1])  # a parameter alone is its own share
    shares = optimizers.shares
    sums = gather(world, torch.stack(copies + owned).tolist())
    wrong = set()
    for share in range(len(copies)):
        bucket, owner = divmod(share, shares)
        votes = [(rank, sums[rank][share]) for rank in range(world.world_size)]
        votes += [(rank, sums[rank][len(copies) + bucket]) for rank in range(owner, world.world_size, shares)]
        (right, _), *_ = Counter(value for _, value in votes).most_common()
        wrong |= {rank for rank, value in votes if value != right}
    return sorted(wrong)


def require_same_parameters(optimizers: Optimizers, world: World, step: int):
    """End all processes with one line and exit code 2 where parameters differ between them. All ranks call this."""
    if world.world_size == 1:
        return
    if wrong := differing_ranks(optimizers, world):
        machines = gather(world, platform.node())
        names = " and ".join(f"rank {rank} on {machines[rank]}" for rank in wrong)
        with exit_on_user_error(), fail_together(world):
            raise ValueError(
                f"step {step}: the weights of {names} are not those of the others: bits flipped in memory or on their "
                "way there. They are in no checkpoint: --resume auto goes on from the last one, better without "
                "that machine"
            )

"""Compare the parameters of all ranks, which must be the same, by a checksum of their bits."""

import functools
import platform
from collections import Counter

import torch
from torch import Tensor

from errors import UserError
from optim.sharded import Optimizers
from runtime.processes import World, gather

PIECE = 2**18  # elements that are multiplied at once; it limits the memory for the products


@functools.cache
def odd_factors(device: torch.device) -> Tensor:
    """Return random odd numbers, (PIECE,) int64, the same in all processes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (PIECE,), generator=generator).bitwise_or_(1).to(device)


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of the tensor's bits in their order, an int64 scalar on its device.

    The checksum is the sum over all elements, read as integers, of the element times an odd random number of its
    position, modulo 2^64. A change within one element is always seen. Changes in several elements cancel with a
    probability of at most 2^-32. (Elements of 8 bytes are read as two integers, else their highest bits could cancel.)
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    elements = tensor.detach().contiguous().flatten().view(integers)
    factors, total = odd_factors(tensor.device), torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in elements.split(PIECE):
        total = (
            total * 0x9E3779B97F4A7C5 + (piece * factors[: len(piece)]).sum()
        )  # the odd factor makes the order of pieces count
    return total


def differing_ranks(optimizers: Optimizers, world: World) -> list[int]:
    """Return the ranks with a parameter that differs from the other ranks'. All ranks call this.

    Every share exists once per rank, plus the owner's working copy. The majority is right; the extra copy breaks the
    tie between two ranks.
    """
    copies, owned = [], []
    for bucket in optimizers.all_buckets():
        full = bucket.pack([p.detach() for p in bucket.params])
        copies += [checksum(share) for share in full.split(bucket.share)]
        owned.append(
            checksum(bucket.shard) if bucket.divided else copies[-1]
        )  # an undivided parameter has no working copy
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
    """Raise UserError on all ranks if parameters differ between them. All ranks call this."""
    if world.world_size == 1:
        return
    if wrong := differing_ranks(optimizers, world):
        machines = gather(world, platform.node())
        names = " and ".join(f"rank {rank} on {machines[rank]}" for rank in wrong)
        raise UserError(
            f"step {step}: the weights of {names} differ from the other ranks'. Bits flipped in memory or in transit. "
            "No checkpoint has them. Continue with --resume auto, better without that machine."
        )

"""Checks that the parameters of all ranks are the same, by a checksum of their bits."""

import platform
from collections import Counter

import torch
from torch import Tensor

from errors import UserError
from optim.sharded import Optimizers
from runtime.processes import World

INTEGERS = {2: torch.int16, 4: torch.int32}  # by element size in bytes


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the tensor's elements, read as integers: an int64 scalar on the tensor's device.

    One flipped bit always changes the sum. Changes in many elements cancel with a probability of about 2^-32.
    """
    return tensor.detach().contiguous().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def differing_ranks(optimizers: Optimizers, world: World) -> list[int]:
    """Return the ranks whose parameters differ from the majority. All ranks call this.

    Each rank has every shard. A shard's owner has a second copy, which it updates. It breaks a tie of two ranks.
    """
    # 1. Compute the checksums on this rank: of its copy of every shard, and of the shards that it updates.
    copies, updated = [], []
    for bucket in optimizers.all_buckets():
        parameters = bucket.pack([p.detach() for p in bucket.params])
        copies += [checksum(shard) for shard in parameters.split(bucket.units_per_rank)]
        updated.append(checksum(bucket.shard))
    copies_by_rank = world.gather(torch.stack(copies).tolist())
    updated_by_rank = world.gather(torch.stack(updated).tolist())

    # 2. Let the ranks vote on each shard.
    wrong = set()
    for number, votes in enumerate(zip(*copies_by_rank)):
        bucket, owner = divmod(number, world.world_size)
        votes = [*enumerate(votes), (owner, updated_by_rank[owner][bucket])]
        (right, _), *_ = Counter(value for _, value in votes).most_common()
        wrong |= {rank for rank, value in votes if value != right}
    return sorted(wrong)


def require_same_parameters(optimizers: Optimizers, world: World, step: int):
    """Raise UserError on all ranks if parameters differ between them. All ranks call this."""
    if world.world_size == 1:
        return
    if wrong := differing_ranks(optimizers, world):
        machines = world.gather(platform.node())
        names = " and ".join(f"rank {rank} on {machines[rank]}" for rank in wrong)
        raise UserError(
            f"step {step}: the weights of {names} differ from the other ranks, after a fault of memory or network. "
            "No checkpoint holds the wrong weights. Continue with --resume auto, if possible without that machine."
        )

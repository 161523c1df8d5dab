"""Bits are flipped in the memory of one of 2, 3 and 4 gloo processes. The rank is named."""

import random

import torch
import torch._dynamo  # here once, or else in every process by its optimizers
from attention_cases import CPU, half_precision
from commands import CORRUPTION, parametrize, refuses, shared
from lives import flip_bit, run_ranks
from test_sharded import Trainer, groups

from errors import UserError
from optim.sharded import Optimizers
from runtime.checkpoint import load_newest, save_checkpoint
from runtime.processes import World
from runtime.replicas import checksum, differing_ranks

WORLDS = (2, 3, 4)


def work(rank, world, trials, folder):
    """Return [ranks expected to differ, ranks found, kind of fault] by trial, and the result of newest_whole."""
    trainer, here = Trainer(rank, world), World(rank, world, CPU)
    *_, unused = parameters = [*trainer.net.parameters()]
    unused.data = unused.data.bfloat16()
    optimizers = trainer.optimizers = Optimizers(groups(trainer.net), rank, world)
    trainer.train(range(3))
    rng, found = random.Random(5), []
    for _ in range(trials):  # all ranks draw the same
        victim, place = rng.randrange(world), rng.randrange(2**30)
        kind, tensors = rng.choice([
            ("share that a rank updates", [bucket.shard for bucket in optimizers.all_buckets()]),
            ("rank's weights", parameters),
        ])
        tensor = rng.choice(tensors)
        if rank == victim:
            flip_bit(tensor, place)
        found.append(([victim], differing_ranks(optimizers, here), f"flipped bit in a {kind}, of {world} processes"))
        if rank == victim:
            flip_bit(tensor, place)
        assert differing_ranks(optimizers, here) == []
    return found, newest_whole(here, folder)


def newest_whole(world, folder):
    """Return the step that this rank goes on from when the last rank reads the newest checkpoint as damaged."""
    (folder := folder / f"read by {world.rank} of {world.world_size}").mkdir()
    for step in (1, 2):
        path = save_checkpoint(folder, step, dict(step=step))
    is_last = world.rank == world.world_size - 1
    if is_last:
        path.write_bytes(path.read_bytes()[:-9])
    path, state, damaged = load_newest(folder, world)
    if is_last:
        save_checkpoint(folder, 3, {})  # the other ranks do not see it
    with refuses(folder, error=UserError):
        load_newest(folder, world)
    return state["step"], [path.name for path in damaged]


@shared
def results(shared_path, long):
    """World size -> what each rank found."""
    return run_ranks(work, WORLDS, shared_path, 300 if long else 12, shared_path)


@CORRUPTION
@parametrize("world", WORLDS)
def test_a_flipped_bit_in_the_memory_of_one_rank_names_it_on_all(results, world, faults):
    ours, *others = [found for found, _ in results[world]]
    assert others == [ours] * (world - 1)
    for flipped, named, kind in ours:
        with faults(kind):
            assert named == flipped


@parametrize("world", WORLDS)
def test_all_ranks_go_on_from_a_checkpoint_that_all_find_whole(results, world):
    assert [newest for _, newest in results[world]] == [(1, ["step_000002.pt"])] * world


@half_precision
def test_the_checksum_sees_any_bit(dtype):
    tensor = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone().T.contiguous().T) == before
    for place in range(8 * tensor.nbytes):
        flip_bit(tensor, place)
        assert checksum(tensor) != before
        flip_bit(tensor, place)

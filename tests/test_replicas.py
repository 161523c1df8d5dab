"""Bits are flipped in the memory of one of 2, 3 and 4 gloo processes. The rank is named."""

import random
import re

import pytest
import torch
import torch._dynamo  # here once, or else in every process by its optimizers
from lives import run_ranks
from test_sharded import WORLDS, Net, groups, train

from errors import UserError
from optim.sharded import Optimizers
from runtime.checkpoint import load_newest, save_checkpoint
from runtime.processes import World
from runtime.replicas import checksum, differing_ranks

CORRUPTION = (12, "flipped bits in checkpoints and in the memory of a rank are found")


def flip(tensor, element, bit):
    integers = tensor.detach().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    bits = 8 * tensor.element_size()
    position = torch.unravel_index(torch.tensor(element), tensor.shape)
    integers[position] ^= -(2 ** (bits - 1)) if bit == bits - 1 else 1 << bit


def work(rank, world, trials, folder):
    net = Net()
    net.unused.data = net.unused.data.bfloat16()
    optimizers = Optimizers(groups(net), rank, world)
    train(net, optimizers, range(3), rank, world)
    here = World(rank, world, torch.device("cpu"))
    rng, found = random.Random(5), [([], differing_ranks(optimizers, here), "")]
    parameters, buckets = list(net.parameters()), optimizers.all_buckets()
    for _ in range(trials):  # all ranks draw the same
        victim, in_share = rng.randrange(world), rng.random() < 0.5
        tensor = rng.choice(buckets).shard if in_share else rng.choice(parameters)
        place = rng.randrange(2**30), rng.randrange(2**30)
        if rank == victim:
            where = place[0] % tensor.numel(), place[1] % (8 * tensor.element_size())
            flip(tensor, *where)
        kind = "share that a rank updates" if in_share else "rank's weights"
        found.append(([victim], differing_ranks(optimizers, here), f"flipped bit in a {kind}, of {world} processes"))
        if rank == victim:
            flip(tensor, *where)
    return [*found, ([], differing_ranks(optimizers, here), "")], newest_whole(rank, world, folder)


def newest_whole(rank, world, folder):
    """Return the step that this rank goes on from when the last rank reads the newest checkpoint as damaged."""
    (rank_folder := folder / f"read by {rank} of {world}").mkdir()
    for step in (1, 2):
        path = save_checkpoint(rank_folder, step, dict(step=step))
    if rank == world - 1:
        path.write_bytes(path.read_bytes()[:-9])
    here = World(rank, world, torch.device("cpu"))
    path, state, damaged = load_newest(rank_folder, here)
    if rank == world - 1:
        save_checkpoint(rank_folder, 3, {})  # the other ranks do not see it
    with pytest.raises(UserError, match=re.escape(str(rank_folder))):
        load_newest(rank_folder, here)
    return state["step"], [path.name for path in damaged]


@pytest.fixture(scope="module")
def results(tmp_path_factory, long):
    """World size -> what each rank found."""
    folder = tmp_path_factory.mktemp("gloo")
    return run_ranks(work, WORLDS, folder, 300 if long else 12, folder)


@pytest.mark.promise(*CORRUPTION)
@pytest.mark.parametrize("world", WORLDS)
def test_a_flipped_bit_in_the_memory_of_one_rank_names_it_on_all(results, world, faults):
    ours, *others = [found for found, _ in results[world]]
    assert all(other == ours for other in others)
    assert ours[0] == ours[-1] == ([], [], "")
    for flipped, named, kind in ours[1:-1]:
        with faults(kind):
            assert named == flipped


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_go_on_from_a_checkpoint_that_all_find_whole(results, world):
    assert [newest for _, newest in results[world]] == [(1, ["step_000002.pt"])] * world


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_sees_any_bit(dtype):
    tensor = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone().T.contiguous().T) == before
    for element in (0, 40, 76):
        for bit in range(8 * tensor.element_size()):
            flip(tensor, element, bit)
            assert checksum(tensor) != before
            flip(tensor, element, bit)

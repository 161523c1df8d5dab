"""A rank whose weights differ is named: bits flipped in the memory of a rank among 2, 3 and 4 gloo processes, which own
shares of the weights or, in groups of 2 and 1, copies of them."""

import random

import pytest
import torch
import torch._dynamo  # here once, or else in every process by its optimizers
import torch.distributed as dist
from lives import start_method
from test_sharded import Net, groups, train
from torch.multiprocessing import start_processes

from optim import sharded
from optim.sharded import Optimizers
from runtime.checkpoint import load_newest, save_checkpoint
from runtime.processes import World
from runtime.replicas import PIECE, checksum, differing_ranks

CORRUPTION = (13, "flipped bits in checkpoints and in the memory of a rank are found")
# Processes, most shares. The largest first: ranks name a group by how many they have made, and must agree.
CASES = [(4, 2), (4, 1), (3, 8), (2, 8)]


def flip(tensor, element, bit):
    integers = tensor.detach().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    bits = 8 * tensor.element_size()
    position = torch.unravel_index(torch.tensor(element), tensor.shape)
    integers[position] ^= -(2 ** (bits - 1)) if bit == bits - 1 else 1 << bit


def work(rank, world, trials):
    net = Net()
    net.unused.data = net.unused.data.bfloat16()
    optimizers = Optimizers(groups(net), rank, world)
    train(net, optimizers, range(3), rank, world)
    here = World(rank, rank, world, torch.device("cpu"))
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
    return [*found, ([], differing_ranks(optimizers, here), "")]


def newest_whole(rank, world, folder):
    """The step from which this rank would go on, when the newest checkpoint is damaged as the last rank reads it."""
    (own := folder / f"read by {rank} of {world}").mkdir()
    for step in (1, 2):
        path = save_checkpoint(own, step, dict(step=step))
    if rank == world - 1:
        path.write_bytes(path.read_bytes()[:-9])
    path, state, damaged = load_newest(own, World(rank, rank, world, torch.device("cpu")))
    return state["step"], [path.name for path in damaged]


def worker(rank, folder, trials):
    torch.set_num_threads(1)
    for world, most in CASES:
        if rank < world:
            sharded.MOST_SHARES = most
            group = f"file://{folder}/group{world}.{most}"
            dist.init_process_group("gloo", init_method=group, rank=rank, world_size=world)
            torch.save(work(rank, world, trials), folder / f"{world}.{most}.{rank}.pt")
            if most == 8:
                torch.save(newest_whole(rank, world, folder), folder / f"newest.{world}.{rank}.pt")
            dist.barrier()
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("gloo")
    trials = 300 if request.config.getoption("--long") else 12
    start_processes(worker, (folder, trials), nprocs=4, start_method=start_method())
    newest = {world: [torch.load(folder / f"newest.{world}.{rank}.pt") for rank in range(world)] for world in (2, 3)}
    ranks = {case: [torch.load(folder / f"{case[0]}.{case[1]}.{rank}.pt") for rank in range(case[0])] for case in CASES}
    return ranks | dict(newest=newest)


@pytest.mark.promise(*CORRUPTION)
@pytest.mark.parametrize("world, most", CASES)
def test_a_flipped_bit_in_the_memory_of_one_rank_names_it_on_all(found, world, most, faults):
    ours, *others = found[world, most]
    assert all(other == ours for other in others)
    assert ours[0] == ours[-1] == ([], [], "")
    for flipped, named, kind in ours[1:-1]:
        with faults(kind):
            assert named == flipped


def test_all_ranks_go_on_from_a_checkpoint_that_all_find_whole(found):
    for world, results in found["newest"].items():
        assert results == [(1, ["step_000002.pt"])] * world


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_the_checksum_sees_any_bit_and_the_order(dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(2 * PIECE + 77, generator=generator).mul(50).to(dtype)
    tensor[[0, 1, PIECE, 2 * PIECE]] = torch.tensor([1, 2, 3, 4], dtype=dtype)
    before, size = checksum(tensor), tensor.element_size()
    assert checksum(tensor.clone().view(-1, 1)) == before
    data = tensor.view(torch.uint8)
    for place in (0, 5, PIECE * size - 1, PIECE * size, 2 * PIECE * size + 3, len(data) - 1):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert checksum(tensor) != before
            data[place] ^= 1 << bit
    for other in (1, PIECE, 2 * PIECE):  # elements, or pieces, change places
        swapped = tensor.clone()
        swapped[0], swapped[other] = tensor[other], tensor[0]
        assert checksum(swapped) != before
    swapped = torch.cat([tensor[PIECE : 2 * PIECE], tensor[:PIECE], tensor[2 * PIECE :]])
    assert checksum(swapped) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_highest_bits_of_two_elements_do_not_cancel(dtype):
    """As they would in any sum of 64-bit words times odd numbers."""
    tensor = torch.ones(100, dtype=dtype)
    sums = {checksum(tensor).item()}
    for other in range(1, 100):
        changed = tensor.clone()
        changed[[0, other]] *= -1
        sums.add(checksum(changed).item())
    assert len(sums) == 100

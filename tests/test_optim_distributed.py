"""Muon on 1, 2 and 3 gloo processes: the same parameters everywhere, the work divided."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from test_optim import Orthogonalised, parameters_of, random_tensors, relative_error, train

from optim.muon import Muon

# 7 matrices of (24, 24), 4 of (16, 40), 1 of (5, 9): neither 2 nor 3 divides them all.
SHAPES = [(3, 24, 24), (24, 24), (16, 40), (40, 16), (3, 24, 24), (9, 5), (2, 40, 16)]
START = random_tensors(SHAPES, seed=20)


def run(dtype):
    """Four steps, with a checkpoint after two; the work is counted in the third."""
    params = parameters_of(START)
    optimizer = Muon(params, dtype=dtype)
    train(optimizer, params, range(2))
    checkpoint = copy.deepcopy({"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()})
    with Orthogonalised() as orthogonalised:
        train(optimizer, params, range(2, 3))
    train(optimizer, params, range(3, 4))
    return {"checkpoint": checkpoint, "params": [p.detach() for p in params], "batches": orthogonalised.batches}


def resume(checkpoint):
    params = parameters_of(checkpoint["params"])
    optimizer = Muon(params, dtype=torch.float32)
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(optimizer, params, range(2, 4))
    return [p.detach() for p in params]


def worker(rank, folder):
    """Rank `rank` of a group of 3, then of a group of 2 that also resumes what the first has saved."""
    torch.set_num_threads(1)
    for world in (3, 2):
        if rank < world:
            dist.init_process_group("gloo", init_method=f"file://{folder}/group{world}", rank=rank, world_size=world)
            results = {"float32": run(torch.float32), "bfloat16": run(torch.bfloat16)}
            if world == 2:
                results["resumed"] = resume(torch.load(folder / "3.0.pt")["float32"]["checkpoint"])
            torch.save(results, folder / f"{world}.{rank}.pt")
            dist.barrier()
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """World size -> results of each rank."""
    folder = tmp_path_factory.mktemp("gloo")
    torch.multiprocessing.spawn(worker, (folder,), nprocs=3)
    return {world: [torch.load(folder / f"{world}.{rank}.pt") for rank in range(world)] for world in (2, 3)}


@pytest.fixture(scope="module")
def alone():
    return run(torch.float32)


def assert_same_training(got, want):
    for p, q, p0 in zip(got, want, START):
        assert (p - q).norm() <= 1e-6 * q.norm(), tuple(p.shape)
        assert relative_error(p, q, p0) < 5e-5, tuple(p.shape)  # as against the float64 reference


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_ranks_end_with_the_same_bits(ranks, world, dtype):
    for other in ranks[world][1:]:
        for p, q in zip(ranks[world][0][dtype]["params"], other[dtype]["params"]):
            assert torch.equal(p, q)


@pytest.mark.parametrize("world", [2, 3])
def test_several_processes_train_as_one(ranks, alone, world):
    assert_same_training(ranks[world][0]["float32"]["params"], alone["params"])


def test_each_rank_orthogonalises_its_share(ranks, alone):
    assert alone["batches"] == [(7, 24, 24), (4, 16, 40), (1, 5, 9)]
    assert [r["float32"]["batches"] for r in ranks[2]] == [[(4, 24, 24), (2, 16, 40), (1, 5, 9)]] * 2
    assert [r["float32"]["batches"] for r in ranks[3]] == [[(3, 24, 24), (2, 16, 40), (1, 5, 9)]] * 3


def test_checkpoint_of_three_processes_resumes_on_two(ranks, alone):
    assert_same_training(ranks[2][0]["resumed"], alone["params"])
    assert all(torch.equal(p, q) for p, q in zip(ranks[2][0]["resumed"], ranks[2][1]["resumed"]))


def test_checkpoint_of_three_processes_resumes_on_one(ranks, alone):
    assert_same_training(resume(ranks[3][0]["float32"]["checkpoint"]), alone["params"])

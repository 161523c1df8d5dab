"""The optimizers of a run on 1, 2, 3 and 4 gloo processes.

Every world size trains the same parameters. The ranks share work and state. The bytes that each rank sends are counted.
"""

import functools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from commands import shared
from lives import run_ranks
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from optim import sharded
from optim.muon import Muon, as_matrices, shape_scale
from optim.sharded import Group, Optimizers

SLOW_FIXTURES = ("ranks",)

STEPS = 6
assert_same = functools.partial(assert_close, rtol=0, atol=0)
assert_near = functools.partial(assert_close, rtol=1e-5, atol=1e-5)


class Net(nn.Module):
    """Banks, matrices, and for Adam sizes that no world size divides; a layer used twice; an unused parameter."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def make(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator) * shape[-1] ** -0.5)

        self.embedding, self.head = make(13, 24), make(13, 24)
        self.banks = nn.ParameterList([make(3, 24, 24), make(3, 24, 24)])
        self.projections = nn.ParameterList([make(24, 24) for _ in range(3)])
        self.up, self.down = make(40, 24), make(24, 40)
        self.scales = nn.ParameterList([make(5), make(5), make(5), make(7)])  # the last is unused

    def forward(self, tokens, targets):
        x = self.embedding[tokens]
        for matrix in (*torch.cat([*self.banks]), *self.projections, self.projections[0]):
            x = x + torch.tanh(F.linear(x, matrix))
        x = x + F.linear(F.linear(x, self.up).relu().square(), self.down)
        for scale in self.scales[:3]:
            x = x * (1 + scale.mean())
        return F.cross_entropy(F.linear(F.rms_norm(x, (24,)), self.head), targets)


def groups(net):
    adam = functools.partial(torch.optim.Adam, eps=1e-3, fused=True)  # a small eps enlarges rounding errors
    matrices = [*net.banks, *net.projections, net.up, net.down]
    return dict(
        head=Group([net.head], adam, 0.02),
        matrices=Group(matrices, Muon, 0.02, as_matrices, shape_scale),
        scalars=Group([*net.scales], adam, 0.01),
        embedding=Group([net.embedding], adam, 0.1),
    )


class Trainer:
    """A net and its optimizers on a rank."""

    def __init__(self, rank=0, world=1, saved=None):
        self.rank, self.world, self.net = rank, world, Net()
        if saved:
            self.net.load_state_dict(saved["net"])
        self.optimizers = Optimizers(groups(self.net), rank, world)
        if saved:
            self.optimizers.load_state_dict(saved["optimizers"])

    def train(self, steps, bad=None):
        """Train with two micro-batches a step and rank. Return losses and squared gradient norms, (steps, 2).

        bad: pair (step, rank) at which the loss is NaN.
        """
        numbers = []
        for step in steps:
            loss = torch.tensor(torch.nan if bad == (step, self.rank) else 0.0)
            mine = batch(step).chunk(self.world, dim=1)[self.rank]
            for tokens, targets in mine.chunk(2, dim=1):
                part = self.net(tokens, targets) / (2 * self.world)
                part.backward()
                loss += part.detach()
            loss, norm = self.optimizers.reduce(loss)
            pair = torch.stack([loss, norm.square()])
            self.optimizers.step(1 - step / 10, pair.isfinite().all())
            numbers.append(pair)
        return torch.stack(numbers)

    def state(self):
        state = dict(net=dict(self.net.named_parameters()), optimizers=self.optimizers.state_dict())
        return tree_map(lambda x: x.detach().clone(), state)

    def count_bytes(self):
        """Return the bytes that this rank hands in a step to all-to-all, all-gather and all-reduce."""
        with (
            mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as to_all,
            mock.patch.object(sharded, "all_gather", wraps=sharded.all_gather) as gather,
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce,
        ):
            self.train([STEPS])
        sent = [[call.args[1] for call in spy.mock_calls] for spy in (to_all, gather)]
        sent.append([call.args[0] for call in reduce.mock_calls])
        return [sum(tensor.nbytes for tensor in tensors) for tensors in sent]


def batch(step):
    """Return inputs and targets, (2, 24), which 1 to 4 ranks divide into two micro-batches each."""
    return torch.randint(13, (2, 24), generator=torch.Generator().manual_seed(step))


def train_and_measure(rank, world, folder=None):
    trainer = Trainer(rank, world)
    results = {"first": trainer.train(range(3)), "checkpoint": trainer.state()}
    results |= {"last": trainer.train(range(3, STEPS)), "end": trainer.state()}
    buckets = trainer.optimizers.buckets.items()
    results["shards"] = {name: sorted(tuple(bucket.shard.shape) for bucket in group) for name, group in buckets}
    results["bytes"] = sum(bucket.shard.nbytes for bucket in trainer.optimizers.all_buckets())
    results |= {"sent": trainer.count_bytes(), "before": trainer.state()}
    results |= {"bad": trainer.train(range(2), bad=(0, 1)), "after": trainer.state()}
    if world == 2:  # three ranks have made their checkpoint before
        saved = torch.load(folder / "3.0.pt")["checkpoint"]
        results["resumed"] = Trainer(rank, world, saved).train(range(3, STEPS))
    return results


@shared
def ranks(shared_path):
    """World size -> results of each rank."""
    return run_ranks(train_and_measure, (2, 3, 4), shared_path, shared_path)


@pytest.fixture(params=[2, 3, 4])
def results(ranks, request):
    """The results of each rank of a world."""
    return ranks[request.param]


@shared
def alone():
    return train_and_measure(0, 1)


def test_one_process_is_the_plain_optimizers(alone):
    net = Net()
    optimizers = {name: group.make(group.params) for name, group in groups(net).items()}
    for step in range(STEPS):
        for tokens, targets in batch(step).chunk(2, dim=1):
            (net(tokens, targets) / 2).backward()
        for name, optimizer in optimizers.items():
            lr = groups(net)[name].peak_lr * (1 - step / 10)
            optimizer.param_groups[0]["lr"] = torch.tensor(lr) if name == "matrices" else lr
            optimizer.step()
            optimizer.zero_grad()
    assert_same(dict(net.named_parameters()), alone["end"]["net"])


def test_several_processes_train_as_one_and_end_with_the_same_bits(results, alone):
    # The order of float32 sums differs. Newton-Schulz multiplies the rounding of small singular values by up to 485.
    for part in ("first", "last"):
        assert_near(results[0][part], alone[part])
    assert_close(results[0]["end"]["net"], alone["end"]["net"], rtol=0, atol=2e-4)
    for rank in results:
        assert_same(rank["end"]["net"], results[0]["end"]["net"])


def test_each_rank_has_its_share_and_sends_the_bytes_of_zero_2(results):
    world = len(results)
    matrices, numbers, scalars = (math.ceil(units / world) for units in (9, 13 * 24, 22))
    for rank in results:
        assert rank["shards"] == dict(
            matrices=sorted([(matrices, 24, 24), (1, 24, 40)]),  # the second: up and down; one is transposed
            embedding=[(numbers,)],
            head=[(numbers,)],
            scalars=[(scalars,)],
        )
        gathered = rank["bytes"]
        assert rank["sent"] == [gathered * world, gathered, 8]


def test_a_loss_that_is_not_finite_on_one_rank_changes_nothing_on_any_then_or_later(results):
    for rank in results:
        assert rank["bad"][0].isnan().any() and rank["bad"][1].isfinite().all()
        assert_same(rank["before"], rank["after"])


def test_checkpoint_equals_the_checkpoint_of_one_process(results, alone):
    assert_close(results[0]["checkpoint"], alone["checkpoint"], rtol=1e-3, atol=1e-4)


def test_checkpoint_of_three_processes_resumes_on_two_and_on_one(ranks, alone):
    alone_again = Trainer(saved=ranks[3][0]["checkpoint"]).train(range(3, STEPS))
    for numbers in (alone_again, *(rank["resumed"] for rank in ranks[2])):
        assert_near(numbers, alone["last"])


def test_the_norm_of_bfloat16_gradients_is_a_float32_number():
    p = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 0.001)
    exact = p.grad.double().square().sum().item()
    optimizers = Optimizers(dict(only=Group([p], torch.optim.Adam, 0.1)))
    assert optimizers.reduce_gradients().item() == pytest.approx(exact, rel=1e-5)

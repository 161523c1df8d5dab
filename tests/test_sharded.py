"""The optimizers of a run on 1, 2, 3 and 4 gloo processes.

Every world size trains the same parameters. The ranks share work and state. The bytes that each rank sends are counted.
"""

import collections

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lives import run_ranks
from torch import nn

from optim.muon import Muon, as_matrices, shape_scale
from optim.sharded import Group, Optimizers

SLOW_FIXTURES = ("ranks",)

WORLDS = (2, 3, 4)
STEPS = 6


class Net(nn.Module):
    """Banks, matrices, and for Adam sizes that no world size divides; a layer used twice; an unused parameter."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        def make(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype) * shape[-1] ** -0.5)
        self.embedding = make(13, 24)
        self.banks = nn.ParameterList([make(3, 24, 24) for _ in range(2)])
        self.projections = nn.ParameterList([make(24, 24) for _ in range(3)])
        self.up, self.down = make(40, 24), make(24, 40)
        self.scales = nn.ParameterList([make(5), make(5), make(5)])
        self.unused = make(7)
        self.head = make(13, 24)

    def forward(self, tokens, targets):
        x = self.embedding[tokens]
        for bank in self.banks:
            x = x + F.linear(torch.tanh(F.linear(x, bank[0])), bank[1]) + F.linear(x, bank[2])
        for projection in (*self.projections, self.projections[0]):
            x = x + torch.tanh(F.linear(x, projection))
        x = x + F.linear(F.linear(x, self.up).relu().square(), self.down)
        for scale in self.scales:
            x = x * (1 + scale.mean())
        return F.cross_entropy(F.linear(F.rms_norm(x, (24,)), self.head), targets)


def groups(net, dtype=torch.float32):
    matrices = [*net.banks, *net.projections, net.up, net.down]
    def adam(params):
        return torch.optim.Adam(params, eps=1e-3, fused=True)  # a small eps enlarges rounding errors
    return dict(
        head=Group([net.head], adam, 0.02),
        matrices=Group(matrices, lambda params: Muon(params, dtype=dtype), 0.02, as_matrices, shape_scale),
        scalars=Group([*net.scales, net.unused], adam, 0.01),
        embedding=Group([net.embedding], adam, 0.1),
    )


def batch(step):
    return torch.randint(13, (2, 24), generator=torch.Generator().manual_seed(step))  # 2 micro-batches on 1 to 4 ranks


def train(net, optimizers, steps, rank=0, world=1, poison=None):
    """Train with two micro-batches a step and rank. Return losses and squared gradient norms, (steps, 2)."""
    numbers = []
    for step in steps:
        tokens, targets = (part.chunk(world)[rank].chunk(2) for part in batch(step))
        loss = torch.zeros(())
        for i in range(2):
            part = net(tokens[i], targets[i]) / (2 * world)
            part.backward()
            loss += part.detach()
        if poison == (step, rank):
            loss += torch.nan
        pair = torch.stack([loss, optimizers.reduce_gradients()])
        if world > 1:
            dist.all_reduce(pair)
        optimizers.step(1 - step / 10, pair.isfinite().all())
        numbers.append(pair)
    return torch.stack(numbers)


def snapshot(net, optimizers):
    def copy(x):
        return {k: copy(v) for k, v in x.items()} if isinstance(x, dict) else x.detach().clone()
    return copy(dict(net=dict(net.named_parameters()), optimizers=optimizers.state_dict()))


def restore(saved, rank=0, world=1):
    net = Net()
    net.load_state_dict(saved["net"])
    optimizers = Optimizers(groups(net), rank, world)
    optimizers.load_state_dict(saved["optimizers"])
    return net, optimizers


def count_bytes(patch):
    """Count the bytes that this rank hands to each collective from now on."""
    sent = collections.Counter()

    def counted(name, function, argument):
        def call(*args, **kwargs):
            sent[name] += args[argument].nbytes
            return function(*args, **kwargs)

        return call

    for name, argument in dict(all_to_all_single=1, all_gather_single=1, all_reduce=0).items():
        patch.setattr(dist, name, counted(name, getattr(dist, name), argument))
    return sent


def train_and_measure(rank, world, folder=None):
    results = {}
    net = Net()
    optimizers = Optimizers(groups(net), rank, world)
    results["numbers"] = train(net, optimizers, range(STEPS // 2), rank, world)
    results["checkpoint"] = snapshot(net, optimizers)
    results["numbers"] = torch.cat([results["numbers"], train(net, optimizers, range(STEPS // 2, STEPS), rank, world)])
    results["net"] = {name: p.detach().clone() for name, p in net.named_parameters()}
    results["shards"] = {k: [tuple(b.shard.shape) for b in v] for k, v in optimizers.buckets.items()}
    with pytest.MonkeyPatch.context() as patch:
        results["sent"] = count_bytes(patch)
        train(net, optimizers, [STEPS], rank, world)
    results["sent"], results["expected"] = dict(results["sent"]), bytes_a_step(optimizers, world)
    before = snapshot(net, optimizers)
    results["poisoned"] = train(net, optimizers, range(2), rank, world, poison=(0, 1))
    results["before"], results["after"] = before, snapshot(net, optimizers)
    if world == 2:  # three ranks have made their checkpoint before
        net, optimizers = restore(torch.load(folder / "3.0.pt")["checkpoint"], rank, world)
        results["resumed"] = train(net, optimizers, range(STEPS // 2, STEPS), rank, world)
    return results


def bytes_a_step(optimizers, world):
    """Return the bytes that a rank hands to each collective in a step of ZeRO's second stage."""
    mine = sum(bucket.shard.nbytes for bucket in optimizers.all_buckets())
    return dict(all_to_all_single=mine * world, all_gather_single=mine, all_reduce=8)  # loss and squared norm


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """World size -> results of each rank."""
    folder = tmp_path_factory.mktemp("gloo")
    return run_ranks(train_and_measure, WORLDS, folder, folder)


@pytest.fixture(scope="module")
def alone():
    return train_and_measure(0, 1)


def test_one_process_is_the_plain_optimizers(alone):
    net = Net()
    optimizers = {name: group.make(group.params) for name, group in groups(net).items()}
    for step in range(STEPS):
        tokens, targets = batch(step)
        for half in range(2):
            (net(tokens.chunk(2)[half], targets.chunk(2)[half]) / 2).backward()
        for name, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                lr = groups(net)[name].peak_lr * (1 - step / 10)
                group["lr"] = torch.tensor(lr) if isinstance(optimizer, Muon) else lr
            optimizer.step()
            optimizer.zero_grad()
    for name, p in net.named_parameters():
        assert torch.equal(p, alone["net"][name]), name


@pytest.mark.parametrize("world", WORLDS)
def test_several_processes_train_as_one(ranks, alone, world):
    # The order of float32 sums differs. Newton-Schulz multiplies the rounding of small singular values by up to 485.
    assert torch.allclose(ranks[world][0]["numbers"], alone["numbers"], rtol=1e-5, atol=1e-5)
    for name, p in alone["net"].items():
        assert torch.allclose(ranks[world][0]["net"][name], p, rtol=0, atol=2e-4), name


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_end_with_the_same_bits(ranks, world):
    for other in ranks[world][1:]:
        assert all(torch.equal(p, other["net"][name]) for name, p in ranks[world][0]["net"].items())


@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_has_its_share(ranks, world):
    matrices, numbers = 2 * 3 + 3, 13 * 24
    for rank in ranks[world]:
        shards = rank["shards"]
        expected = [(-(-matrices // world), 24, 24), (1, 24, 40)]  # the last: up and down; one is transposed
        assert sorted(shards["matrices"]) == sorted(expected)
        assert shards["embedding"] == shards["head"] == [(-(-numbers // world),)]
        assert shards["scalars"] == [(-(-22 // world),)]


@pytest.mark.parametrize("world", WORLDS)
def test_bytes_sent_are_the_bytes_of_zero_2(ranks, world):
    assert all(rank["sent"] == rank["expected"] for rank in ranks[world])


@pytest.mark.parametrize("world", WORLDS)
def test_a_loss_that_is_not_finite_on_one_rank_changes_nothing_on_any_then_or_later(ranks, world):
    for rank in ranks[world]:
        assert rank["poisoned"][0].isnan().any() and rank["poisoned"][1].isfinite().all()
        assert flat(rank["before"]).keys() == flat(rank["after"]).keys()
        assert all(torch.equal(x, flat(rank["after"])[key]) for key, x in flat(rank["before"]).items())


@pytest.mark.parametrize("world", WORLDS)
def test_checkpoint_equals_the_checkpoint_of_one_process(ranks, alone, world):
    ours, expected = flat(ranks[world][0]["checkpoint"]), flat(alone["checkpoint"])
    assert ours.keys() == expected.keys() | {  # several ranks give the unused parameter a state, from a gradient of 0
        ("optimizers", "scalars", "state", 3, k) for k in ("exp_avg", "exp_avg_sq", "step")
    }
    for key, x in expected.items():
        assert ours[key].shape == x.shape and torch.allclose(ours[key], x, rtol=1e-3, atol=1e-4), key


def test_checkpoint_of_three_processes_resumes_on_two(ranks, alone):
    for rank in ranks[2]:
        assert torch.allclose(rank["resumed"], alone["numbers"][STEPS // 2 :], rtol=1e-5, atol=1e-5)


def test_checkpoint_of_three_processes_resumes_on_one(ranks, alone):
    net, optimizers = restore(ranks[3][0]["checkpoint"])
    numbers = train(net, optimizers, range(STEPS // 2, STEPS))
    assert torch.allclose(numbers, alone["numbers"][STEPS // 2 :], rtol=1e-5, atol=1e-5)


def test_checkpoint_of_one_process_resumes_on_two(alone):
    saved = alone["checkpoint"]
    state = saved["optimizers"]["scalars"]["state"]
    assert sorted(state) == [0, 1, 2, 3] and state[3]["step"] == state[0]["step"]  # the last one has no gradients
    for key in ("exp_avg", "exp_avg_sq"):
        shards = []
        for rank in (0, 1):
            _, optimizers = restore(saved, rank, 2)
            (bucket,) = optimizers.buckets["scalars"]
            shards.append(optimizers.optimizers["scalars"].state[bucket.shard][key])
        assert torch.equal(torch.cat(shards), torch.cat([state[i][key] for i in (3, 2, 1, 0)]))


def test_the_norm_of_bfloat16_gradients_is_a_float32_number():
    p = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 0.001)
    optimizers = Optimizers(dict(only=Group([p], torch.optim.Adam, 0.1)))
    assert optimizers.reduce_gradients().item() == pytest.approx(p.grad.double().square().sum().item(), rel=1e-5)


def test_resumed_on_one_process_bit_for_bit(alone):
    net, optimizers = restore(alone["checkpoint"])
    assert torch.equal(train(net, optimizers, range(STEPS // 2, STEPS)), alone["numbers"][STEPS // 2 :])
    assert all(torch.equal(p, alone["net"][name]) for name, p in net.named_parameters())


def flat(tree, path=()):
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: x for name, branch in tree.items() for key, x in flat(branch, (*path, name)).items()}

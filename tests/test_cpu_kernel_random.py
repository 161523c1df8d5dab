"""The kernels for CPUs on random calls: shapes, offsets, strides, windows, sinks, biases, threads (scripts/sanitize.py
runs them with sanitizers of the compiler, 100 of each)."""

import random

import pytest
import torch
from test_cpu_kernel import Given, both, check, pytestmark  # noqa: F401, as it marks this file too
from test_methods import random as normal
from torch.testing import assert_close

from model.attention import cpu
from model.methods import Method
from model.methods.alibi import ALiBi
from model.methods.scale_invariant import ScaleInvariant
from model.methods.sink import LearnedSink
from model.methods.window import SlidingWindow

LAYOUTS = [
    lambda x: x,
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    lambda x: torch.cat([x, x], dim=3)[..., : x.shape[3]],
    lambda x: torch.cat([x, x], dim=2)[:, :, x.shape[2] :],
    lambda x: x[:, :1].expand_as(x),
]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_method(draw, dtype):
    head_dim = draw.choice([1, 2, 3, 8, 16, 20, 33, 64, 65, 128])
    head_dim += head_dim % 2 if dtype == torch.bfloat16 else 0
    shape = dict(num_heads=draw.randint(1, 5), head_dim=head_dim, train_length=64)
    changes = [], [ALiBi(**shape)], [ScaleInvariant(**shape, learn_tau=draw.random() < 0.5)]
    mechanisms = draw.choice(changes) + [Given()] * draw.randint(0, 1)
    mechanisms += [LearnedSink(**shape, sink_init=draw.uniform(-3, 3))] * draw.randint(0, 1)
    window = draw.choice([1, 2, 31, 64, draw.randint(1, 700)])
    mechanisms += [SlidingWindow(**shape, window=window)] * draw.randint(0, 1)
    return Method("random", **shape, mechanisms=mechanisms)


@both
def test_random_calls_are_the_plain_form(dtype, long, threads):
    for seed in range(100 if long else 6):
        draw = random.Random(seed)
        method, batch = random_method(draw, dtype), draw.randint(1, 3)
        length = max(1, draw.choice([draw.randint(1, 700), 64 * draw.randint(0, 10) + draw.randint(-1, 1)]))
        queries = draw.choice([None, draw.randint(1, length)])
        threads(draw.randint(1, 4))
        shape = batch, method.num_heads, length, method.head_dim
        tensors = [draw.choice(LAYOUTS)(normal(*shape, seed=seed + i).to(dtype)) for i in range(3)]
        x = normal(batch, length, method.num_heads, seed=seed).float() if method.key_bias else None
        check(method, *tensors, queries, dtype=dtype, x=x, along_output=1.0, limit=0.02)


@both
def test_losses_of_random_rows_are_the_plain_form(dtype, long, threads):
    for seed in range(100 if long else 6):
        draw = random.Random(seed)
        rows, vocabulary = draw.randint(1, 70), draw.choice([1, 2, draw.randint(1, 5000), 1024 * draw.randint(1, 4)])
        threads(draw.randint(1, 4))
        logits = (5 * normal(rows, vocabulary, seed=seed)).to(dtype)
        targets, losses = torch.tensor([draw.randrange(vocabulary) for _ in range(rows)]), torch.empty(rows)
        log_p, of_targets = logits.double().log_softmax(dim=1), (torch.arange(rows), targets)
        cpu.cross_entropy_(logits, targets, losses, True)
        assert_close(losses.double(), -log_p[of_targets], rtol=1e-5, atol=1e-5)
        gradient = log_p.exp().index_put(of_targets, torch.tensor(-1.0).double(), accumulate=True)
        assert_close(logits.double(), gradient, rtol=1e-5 + torch.finfo(dtype).eps / 2, atol=1e-7)

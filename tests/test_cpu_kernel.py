"""The C++ kernels for CPUs: random and extreme calls against the formula in float64, and the build.

test_attention.py runs every kind of method by them. test_sanitize.py runs test_random_calls with sanitizers.
"""

import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
from attention_cases import LAYOUTS, GivenBias, assert_near, attend, check, make_case, make_inputs
from attention_cases import random as normal
from commands import ROOT
from test_loss import check_kernel, cpu_cross_entropy

from model import cpu
from model.attention.cpu import make_tables
from model.attention.reference import plain_attention
from model.methods.alibi import ALiBi
from model.methods.base import Method, Shape
from model.methods.forgetting import Forgetting
from model.methods.scale_invariant import ScaleInvariant
from model.methods.sink import LearnedSink
from model.methods.window import SlidingWindow

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(not COMPILER, reason="the kernels need a C++ compiler")


def extended(window=None, num_heads=2, sinks=1):
    shape = Shape(num_heads, head_dim=16, train_length=64)
    mechanisms = [ScaleInvariant(shape, learn_tau=True), GivenBias(shape)]
    mechanisms += [LearnedSink(shape, sink_init=0.7)] * sinks
    mechanisms += [SlidingWindow(shape, window=window or 1)] * bool(window)
    return Method("extended", shape, mechanisms)


def random_method(draw):
    head_dim = draw.choice([1, 2, 3, 8, 16, 20, 33, 64, 65, 128])
    shape = Shape(draw.randint(1, 5), head_dim, train_length=64)
    change = draw.choice([ALiBi(shape), ScaleInvariant(shape, learn_tau=draw.random() < 0.5)])
    window = draw.choice([1, 2, 31, 64, draw.randint(1, 700)])
    mechanisms = [
        change,
        GivenBias(shape),
        LearnedSink(shape, sink_init=draw.uniform(-3, 3)),
        SlidingWindow(shape, window=window),
    ]
    return Method("random", shape, [mechanism for mechanism in mechanisms if draw.randint(0, 1)])


@pytest.mark.parametrize("seed", range(12))
def test_random_calls_are_the_formula(seed, long, threads):
    """Shapes, offsets, strides, windows, sinks, biases, threads; 100 of them in the long form."""
    for number in range(seed, 100 if long else 12, 12):
        draw = random.Random(number)
        method, batch, layout = random_method(draw), draw.randint(1, 3), draw.choice(list(LAYOUTS))
        length = max(1, draw.choice([draw.randint(1, 700), 64 * draw.randint(0, 10) + draw.randint(-1, 1)]))
        threads(draw.randint(1, 4))
        check("cpu", method, length, batch=batch, layout=layout, weigh_output=1.0, tolerance=4e-5,
              queries=None if method.needs_input else draw.choice([None, draw.randint(1, length)]))


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257, 515])
@pytest.mark.parametrize("window", [None, 1, 33, 64, 128, 257])
def test_lengths_and_windows_near_the_size_of_a_tile(length, window):
    check("cpu", extended(window), length, batch=1, weigh_output=1.0)


def test_keys_that_no_query_sees():
    """The last tile of queries ends before the second tile of keys begins; a full tile would end after it."""
    method = make_case("scale_invariant")
    q, k, v, _ = make_inputs(method, 600)
    gradients = []
    for n in (600, 510):
        tables = make_tables(method.score_change, 3, 16, n)
        output, _ = cpu.forward_op(q[:, :, 250:510], k[:, :, :n], v[:, :, :n], tables, None, None, 250, n)
        gradients.append(torch.autograd.grad(output.sum(), [k, v]))
    assert all(map(torch.equal, *gradients)) and gradients[0][0][:, :, 510:].abs().max() == 0


def test_large_logits_and_long_sequences():
    method = make_case("alibi")
    q, k, v, x = make_inputs(method, 1500, batch=1)
    inputs = [y.detach().requires_grad_() for y in (4 * q, 4 * k, v, x)]
    check("cpu", method, 1500, inputs=inputs, tolerance=2e-4)  # logits in the hundreds, whose own rounding is 3e-5


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("grow", [5, 40, -40])
def test_large_biases_keep_the_digits_of_the_logits(window, grow):
    """Biases grow to 20,000, where float32's last bit is 0.002. The results must keep it."""
    method = extended(window, num_heads=1, sink=False)
    q, k, v, x = make_inputs(method, 700, batch=1)
    biases = grow * x.detach().abs().cumsum(dim=1)
    # Where they fall, far keys count, with the last bits of their biases.
    tolerance = 2e-5 if grow > 0 else 2 * torch.finfo(torch.float32).eps * biases.abs().max().item()
    check("cpu", method, 700, inputs=[q, k, v, biases.requires_grad_()], weigh_output=1.0, tolerance=tolerance)


@pytest.mark.parametrize("logit", [-200.0, -20.0, 20.0, 200.0])
def test_sinks_of_any_size(logit):
    method = extended(50)
    method.sink.logit.data.fill_(logit)
    check("cpu", method, 300, weigh_output=1.0)


def test_the_gradients_of_biases_add_up():
    """Forgetting attention sums rounding errors over all keys. In exact arithmetic, the gradients of a row sum to 0."""
    shape = Shape(num_heads=2, head_dim=64, train_length=64)
    method = Method("fox", shape, [Forgetting(shape)])
    q, k, v, x = make_inputs(method, 1500, batch=1)
    weight = normal(1, 2, 1500, 64, seed=3)
    truth, ours = (
        torch.autograd.grad((output * weight).sum(), method.key_bias.bias_of_gate)[0]
        for output in (plain_attention(method, q, k, v, x=x.double()), attend(method, q, k, v, x=x, backend="cpu"))
    )
    assert_near(ours, truth, 1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_not_hidden(bad):
    method = make_case("nope")
    q, k, v, _ = (x.detach() for x in make_inputs(method, 300))
    q[0, 0, 150, 3] = bad
    output = attend(method, q, k, v, backend="cpu")
    assert output[0, 0, 150].isnan().all() and output.isnan().sum() == 16


@pytest.mark.parametrize("kv_heads, q_dim, k_dim, v_dim", [(1, 16, 16, 16), (2, 8, 8, 16), (2, 16, 16, 8)])
def test_shapes_that_do_not_fit_are_refused(kv_heads, q_dim, k_dim, v_dim):
    q, k, v = (torch.zeros(1, 2, 9, 16) for _ in range(3))
    with pytest.raises(AssertionError):
        k, v = k[:, :kv_heads, :, :k_dim], v[:, :kv_heads, :, :v_dim]
        cpu.attention(q[..., :q_dim], k, v, make_tables(None, 1, 16, 9), None, None, 9)


def test_keys_outside_of_the_window_are_not_read():
    """Neither keys that are not numbers, nor, beyond its tile of 128 queries, values and gradients that are not."""
    method = extended(window=20)
    q, k, v, x = (y.detach() for y in make_inputs(method, 600, batch=1))
    bad_k = k.clone()
    bad_k[0, 0, 150, 3] = torch.nan
    rows = attend(method, q, bad_k, v, x=x, backend="cpu")[0].isnan().any(dim=-1)  # (H, T)
    assert rows[0].nonzero().flatten().tolist() == list(range(150, 170)) and not rows[1].any()
    v[:, :, :224] = torch.nan  # 256 - 20, rounded down to tiles of keys
    v.requires_grad_()
    output = attend(method, q, k, v, x=x, backend="cpu")
    assert output[:, :, 256:].isfinite().all() and output[:, :, :224].isnan().all()
    weight = torch.ones_like(output).detach()
    weight[:, :, 512:] = torch.nan
    (gradient,) = torch.autograd.grad(output, v, weight)
    assert gradient[:, :, :480].isfinite().all() and gradient[:, :, 512:].isnan().all()


def test_it_repeats_bit_for_bit():
    method = extended(window=300)
    *inputs, x = make_inputs(method, 700, batch=1)
    leaves = [*inputs, x, *method.parameters()]
    runs = [torch.autograd.grad(attend(method, *inputs, x=x, backend="cpu").square().sum(), leaves) for _ in range(2)]
    assert all(map(torch.equal, *runs))


def test_the_operations_keep_torch_s_rules():
    method = make_case("learned")
    q, k, v, _ = make_inputs(method, 20)
    tables = make_tables(method.score_change, 3, 16, 20).detach().requires_grad_()
    bias, sink = (normal(*shape, seed=4).float().requires_grad_() for shape in ((2, 3, 20), (3,)))
    for extras in ((None, None, 0, 20), (bias, sink, 0, 7)):
        torch.library.opcheck(cpu.forward_op, (q, k, v, tables, *extras))


@pytest.mark.parametrize("seed", range(6))
def test_losses_of_random_rows_are_the_formula(seed, long, threads):
    for number in range(seed, 100 if long else 6, 6):
        draw = random.Random(number)
        rows, vocabulary = draw.randint(1, 70), draw.choice([1, 2, draw.randint(1, 5000), 1024 * draw.randint(1, 4)])
        threads(draw.randint(1, 4))
        logits = (5 * normal(rows, vocabulary, seed=number)).float()
        check_kernel(cpu_cross_entropy, logits, torch.tensor([draw.randrange(vocabulary) for _ in range(rows)]))


RUN = """
import torch
from attention_cases import CPU, attend, make_case
from model.attention.choose import choose_backend
method, q = make_case("nope", 1, 8), torch.ones(1, 1, 4, 8)
backend, why = choose_backend(method, CPU)
print(backend.name, torch.equal(attend(method, q, q, q), q) if backend.name == "cpu" else why)
"""


@pytest.mark.slow
@pytest.mark.parametrize("variables, backend, named", [
    ({}, "cpu", "True"), (dict(CXX="/nowhere/g++"), "blocks", "/nowhere/g++"),
    (dict(CXX="false"), "blocks", "false"), (dict(XDG_CACHE_HOME="/dev/null"), "blocks", "/dev/null"),
])
def test_several_processes_build_it_at_once_or_name_the_obstacle(variables, backend, named, tmp_path):
    paths = f"{ROOT}:{ROOT / 'tests'}"
    environment = os.environ | dict(XDG_CACHE_HOME=str(tmp_path), PYTHONPATH=paths) | variables
    command = [sys.executable, "-c", RUN]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        out, _ = process.communicate(timeout=600)
        assert out.startswith(f"{backend} ") and named in out and out.count("\n") == 1
    libraries = list(tmp_path.glob("scale_invariant_attention/*"))
    assert len(libraries) == (backend == "cpu")

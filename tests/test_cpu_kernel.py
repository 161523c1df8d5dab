"""The C++ kernels for CPUs: random and extreme calls against the formula in float64, and the build.

test_attention.py runs every kind of method by them. test_sanitize.py runs test_random_calls with sanitizers.
"""

import os
import random
import shutil

import pytest
import torch
from attention_cases import (
    LAYOUTS,
    assert_near,
    attend,
    cast,
    check,
    gradients,
    make_case,
    make_inputs,
    random_documents,
)
from attention_cases import random as normal
from commands import ROOT, parametrize, slow, start, table
from test_loss import check_kernel, cpu_cross_entropy

from model import cpu
from model.attention.cpu import make_tables
from model.attention.reference import plain_attention
from model.methods.base import Shape
from model.methods.make import make_method

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(not COMPILER, reason="the kernels need a C++ compiler")


BIASED = "scale_invariant learn_tau=True | given_bias"


def extended(window=None, num_heads=2):
    return make_case(f"{BIASED} | sink" + f" | window window={window}" * bool(window), num_heads)


def random_method(draw):
    window = draw.choice([1, 2, 31, 64, draw.randint(1, 700)])
    change = draw.choice(["alibi", "scale_invariant", "scale_invariant learn_tau=True"])
    parts = [part for part in (change, "given_bias", "sink", f"window window={window}") if draw.randint(0, 1)]
    head_dim = draw.choice([1, 2, 3, 8, 16, 20, 33, 64, 65, 128])
    return make_case("|".join(parts), draw.randint(1, 5), head_dim)


@parametrize("seed", range(12))
def test_random_calls_are_the_formula(seed, long, threads):
    """Shapes, offsets, strides, windows, sinks, biases, threads; 100 of them in the long form."""
    for number in range(seed, 100 if long else 12, 12):
        draw = random.Random(number)
        method, batch, layout = random_method(draw), draw.randint(1, 3), draw.choice(list(LAYOUTS))
        near_tiles = 64 * draw.randint(0, 10) + draw.randint(-1, 1)
        length = max(1, draw.choice([draw.randint(1, 700), near_tiles]))
        queries = length if method.needs_input else draw.choice([length, draw.randint(1, length)])
        threads(draw.randint(1, 4))
        starts = draw.choice([None, random_documents(length, batch)])
        check("cpu", method, length, queries=queries, batch=batch, layout=layout, weigh_output=1.0, tolerance=4e-5,
              starts=starts)


@parametrize("length", [127, 128, 129, 255, 256, 257, 515])
@parametrize("window", [None, 1, 33, 64, 128, 257])
def test_lengths_and_windows_near_the_size_of_a_tile(length, window):
    check("cpu", extended(window), length, batch=1, weigh_output=1.0)


@parametrize("count", [1, 2, 3])
@parametrize("num_heads", [1, 3])
def test_any_number_of_threads(count, num_heads, threads):
    """With few heads, several threads share the key tiles of one head. Each has a separate dQ."""
    threads(count)
    check("cpu", extended(300, num_heads), 800, batch=1, weigh_output=1.0)


def test_keys_that_no_query_sees():
    """The last tile of queries ends before the second tile of keys begins; a full tile would end after it."""
    method = make_case("scale_invariant")
    q, k, v, _ = make_inputs(method, 600)
    gradients = []
    for n in (600, 510):
        tables = make_tables(method.score_change, 3, 16, n)
        keys, values = k[:, :, :n], v[:, :, :n]
        absent = [None] * 3  # key bias, sink, starts
        output, _ = cpu.forward_op(q[:, :, 250:510], keys, values, tables, *absent, 250, n)
        gradients.append(torch.autograd.grad(output.sum(), [k, v]))
    assert all(map(torch.equal, *gradients)) and not gradients[0][0][:, :, 510:].any()


def test_large_logits_and_long_sequences():
    method = make_case("alibi")
    q, k, v, x = make_inputs(method, 1500, batch=1)
    inputs = cast([4 * q, 4 * k, v, x], torch.float32)
    check("cpu", method, 1500, inputs=inputs, tolerance=2e-4)  # logits in the hundreds, whose own rounding is 3e-5


@parametrize("window", [None, 100])
@parametrize("grow", [5, 40, -40])
def test_large_biases_keep_the_digits_of_the_logits(window, grow):
    """Biases grow to 20,000, where float32's last bit is 0.002. The results must keep it."""
    method = make_case(f"{BIASED} | window window={window}" if window else BIASED, num_heads=1)
    *qkv, x = make_inputs(method, 700, batch=1)
    biases = grow * x.detach().abs().cumsum(dim=1)
    # Where they fall, far keys count, with the last bits of their biases.
    tolerance = 2e-5 if grow > 0 else 2**-22 * biases.abs().max().item()
    check("cpu", method, 700, inputs=[*qkv, biases.requires_grad_()], weigh_output=1.0, tolerance=tolerance)


@parametrize("logit", [-200.0, -20.0, 20.0, 200.0])
def test_sinks_of_any_size(logit):
    method = extended(50)
    method.sink.logit.data.fill_(logit)
    check("cpu", method, 300, weigh_output=1.0)


def test_the_gradients_of_biases_add_up():
    """Forgetting attention sums rounding errors over all keys. In exact arithmetic, the gradients of a row sum to 0."""
    method = make_method("fox", Shape(num_heads=2, head_dim=64, train_length=64))
    *qkv, x = make_inputs(method, 1500, batch=1)
    outputs = plain_attention(method, *qkv, x.double()), attend(method, *qkv, x, backend="cpu")
    (truth,), (ours,) = (gradients(output, [method.key_bias.bias_of_gate]) for output in outputs)
    assert_near(ours, truth, 1e-4)


@parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_not_hidden(bad):
    method = make_case("nope")
    q, k, v, _ = make_inputs(method, 300)
    q.data[0, 0, 150, 3] = bad
    output = attend(method, q, k, v, backend="cpu")
    assert output[0, 0, 150].isnan().all() and output.isnan().sum() == 16


@parametrize("kv_heads, q_dim, k_dim, v_dim", [
    (1, 16, 16, 16), (2, 8, 8, 16), (2, 16, 16, 8),
])
def test_shapes_that_do_not_fit_are_refused(kv_heads, q_dim, k_dim, v_dim):
    q = torch.zeros(1, 2, 9, q_dim)
    k, v = (torch.zeros(1, kv_heads, 9, dim) for dim in (k_dim, v_dim))
    tables = make_tables(None, 1, 16, 9)
    with pytest.raises(AssertionError):
        cpu.attention(q, k, v, tables, None, None, None, 9)


def test_keys_outside_of_the_window_are_not_read():
    """Neither keys that are not numbers, nor, beyond its tile of 128 queries, values and gradients that are not."""
    method = extended(window=20)
    q, k, v, x = make_inputs(method, 600, batch=1)
    bad_k = k.clone()
    bad_k[0, 0, 150, 3] = torch.nan
    rows = attend(method, q, bad_k, v, x, backend="cpu").isnan().any(dim=-1)  # (1, H, T)
    assert rows.nonzero().tolist() == [[0, 0, t] for t in range(150, 170)]
    v.data[:, :, :224] = torch.nan  # 256 - 20, rounded down to tiles of keys
    output = attend(method, q, k, v, x, backend="cpu")
    assert output[:, :, 256:].isfinite().all()
    assert output[:, :, :224].isnan().all()
    weight = torch.ones_like(output)
    weight[:, :, 512:] = torch.nan
    (gradient,) = torch.autograd.grad(output, v, weight)
    assert gradient[:, :, :480].isfinite().all()
    assert gradient[:, :, 512:].isnan().all()


def test_it_repeats_bit_for_bit():
    method = extended(window=300)
    inputs = make_inputs(method, 700, batch=1)
    leaves = [*inputs, *method.parameters()]
    runs = [gradients(attend(method, *inputs, backend="cpu"), leaves) for _ in range(2)]
    assert all(map(torch.equal, *runs))


def test_the_operations_keep_torch_s_rules():
    method = make_case("learned")
    q, k, v, _ = make_inputs(method, 20)
    tables = make_tables(method.score_change, 3, 16, 20)
    bias, sink = normal(2, 3, 20, seed=4), normal(3, seed=4)
    tables, bias, sink = cast([tables, bias, sink], torch.float32)
    for extras in ((None, None, None, 0, 20), (bias, sink, random_documents(20), 0, 7)):
        torch.library.opcheck(cpu.forward_op, (q, k, v, tables, *extras))


@parametrize("seed", range(6))
def test_losses_of_random_rows_are_the_formula(seed, long, threads):
    for number in range(seed, 100 if long else 6, 6):
        draw = random.Random(number)
        rows = draw.randint(1, 70)
        vocabulary = draw.choice([1, 2, draw.randint(1, 5000), 1024 * draw.randint(1, 4)])
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


@slow
@table("setting, backend, named", """
                             | cpu    | True
    CXX=/nowhere/g++         | blocks | /nowhere/g++
    CXX=false                | blocks | false
    XDG_CACHE_HOME=/dev/null | blocks | /dev/null
""")
def test_several_processes_build_it_at_once_or_name_the_obstacle(setting, backend, named, tmp_path):
    variables = dict(XDG_CACHE_HOME=str(tmp_path), PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    variables |= dict(word.split("=") for word in setting.split())
    for process in [start("-c", RUN, **variables) for _ in range(2)]:
        out, _ = process.communicate(timeout=600)
        assert out.startswith(f"{backend} ") and named in out
        assert out.count("\n") == 1
    libraries = list(tmp_path.glob("scale_invariant_attention/*"))
    assert len(libraries) == (backend == "cpu")

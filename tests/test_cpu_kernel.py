"""The kernel for CPUs against the plain form in float64: values, gradients, awkward shapes and strides; refusals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_attention import Mine
from test_methods import assert_near, assert_refused, random

from model.attention import attend, choose_backend, cpu, make_plan
from model.attention.reference import plain_attention
from model.methods import Method, make_method
from model.methods.base import KeyBias
from model.methods.scale_invariant import ScaleInvariant
from model.methods.sink import LearnedSink
from model.methods.window import SlidingWindow

REPOSITORY = Path(__file__).parents[1]
CPU = torch.device("cpu")

PROBLEM = cpu.kernel_problem(CPU, torch.float32)
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if cpu.kernel_problem(CPU, dtype) is None]
both = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Where there is nothing to compile it with, or no BLAS to call; a compiler that refuses it is a failure.
pytestmark = pytest.mark.skipif(PROBLEM is not None and "cannot compile" not in PROBLEM, reason=str(PROBLEM))


def make(name="scale_invariant_nope", num_heads=2, head_dim=16, **options):
    return make_method(name, num_heads=num_heads, head_dim=head_dim, train_length=64, **options)


def qkv(batch, method, length):
    return [random(batch, method.num_heads, length, method.head_dim, seed=i).float() for i in range(3)]


class Given(KeyBias):
    """Biases that are the layer's input, (B, T, H)."""

    def of_tokens(self, x):
        return x.transpose(1, 2)

    def bias(self, of_tokens):
        return of_tokens


def make_extended(window=None, num_heads=2, bias=True, sink=True, learn_tau=True):
    shape = dict(num_heads=num_heads, head_dim=16, train_length=64)
    mechanisms = [ScaleInvariant(**shape, learn_tau=learn_tau)]
    mechanisms += [Given()] * bias + [LearnedSink(**shape, sink_init=0.7)] * sink
    mechanisms += [SlidingWindow(**shape, window=window)] if window else []
    return Method("extended", **shape, mechanisms=mechanisms)


def biases(batch, method, length):
    return random(batch, length, method.num_heads, seed=7).float()


def check_extended(method, batch, length, queries=None, x=None, tolerance=1e-5, dtype=torch.float32):
    """As check, with a loss to which all rows add, so that what is learned gets no sum that is close to 0.

    In bfloat16 rows of few keys have gradients near 0, in which the rounding of the output shows, as delta is from it.
    """
    x = biases(batch, method, length) if x is None else x
    check(method, *qkv(batch, method, length), queries, tolerance, dtype, x=x, along_output=1.0, limit=0.02)


def check(
    method, q, k, v, queries=None, tolerance=1e-5, dtype=torch.float32, *, x=None, along_output=0.0, limit=0.01
):
    """Output and all gradients of the last `queries` queries, the tensors as they lie in memory.

    x: the keys' biases. along_output: how much of the output its gradient has, beside random numbers. In bfloat16 their
    relative errors, as norms: plain blocks in bfloat16 have 0.008, and with learned tau 0.015.
    """
    T = k.shape[2]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    offset = T - (queries or T)
    tensors = (q, k, v) if method.key_bias is None else (q, k, v, x)
    exact = [x.double().requires_grad_() for x in tensors]
    expected = plain_attention(method, *exact[:3], x=exact[-1])[:, :, offset:]
    inputs = [x.detach().requires_grad_() for x in (q[:, :, offset:], *tensors[1:])]
    output = attend(method, *inputs[:3], x=inputs[-1], q_offset=offset, backend="cpu")
    weight = (random(*output.shape, seed=3) + along_output * expected.detach()).to(dtype)
    learned = list(method.parameters())
    gradients = torch.autograd.grad((output * weight).sum(), [*inputs, *learned])
    of_q, *others = torch.autograd.grad((expected * weight).sum(), [*exact, *learned])
    for ours, theirs in zip([output, *gradients], [expected, of_q[:, :, offset:], *others], strict=True):
        if dtype == torch.float32:
            assert_near(ours, theirs, tolerance)
        else:
            error = (ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-3)
            assert ours.dtype == (dtype if ours.dim() == 4 else torch.float32)
            assert error < (limit if ours.dim() == 4 else 0.02), error


@both
@pytest.mark.parametrize("name", ["nope", "alibi", "scale_invariant_nope"])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 255, 256, 257, 300, 515])
def test_it_is_the_plain_form(name, length, dtype):
    method = make(name)
    check(method, *qkv(1, method, length), dtype=dtype)


@both
@pytest.mark.parametrize("batch, num_heads, head_dim", [(3, 1, 1), (1, 3, 20), (2, 6, 96), (1, 1, 128), (5, 2, 256)])
def test_batches_heads_and_head_dimensions(batch, num_heads, head_dim, dtype):
    if dtype == torch.bfloat16:
        head_dim += head_dim % 2
    method = make("alibi", num_heads, head_dim)
    check(method, *qkv(batch, method, 140), dtype=dtype)


@both
@pytest.mark.parametrize("queries", [1, 17, 128, 200, 299])
def test_the_last_queries(queries, dtype):
    method = make()
    check(method, *qkv(2, method, 300), queries, dtype=dtype)


@both
def test_keys_that_no_query_sees(dtype):
    """The last tile of queries ends before the second tile of keys begins, but not before what it could reach."""
    q, k, v = (x.to(dtype).requires_grad_() for x in qkv(1, make(), 600))
    of_all = torch.autograd.grad(attend(make(), q[:, :, 250:510], k, v, q_offset=250, backend="cpu").sum(), [k, v])
    of_seen = torch.autograd.grad(
        attend(make(), q[:, :, 250:510], k[:, :, :510], v[:, :, :510], q_offset=250, backend="cpu").sum(), [k, v]
    )
    assert all(torch.equal(a, b) for a, b in zip(of_all, of_seen)) and of_all[0][:, :, 510:].abs().max() == 0


@both
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch, num_heads", [(1, 1), (1, 3), (2, 2)])
def test_any_number_of_threads(threads, batch, num_heads, dtype):
    """With few heads the tiles of keys of one head go to several threads, each with its own dQ."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        method = make(num_heads=num_heads, learn_tau=True)
        check(method, *qkv(batch, method, 800), dtype=dtype)
    finally:
        torch.set_num_threads(before)


def test_large_logits_and_long_sequences():
    method = make()
    q, k, v = qkv(1, method, 1500)
    check(method, 4 * q, 4 * k, v, tolerance=1e-4)  # logits in the hundreds, whose own rounding is 3e-5


@both
def test_other_functions_of_the_distance(dtype):
    class Rough(Mine):
        def coefficients(self, distance, head):
            return 1 + 0.5 * (distance % 2), -0.1 * (distance // 7)

    shape = dict(num_heads=2, head_dim=16, train_length=64)
    for change in (Mine, Rough):
        method = Method("mine", **shape, mechanisms=[change(**shape)])
        check(method, *qkv(2, method, 270), dtype=dtype)


@both
@pytest.mark.parametrize("lay", [
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # as the model has them
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    lambda x: x[:, :, :1].expand(-1, -1, x.shape[2], -1),
    lambda x: x[:1].expand(2, -1, -1, -1),
    lambda x: torch.stack([x, x], dim=-1)[..., 0],
], ids=["heads_last", "tokens_last", "one_token", "one_sequence", "every_second"])
def test_any_strides(lay, dtype):
    method = make()
    check(method, *(lay(x) for x in qkv(2, method, 130)), dtype=dtype)


def test_an_expanded_gradient():
    method = make()
    inputs = [x.requires_grad_() for x in qkv(1, method, 50)]
    row = random(1, 2, 1, 16, seed=5).float()
    ours = torch.autograd.grad(attend(method, *inputs, backend="cpu"), inputs, row.expand(-1, -1, 50, -1))
    theirs = torch.autograd.grad((plain_attention(method, *inputs) * row).sum(), inputs)
    for a, b in zip(ours, theirs):
        assert_near(a, b, 1e-5)


@both
def test_it_repeats_bit_for_bit(dtype):
    method = make(learn_tau=True)
    inputs = [x.to(dtype).requires_grad_() for x in qkv(1, method, 700)]
    runs = [torch.autograd.grad(attend(method, *inputs, backend="cpu").square().sum(), [*inputs, *method.parameters()])
            for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))


@both
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden(bad, dtype):
    method = make()
    q, k, v = (x.to(dtype) for x in qkv(1, method, 300))
    q[0, 0, 150, 3] = bad
    output = attend(method, q, k, v, backend="cpu")
    assert output[0, 0, 150].isnan().all() and output.isnan().sum() == 16


def test_it_is_one_operation_of_a_compiled_graph():
    method = make(learn_tau=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: attend(method, *x, backend="cpu"), dynamic=False, fullgraph=True)
    inputs = [x.requires_grad_() for x in qkv(1, method, 70)]
    for run in (compiled, lambda *x: plain_attention(method, *x)):
        gradients = torch.autograd.grad(run(*inputs).square().sum(), [*inputs, *method.parameters()])
        if run is compiled:
            ours = gradients
    for a, b in zip(ours, gradients):
        assert_near(a, b, 1e-5)


def test_the_operations_keep_torch_s_rules():
    method = make()
    inputs = [x.requires_grad_() for x in qkv(1, method, 20)]
    tables = cpu.make_tables(method.score_change, 2, 16, 20).requires_grad_()
    torch.library.opcheck(cpu.forward_op, (*inputs, tables, None, None, 0, 20))
    bias, sink = random(1, 2, 20, seed=4).float().requires_grad_(), random(2, seed=5).float().requires_grad_()
    torch.library.opcheck(cpu.forward_op, (*inputs, tables, bias, sink, 0, 7))


# ---- biases of keys, windows, sinks ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("extras", [
    dict(), dict(bias=False), dict(sink=False, learn_tau=False), dict(bias=False, sink=False, learn_tau=False),
], ids=str)
@pytest.mark.parametrize("window, lengths", [
    (None, (1, 5, 129, 300)), (1, (1, 2, 64, 300)), (2, (1, 129)), (33, (31, 257)), (64, (128, 300)),
    (128, (300,)), (256, (257, 515)), (257, (515,)), (1000, (1, 300)),
])
def test_each_of_them_and_all_together(window, lengths, extras, dtype):
    for length in lengths:
        check_extended(make_extended(window, **extras), 1, length, dtype=dtype)


@both
@pytest.mark.parametrize("window", [None, 1, 40, 128, 290])
@pytest.mark.parametrize("queries", [1, 17, 128, 200, 299])
def test_the_last_queries_with_them(queries, window, dtype):
    check_extended(make_extended(window), 2, 300, queries, dtype=dtype)


@both
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch, num_heads", [(1, 1), (1, 3), (2, 2)])
def test_any_number_of_threads_with_them(threads, batch, num_heads, dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_extended(make_extended(300, num_heads), batch, 600, dtype=dtype)
    finally:
        torch.set_num_threads(before)


@both
def test_biases_with_any_strides(dtype):
    method = make_extended()
    x = biases(2, method, 130)
    for lay in (x[:1].expand(2, -1, -1), x[:, :, :1].expand(-1, -1, 2), x[:, :1].expand(-1, 130, -1), x.mT.clone().mT):
        check_extended(method, 2, 130, x=lay, dtype=dtype)


@both
@pytest.mark.parametrize("window", [None, 100])
def test_large_biases_keep_the_digits_of_the_logits(window, dtype):
    """Biases grow to 20,000, where float32's last bit is 0.002: the results are those of exactly these biases."""
    method = make_extended(window, num_heads=1, sink=False)
    steps = biases(1, method, 700).abs()
    for grown in (5 * steps.cumsum(dim=1), 40 * steps.cumsum(dim=1), 2**14 + steps.cumsum(dim=1) / 50):
        check_extended(method, 1, 700, x=grown, dtype=dtype)
    largest = (40 * steps).sum().item()
    assert largest > 2e4
    if dtype == torch.float32:  # where they fall, it is far keys that count, with the last bits of their biases
        tolerance = 2 * torch.finfo(torch.float32).eps * largest  # as in test_rivals.py
        check_extended(method, 1, 700, x=-40 * steps.cumsum(dim=1), tolerance=tolerance)


@both
@pytest.mark.parametrize("logit", [-200.0, -20.0, 20.0, 200.0])
def test_sinks_of_any_size(logit, dtype):
    method = make_extended(50)
    method.sink.logit.data.fill_(logit)
    check_extended(method, 1, 300, dtype=dtype)


@both
def test_the_gradients_of_biases_add_up(dtype):
    """Those of a row's logits add up to 0. Forgetting attention's gate gets sums of them, in which nothing may be left
    over from rounding: without the share of each query's own key, its gradient in bfloat16 was wrong by 300 %."""
    method = make("fox", head_dim=64)
    exact = [x.to(dtype).double() for x in (*qkv(1, method, 1500), random(1, 1500, 128, seed=9))]
    weight = random(1, 2, 1500, 64, seed=3)
    truth, ours = (
        torch.autograd.grad((output * weight).sum(), method.key_bias.bias_of_gate)[0]
        for output in (plain_attention(method, *exact[:3], x=exact[3]),
                       attend(method, *(x.to(dtype) for x in exact[:3]), x=exact[3].to(dtype), backend="cpu"))
    )
    assert_near(ours, truth, 0.01 if dtype == torch.bfloat16 else 1e-4)


@both
def test_what_a_window_hides_is_not_read(dtype):
    """Neither keys that are not numbers, nor, beyond its tile of 128 queries, values and gradients that are not."""
    method = make_extended(window=20)
    x = biases(1, method, 600)
    q, k, v = (x.to(dtype) for x in qkv(1, method, 600))
    k[0, 0, 150, 3] = torch.nan
    rows = attend(method, q, k, v, x=x, backend="cpu")[0].isnan().any(dim=-1)  # (H, T)
    assert rows[0].nonzero().flatten().tolist() == list(range(150, 170)) and not rows[1].any()
    v = torch.full_like(v, torch.nan).index_copy(2, torch.arange(224, 600), v[:, :, 224:])  # 256 - 20, rounded down
    v.requires_grad_()
    q, k, _ = (x.to(dtype) for x in qkv(1, method, 600))
    output = attend(method, q, k, v, x=x, backend="cpu")
    assert output[:, :, 256:].isfinite().all() and output[:, :, :224].isnan().all()
    weight = torch.full_like(output, torch.nan).index_copy(2, torch.arange(512), torch.ones_like(output[:, :, :512]))
    (gradient,) = torch.autograd.grad(output, v, weight.detach())
    assert gradient[:, :, :480].isfinite().all() and gradient[:, :, 512:].isnan().all()  # 512 - 20, rounded down


@both
def test_they_repeat_bit_for_bit(dtype):
    method = make_extended(window=300)
    x = biases(1, method, 700).requires_grad_()
    inputs = [x.to(dtype).requires_grad_() for x in qkv(1, method, 700)]
    leaves = [*inputs, x, *method.parameters()]
    runs = [torch.autograd.grad(attend(method, *inputs, x=x, backend="cpu").square().sum(), leaves) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_they_are_in_the_one_operation_of_a_compiled_graph():
    method = make_extended(window=30)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *y: attend(method, *y[:3], x=y[3], backend="cpu"), dynamic=False, fullgraph=True)
    inputs = [x.requires_grad_() for x in (*qkv(1, method, 70), biases(1, method, 70))]
    leaves = [*inputs, *method.parameters()]
    ours = torch.autograd.grad(compiled(*inputs).square().sum(), leaves)
    theirs = torch.autograd.grad(plain_attention(method, *inputs[:3], x=inputs[3]).square().sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        assert_near(a, b, 1e-5)


# ---- when it cannot run ----------------------------------------------------------------------------------------------


def test_other_dtypes_and_devices_run_elsewhere_or_are_refused():
    for dtype in DTYPES:
        assert choose_backend(make(), CPU, dtype=dtype) == ("cpu", "the first choice on cpu")
    for dtype in {torch.float64, torch.float16, torch.bfloat16} - set(DTYPES):
        assert choose_backend(make(), CPU, dtype=dtype)[0] == "blocks"
        with assert_refused("cpu", "float32", "auto"):
            choose_backend(make(), CPU, "cpu", dtype)
    with assert_refused("cpu", "cuda", "auto"):
        choose_backend(make(), torch.device("cuda"), "cpu")


@pytest.mark.slow
def test_the_plan_says_why(tmp_path):
    code = (
        "from model.attention import make_plan; from model.methods import make_method;"
        "plan = make_plan(make_method('rope', num_heads=1, head_dim=8, train_length=8), 8, 8);"
        "print(plan.backend, plan.why)"
    )
    for variables, expected in [
        ({}, "cpu the first choice on cpu"),
        (dict(CXX="/nowhere/g++"), "blocks cpu cannot run: /nowhere/g++ cannot compile it: "),
        (dict(CXX="false"), "blocks cpu cannot run: false cannot compile it: "),
        (dict(XDG_CACHE_HOME="/dev/null", TMPDIR=str(tmp_path)), "cpu the first choice on cpu"),  # no home
    ]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY), **variables}
        process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert process.stdout.startswith(expected) and process.stdout.count("\n") == 1, process.stdout + process.stderr
    assert len(list((tmp_path / "scale_invariant_attention").iterdir())) == 1  # nothing half made is left


RUNS = """
import torch
from model.attention import cpu
q = torch.ones(1, 1, 4, 8)
tables = cpu.make_tables(None, 1, 8, 4)
print(torch.equal(cpu.run(q, q, q, prepared=(tables, None)), q), cpu.load_library()[1])
"""
DAMAGE = {
    "emptied": lambda content: b"",
    "cut": lambda content: content[:5000],
    "a flipped byte": lambda content: content[:3000] + bytes([content[3000] ^ 1]) + content[3001:],
    "without its checksum": lambda content: content[:-32],
}


@pytest.mark.slow
@pytest.mark.promise(9, "no surprises from outside")
def test_a_damaged_one_is_made_again_by_several_processes_at_once_too(tmp_path, faults):
    def run(processes):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started = [subprocess.Popen([sys.executable, "-c", RUNS], env=environment, **pipes) for _ in range(processes)]
        for process in started:
            out, err = process.communicate(timeout=600)
            assert (process.returncode, out) == (0, "True None\n"), err

    run(1)
    (path,) = (tmp_path / "scale_invariant_attention").iterdir()
    whole = path.read_bytes()
    for number, damage in enumerate(DAMAGE):
        with faults("damaged compiled kernel"):
            path.unlink()  # others may have the old file in use, which stays as it is
            path.write_bytes(DAMAGE[damage](whole))
            run(1 + number % 2)
            assert list(path.parent.iterdir()) == [path] and cpu.library.is_whole(path), damage
    made = path.stat().st_mtime_ns
    run(1)
    assert path.stat().st_mtime_ns == made  # a whole one is not made again


def test_more_positions_than_it_counts_are_refused():
    with assert_refused("positions"):
        make_plan(make(), 1, 2**31 + 1, q_offset=2**31)

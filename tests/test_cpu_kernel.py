"""The kernel for CPUs against the plain form in float64: values, gradients, awkward shapes and strides; refusals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_attention import Mine
from test_methods import assert_near, assert_refused, random

from model.attention import attend, choose_backend, make_plan
from model.kernels import cpu
from model.methods import Method, make_method
from model.reference import plain_attention

REPOSITORY = Path(__file__).parents[1]
CPU = torch.device("cpu")

PROBLEM = cpu.find_problem(CPU, torch.float32)
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if cpu.find_problem(CPU, dtype) is None]
both = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Where there is nothing to compile it with, or no BLAS to call; a compiler that refuses it is a failure.
pytestmark = pytest.mark.skipif(PROBLEM is not None and "cannot compile" not in PROBLEM, reason=str(PROBLEM))


def make(name="scale_invariant_nope", num_heads=2, head_dim=16, **options):
    return make_method(name, num_heads=num_heads, head_dim=head_dim, train_length=64, **options)


def qkv(batch, method, length):
    return [random(batch, method.num_heads, length, method.head_dim, seed=i).float() for i in range(3)]


def check(method, q, k, v, queries=None, tolerance=1e-5, dtype=torch.float32):
    """Output and all gradients of the last `queries` queries, the tensors as they lie in memory.

    In bfloat16 their relative errors, as norms: plain blocks in bfloat16 have 0.008, and with learned tau 0.015.
    """
    T = k.shape[2]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    offset = T - (queries or T)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = plain_attention(method, *exact)[:, :, offset:]
    inputs = [x.detach().requires_grad_() for x in (q[:, :, offset:], k, v)]
    output = attend(method, *inputs, q_offset=offset, backend="cpu")
    weight = random(*output.shape, seed=3).to(dtype)
    learned = list(method.parameters())
    gradients = torch.autograd.grad((output * weight).sum(), [*inputs, *learned])
    of_q, *others = torch.autograd.grad((expected * weight).sum(), [*exact, *learned])
    for ours, theirs in zip([output, *gradients], [expected, of_q[:, :, offset:], *others], strict=True):
        if dtype == torch.float32:
            assert_near(ours, theirs, tolerance)
        else:
            error = (ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-3)
            assert ours.dtype == (dtype if ours.dim() == 4 else torch.float32)
            assert error < (0.01 if ours.dim() == 4 else 0.02), error


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


# ---- when it cannot run ----------------------------------------------------------------------------------------------


def test_other_dtypes_and_devices_run_elsewhere_or_are_refused():
    for dtype in DTYPES:
        assert choose_backend(make(), CPU, dtype=dtype) == ("cpu", "the first choice on cpu")
    for dtype in {torch.float64, torch.float16, torch.bfloat16} - set(DTYPES):
        assert choose_backend(make(), CPU, dtype=dtype)[0] == "blocks"
        with assert_refused("cpu", "bfloat16", "auto"):
            choose_backend(make(), CPU, "cpu", dtype)
    if torch.bfloat16 in DTYPES:
        assert choose_backend(make(head_dim=15), CPU, dtype=torch.bfloat16)[0] == "blocks"
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
from model.kernels import cpu
q = torch.ones(1, 1, 4, 8)
tables = cpu.make_tables(None, 1, 8, 4)
print(torch.equal(cpu.cpu_attention(q, q, q, tables), q), cpu.load_library()[1])
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
            assert list(path.parent.iterdir()) == [path] and cpu.is_whole(path), damage
    made = path.stat().st_mtime_ns
    run(1)
    assert path.stat().st_mtime_ns == made  # a whole one is not made again


def test_more_positions_than_it_counts_are_refused():
    with assert_refused("positions"):
        make_plan(make(), 1, 2**31 + 1, q_offset=2**31)

"""The check of a kernel: right ones pass in every dtype, planted faults are refused, whatever they are like."""

import math
from types import SimpleNamespace

import pytest
import torch
from attention_cases import CPU, MECHANISMS, backend_runs, make_case

from model.attention import BACKENDS, blocks
from model.attention.check import LENGTHS, check_backend, worst_error

LENGTH = 300


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("backend", ["blocks", "cpu"])
def test_right_ones_pass(backend, name):
    method = make_case(name)
    if not backend_runs(backend, method):
        pytest.skip("it cannot run here")
    assert check_backend(BACKENDS[backend], method, CPU, torch.float32, [LENGTH, 129]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["nope", "scale_invariant", "pope", "all"])
def test_plain_pytorch_passes_in_low_precision(name, dtype):
    assert check_backend(blocks, make_case(name), CPU, dtype, [LENGTH]) is None


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", [
    ("nope", torch.float32), ("scale_invariant", torch.float16), ("all", torch.float16),
])
def test_our_triton_kernel_passes(name, dtype):
    if not backend_runs("triton", make_case(name), dtype=dtype):
        pytest.skip("Triton's interpreter is off")
    assert check_backend(BACKENDS["triton"], make_case(name), CPU, dtype, [70]) is None


def faulty(change):
    """The backend `blocks` with run(q, k, v, **more) changed: change(run, q, k, v, **more)."""
    def run(q, k, v, **more):
        return change(blocks.run, q, k, v, **more)
    return SimpleNamespace(prepare=blocks.prepare, run=run)


def hides_one_tile(run, q, k, v, **more):
    """128 queries do not see 64 keys a while before them."""
    tile = torch.zeros(q.shape[2], q.shape[2], dtype=torch.bool)
    tile[512:640, 128:192] = True
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(torch.ones_like(tile).triu(1) | tile, -torch.inf)
    return scores.softmax(dim=-1) @ v


def is_wrong_for_strided_values(run, q, k, v, **more):
    return run(q, k, v if v.is_contiguous() else v.roll(1, dims=0), **more)


def is_not_finite_in_one_row(run, q, k, v, **more):
    row = torch.arange(q.shape[2]).view(-1, 1)
    return run(q, k, v, **more).masked_fill(row == 7, torch.nan)


def has_no_gradient_of_keys(run, q, k, v, **more):
    return run(q, k.detach() + 0 * k, v, **more)


@pytest.mark.parametrize("fault", [
    hides_one_tile, is_wrong_for_strided_values, is_not_finite_in_one_row, has_no_gradient_of_keys,
])
def test_a_planted_fault_is_refused(fault):
    problem = check_backend(faulty(fault), make_case("nope"), CPU, torch.float32)
    assert problem is not None and str(LENGTHS[0]) in problem


def test_a_missing_tile_is_refused_in_bfloat16():
    """Its rounding makes errors of its own, in whose norm a tile of a long sequence is lost."""
    def rounded(change):
        return faulty(lambda run, q, k, v, **more: change(run, *(x.float() for x in (q, k, v)), **more).to(q.dtype))
    right = rounded(lambda run, q, k, v, **more: run(q, k, v, **more))
    assert check_backend(right, make_case("nope"), CPU, torch.bfloat16, [1024]) is None
    assert check_backend(rounded(hides_one_tile), make_case("nope"), CPU, torch.bfloat16, [1024]) is not None


def test_a_wrong_gradient_of_a_learned_parameter_is_refused():
    def prepare(change, plan, earlier=None):
        bands = blocks.prepare(change, plan, earlier)
        return bands._replace(scale=0.5 * bands.scale + 0.5 * bands.scale.detach()) if change is not None else bands
    wrong = SimpleNamespace(prepare=prepare, run=blocks.run)
    problem = check_backend(wrong, make_case("learned"), CPU, torch.float32, [LENGTH])
    assert "dlog_tau" in problem


@pytest.mark.parametrize("name", ["key_bias", "window", "sink"])
def test_a_kernel_that_ignores_a_mechanism_is_refused(name):
    def ignore(run, q, k, v, *, prepared, key_bias=None, sink=None):
        unused = sum(0 * x.sum() for x in (key_bias, sink) if x is not None)
        plan = SimpleNamespace(query_length=LENGTH, key_length=LENGTH, device=CPU, window=None)
        return run(q, k, v, prepared=blocks.prepare(None, plan)) + unused
    assert check_backend(faulty(ignore), make_case(name), CPU, torch.float32, [LENGTH]) is not None


def test_an_error_of_any_kind_is_a_reason():
    def fail(run, q, k, v, **more):
        raise ZeroDivisionError("no\nsuch kernel")
    problem = check_backend(faulty(fail), make_case("nope"), CPU, torch.float32)
    assert "ZeroDivisionError: no such kernel" in problem and "\n" not in problem


def test_errors_are_shares_of_the_norm_and_of_the_mean_row():
    exact = dict(o=torch.ones(4, 25, dtype=torch.float64))
    off = dict(o=exact["o"] + 0.1 * torch.eye(4, 25))
    plain = dict(o=exact["o"] + 0.04)
    assert worst_error(off, exact, plain) == ("o", pytest.approx(0.02 / 0.06))
    assert worst_error(dict(o=off["o"] * torch.nan), exact, plain)[1] == math.inf

"""The check of a kernel: right kernels pass in every dtype, and planted faults end a run or choose another kernel."""

import math
import re

import pytest
import torch
from attention_cases import CPU, CUDA, MECHANISMS, make_case, make_plan, skip_unless_runs
from commands import ROOT, TWO_RANKS, parametrize, python, refuses, slow
from test_train import arguments

from model.attention.blocks import Blocks
from model.attention.check import LENGTHS, check_backend, worst_error
from model.attention.choose import BACKENDS, choose_backend

LENGTH = 300


def problem_of(backend, name="nope", lengths=(LENGTH, 129), dtype=torch.float32, **options):
    """Return what the check finds wrong with a backend, or None."""
    return check_backend(backend, make_case(name), CPU, dtype, lengths, **options).problem


@parametrize("name", [*MECHANISMS, "window window=1", "scale_invariant learn_moments=True terms=a"])
@parametrize("backend, dtype", [
    ("cpu", torch.float32), ("blocks", torch.float32), ("blocks", torch.bfloat16), ("blocks", torch.float16),
])
def test_right_ones_pass(backend, dtype, name):
    skip_unless_runs(backend, make_case(name))
    assert problem_of(BACKENDS[backend], name, [LENGTH], dtype) is None


def faulty(change):
    """Return the backend `blocks`, but with the output change(run, q, k, v)."""
    class Faulty(Blocks):
        error_factor = 1.0

        def run(self, q, k, v, plan, **more):
            return change(lambda *qkv: super(Faulty, self).run(*qkv, plan, **more), q, k, v)
    return Faulty()


def hides_one_tile(run, q, k, v):
    """128 queries do not see 64 keys a while before them."""
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    hidden[512:640, 128:192] = True
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, ~hidden)


def is_wrong_for_strided_values(run, q, k, v):
    return run(q, k, v if v.transpose(1, 2).is_contiguous() else v.roll(1, dims=0))


def is_wrong_for_strided_queries(run, q, k, v):
    return run(q if q.is_contiguous() else q.roll(1, dims=1), k, v)


def is_wrong_in_a_batch(run, q, k, v):
    """All sequences attend to the keys of the first."""
    return run(q, k[:1].expand_as(k), v)


def is_not_finite_in_one_row(run, q, k, v):
    output = run(q, k, v)
    return output.index_fill(2, torch.tensor(7), torch.nan)


def has_no_gradient_of_keys(run, q, k, v):
    return run(q, k.detach() + 0 * k, v)


@parametrize("fault", [
    hides_one_tile, is_wrong_for_strided_values, is_wrong_for_strided_queries, is_wrong_in_a_batch,
    is_not_finite_in_one_row, has_no_gradient_of_keys,
])
def test_a_planted_fault_is_refused(fault):
    problem = problem_of(faulty(fault), lengths=LENGTHS)
    assert "allowed error" in problem and str(LENGTHS[0]) in problem


def test_without_a_backward_pass_the_output_alone_is_checked():
    assert problem_of(faulty(has_no_gradient_of_keys), backward=False) is None
    assert "output" in problem_of(faulty(is_wrong_in_a_batch), backward=False)


def test_a_missing_tile_is_refused_in_bfloat16():
    """Rounding to bfloat16 makes errors too. Their norm must not hide a missing tile of a long sequence."""
    def problem(change):
        def rounded(run, *qkv):
            return change(run, *map(torch.Tensor.float, qkv)).bfloat16()
        return problem_of(faulty(rounded), lengths=[1024], dtype=torch.bfloat16)
    assert problem(lambda run, *qkv: run(*qkv)) is None
    assert "allowed error" in problem(hides_one_tile)


def test_a_wrong_gradient_of_a_learned_parameter_is_refused():
    class Wrong(Blocks):
        def prepare(self, plan, score_change):
            bands = super().prepare(plan, score_change)
            if score_change is None:
                return bands
            return bands._replace(scale=0.5 * (bands.scale + bands.scale.detach()))
    assert "log_tau" in problem_of(Wrong(), "learned")


@parametrize("name", ["key_bias", "window", "sink"])
def test_a_kernel_that_ignores_a_mechanism_is_refused(name):
    class Ignoring(Blocks):
        def run(self, q, k, v, plan, *, key_bias, sink, score_change):
            unused = sum(0 * x.sum() for x in (key_bias, sink) if x is not None)
            return super().run(q, k, v, make_plan(make_case("nope"), LENGTH, LENGTH, "blocks")) + unused
    assert "allowed error" in problem_of(Ignoring(), name)


def test_an_error_of_any_kind_is_a_reason():
    def fail(run, q, k, v):
        raise ZeroDivisionError("no\nsuch kernel")
    problem = problem_of(faulty(fail))
    assert "ZeroDivisionError: no such kernel" in problem and "\n" not in problem


def test_errors_are_shares_of_the_norm_and_of_the_mean_row():
    exact = dict(o=torch.ones(4, 25, dtype=torch.float64))
    off = dict(o=exact["o"] + 0.1 * torch.eye(4, 25))
    plain = dict(o=exact["o"] + 0.04)
    assert worst_error(off, exact, plain) == ("o", pytest.approx(0.02 / 0.06))
    assert worst_error(dict(o=off["o"] * torch.nan), exact, plain)[1] == math.inf


@pytest.fixture
def on_cuda(monkeypatch):
    """Set backends: {name: fault, or None}. The choice is CUDA's, and the check runs on this CPU."""
    def check_here(backend, method, device, dtype, documents):
        return check_backend(backend, method, CPU, torch.float32, [130], documents=documents)
    def set_backends(**faults):
        for name, fault in faults.items():
            backend = faulty(fault) if fault else Blocks()
            backend.name = name
            monkeypatch.setitem(BACKENDS, name, backend)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("model.attention.check.check_backend", check_here)
    return set_backends


def test_on_cuda_the_first_right_backend_is_chosen_and_its_error_is_in_the_reason(on_cuda):
    on_cuda(sdpa=has_no_gradient_of_keys, flex=None)
    backend, why = choose_backend(make_case("rope"), CUDA)
    assert backend.name == "flex" and "dk" in why
    assert 0 < float(re.search(r"error (\S+) of", why)[1]) < 1
    on_cuda(sdpa=None)
    assert choose_backend(make_case("rope"), CUDA)[0].name == "sdpa"


@parametrize("name", ["sdpa", "flex_flash"])
def test_a_named_backend_that_is_wrong_is_refused_and_a_right_one_is_named(name, on_cuda):
    on_cuda(flex=None, **{"sdpa": has_no_gradient_of_keys, name: is_not_finite_in_one_row})
    with refuses(f"{name} .*output.* flex") as refused:
        choose_backend(make_case("rope"), CUDA, name=name)
    assert "blocks" not in str(refused.value)


def test_without_a_right_backend_nothing_runs(on_cuda):
    on_cuda(**dict.fromkeys(("sdpa", "flex", "blocks"), has_no_gradient_of_keys))
    with refuses("sdpa .*flex .*blocks "):
        choose_backend(make_case("rope"), CUDA)


RANK_1_WITHOUT_COMPILER = """
import os
import train_gpt
from model import cpu
if os.environ["RANK"] == "1":
    cpu.load_library = lambda: (None, "it has no compiler")
train_gpt.main()
"""


@slow
@parametrize("backend", ["auto", "cpu"])
def test_ranks_with_other_backends_end_the_run_in_one_line(backend, data, tmp_path):
    skip_unless_runs("cpu", make_case("rope"))
    (tmp_path / "train.py").write_text(RANK_1_WITHOUT_COMPILER)
    argv = arguments(data, tmp_path / "runs", f"--attention_backend {backend}")
    done = python(*TWO_RANKS, tmp_path / "train.py", *argv, code=1, PYTHONPATH=str(ROOT))  # torchrun's own exit code
    (error,) = re.findall("error: .*", done.stderr)
    assert "rank 1" in error and "no compiler" in error
    assert "blocks" in error or backend == "cpu"
    assert "exitcode  : 2" in done.stderr and 'train_gpt.py", line' not in done.stderr  # no worker's traceback
    assert not (tmp_path / "runs").exists()

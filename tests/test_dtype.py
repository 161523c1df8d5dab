"""The tests that depend on whether this CPU has bfloat16 units pass with these units hidden too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optim.muon import fast_dtype

ROOT = Path(__file__).parents[1]
HIDDEN = dict(ONEDNN_MAX_CPU_ISA="AVX2")
DEPENDENT = """
tests/test_train.py::test_all_of_a_step_is_in_the_dtype_of_the_run
tests/test_train.py::test_resumes_bit_for_bit_in_the_dtype_of_this_machine
tests/test_bench_step.py::test_muon_matrix_by_matrix_makes_the_same_updates
tests/test_bench_step.py::test_the_gate_lets_equal_models_pass_and_no_others
tests/test_optim.py::test_bank_equals_separate_matrices
tests/test_optim.py::test_transposed_gradient_layout_changes_nothing
tests/test_needle.py::test_what_was_interrupted_goes_on_and_ends_with_the_same_weights
tests/test_needle.py::test_fine_tuning_learns_and_leaves_everything_in_the_run
""".split()


def python_without_units(*words):
    """What it says, with the CPU's units hidden from it. It must exit with 0."""
    environment = os.environ | dict(OMP_NUM_THREADS="1") | HIDDEN
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    return done.stdout.strip()


@pytest.mark.skipif(fast_dtype(torch.device("cpu")) == torch.float32, reason="this CPU has no bfloat16 units to hide")
def test_dependent_tests_pass_without_the_units():
    """With them they pass where they are."""
    fast = "import torch, optim.muon; print(optim.muon.fast_dtype(torch.device('cpu')))"
    assert python_without_units("-c", fast) == "torch.float32"
    said = python_without_units("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *DEPENDENT)
    assert " passed" in said and "skipped" not in said, said

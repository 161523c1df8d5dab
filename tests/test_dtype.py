"""dtype auto is what was measured; the tests that depend on a CPU's bfloat16 units pass with these hidden too."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from configs.presets import preset
from model.kernels.cpu import multiplies_bfloat16
from runtime.dtype import compute_dtype, explain_dtype, layer_seconds

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


@pytest.mark.slow
@pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU has no bfloat16 units to hide")
def test_dependent_tests_pass_without_the_units():
    """With them they pass where they are."""
    units = "from model.kernels.cpu import multiplies_bfloat16; print(multiplies_bfloat16())"
    assert python_without_units("-c", units) == "False"
    said = python_without_units("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *DEPENDENT)
    assert " passed" in said and "skipped" not in said, said


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU has no bfloat16 units: float32, without a measurement")
def test_auto_is_what_was_measured_once_and_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, cpu = preset("quickstart"), torch.device("cpu")
    seconds = layer_seconds(config)
    assert seconds.keys() == {"float32", "bfloat16"} and layer_seconds(config) == seconds
    assert compute_dtype(config, cpu) == getattr(torch, min(seconds, key=seconds.get))
    assert f"{1e3 * seconds['float32']:.1f} ms in float32" in explain_dtype(config, cpu)
    (path,) = (tmp_path / "scale_invariant_attention").glob("dtype-*.json")
    for faster in seconds:
        path.write_text(json.dumps({name: 1.0 + (name != faster) for name in seconds}))
        assert compute_dtype(config, cpu) == getattr(torch, faster)
    path.write_text("{")
    assert layer_seconds(config).keys() == seconds.keys()
    layer_seconds(dataclasses.replace(config, model_dim=64))
    assert len(list(path.parent.glob("dtype-*.json"))) == 2  # another shape has a measurement of its own
    state = torch.get_rng_state()
    path.unlink()
    layer_seconds(config)
    assert torch.equal(torch.get_rng_state(), state)

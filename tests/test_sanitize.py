"""scripts/sanitize.py finds what is planted in the C++ kernels, each fault by its sanitizer, and refuses mistakes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_cpu_kernel import PROBLEM

from scripts import sanitize

ROOT = Path(__file__).parents[1]
HAS_COMPILER = bool(shutil.which("g++")) and PROBLEM is None
PLANTED = {
    "a write behind the end": ("address", "heap-buffer-overflow", "start + i] = peak[i]", "start + i + 1] = peak[i]"),
    "a product of too many rows": (
        "address", "heap-buffer-overflow.*plain_gemm", '"N", "N", rows, c.dim, keys', '"N", "N", 2 * rows, c.dim, keys',
    ),
    "a sum that overflows": (
        "undefined", "signed integer overflow", "keys = std::min(width, end - j);",
        "keys = std::min(width, end - j + INT64_MAX);",
    ),
    "sums of two threads in one place": ("thread", "data race", "+ part * call->batch * dq.batch", ""),
}
SHORTEST = "a write behind the end"


def run(folder, *words):
    command = [sys.executable, "-m", "scripts.sanitize", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="there is no g++, or the kernel cannot run")
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault, tmp_path, long):
    """The fault is planted in a copy of the repository."""
    if not long and fault != SHORTEST:
        pytest.skip("with --long")
    kind, says, good, bad = PLANTED[fault]
    for name in ("model", "scripts", "tests", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("errors.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    kernels = tmp_path / "model" / "attention" / "cpu"
    source = kernels / "cpu.cpp"
    assert source.read_text().count(good) == 1
    one = "any_number_of_threads and not with_them and 1-1-2 and float32"
    if long:
        assert run(tmp_path, kind, "-k", one).returncode == 0
    source.write_text(source.read_text().replace(good, bad))
    done = run(tmp_path, kind, "-k", one)
    assert done.returncode not in (0, 2), done.stdout
    assert re.search(says, done.stdout + done.stderr, re.DOTALL), done.stdout + done.stderr


@pytest.mark.parametrize("words, says", [([], "name one: address, undefined, thread"), (["memory"], "not 'memory'")])
def test_other_sanitizers_are_refused(words, says):
    with pytest.raises(ValueError, match=says):
        sanitize.main(words)


def test_a_compiler_without_sanitizers_is_refused(tmp_path, monkeypatch):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho libasan.so\n")  # what GCC says of a library that it does not have
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(ValueError, match="has no libasan.so"):
        sanitize.main(["address"])

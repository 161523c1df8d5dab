"""The C++ kernels with the compiler's sanitizers in them, which end the process at the first fault.

`address` finds memory that belongs to others, `undefined` what C++ does not define. The kernels are compiled anew with
the flags of model/cpu/library.py and these, and run the random calls of test_cpu_kernel.py.
"""

import os
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from commands import ROOT, parametrize, slow

from model import cpu

FLAGS = {
    "address": "-fsanitize=address",
    "undefined": "-fsanitize=undefined,float-cast-overflow -fno-sanitize-recover=all",
}
RUNTIMES = dict(address="libasan.so", undefined="libubsan.so")
# The compiler that the kernels see. What else is compiled stays as it is.
COMPILER = """#!/bin/sh
unset LD_PRELOAD
case "$*" in
*cpu/loss.cpp*) exec g++ "$@" {flags} ;;
*) exec g++ "$@" ;;
esac
"""
RUN = """
import sys, pytest
from model.cpu.library import load_library
assert load_library()[0] is not None, load_library()[1]
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--capture=sys", "-m", "not slow", *sys.argv[1:]]))
"""
PLANTED = {
    "a write behind the end": ("address", "heap-buffer-overflow", "start + i] = peak[i]", "start + i + 1] = peak[i]"),
    "a sum that overflows": (
        "undefined", "signed integer overflow", "keys = std::min(width, end - j);",
        "keys = std::min(width, end - j + INT64_MAX);",
    ),
}


def library(name):
    """Return the path of a library of the compiler, or its name alone where it has none."""
    return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()


CAN_RUN = shutil.which("g++") and cpu.kernel_problem(torch.device("cpu"), torch.float32) is None
CAN_RUN = CAN_RUN and all(os.path.isabs(library(name)) for name in RUNTIMES.values())
pytestmark = [slow, pytest.mark.skipif(not CAN_RUN, reason="there is no g++ with its sanitizers")]


def sanitize(kind, root, folder, *arguments):
    """Run tests of the repository at root with a sanitizer; return the finished process."""
    wrapper = folder / "compiler"
    source = shlex.quote(str(ROOT / "tests/sanitized.cpp"))
    wrapper.write_text(COMPILER.format(flags=f"{source} -g -Wl,-Bsymbolic -fno-omit-frame-pointer {FLAGS[kind]}"))
    wrapper.chmod(0o700)
    preload = ":".join(library(name) for name in (RUNTIMES[kind], "libstdc++.so.6"))
    # Python frees little of its memory when it ends, so leaks say nothing.
    variables = dict(ASAN_OPTIONS="detect_leaks=0", UBSAN_OPTIONS="print_stacktrace=1", PYTHONPATH=str(root))
    variables |= dict(CXX=str(wrapper), XDG_CACHE_HOME=str(folder), LD_PRELOAD=preload, OMP_NUM_THREADS="2")
    return subprocess.run([sys.executable, "-c", RUN, *arguments], cwd=root, env=os.environ | variables,
                          capture_output=True, text=True, timeout=1200)


@parametrize("kind", FLAGS)
def test_random_calls_of_the_kernels_pass(kind, tmp_path, long):
    tests = ["tests/test_cpu_kernel.py", *(["--long"] if long else []), "-k", "random"]
    done = sanitize(kind, ROOT, tmp_path, *tests)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault, tmp_path, long):
    if not long and fault != "a write behind the end":
        pytest.skip("with --long")
    kind, message, good, bad = PLANTED[fault]
    for name in ("configs", "model", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, tmp_path)
    source = tmp_path / "model/cpu/attention.cpp"
    text = source.read_text()
    assert text.count(good) == 1
    source.write_text(text.replace(good, bad))
    done = sanitize(kind, tmp_path, tmp_path, "tests/test_cpu_kernel.py", "-k", "any_number_of_threads and 1-2")
    assert done.returncode not in (0, 2) and message in done.stdout + done.stderr, done.stdout[-3000:]

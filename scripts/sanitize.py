"""Run the tests of the C++ kernels with a sanitizer of the compiler in them, which ends the process at the first fault.

    python -m scripts.sanitize address        memory that is not theirs: out of bounds, or freed before
    python -m scripts.sanitize undefined      what C++ does not define: overflows, shifts, misaligned addresses, ...
    python -m scripts.sanitize thread         threads that read and write the same number, and do not wait

What follows goes to pytest, like -x or -k window. It needs GCC with its sanitizers, as distributions bring it. The
kernels are compiled anew, with the flags of model/kernels/cpu.py and those below; the matrix products, which are the
libraries' own otherwise, are plain loops here, so that a wrong size given to them is found too (tests/sanitized.cpp).
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from errors import exit_on_user_error, require

ROOT = Path(__file__).parents[1]
TESTS = ("tests/test_cpu_kernel.py", "tests/test_cpu_kernel_random.py")
FLAGS = {
    "address": ("-fsanitize=address",),
    "undefined": ("-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread", *(f"-Wl,--wrap=GOMP_{name}" for name in ("parallel", "barrier", "loop_end"))),
}
RUNTIMES = dict(address="libasan.so", undefined="libubsan.so", thread="libtsan.so")
# Python frees little of what it holds when it ends; and PyTorch's own threads are none of ours.
OPTIONS = dict(
    ASAN_OPTIONS="detect_leaks=0",
    UBSAN_OPTIONS="print_stacktrace=1",
    TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1",
)
# Called as the compiler, for the kernels and for what torch.compile makes, which stays as it is.
COMPILER = """#!/bin/sh
unset LD_PRELOAD
case "$*" in
*cpu_loss.cpp*) exec {compiler} "$@" {flags} ;;
*) exec {compiler} "$@" ;;
esac
"""


def main(argv: list[str]) -> int:
    """Run the tests, and return pytest's exit code or what the sanitizer ends a process with."""
    if {"-h", "--help"} & {*argv}:
        print(__doc__)
        return 0
    kind, *words = argv or [""]
    require(kind in FLAGS, f"name one: {', '.join(FLAGS)}; not {kind!r}")
    compiler = os.environ.get("CXX") or shutil.which("g++")
    require(compiler, "there is no g++, whose sanitizers this needs")
    require(kind != "thread" or shutil.which("setarch"), "there is no setarch, which comes with util-linux")
    preload = [find_library(compiler, name) for name in (RUNTIMES[kind], "libstdc++.so.6")]
    with tempfile.TemporaryDirectory() as folder:
        flags = shlex.join([str(ROOT / "tests" / "sanitized.cpp"), "-g", "-fno-omit-frame-pointer", *FLAGS[kind]])
        wrapper = Path(folder, "compiler")
        wrapper.write_text(COMPILER.format(compiler=shlex.quote(compiler), flags=flags))
        wrapper.chmod(0o700)
        environment = os.environ | OPTIONS | dict(CXX=str(wrapper), XDG_CACHE_HOME=folder, LD_PRELOAD=":".join(preload))
        environment |= dict(OMP_NUM_THREADS="2", OMP_WAIT_POLICY="passive")  # tests ask for more threads than cores
        # The sanitizer writes to descriptor 2, which pytest must not keep to itself. ThreadSanitizer wants addresses
        # that are not at random.
        command = ["setarch", "--addr-no-randomize"] * (kind == "thread")
        command += [sys.executable, "-m", "pytest", "-q", "-p", "tests.sanitized", "-p", "no:cacheprovider"]
        command += ["--capture=sys", "--long", "-m", "not slow", *(words or ()), *TESTS]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


def find_library(compiler: str, name: str) -> str:
    """Return the path of a library that the compiler brings."""
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    require(os.path.isabs(path), f"{compiler} has no {name}, which the sanitizer needs (GCC's packages bring it)")
    return path


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main(sys.argv[1:]))

"""Compiles the C++ kernels on first use, keeps the result in the user's cache, and calls its functions."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCES = [Path(__file__).with_name(name) for name in ("attention.cpp", "loss.cpp", "cpu.h")]
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
TILE = (128, 256)  # queries, keys: the fastest in results/speed/cpu.md
FEW_QUERIES, SMALL_TILE = 256, 64  # with so few queries, a small tile has fewer hidden logits
MATRICES = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")


class Matrix(ctypes.Structure):
    """The struct Matrix of cpu.h."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "token"))]


class Arguments(ctypes.Structure):
    """The struct Call of cpu.h."""

    _fields_ = [
        *((name, Matrix) for name in MATRICES),
        *((name, ctypes.c_void_p) for name in ("lse", "delta", "tables", "dtables")),
        *((name, ctypes.c_void_p) for name in ("bias", "dbias", "dlogits", "sink", "starts")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "table_heads", "queries", "keys", "dim")),
        *((name, ctypes.c_int64) for name in ("q_offset", "window", "parts", "tile_queries", "tile_keys")),
    ]


def call_library(function: str, q_offset: int, window: int, parts: int = 1, **tensors: Tensor | None):
    """Call a function of the library. Tensors are named like their fields in Arguments."""
    kernel, reason = load_library()
    assert kernel is not None, reason
    q, k, tables = tensors["q"], tensors["k"], tensors["tables"]
    batch, heads, queries, dim = q.shape
    call = Arguments(
        batch=batch,
        heads=heads,
        table_heads=tables.shape[1],
        queries=queries,
        keys=k.shape[2],
        dim=dim,
        q_offset=q_offset,
        window=window,
        parts=parts,
        tile_queries=SMALL_TILE if queries <= FEW_QUERIES else TILE[0],
        tile_keys=TILE[1],
    )
    for name, x in tensors.items():
        if name in MATRICES:
            batch, head, token, _ = x.stride()
            token = max(token, x.shape[3])  # the stride of a single token may be anything
            setattr(call, name, Matrix(x.data_ptr(), batch, head, token))
        elif x is not None:
            setattr(call, name, x.data_ptr())
    getattr(kernel, function)(ctypes.byref(call))


@functools.cache
def load_library() -> tuple[ctypes.CDLL | None, str | None]:
    """Return the compiled kernels and None, or None and the reason why there are none."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return None, "there is no C++ compiler"
    try:
        return ctypes.CDLL(str(compile_library(compiler))), None
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return None, f"{compiler} cannot compile it: {detail.strip().splitlines()[0]}"


def compile_library(compiler: str) -> Path:
    """Return the shared object, from the user's cache if this compiler has already compiled it for this processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")  # of x86, of ARM
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"  # contains the BLAS
    texts = *map(Path.read_text, SOURCES), version, processor, str(torch_library), *FLAGS
    key = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "scale_invariant_attention"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"cpu-{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:  # other processes may compile it at the same time
            fresh = Path(temporary) / path.name
            sources = [str(source) for source in SOURCES if source.suffix == ".cpp"]
            command = [compiler, *FLAGS, *sources, str(torch_library), "-o", str(fresh)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            with open(fresh, "rb") as file:
                os.fsync(file.fileno())  # the data must be on the disk before the name is
            os.replace(fresh, path)
    return path

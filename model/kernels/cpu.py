"""Attention over L = a_t S + m_t + b_j on a CPU, and the head's cross-entropy, in C++ that is compiled on first use.

float32 alone. It needs a compiler with OpenMP, as torch.compile does, and a PyTorch whose BLAS can be called from
outside. find_problem says what is missing; then plain PyTorch runs (model/backends/blocks.py, model/loss.py).
"""

import ctypes
import functools
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from model.kernels import heads_last
from model.kernels.distance import to_bits
from model.methods.base import ScoreChange

SOURCES = [Path(__file__).with_name(name) for name in ("cpu.cpp", "cpu_loss.cpp", "cpu.h")]
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
GEMMS = dict(gemm="sgemm_", set_threads="MKL_Set_Num_Threads_Local")  # in PyTorch's library; the second if oneMKL is
TILE = (128, 256)  # queries, keys: the fastest of those tried (results/speed/cpu.md)
FEW, TILE_OF_FEW = 256, 64  # so many queries are better cut finer: less of what causality hides is computed
MATRICES = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")


class Matrix(ctypes.Structure):
    """The struct Matrix of cpu.h."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "token"))]


class Arguments(ctypes.Structure):
    """The struct Call of cpu.h."""

    _fields_ = [
        ("gemm", ctypes.c_void_p),
        ("set_threads", ctypes.c_void_p),
        *((name, Matrix) for name in MATRICES),
        *((name, ctypes.c_void_p) for name in ("lse", "delta", "tables", "dtables")),
        *((name, ctypes.c_void_p) for name in ("bias", "dbias", "dlogits", "sink")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "table_heads", "queries", "keys", "dim")),
        *((name, ctypes.c_int64) for name in ("q_offset", "window", "parts", "tile_queries", "tile_keys")),
    ]


def find_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run there, or None. It is compiled when this is asked for the first time."""
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device}"
    if dtype != torch.float32:
        return f"it takes float32, not {dtype}"
    return load_library()[1]


# What torch.compiler.assume_constant_result does besides importing the compiler, which takes two seconds.
find_problem._dynamo_marked_constant = True


@functools.cache
def load_library() -> tuple[ctypes.CDLL | None, str | None]:
    """Return the compiled kernel and None, or None and why there is none."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return None, "there is no C++ compiler"
    try:
        blas = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        blas = None
    addresses = {
        name: ctypes.cast(getattr(blas, symbol, None), ctypes.c_void_p).value for name, symbol in GEMMS.items()
    }
    if not addresses["gemm"]:
        return None, "this PyTorch does not show its BLAS"
    try:
        kernel = ctypes.CDLL(str(compile_library(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return None, f"{compiler} cannot compile it: {detail.strip().splitlines()[0]}"
    for name, address in addresses.items():
        setattr(kernel, name, address)
    return kernel, None


def compile_library(compiler: str) -> Path:
    """Return the shared object, from the cache if it was compiled before for this processor by this compiler.

    It ends with the SHA-256 of all before that, which the system's loader ignores, and is made again if that differs: a
    damaged one would end the process when it is loaded, without a word.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    texts = *map(Path.read_text, SOURCES), version, processor_flags(), *FLAGS
    key = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    folder = cache_folder()
    path = folder / f"cpu-{key}.so"
    if not is_whole(path):
        with tempfile.TemporaryDirectory(dir=folder) as temporary:  # then moved, whole, as others may be doing the same
            fresh = Path(temporary) / path.name
            command = [compiler, *FLAGS, *(str(path) for path in SOURCES if path.suffix == ".cpp"), "-o", str(fresh)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            with open(fresh, "rb+") as file:
                file.write(hashlib.sha256(file.read()).digest())
                file.flush()
                os.fsync(file.fileno())  # the data must be on the disk before the name is
            os.replace(fresh, path)
    return path


def processor_flags() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("flags")), "")


def cache_folder() -> Path:
    """Return the folder for what is made once for a machine, in the user's cache or, without a home, a temporary one.
    Raise PermissionError if that belongs to somebody else."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~")) / ".cache"
    folder = Path(cache) / "scale_invariant_attention"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home
        folder = Path(tempfile.gettempdir()) / f"scale_invariant_attention_{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user") from None
    return folder


def is_whole(path: Path) -> bool:
    """Tell whether a shared object of compile_library is there, as it was left."""
    content = path.read_bytes() if path.exists() else b""
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def make_tables(change: ScoreChange | None, num_heads: int, head_dim: int, key_length: int) -> Tensor:
    """Return A and M of distance.py, turned round, (2, H or 1, keys) float32; differentiable in what is learned."""
    distance = torch.arange(key_length - 1, -1, -1).double()
    a, m = (1.0, 0.0) if change is None else change.coefficients(distance, torch.arange(num_heads).unsqueeze(-1))
    return to_bits(a, m, distance, head_dim).float().contiguous()


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, *,
    q_offset: int = 0, window: int | None = None, key_bias: Tensor | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return causal attention (B, H, Tq, D) over a_t S + m_t + b_j, tables coming from make_tables for these keys.

    q (B, H, Tq, D), k and v (B, H, Tk, D), float32; query i is at position q_offset + i, key j at j. Keys
    at a distance of `window` or more are hidden. key_bias (B, H, Tk), the b_j, and sink (H,), a logit without a value
    that each row has besides, are float32.
    """
    B, H, Tk, _ = k.shape
    assert q.dtype == k.dtype == v.dtype == tables.dtype == torch.float32 and tables.shape[2] == Tk
    assert 0 <= q_offset <= Tk - q.shape[2] and (window is None or window >= 1)
    assert key_bias is None or (key_bias.dtype, key_bias.shape) == (torch.float32, (B, H, Tk))
    assert sink is None or (sink.dtype, sink.shape) == (torch.float32, (H,))
    key_bias, sink = (x if x is None else x.contiguous() for x in (key_bias, sink))
    window = Tk if window is None else min(window, Tk)
    return forward_op(*map(blas_layout, (q, k, v)), tables, key_bias, sink, q_offset, window)[0]


def blas_layout(x: Tensor) -> Tensor:
    """Return x in a form whose (T, D) matrices BLAS can read."""
    return x if x.stride(3) == 1 and x.stride(2) >= x.shape[3] else x.contiguous()


def query_tile(queries: int) -> int:
    return TILE_OF_FEW if queries <= FEW else TILE[0]


def call_library(function: str, q_offset: int, window: int, parts: int = 1, **tensors: Tensor | None):
    """Call a function of the library with these tensors, by the names of their fields in Arguments."""
    kernel, reason = load_library()
    assert kernel is not None, reason
    q, k, tables = tensors["q"], tensors["k"], tensors["tables"]
    call = Arguments(
        gemm=kernel.gemm, set_threads=kernel.set_threads,
        batch=q.shape[0], heads=q.shape[1], table_heads=tables.shape[1], queries=q.shape[2],
        keys=k.shape[2], dim=q.shape[3], q_offset=q_offset, window=window, parts=parts,
        tile_queries=query_tile(q.shape[2]), tile_keys=TILE[1],
    )  # fmt: skip
    for name, x in tensors.items():
        if name in MATRICES:
            batch, head, token, _ = x.stride()
            token = max(token, x.shape[3])  # of a single token, the stride may be anything
            setattr(call, name, Matrix(x.data_ptr(), batch, head, token))
        elif x is not None:
            setattr(call, name, x.data_ptr())
    getattr(kernel, function)(ctypes.byref(call))


@torch.library.custom_op("scale_invariant::cpu_forward", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, key_bias: Tensor | None, sink: Tensor | None,
    q_offset: int, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and, in bits, the logarithm of what it was divided by, without the bias of the query's own key:
    (B, H, Tq), which is for the backward pass and has no gradient."""
    o, lse = heads_last(q, torch.empty), torch.empty(q.shape[:3])
    call_library("forward", q_offset, window, q=q, k=k, v=v, o=o, lse=lse, tables=tables, bias=key_bias, sink=sink)
    return o, lse


@forward_op.register_fake
def _(q, k, v, tables, key_bias, sink, q_offset, window):
    return heads_last(q, q.new_empty), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("scale_invariant::cpu_backward", mutates_args=())
def backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tables: Tensor, key_bias: Tensor | None,
    sink: Tensor | None, q_offset: int, window: int, learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, the tables, key_bias and sink; empty for tables that are not learned, and for
    what is not there."""
    dout = blas_layout(dout)
    B, H, Tq, D = q.shape
    threads, tiles = torch.get_num_threads(), -(-k.shape[2] // TILE[1])
    parts = 1 if B * H % threads == 0 or B * H >= 4 * threads else min(threads, tiles)
    dtables = torch.zeros(parts * B, H, 2, k.shape[2]) if learned else None
    dbias = torch.zeros(0 if key_bias is None else key_bias.shape)
    dlogits = torch.zeros(0 if key_bias is None else (parts, *lse.shape))
    delta = (dout * o).sum(dim=-1)
    common = dict(
        q=q, k=k, v=v, o=o, dout=dout, lse=lse, delta=delta, dtables=dtables, bias=key_bias, dbias=dbias,
        dlogits=dlogits,
    )  # fmt: skip
    dk, dv = heads_last(k, torch.zeros), heads_last(v, torch.zeros)
    dq = torch.zeros(parts, B, Tq, H, D).transpose(2, 3)
    call_library("backward", q_offset, window, parts, **common, dq=dq[0], dk=dk, dv=dv, tables=tables)
    dq = dq[0] if parts == 1 else dq.sum(dim=0)
    own = slice(q_offset, q_offset + Tq)  # of each query its own key
    dsink = torch.empty(0)
    if sink is not None:
        own_bias = 0 if key_bias is None else key_bias[:, :, own]
        weight = torch.exp2((sink.unsqueeze(-1) - own_bias) / math.log(2) - lse)  # in each row, (B, H, Tq)
        of_rows = -weight * delta  # as its value is 0
        dsink = of_rows.sum(dim=(0, 2))
    if key_bias is not None:
        # The gradients of a row's logits sum up to 0 but for the rounding of the output, in delta. Own biases are taken
        # from the logits, so they get these sums: else what adds up biases, as forgetting attention does, would add up
        # that rounding.
        dbias[:, :, own] -= dlogits.sum(dim=0) if sink is None else dlogits.sum(dim=0) + of_rows
    if not learned:
        return dq, dk, dv, torch.empty(0), dbias, dsink
    dtables = dtables.sum(dim=0).transpose(0, 1)  # (2, H, Tk)
    dtables = dtables.contiguous() if tables.shape[1] > 1 else dtables.sum(dim=1, keepdim=True)
    return dq, dk, dv, dtables, dbias, dsink


@backward_op.register_fake
def _(dout, q, k, v, o, lse, tables, key_bias, sink, q_offset, window, learned):
    dq, dk, dv = heads_last(q, q.new_empty), heads_last(k, k.new_empty), heads_last(k, k.new_empty)
    others = tables if learned else None, key_bias, sink
    return dq, dk, dv, *(tables.new_empty(0 if x is None else x.shape) for x in others)


def save_for_backward(ctx, inputs, output):
    *tensors, ctx.q_offset, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def backward(ctx, dout, _):
    q, k, v, tables, key_bias, sink, o, lse = ctx.saved_tensors
    tensors = dout, q, k, v, o, lse, tables, key_bias, sink
    gradients = backward_op(*tensors, ctx.q_offset, ctx.window, ctx.needs_input_grad[3])
    return *(x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad)), None, None


forward_op.register_autograd(backward, setup_context=save_for_backward)


def cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor, gradient: bool):
    """Set losses (R,) from logits (R, V), and the logits, if gradient, to softmax - onehot; else they are lost."""
    assert logits.dtype == losses.dtype == torch.float32 and targets.dtype == torch.int64
    assert logits.is_contiguous() and targets.is_contiguous() and losses.is_contiguous()
    low, high = (x.item() for x in targets.aminmax())
    if low < 0 or high >= logits.shape[1]:
        raise IndexError(f"targets are from {low} to {high}, there are logits of 0 to {logits.shape[1] - 1}")
    kernel, reason = load_library()
    assert kernel is not None, reason
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (logits, targets, losses))
    kernel.cross_entropy(*pointers, *map(ctypes.c_int64, (*logits.shape, gradient)))

"""C++ kernels for CPUs, in float32: attention over logits a_t S + m_t + b_j, and the head's cross-entropy.

The kernels are compiled on first use. They need a C++ compiler with OpenMP, as torch.compile does, and a PyTorch whose
BLAS other libraries can call. Otherwise plain PyTorch runs (model/attention/blocks.py, model/loss.py).
"""

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor

from model.cpu.library import TILE, call_library, load_library


def kernel_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot run with this device and dtype, or None. The first call compiles them."""
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device}"
    if dtype != torch.float32:
        return f"it takes float32, not {dtype}"
    return load_library()[1]


# torch.compiler.assume_constant_result does the same, but imports the compiler, which takes two seconds.
kernel_problem._dynamo_marked_constant = True


# ---- attention -------------------------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    key_bias: Tensor | None,
    sink: Tensor | None,
    starts: Tensor | None,
    window: int,
) -> Tensor:
    """Return the output (B, H, Tq, D) of q (B, H, Tq, D), which has the last Tq tokens of k and v (B, H, Tk, D).

    tables (2, H or 1, Tk): A and M of logits A q.k + M in bits, the largest distance first. key_bias (B, H, Tk) is
    added to the logits in nats, and sink (H,) is one more logit. Keys at a distance of `window` or more are hidden, and
    keys before starts (B, Tk) int64 of the query's own token. starts never decreases along a sequence.
    """
    B, H, Tk, D = k.shape
    shapes = q.shape, k.shape, v.shape
    assert v.shape == k.shape and q.shape == (B, H, q.shape[2], D), shapes
    assert q.dtype == k.dtype == v.dtype == tables.dtype == torch.float32
    assert tables.shape[2] == Tk and 1 <= q.shape[2] <= Tk and 1 <= window <= Tk
    if key_bias is not None:
        key_bias = key_bias.float().contiguous()
        assert key_bias.shape == (B, H, Tk)
    if sink is not None:
        sink = sink.float().contiguous()
        assert sink.shape == (H,)
    if starts is not None:
        starts = starts.contiguous()
        assert starts.shape == (B, Tk) and starts.dtype == torch.int64
    q, k, v = blas_layout(q), blas_layout(k), blas_layout(v)
    output, _ = forward_op(q, k, v, tables, key_bias, sink, starts, Tk - q.shape[2], window)
    return output


def blas_layout(x: Tensor) -> Tensor:
    """Return x in a form whose (T, D) matrices BLAS can read."""
    return x if x.stride(3) == 1 and x.stride(2) >= x.shape[3] else x.contiguous()


def heads_last(x: Tensor, make: Callable) -> Tensor:  # make: torch.empty, x.new_empty or torch.zeros
    """Return a new tensor with the shape of x (B, H, T, D) and the memory order (B, T, H, D) of linear layers."""
    B, H, T, D = x.shape
    return make((B, T, H, D), dtype=x.dtype).transpose(1, 2)


@torch.library.custom_op("scale_invariant::cpu_forward", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    key_bias: Tensor | None,
    sink: Tensor | None,
    starts: Tensor | None,
    q_offset: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log2 of the softmax denominator (B, H, Tq) for the backward pass.

    The bias of the query's own key is subtracted from the logits. The second output has no gradient.
    """
    o, lse = heads_last(q, torch.empty), torch.empty(q.shape[:3])
    inputs = dict(q=q, k=k, v=v, tables=tables, bias=key_bias, sink=sink, starts=starts)
    call_library("forward", q_offset, window, **inputs, o=o, lse=lse)
    return o, lse


@forward_op.register_fake
def _(q, k, v, tables, key_bias, sink, starts, q_offset, window):
    return heads_last(q, q.new_empty), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("scale_invariant::cpu_backward", mutates_args=())
def backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    tables: Tensor,
    key_bias: Tensor | None,
    sink: Tensor | None,
    starts: Tensor | None,
    q_offset: int,
    window: int,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, tables, key_bias and sink. Gradients of absent inputs, and of tables that are
    not learned, are empty."""
    dout = blas_layout(dout)
    B, H, Tq, D = q.shape
    delta = (dout * o).sum(dim=-1)  # (B, H, Tq)

    # 1. Where heads are too few for all threads, several threads share the keys of a head. Each has its own sums.
    threads = torch.get_num_threads()
    is_even = B * H % threads == 0 or B * H >= 4 * threads
    parts = 1 if is_even else min(threads, -(-k.shape[2] // TILE[1]))
    dq = torch.zeros(parts, B, Tq, H, D).transpose(2, 3)
    dk, dv = heads_last(k, torch.zeros), heads_last(v, torch.zeros)
    dtables = torch.zeros(parts * B, H, 2, k.shape[2]) if learned else None
    dbias = torch.zeros(0 if key_bias is None else key_bias.shape)
    dlogits = torch.zeros(0 if key_bias is None else (parts, *lse.shape))  # sums over each row
    call_library(
        "backward",
        q_offset,
        window,
        parts,
        q=q,
        k=k,
        v=v,
        o=o,
        dout=dout,
        lse=lse,
        delta=delta,
        tables=tables,
        dtables=dtables,
        bias=key_bias,
        starts=starts,
        dbias=dbias,
        dlogits=dlogits,
        dq=dq[0],
        dk=dk,
        dv=dv,
    )

    # 2. Sums over the threads and rows.
    dq = dq[0] if parts == 1 else dq.sum(dim=0)
    own_keys = slice(q_offset, q_offset + Tq)  # each query's own key
    dsink = torch.empty(0)
    if sink is not None:
        own_bias = 0 if key_bias is None else key_bias[:, :, own_keys]
        probability = torch.exp2((sink.unsqueeze(-1) - own_bias) / math.log(2) - lse)  # (B, H, Tq)
        dsink_rows = -probability * delta  # the sink's value is 0
        dsink = dsink_rows.sum(dim=(0, 2))
    if key_bias is not None:
        # In exact arithmetic the gradients of a row's logits sum to 0. Rounding of the output leaves a remainder, which
        # forgetting attention would add up over keys. So the remainder is subtracted at the diagonal.
        remainder = dlogits.sum(dim=0) if sink is None else dlogits.sum(dim=0) + dsink_rows
        dbias[:, :, own_keys] -= remainder
    if not learned:
        return dq, dk, dv, torch.empty(0), dbias, dsink
    dtables = dtables.sum(dim=0).transpose(0, 1)  # (2, H, Tk)
    if tables.shape[1] == 1:
        dtables = dtables.sum(dim=1, keepdim=True)
    return dq, dk, dv, dtables.contiguous(), dbias, dsink


@backward_op.register_fake
def _(dout, q, k, v, o, lse, tables, key_bias, sink, starts, q_offset, window, learned):
    dq, dk, dv = heads_last(q, q.new_empty), heads_last(k, k.new_empty), heads_last(k, k.new_empty)
    others = tables if learned else None, key_bias, sink
    return dq, dk, dv, *(tables.new_empty(0 if x is None else x.shape) for x in others)


def save_for_backward(ctx, inputs, output):
    *tensors, ctx.q_offset, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def backward(ctx, dout, _):
    q, k, v, tables, key_bias, sink, starts, o, lse = ctx.saved_tensors
    tensors = dout, q, k, v, o, lse, tables, key_bias, sink, starts
    gradients = backward_op(*tensors, ctx.q_offset, ctx.window, ctx.needs_input_grad[3])
    return *(x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad)), None, None, None


forward_op.register_autograd(backward, setup_context=save_for_backward)


# ---- the head's cross-entropy ----------------------------------------------------------------------------------------


def cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor, gradient: bool):
    """Set losses (R,) from logits (R, V). If gradient, set logits to softmax - onehot, else to undefined values."""
    assert logits.dtype == losses.dtype == torch.float32 and targets.dtype == torch.int64
    assert logits.is_contiguous() and targets.is_contiguous() and losses.is_contiguous()
    low, high = (x.item() for x in targets.aminmax())
    if low < 0 or high >= logits.shape[1]:
        raise IndexError(f"targets are {low} to {high}. Use targets from 0 to {logits.shape[1] - 1}.")
    kernel, reason = load_library()
    assert kernel is not None, reason
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (logits, targets, losses))
    kernel.cross_entropy(*pointers, *map(ctypes.c_int64, (*logits.shape, gradient)))

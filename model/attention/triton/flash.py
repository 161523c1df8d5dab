"""Launches the kernels of kernels.py for causal attention over L = a_t S + m_t + b_j, with autograd."""

import dataclasses

import torch
import triton
from torch import Tensor

from model.attention.base import LOG2E, MAX_LENGTH, heads_last
from model.attention.triton import DTYPES, MAX_HEAD_DIM, PADDING, Tables
from model.attention.triton.kernels import forward_kernel, key_gradient_kernel, query_gradient_kernel
from model.methods.base import upcast


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The queries and keys of a kernel's tile, its warps and its pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


def choose_tiles(dtype: torch.dtype, head_dim: int) -> dict[str, Tiles]:
    """Return the tiles of each kernel. Among tiles that hardly spill registers, they need the fewest instructions per
    logit (results/speed/flex_code.md). They are not timed yet."""
    if dtype == torch.float32:
        small = Tiles(32, 32, 4, 1) if head_dim <= 128 else Tiles(16, 16, 4, 1)
        return dict(forward=small, query_gradient=small, key_gradient=small)
    if head_dim > 128:
        return dict(forward=Tiles(64, 32, 4, 2), query_gradient=Tiles(64, 32, 4, 1), key_gradient=Tiles(32, 32, 4, 1))
    narrow = head_dim <= 64
    return dict(
        forward=Tiles(128, 64, 4, 2) if narrow else Tiles(128, 64, 8, 3),
        query_gradient=Tiles(64, 64, 4, 2),
        key_gradient=Tiles(64, 128, 8, 2) if narrow else Tiles(32, 128, 8, 3),
    )


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, q_offset: int, key_bias: Tensor | None, sink: Tensor | None
) -> Tensor:
    """Return causal attention (B, H, Tq, D). Arguments are as in a backend's run. Both passes are deterministic."""
    (B, H, Tq, D), Tk = q.shape, k.shape[2]
    # `attend` and `prepare` guarantee these shapes. With others, a kernel would read the memory of other tensors.
    assert k.shape == v.shape == (B, H, Tk, D) and q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    assert q.dtype in DTYPES and 1 <= D <= MAX_HEAD_DIM and Tk <= MAX_LENGTH and 0 <= q_offset <= Tk - Tq
    assert key_bias is None or (key_bias.shape, key_bias.device) == ((B, H, Tk), q.device)
    assert sink is None or (sink.shape, sink.device) == ((H,), q.device)
    if tables.functions is not None:
        assert tables.functions.shape[1] in (1, H) and tables.functions.shape[2] >= Tk + PADDING
        if sink is not None and len(tables.functions) == 1:
            sink = sink - 1  # with one function, all logits lack the 1
    key_bias, sink = (x if x is None else x.float().contiguous() for x in (key_bias, sink))
    functions = tables.functions, tables.tangent, tables.window, q_offset
    return forward_op(*map(tokens_first, (q, k, v)), tables.parameter, key_bias, sink, *functions)[0]


def tokens_first(x: Tensor) -> Tensor:
    """Return x (B, H, T, D) in memory order (B, T, H, D). Tokens may have gaps, as q, k and v of one matmul have."""
    B, H, T, D = x.shape
    fits = x.stride() == (T * x.stride(2), D, x.stride(2), 1)
    return x if fits else heads_last(x, x.new_empty).copy_(x)


@torch.library.custom_op("scale_invariant::flash_forward", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, parameter: Tensor | None, key_bias: Tensor | None, sink: Tensor | None,
    functions: Tensor | None, tangent: Tensor | None, window: int, q_offset: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output, and the log2 of the softmax denominator, (B, H, Tq), which has no gradient."""
    o, lse = empty_outputs(q)
    launch(forward_kernel, "forward", (q, k, v), (o, lse, key_bias, sink), functions, window, q_offset)
    return o, lse


@forward_op.register_fake
def _(q, *args):
    return empty_outputs(q)


def empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:  # (B, H, Tq, D) and (B, H, Tq)
    return heads_last(q, q.new_empty), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("scale_invariant::flash_backward", mutates_args=())
def backward_op(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, key_bias: Tensor | None,
    sink: Tensor | None, functions: Tensor | None, tangent: Tensor | None, window: int, q_offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, of each head's parameter (H,), key_bias and sink. Absent inputs have empty ones.

    delta_i = sum_d o_id do_id, (B, H, Tq), which is also sum_j P_ij dP_ij.
    """
    dq, dk, dv, dparameter, dkey_bias, dsink = empty_gradients(q, k, v, key_bias, sink, tangent)
    vectors = q, k, v, tokens_first(do)
    row_sums = None if key_bias is None else torch.empty_like(lse)
    dparameter_rows = None if tangent is None else torch.empty_like(lse)  # each query's part of dparameter
    learned = *((None, None) if tangent is None else tangent), dparameter_rows
    tensors = lse, delta, dq, key_bias, row_sums, *learned
    launch(query_gradient_kernel, "query_gradient", vectors, tensors, functions, window, q_offset)
    tensors = lse, delta, dk, dv, key_bias, None if key_bias is None else dkey_bias
    launch(key_gradient_kernel, "key_gradient", vectors, tensors, functions, window, q_offset)
    if dparameter_rows is not None:
        dparameter = dparameter_rows.sum(dim=(0, 2))
    if sink is not None:  # P (dP - delta), where dP is 0 because the sink has no value
        dsink_rows = -torch.exp2(LOG2E * sink[:, None] - lse) * delta
        dsink = dsink_rows.sum(dim=(0, 2))
    if key_bias is not None:
        # In exact arithmetic the gradients of a row's logits sum to 0. Rounding of o leaves a remainder, which
        # forgetting attention would add up over keys. So the remainder is subtracted at the diagonal.
        remainder = row_sums if sink is None else row_sums + dsink_rows
        dkey_bias[:, :, q_offset : q_offset + q.shape[2]] -= remainder
    return dq, dk, dv, dparameter, dkey_bias, dsink


@backward_op.register_fake
def _(do, q, k, v, lse, delta, key_bias, sink, functions, tangent, *args):
    return empty_gradients(q, k, v, key_bias, sink, tangent)


def empty_gradients(q, k, v, key_bias, sink, tangent):
    vectors = (heads_last(x, x.new_empty) for x in (q, k, v))
    shapes = 0 if tangent is None else q.shape[1], *(0 if x is None else x.shape for x in (key_bias, sink))
    return *vectors, *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)


def save_for_backward(ctx, inputs, output):
    *tensors, ctx.window, ctx.q_offset = inputs
    ctx.save_for_backward(*tensors, *output)


def backward(ctx, do, _):
    q, k, v, _, key_bias, sink, functions, tangent, o, lse = ctx.saved_tensors
    delta = (upcast(do) * upcast(o)).sum(dim=-1)  # not in backward_op, so that torch.compile fuses it
    tensors = do, q, k, v, lse, delta, key_bias, sink, functions, tangent
    gradients = backward_op(*tensors, ctx.window, ctx.q_offset)
    return *(x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad)), *[None] * 4


forward_op.register_autograd(backward, setup_context=save_for_backward)


def launch(kernel, role: str, vectors: tuple, tensors: tuple, functions: Tensor | None, window: int, q_offset: int):
    """Launch a kernel. vectors: q, k, v and perhaps do, in tokens_first's layout. tensors: the others, or None.

    role: a key of choose_tiles.
    """
    (B, H, Tq, D), Tk = vectors[0].shape, vectors[1].shape[2]
    tiles = choose_tiles(vectors[0].dtype, D)[role]
    length, rows = (Tk, tiles.keys) if role == "key_gradient" else (Tq, tiles.queries)
    tables = [] if functions is None else list(functions)
    head_stride = 0 if functions is None or functions.shape[1] == 1 else functions.stride(1)
    scale = (LOG2E * D**-0.5, LOG2E**0.5 * D**-0.5, 1.0)[len(tables)]  # of q.k, before the functions are applied
    with torch.cuda.device_of(vectors[0]):  # Triton launches on the current GPU
        kernel[(triton.cdiv(length, rows) * B * H,)](
            *vectors, *tensors, *(tables + [None, None])[:2], *(x.stride(2) for x in vectors),
            head_stride, scale, H, Tq, Tk, q_offset,
            WINDOW=window, HEAD_DIM=D, BLOCK_D=max(16, triton.next_power_of_2(D)),
            QUERIES=tiles.queries, KEYS=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

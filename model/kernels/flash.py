"""Causal attention over L = a_t S + m_t in Triton, as FlashAttention-2 (Dao 2023, arXiv 2307.08691), and its gradients.

A program owns a tile of queries (or, for the gradients of keys and values, of keys) and walks over the tiles that it
sees in three stretches, so that no logit pays for what its tile does not need:

    masked   tiles on the diagonal                      a, m from the table by distance
    near     tiles below it, without a mask             a, m from the table
    far      all tiles from coefficients.far on         a, m by the tile's polynomials, 3 multiply-adds a logit

distance.py has the tables, the polynomials and the units. Nothing here depends on the method: without coefficients it
is plain causal attention, and with those of ALiBi all tiles are far ones, by polynomials of degree 0 and 1.
"""

import contextlib
import dataclasses
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.kernels.distance import EVERYWHERE, LOG2E, MAX_LENGTH, REACH, STEP, Coefficients

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: tile by tile in numpy, on a CPU, for tests
IN_INTERPRETER = tl.constexpr(INTERPRETED)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


# ---- inside a tile ---------------------------------------------------------------------------------------------------


@triton.jit
def load_rows(base, row, stride, d, rows_left, HEAD_DIM: tl.constexpr, BOUNDED: tl.constexpr):
    """Rows (R, BLOCK_D) that start at the pointer base; 0 outside the head, and beyond rows_left if BOUNDED."""
    at = base + row[:, None] * stride + d[None, :]
    if BOUNDED and HEAD_DIM < d.shape[0]:
        return tl.load(at, mask=(row[:, None] < rows_left) & (d[None, :] < HEAD_DIM), other=0.0)
    elif BOUNDED:
        return tl.load(at, mask=row[:, None] < rows_left, other=0.0)
    elif HEAD_DIM < d.shape[0]:
        return tl.load(at, mask=d[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(base, row, stride, d, rows_left, value, HEAD_DIM: tl.constexpr):
    at = base + row[:, None] * stride + d[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=(row[:, None] < rows_left) & (d[None, :] < HEAD_DIM))


@triton.jit
def approximate_log2(x):
    """By the special function unit: Triton's own takes some 15 instructions more. The interpreter knows no assembly."""
    if IN_INTERPRETER:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def approximate_sqrt(x):
    if IN_INTERPRETER:
        return tl.sqrt(x)
    else:
        return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def function_of_tile(at, D, u, v, DEGREE: tl.constexpr):
    """A function at the distances D + u + v of a tile (R, C), u (R, 1) and v (1, C), by the coefficients at `at`.

    A cubic is first turned into one in v for each row, of which a thread has few: then a logit costs three
    multiply-adds, and no register is spent on its distance.
    """
    c0 = tl.load(at)
    c1 = tl.load(at + 1)
    if DEGREE == 0:
        return c0
    elif DEGREE == 1:
        return (c0 + c1 * (D + u)) + c1 * v
    elif DEGREE == 3:
        c2 = tl.load(at + 2)
        c3 = tl.load(at + 3)
        r0 = c0 + u * (c1 + u * (c2 + u * c3))
        r1 = c1 + u * (2 * c2 + u * (3 * c3))
        r2 = c2 + u * (3 * c3)
        return r0 + v * (r1 + v * (r2 + v * c3))
    else:  # the scale-invariant b itself, 1 / tau being the first coefficient
        x = tl.maximum(c0 * (D + u) + c0 * v, 0.0) + 1.0
        return approximate_sqrt(1.4426950408889634 + 2 * approximate_log2(x))


@triton.jit
def logits_of_tile(
    qk, D, u, v, table, polynomials, table_f, polynomials_f, first_D, scale,
    MASKED: tl.constexpr, FAR: tl.constexpr,
    FUNCTIONS: tl.constexpr, DEGREE_A: tl.constexpr, DEGREE_M: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Logits in bits from products qk at distances D + u + v, and their slope in qk, but for a constant factor."""
    if FUNCTIONS == 0:
        return qk * scale, 1.0
    else:
        if FAR:
            at = polynomials + (D - first_D) // STEP * 4
            a = function_of_tile(at, D, u.to(tl.float32), v.to(tl.float32), DEGREE_A)
        else:
            t = D + (u + v)
            if MASKED:
                t = tl.maximum(t, 0)
            a = tl.load(table + t)
        if FUNCTIONS == 1:
            return a * (qk * scale - a), a
        else:
            if FAR:
                m = function_of_tile(at + polynomials_f, D, u.to(tl.float32), v.to(tl.float32), DEGREE_M)
            else:
                m = tl.load(table + table_f + t)
            return a * qk + m, a


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def which_tile(num_tiles, num_heads):
    """Head by head, so that the keys and values in use at one time are few."""
    program = tl.program_id(0)
    batch_head = program // num_tiles
    return (batch_head // num_heads).to(tl.int64), (batch_head % num_heads).to(tl.int64), program % num_tiles


@triton.jit
def forward_kernel(
    q, k, v, o, lse, documents, table, polynomials,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    table_f, table_h, polynomials_f, polynomials_h, first_D, far, scale, H, GROUP, Tq, Tk, q_offset,
    FUNCTIONS: tl.constexpr, DEGREE_A: tl.constexpr, DEGREE_M: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    batch, head, tile = which_tile(tl.cdiv(Tq, QUERIES), H)
    start = (tl.cdiv(Tq, QUERIES) - 1 - tile) * QUERIES  # the longest rows first
    q += batch * q_b + head * q_h + start.to(tl.int64) * q_t
    k += batch * k_b + head // GROUP * k_h
    v += batch * v_b + head // GROUP * v_h
    o += batch * o_b + head * o_h + start.to(tl.int64) * o_t
    lse += (batch * H + head) * Tq + start
    documents += batch * Tk
    table += head * table_h
    polynomials += head * polynomials_h
    row, column, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    D0 = q_offset + start  # position of the first query
    q_tile = load_rows(q, row, q_t, d, Tq - start, HEAD_DIM, not EVEN)
    if DOCUMENTS:
        q_document = tl.load(documents + D0 + row, mask=D0 + row < Tk, other=-1)

    masked_from, far_to = key_stretches(D0, far, NEAR, FAR, DOCUMENTS, KEYS)
    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    for stretch in tl.static_range(3):  # masked (first: then every row has seen a key), near, far
        if stretch == 0:
            begin, end = masked_from, tl.minimum(D0 + QUERIES, Tk)
        elif stretch == 1:
            begin, end = far_to, masked_from
        else:
            begin, end = 0, far_to
        for n in range(begin, end, KEYS):
            at = tl.cast(n, tl.int64)
            k_tile = load_rows(k + at * k_t, column, k_t, d, Tk - n, HEAD_DIM, stretch == 0)
            v_tile = load_rows(v + at * v_t, column, v_t, d, Tk - n, HEAD_DIM, stretch == 0)
            logits, _ = logits_of_tile(
                tl.dot(q_tile, k_tile.T, input_precision=PRECISION), D0 - n, row[:, None], -column[None, :],
                table, polynomials, table_f, polynomials_f, first_D, scale,
                stretch == 0, stretch == 2 or not NEAR, FUNCTIONS, DEGREE_A, DEGREE_M, STEP,
            )  # fmt: skip
            if stretch == 0:
                visible = D0 + row[:, None] >= n + column[None, :]
                if DOCUMENTS:
                    visible &= q_document[:, None] == tl.load(documents + n + column, n + column < Tk, -1)[None, :]
                logits = tl.where(visible, logits, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(logits, 1))
            shift = new_peak
            if stretch == 0:  # a row of this tile may have seen no key yet
                shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            p = tl.exp2(logits - shift[:, None])
            shrink = tl.exp2(peak - shift)
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
            peak = new_peak
    store_rows(o, row, o_t, d, Tq - start, acc / total[:, None], HEAD_DIM)
    tl.store(lse + row, peak + tl.log2(total), mask=row < Tq - start)


@triton.jit
def key_stretches(D0, far, NEAR: tl.constexpr, FAR: tl.constexpr, DOCUMENTS: tl.constexpr, KEYS: tl.constexpr):
    """The keys that queries from D0 on see: far ones up to the second number, near ones up to the first, masked"""
    masked_from = D0 // KEYS * KEYS
    if DOCUMENTS:
        masked_from *= 0
    far_to = masked_from
    if NEAR:
        far_to *= 0
        if FAR:
            far_to = tl.where(D0 >= far, tl.minimum((D0 - far) // KEYS * KEYS + KEYS, masked_from), 0)
    return masked_from, far_to


@triton.jit
def delta_kernel(
    o, do, delta, o_b, o_h, o_t, do_b, do_h, do_t, H, Tq,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """delta_i = sum_d o_id do_id, which is also sum_j P_ij dP_ij."""
    batch, head, tile = which_tile(tl.cdiv(Tq, QUERIES), H)
    start = tile * QUERIES
    row, d = tl.arange(0, QUERIES), tl.arange(0, BLOCK_D)
    at = tl.cast(start, tl.int64)
    o_tile = load_rows(o + batch * o_b + head * o_h + at * o_t, row, o_t, d, Tq - start, HEAD_DIM, True)
    do_tile = load_rows(do + batch * do_b + head * do_h + at * do_t, row, do_t, d, Tq - start, HEAD_DIM, True)
    sums = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + (batch * H + head) * Tq + start + row, sums, mask=row < Tq - start)


@triton.jit
def query_gradient_kernel(
    q, k, v, do, dq, lse, delta, documents, table, polynomials, tangent, dparameter,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    table_f, table_h, polynomials_f, polynomials_h, first_D, far, scale, unit, H, GROUP, Tq, Tk, q_offset,
    FUNCTIONS: tl.constexpr, DEGREE_A: tl.constexpr, DEGREE_M: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries; if LEARNED, also each query's part in the gradient of its head's parameter."""
    batch, head, tile = which_tile(tl.cdiv(Tq, QUERIES), H)
    start = (tl.cdiv(Tq, QUERIES) - 1 - tile) * QUERIES
    q += batch * q_b + head * q_h + start.to(tl.int64) * q_t
    k += batch * k_b + head // GROUP * k_h
    v += batch * v_b + head // GROUP * v_h
    do += batch * do_b + head * do_h + start.to(tl.int64) * do_t
    dq += batch * dq_b + head * dq_h + start.to(tl.int64) * dq_t
    first_row = (batch * H + head) * Tq + start
    documents += batch * Tk
    table += head * table_h
    tangent += head * table_h
    polynomials += head * polynomials_h
    row, column, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    D0 = q_offset + start
    q_tile = load_rows(q, row, q_t, d, Tq - start, HEAD_DIM, not EVEN)
    do_tile = load_rows(do, row, do_t, d, Tq - start, HEAD_DIM, not EVEN)
    lse_row = tl.load(lse + first_row + row, row < Tq - start, float("inf"))  # beyond the end: P = 0
    delta_row = tl.load(delta + first_row + row, row < Tq - start, 0.0)
    if DOCUMENTS:
        q_document = tl.load(documents + D0 + row, mask=D0 + row < Tk, other=-1)

    masked_from, far_to = key_stretches(D0, far, NEAR, FAR, DOCUMENTS, KEYS)
    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    learned = tl.zeros([QUERIES], tl.float32)
    for stretch in tl.static_range(3):  # masked, near, far
        if stretch == 0:
            begin, end = masked_from, tl.minimum(D0 + QUERIES, Tk)
        elif stretch == 1:
            begin, end = far_to, masked_from
        else:
            begin, end = 0, far_to
        for n in range(begin, end, KEYS):
            at = tl.cast(n, tl.int64)
            k_tile = load_rows(k + at * k_t, column, k_t, d, Tk - n, HEAD_DIM, stretch == 0)
            v_tile = load_rows(v + at * v_t, column, v_t, d, Tk - n, HEAD_DIM, stretch == 0)
            qk = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
            logits, slope = logits_of_tile(
                qk, D0 - n, row[:, None], -column[None, :],
                table, polynomials, table_f, polynomials_f, first_D, scale,
                stretch == 0, stretch == 2 or not NEAR, FUNCTIONS, DEGREE_A, DEGREE_M, STEP,
            )  # fmt: skip
            p = tl.exp2(logits - lse_row[:, None])
            if stretch == 0:
                visible = D0 + row[:, None] >= n + column[None, :]
                if DOCUMENTS:
                    visible &= q_document[:, None] == tl.load(documents + n + column, n + column < Tk, -1)[None, :]
                p = tl.where(visible, p, 0.0)
            dp = tl.dot(do_tile, v_tile.T, input_precision=PRECISION)
            ds = p * (dp - delta_row[:, None])
            if LEARNED:
                entry = tangent + tl.maximum((D0 - n) + (row[:, None] - column[None, :]), 0)
                learned += tl.sum(ds * (tl.load(entry) * qk + tl.load(entry + table_f)), 1)
            acc = tl.dot((ds * slope).to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    store_rows(dq, row, dq_t, d, Tq - start, acc * unit, HEAD_DIM)
    if LEARNED:
        tl.store(dparameter + first_row + row, learned * unit, mask=row < Tq - start)


@triton.jit
def key_gradient_kernel(
    q, k, v, do, dq, dk, dv, lse, delta, documents, table, polynomials,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, dk_b, dk_h, dk_t,
    table_f, table_h, polynomials_f, polynomials_h, first_D, far, scale, unit, H, GROUP, Tq, Tk, q_offset,
    FUNCTIONS: tl.constexpr, DEGREE_A: tl.constexpr, DEGREE_M: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys; if ATOMIC, also its part in dQ, added in whatever order the tiles come."""
    batch, kv_head, tile = which_tile(tl.cdiv(Tk, KEYS), H // GROUP)
    start = tile * KEYS
    at = tl.cast(start, tl.int64)
    row, column, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    k_tile = load_rows(k + batch * k_b + kv_head * k_h + at * k_t, column, k_t, d, Tk - start, HEAD_DIM, True)
    v_tile = load_rows(v + batch * v_b + kv_head * v_h + at * v_t, column, v_t, d, Tk - start, HEAD_DIM, True)
    documents += batch * Tk
    if DOCUMENTS:
        k_document = tl.load(documents + start + column, start + column < Tk, -1)

    first = tl.maximum(start - q_offset, 0)  # query that sees any of these keys
    masked_to = tl.cdiv(tl.maximum(start + KEYS - 1 - q_offset, 0), QUERIES) * QUERIES
    if DOCUMENTS:
        masked_to = Tq
    far_from = masked_to
    if NEAR:
        far_from = Tq
        if FAR:  # far is at most 2^30 here
            far_from = tl.maximum(tl.cdiv(tl.maximum(start - q_offset + far, 0), QUERIES) * QUERIES, masked_to)
    acc_k = tl.zeros([KEYS, BLOCK_D], tl.float32)
    acc_v = tl.zeros([KEYS, BLOCK_D], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q_head = q + batch * q_b + head * q_h
        do_head = do + batch * do_b + head * do_h
        dq_head = dq + batch * dq_b + head * dq_h
        first_row = (batch * H + head) * Tq
        for stretch in tl.static_range(3):  # masked, near, far
            if stretch == 0:
                begin, end = first // QUERIES * QUERIES, tl.minimum(masked_to, Tq)
            elif stretch == 1:
                begin, end = masked_to, tl.minimum(far_from, Tq)
            else:
                begin, end = far_from, Tq
            for m in range(begin, end, QUERIES):
                at = tl.cast(m, tl.int64)
                q_tile = load_rows(q_head + at * q_t, row, q_t, d, Tq - m, HEAD_DIM, not EVEN)
                do_tile = load_rows(do_head + at * do_t, row, do_t, d, Tq - m, HEAD_DIM, not EVEN)
                lse_row = tl.load(lse + first_row + m + row, row < Tq - m, float("inf"))  # beyond the end: P = 0
                delta_row = tl.load(delta + first_row + m + row, row < Tq - m, 0.0)
                D = q_offset + m - start
                logits, slope = logits_of_tile(  # (KEYS, QUERIES)
                    tl.dot(k_tile, q_tile.T, input_precision=PRECISION), D, -column[:, None], row[None, :],
                    table + head * table_h, polynomials + head * polynomials_h, table_f, polynomials_f, first_D, scale,
                    stretch == 0, stretch == 2 or not NEAR, FUNCTIONS, DEGREE_A, DEGREE_M, STEP,
                )  # fmt: skip
                p = tl.exp2(logits - lse_row[None, :])
                if stretch == 0:
                    visible = D + row[None, :] >= column[:, None]
                    if DOCUMENTS:
                        q_at = q_offset + m + row
                        visible &= k_document[:, None] == tl.load(documents + q_at, q_at < Tk, -1)[None, :]
                    p = tl.where(visible, p, 0.0)
                acc_v = tl.dot(p.to(do_tile.dtype), do_tile, acc_v, input_precision=PRECISION)
                dp = tl.dot(v_tile, do_tile.T, input_precision=PRECISION)
                ds = (p * (dp - delta_row[None, :]) * slope).to(q_tile.dtype)
                acc_k = tl.dot(ds, q_tile, acc_k, input_precision=PRECISION)
                if ATOMIC:
                    dq_tile = tl.dot(ds.T, k_tile, input_precision=PRECISION) * unit
                    at_dq = dq_head + at * dq_t + row[:, None] * dq_t + d[None, :]
                    tl.atomic_add(at_dq, dq_tile, (row[:, None] < Tq - m) & (d[None, :] < HEAD_DIM), sem="relaxed")
    dk += batch * dk_b + kv_head * dk_h + start.to(tl.int64) * dk_t
    dv += batch * dk_b + kv_head * dk_h + start.to(tl.int64) * dk_t
    store_rows(dk, column, dk_t, d, Tk - start, acc_k * unit, HEAD_DIM)
    store_rows(dv, column, dk_t, d, Tk - start, acc_v, HEAD_DIM)


# ---- on the host -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, warps and pipeline stages, of a kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


def choose_tiles(dtype: torch.dtype, block_d: int, capability: tuple[int, int]) -> dict[str, Tiles]:
    """The tiles of each kernel, chosen to fit registers and shared memory (scripts.kernel_code), not timed yet."""
    if dtype == torch.float32:
        small = Tiles(32, 32, 4, 1) if block_d <= 128 else Tiles(16, 16, 4, 1)
        return dict(forward=small, query_gradient=small, key_gradient=small)
    if block_d > 128:
        return dict(forward=Tiles(64, 32, 4, 2), query_gradient=Tiles(64, 32, 4, 1), key_gradient=Tiles(32, 32, 4, 1))
    if block_d == 128 and capability >= (9, 0):
        big = Tiles(128, 64, 8, 2)
        return dict(forward=Tiles(128, 64, 8, 3), query_gradient=big, key_gradient=Tiles(64, 128, 8, 2))
    middle = Tiles(64, 64, 4, 2)
    return dict(forward=Tiles(128, 64, 4 if block_d <= 64 else 8, 2), query_gradient=middle, key_gradient=middle)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficients: Coefficients | None = None,
    *,
    q_offset: int = 0,
    documents: Tensor | None = None,
    deterministic: bool = True,
) -> Tensor:
    """Causal attention (B, H, Tq, D) over a_t S + m_t, whose coefficients come from make_coefficients; None: over S.

    q (B, H, Tq, D), k and v (B, Hk, Tk, D), Hk dividing H (grouped queries); query i is at position q_offset + i, key j
    at j. documents (B, Tk), integers: tokens see their own document only. The forward pass is deterministic; the
    backward pass too, unless told otherwise: then dQ is summed atomically, which takes a kernel less, in any order.
    ValueError for what the kernel does not cover.
    """
    check(q, k, v, coefficients, q_offset, documents)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    c = coefficients or Coefficients(torch.empty(0, 1, 1, device=q.device))
    if documents is not None:
        documents = documents.to(torch.int64).contiguous()
    return forward_op(
        q, k, v, c.parameter, c.table, c.polynomials, c.tangent, documents,
        list(c.degrees), c.far, q_offset, deterministic,
    )[0]  # fmt: skip


def problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernel cannot run there, or None."""
    if device.type == "cuda":
        if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0 (A100) or newer"
    elif not INTERPRETED:
        return f"it runs on CUDA (on a CPU only interpreted, for tests, with TRITON_INTERPRET=1), not on {device}"
    if dtype not in DTYPES:
        return f"it takes float32, float16 and bfloat16, not {dtype}"
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"it covers head dimensions up to {MAX_HEAD_DIM}, not {head_dim}"
    return None


def check(q, k, v, coefficients, q_offset, documents):
    if not (q.dim() == k.dim() == v.dim() == 4 and k.shape == v.shape and q.shape[::3] == k.shape[::3]):
        raise ValueError(f"q, k, v must be (B, H, T, D): got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if reason := problem(q.device, q.dtype, q.shape[3]):
        raise ValueError(f"the Triton kernel cannot run: {reason}")
    if len({x.device for x in (q, k, v)}) > 1:
        raise ValueError(f"q, k, v must be on one device: got {q.device}, {k.device} and {v.device}")
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{k.shape[1]} key heads do not divide {q.shape[1]} query heads")
    if not 0 <= q_offset <= k.shape[2] - q.shape[2]:
        raise ValueError(f"{q.shape[2]} queries from position {q_offset} do not fit {k.shape[2]} keys")
    if k.shape[2] > MAX_LENGTH:
        raise ValueError(f"the kernel covers up to {MAX_LENGTH} positions, got {k.shape[2]}")
    if documents is not None and (documents.shape != (k.shape[0], k.shape[2]) or documents.dtype.is_floating_point):
        raise ValueError(f"documents must be integers (B, Tk), got {documents.dtype} {tuple(documents.shape)}")
    if coefficients is not None and coefficients.table.shape[1] not in (1, q.shape[1]):
        raise ValueError(f"coefficients of {coefficients.table.shape[1]} heads do not fit {q.shape[1]} heads")
    if coefficients is not None and coefficients.table.shape[2] < k.shape[2] + 2 * REACH:
        raise ValueError(f"coefficients were made for fewer than {k.shape[2]} keys")
    if coefficients is not None and coefficients.polynomials is not None and coefficients.q_offset != q_offset % STEP:
        raise ValueError(f"coefficients were made for another offset of the queries than {q_offset}")


def on_its_gpu(operation):
    """Triton launches on the current GPU, which need not be that of the tensors."""

    @functools.wraps(operation)
    def run(*args):
        with torch.cuda.device(args[0].device) if args[0].is_cuda else contextlib.nullcontext():
            return operation(*args)

    return run


@torch.library.custom_op("scale_invariant::flash_forward", mutates_args=())
@on_its_gpu
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, parameter: Tensor | None,
    table: Tensor, polynomials: Tensor | None, tangent: Tensor | None, documents: Tensor | None,
    degrees: list[int], far: int, q_offset: int, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    o, lse = empty_outputs(q)
    launch = Launch(q, k, v, table, polynomials, documents, degrees, far, q_offset)
    launch(
        forward_kernel, "forward", q.shape[2],
        (q, k, v, o, lse, launch.documents, table, launch.polynomials,
         *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3]),
    )  # fmt: skip
    return o, lse


@forward_op.register_fake
def _(q, *args):
    return empty_outputs(q)


def empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:  # (B, H, Tq, D), in memory (B, Tq, H, D); (B, H, Tq)
    return empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def empty_like(x: Tensor) -> Tensor:
    """(B, H, T, D) with the heads of a token side by side, as the projections before and after want them."""
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


@torch.library.custom_op("scale_invariant::flash_backward", mutates_args=())
@on_its_gpu
def backward_op(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    table: Tensor, polynomials: Tensor | None, tangent: Tensor | None, documents: Tensor | None,
    degrees: list[int], far: int, q_offset: int, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if do.stride(-1) != 1:
        do = do.contiguous()
    dq, dk, dv, dparameter = empty_gradients(q, k, v, tangent)
    delta = torch.empty_like(lse)
    launch = Launch(q, k, v, table, polynomials, documents, degrees, far, q_offset)
    B, H, Tq, D = q.shape
    delta_kernel[(triton.cdiv(Tq, 64) * B * H,)](
        o, do, delta, *o.stride()[:3], *do.stride()[:3], H, Tq,
        HEAD_DIM=D, BLOCK_D=launch.block_d, QUERIES=64,
    )  # fmt: skip
    shared = (launch.documents, table, launch.polynomials)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3])
    atomic = not deterministic and tangent is None
    if atomic:
        dq_sum = q.new_zeros((B, Tq, H, D), dtype=torch.float32).transpose(1, 2)
    else:
        launch(
            query_gradient_kernel, "query_gradient", Tq,
            (q, k, v, do, dq, lse, delta, *shared, table if tangent is None else tangent, dparameter,
             *strides, *dq.stride()[:3]),
            LEARNED=tangent is not None,
        )  # fmt: skip
    target = dq_sum if atomic else dq
    launch(
        key_gradient_kernel, "key_gradient", k.shape[2],
        (q, k, v, do, target, dk, dv, lse, delta, *shared, *strides, *target.stride()[:3], *dk.stride()[:3]),
        ATOMIC=atomic,
    )  # fmt: skip
    if atomic:
        dq.copy_(dq_sum)
    return dq, dk, dv, dparameter.sum(dim=(0, 2))


@backward_op.register_fake
def _(do, q, k, v, o, lse, table, polynomials, tangent, *args):
    *gradients, dparameter = empty_gradients(q, k, v, tangent)
    return *gradients, dparameter.sum(dim=(0, 2))


def empty_gradients(q, k, v, tangent):
    shape = (0, q.shape[1], 0) if tangent is None else q.shape[:3]
    return empty_like(q), empty_like(k), empty_like(v), q.new_empty(shape, dtype=torch.float32)


def save_for_backward(ctx, inputs, output):
    q, k, v, _, *tensors, ctx.degrees, ctx.far, ctx.q_offset, ctx.deterministic = inputs
    ctx.save_for_backward(q, k, v, *output, *tensors)


def backward(ctx, do, _):
    *gradients, dparameter = backward_op(do, *ctx.saved_tensors, ctx.degrees, ctx.far, ctx.q_offset, ctx.deterministic)
    return *gradients, dparameter if ctx.needs_input_grad[3] else None, *[None] * 8


forward_op.register_autograd(backward, setup_context=save_for_backward)


class Launch:
    """What all kernels of a call share: their common arguments, and which code they need."""

    def __init__(self, q, k, v, table, polynomials, documents, degrees, far, q_offset):
        B, H, Tq, D = q.shape
        functions = len(table)
        near = functions > 0 and far > EVERYWHERE
        has_far = functions > 0 and far < k.shape[2]
        self.block_d = max(16, triton.next_power_of_2(D))
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
        self.tiles = choose_tiles(q.dtype, self.block_d, capability)
        self.polynomials = table if polynomials is None else polynomials
        self.documents = k.new_empty(0, dtype=torch.int32) if documents is None else documents
        scale = {0: LOG2E * D**-0.5, 1: LOG2E**0.5 * D**-0.5, 2: 1.0}[functions]
        self.heads = dict(keys=(B * k.shape[1]), queries=(B * H))
        of_head = lambda x: x.stride(1) if x.shape[1] > 1 else 0
        degree_a, degree_m = [*degrees, 0, 0][:2]
        self.common = (
            table.stride(0), of_head(table), self.polynomials.stride(0), of_head(self.polynomials),
            q_offset % STEP - REACH, far if near and has_far else 0, scale,
        )  # fmt: skip
        self.lengths = (H, H // k.shape[1], Tq, k.shape[2], q_offset)
        self.unit = scale / LOG2E
        self.options = dict(
            FUNCTIONS=functions, DEGREE_A=degree_a, DEGREE_M=degree_m, NEAR=near, FAR=has_far,
            DOCUMENTS=documents is not None, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            STEP=STEP, HEAD_DIM=D, BLOCK_D=self.block_d,
        )  # fmt: skip

    def __call__(self, kernel, role: str, length: int, arguments: tuple, **options):
        tiles = self.tiles[role]
        owned = "keys" if role == "key_gradient" else "queries"  # by a program
        unit = () if role == "forward" else (self.unit,)
        kernel[(triton.cdiv(length, getattr(tiles, owned)) * self.heads[owned],)](
            *arguments, *self.common, *unit, *self.lengths,
            **self.options, **options, EVEN=self.lengths[2] % tiles.queries == 0,
            QUERIES=tiles.queries, KEYS=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

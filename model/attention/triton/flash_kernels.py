"""The GPU code of causal attention over L = a_t S + m_t and of its gradients, in Triton.

As in FlashAttention-2 (Dao 2023, arXiv 2307.08691), a program owns a tile of queries, or of keys for the gradients of
keys and values. It walks over the tiles that it sees in stretches, and each stretch computes only what its tiles need:

    masked   tiles on the diagonal                      a, m from the table by distance
    near     tiles below it, without a mask             a, m from the table
    far      all tiles from coefficients.far on         a, m by the tile's polynomials, 3 multiply-adds a logit
    line     all tiles from coefficients.line on        a, m by the tile's lines, one multiply-add a logit
    edge     with a window, tiles across its far end    as masked; tiles beyond it are not visited

flash.py launches them; distance.py has the tables, the polynomials and the units. Nothing here depends on the method.
FUNCTIONS 0 is plain causal attention. With ALiBi's functions all tiles are far ones, of degrees 0 and 1. Key biases
(BIASED, in bits as the logits), a window (WINDOW tokens, 0 for none) and sinks (SINK) are compiled in only where a call
has them. Capital arguments are constants of the compiled code. q_b, q_h and q_t are q's strides by batch, head and
token. D is the distance from a tile's first key to its first query; row and column count queries and keys within it.
"""

import triton
import triton.language as tl

from model.attention.triton.flash_tiles import (
    key_stretches,
    keys_of_stretch,
    load_rows,
    logits_of_tile,
    queries_of_stretch,
    query_stretches,
    sees,
    store_rows,
    which_tile,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def forward_kernel(
    q, k, v, o, lse, table, polynomials, key_bias, sink,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    table_f, table_h, polynomials_f, polynomials_h, first_D, far, line, scale, H, Tq, Tk, q_offset,
    FUNCTIONS: tl.constexpr, DEGREE_A: tl.constexpr, DEGREE_M: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    LINE: tl.constexpr, BIASED: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    STEP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    BOUNDED: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Write the output o of a tile of queries, and lse, the log2 of the softmax denominator, sink included.

    If BOUNDED, every exp2(logit) fits float32 (distance.is_bounded), so the sum needs no running maximum.
    """
    batch, head, tile = which_tile(tl.cdiv(Tq, QUERIES), H)
    start = (tl.cdiv(Tq, QUERIES) - 1 - tile) * QUERIES  # the longest rows first
    q += batch * q_b + head * q_h + start.to(tl.int64) * q_t
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    o += batch * o_b + head * o_h + start.to(tl.int64) * o_t
    lse += (batch * H + head) * Tq + start
    table += head * table_h
    polynomials += head * polynomials_h
    key_bias += (batch * H + head) * Tk
    row, column, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    D0 = q_offset + start  # position of the first query
    q_tile = load_rows(q, row, q_t, d, Tq - start, HEAD_DIM, not EVEN)

    masked_from, far_to, line_to = key_stretches(D0, far, line, NEAR, FAR, LINE, KEYS)
    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    # Subtracted from the logits. Finite with a window: some rows see no key of the first masked tile then.
    peak = tl.full([QUERIES], 0.0 if BOUNDED else -1e38 if WINDOW else float("-inf"), tl.float32)
    for stretch in tl.static_range(5 if WINDOW else 4):  # masked (in which every row sees a key), near, far, line, edge
        begin, end = keys_of_stretch(stretch, D0, Tk, masked_from, far_to, line_to, WINDOW, QUERIES, KEYS)
        for n in range(begin, end, KEYS):
            at = tl.cast(n, tl.int64)
            k_tile = load_rows(k + at * k_t, column, k_t, d, Tk - n, HEAD_DIM, stretch == 0)
            v_tile = load_rows(v + at * v_t, column, v_t, d, Tk - n, HEAD_DIM, stretch == 0)
            logits, _ = logits_of_tile(
                tl.dot(q_tile, k_tile.T, input_precision=PRECISION), D0 - n, row[:, None], -column[None, :],
                table, polynomials, table_f, polynomials_f, first_D, scale,
                stretch % 4 == 0, stretch % 4 >= 2 or not NEAR, stretch == 3, FUNCTIONS, DEGREE_A, DEGREE_M, STEP,
            )  # fmt: skip
            if BIASED:
                logits += tl.load(key_bias + n + column, column < Tk - n, 0.0)[None, :]
            if stretch % 4 == 0:
                logits = tl.where(sees(D0 + row[:, None], n + column[None, :], WINDOW), logits, float("-inf"))
            if not BOUNDED:
                new_peak = tl.maximum(peak, tl.max(logits, 1))
                shrink = tl.exp2(peak - new_peak)
                total *= shrink
                acc *= shrink[:, None]
                logits -= new_peak[:, None]
                peak = new_peak
            p = tl.exp2(logits)
            total += tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    if SINK:  # one logit more, of no value
        logit = tl.load(sink + head)
        new_peak = tl.maximum(peak, logit)
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.exp2(logit - new_peak)
        acc *= shrink[:, None]
        peak = new_peak
    store_rows(o, row, o_t, d, Tq - start, acc / total[:, None], HEAD_DIM)
    tl.store(lse + row, peak + tl.log2(total), mask=row < Tq - start)


@triton.jit
def delta_kernel(
    o, do, delta, o_b, o_h, o_t, do_b, do_h, do_t, H, Tq,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Write delta_i = sum_d o_id do_id, which is also sum_j P_ij dP_ij."""
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
    q, k, v, do, dq, lse, delta, table, polynomials, key_bias, tangent, dparameter, row_sums,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    table_f, table_h, polynomials_f, polynomials_h, first_D, far, line, scale, unit, H, Tq, Tk, q_offset,
    FUNCTIONS: tl.constexpr, DEGREE_A: tl.constexpr, DEGREE_M: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    LINE: tl.constexpr, BIASED: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    STEP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    LEARNED: tl.constexpr,
):  # fmt: skip
    """Write dQ of a tile of queries. If LEARNED, write each query's part of the gradient of its head's parameter. If
    BIASED, write each row's sum of the gradients of its logits."""
    batch, head, tile = which_tile(tl.cdiv(Tq, QUERIES), H)
    start = (tl.cdiv(Tq, QUERIES) - 1 - tile) * QUERIES
    q += batch * q_b + head * q_h + start.to(tl.int64) * q_t
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    do += batch * do_b + head * do_h + start.to(tl.int64) * do_t
    dq += batch * dq_b + head * dq_h + start.to(tl.int64) * dq_t
    first_row = (batch * H + head) * Tq + start
    table += head * table_h
    tangent += head * table_h
    polynomials += head * polynomials_h
    key_bias += (batch * H + head) * Tk
    row, column, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    D0 = q_offset + start
    q_tile = load_rows(q, row, q_t, d, Tq - start, HEAD_DIM, not EVEN)
    do_tile = load_rows(do, row, do_t, d, Tq - start, HEAD_DIM, not EVEN)
    lse_row = tl.load(lse + first_row + row, row < Tq - start, float("inf"))  # beyond the end: P = 0
    delta_row = tl.load(delta + first_row + row, row < Tq - start, 0.0)

    masked_from, far_to, line_to = key_stretches(D0, far, line, NEAR, FAR, LINE, KEYS)
    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    learned = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for stretch in tl.static_range(5 if WINDOW else 4):  # masked (in which every row sees a key), near, far, line, edge
        begin, end = keys_of_stretch(stretch, D0, Tk, masked_from, far_to, line_to, WINDOW, QUERIES, KEYS)
        for n in range(begin, end, KEYS):
            at = tl.cast(n, tl.int64)
            k_tile = load_rows(k + at * k_t, column, k_t, d, Tk - n, HEAD_DIM, stretch == 0)
            v_tile = load_rows(v + at * v_t, column, v_t, d, Tk - n, HEAD_DIM, stretch == 0)
            qk = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
            logits, slope = logits_of_tile(
                qk, D0 - n, row[:, None], -column[None, :],
                table, polynomials, table_f, polynomials_f, first_D, scale,
                stretch % 4 == 0, stretch % 4 >= 2 or not NEAR, stretch == 3, FUNCTIONS, DEGREE_A, DEGREE_M, STEP,
            )  # fmt: skip
            if BIASED:
                logits += tl.load(key_bias + n + column, column < Tk - n, 0.0)[None, :]
            p = tl.exp2(logits - lse_row[:, None])
            if stretch % 4 == 0:
                p = tl.where(sees(D0 + row[:, None], n + column[None, :], WINDOW), p, 0.0)
            dp = tl.dot(do_tile, v_tile.T, input_precision=PRECISION)
            ds = p * (dp - delta_row[:, None])
            if LEARNED:
                entry = tangent + tl.maximum((D0 - n) + (row[:, None] - column[None, :]), 0)
                learned += tl.sum(ds * (tl.load(entry) * qk + tl.load(entry + table_f)), 1)
            if BIASED:
                total += tl.sum(ds, 1)
            acc = tl.dot((ds * slope).to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    store_rows(dq, row, dq_t, d, Tq - start, acc * unit, HEAD_DIM)
    if LEARNED:
        tl.store(dparameter + first_row + row, learned * unit, mask=row < Tq - start)
    if BIASED:
        tl.store(row_sums + first_row + row, total, mask=row < Tq - start)


@triton.jit
def key_gradient_kernel(
    q, k, v, do, dk, dv, lse, delta, table, polynomials, key_bias, dkey_bias,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t,
    table_f, table_h, polynomials_f, polynomials_h, first_D, far, line, scale, unit, H, Tq, Tk, q_offset,
    FUNCTIONS: tl.constexpr, DEGREE_A: tl.constexpr, DEGREE_M: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    LINE: tl.constexpr, BIASED: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    STEP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of a tile of keys, and the gradients of their biases."""
    batch, head, tile = which_tile(tl.cdiv(Tk, KEYS), H)
    start = tile * KEYS
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h + start.to(tl.int64) * k_t
    v += batch * v_b + head * v_h + start.to(tl.int64) * v_t
    do += batch * do_b + head * do_h
    dk += batch * dk_b + head * dk_h + start.to(tl.int64) * dk_t
    dv += batch * dk_b + head * dk_h + start.to(tl.int64) * dk_t
    first_row = (batch * H + head) * Tq
    table += head * table_h
    polynomials += head * polynomials_h
    row, column, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    k_tile = load_rows(k, column, k_t, d, Tk - start, HEAD_DIM, True)
    v_tile = load_rows(v, column, v_t, d, Tk - start, HEAD_DIM, True)

    first, masked_to, far_from, line_from = query_stretches(
        start, Tq, q_offset, far, line, NEAR, FAR, LINE, QUERIES, KEYS
    )
    acc_k = tl.zeros([KEYS, BLOCK_D], tl.float32)
    acc_v = tl.zeros([KEYS, BLOCK_D], tl.float32)
    if BIASED:
        at_bias = (batch * H + head) * Tk + start + column
        bias = tl.load(key_bias + at_bias, column < Tk - start, 0.0)
        acc_bias = tl.zeros([KEYS], tl.float32)
    for stretch in tl.static_range(5 if WINDOW else 4):  # masked (in which every row sees a key), near, far, line, edge
        begin, end = queries_of_stretch(
            stretch, start, Tq, q_offset, first, masked_to, far_from, line_from, WINDOW, QUERIES, KEYS
        )
        for m in range(begin, end, QUERIES):
            at = tl.cast(m, tl.int64)
            q_tile = load_rows(q + at * q_t, row, q_t, d, Tq - m, HEAD_DIM, not EVEN)
            do_tile = load_rows(do + at * do_t, row, do_t, d, Tq - m, HEAD_DIM, not EVEN)
            lse_row = tl.load(lse + first_row + m + row, row < Tq - m, float("inf"))  # beyond the end: P = 0
            delta_row = tl.load(delta + first_row + m + row, row < Tq - m, 0.0)
            D = q_offset + m - start
            logits, slope = logits_of_tile(  # (KEYS, QUERIES)
                tl.dot(k_tile, q_tile.T, input_precision=PRECISION), D, -column[:, None], row[None, :],
                table, polynomials, table_f, polynomials_f, first_D, scale,
                stretch % 4 == 0, stretch % 4 >= 2 or not NEAR, stretch == 3, FUNCTIONS, DEGREE_A, DEGREE_M, STEP,
            )  # fmt: skip
            if BIASED:
                logits += bias[:, None]
            p = tl.exp2(logits - lse_row[None, :])
            if stretch % 4 == 0:
                p = tl.where(sees(D + row[None, :], column[:, None], WINDOW), p, 0.0)
            acc_v = tl.dot(p.to(do_tile.dtype), do_tile, acc_v, input_precision=PRECISION)
            dp = tl.dot(v_tile, do_tile.T, input_precision=PRECISION)
            ds = p * (dp - delta_row[None, :])
            if BIASED:
                acc_bias += tl.sum(ds, 1)
            acc_k = tl.dot((ds * slope).to(q_tile.dtype), q_tile, acc_k, input_precision=PRECISION)
    store_rows(dk, column, dk_t, d, Tk - start, acc_k * unit, HEAD_DIM)
    store_rows(dv, column, dk_t, d, Tk - start, acc_v, HEAD_DIM)
    if BIASED:
        tl.store(dkey_bias + at_bias, acc_bias * LN2, mask=column < Tk - start)

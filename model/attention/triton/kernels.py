"""Triton kernels of causal attention over L = a_t S + m_t + b_j and of its gradients. flash.py launches them.

As in FlashAttention-2 (Dao 2023, arXiv 2307.08691), a program computes one tile of queries and visits tiles of keys.
For gradients of keys and values, it computes one tile of keys and visits tiles of queries. It visits three stretches:

    0   tiles on the diagonal, masked
    1   tiles below it, without a mask
    2   with a window: tiles across its far end, masked. Tiles beyond it are not visited.

Logits are in bits, L log2(e). a_table and m_table are the tables of __init__.py, by distance. Both are None for plain
attention. m_table is None if one function is enough. Other pointers are None if a call has no key biases, no sink or no
learned parameter. Their code is then not compiled. WINDOW is 0 without a window.

The memory order is (batch, token, head, HEAD_DIM). Tokens may have gaps: q_t is the stride from token to token of q.
row and column are indices of queries and keys within a tile. t is the distance from query back to key.
"""

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: tile by tile in numpy, on a CPU, for tests
IN_INTERPRETER = tl.constexpr(INTERPRETED)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e38)  # a row's maximum before its first logit; finite, since a masked tile may hide a whole row


@triton.jit
def forward_kernel(
    q, k, v, o, lse, key_bias, sink, a_table, m_table, q_t, k_t, v_t, table_h, scale, H, Tq, Tk, q_offset,
    WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Write the output o of a tile of queries, and lse, the log2 of the softmax denominator with the sink."""
    batch, head, tile = tile_of_program(tl.cdiv(Tq, QUERIES), H)
    start = (tl.cdiv(Tq, QUERIES) - 1 - tile) * QUERIES  # the longest rows first
    q += (batch * Tq + start) * q_t + head * HEAD_DIM
    k += batch * Tk * k_t + head * HEAD_DIM
    v += batch * Tk * v_t + head * HEAD_DIM
    o += ((batch * Tq + start) * H + head) * HEAD_DIM
    lse += (batch * H + head) * Tq + start
    row, column, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    position = q_offset + start  # of the first query
    q_tile = load_rows(q, q_t, row, d, Tq - start, HEAD_DIM)

    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], LOWEST, tl.float32)  # the running maximum
    for stretch in tl.static_range(3 if WINDOW else 2):
        begin, end = keys_of_stretch(stretch, position, Tk, WINDOW, QUERIES, KEYS)
        for n in range(begin, end, KEYS):
            at = tl.cast(n, tl.int64)
            k_tile = load_rows(k + at * k_t, k_t, column, d, Tk - n, HEAD_DIM)
            v_tile = load_rows(v + at * v_t, v_t, column, d, Tk - n, HEAD_DIM)
            qk = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            t = (position - n) + (row[:, None] - column[None, :])
            logits, _ = logits_of_tile(qk, t, a_table, m_table, head * table_h, scale, stretch != 1)
            if key_bias is not None:
                bias = tl.load(key_bias + (batch * H + head) * Tk + n + column, column < Tk - n, 0.0)
                logits += LOG2E * bias[None, :]
            if stretch != 1:
                logits = tl.where(sees(t, WINDOW), logits, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(logits, 1))
            shrink = tl.exp2(peak - new_peak)
            p = tl.exp2(logits - new_peak[:, None])
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
            peak = new_peak
    if sink is not None:  # one logit more, without a value
        logit = LOG2E * tl.load(sink + head)
        new_peak = tl.maximum(peak, logit)
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.exp2(logit - new_peak)
        acc *= shrink[:, None]
        peak = new_peak
    store_rows(o, H * HEAD_DIM, row, d, Tq - start, acc / total[:, None], HEAD_DIM)
    tl.store(lse + row, peak + tl.log2(total), mask=row < Tq - start)


@triton.jit
def query_gradient_kernel(
    q, k, v, do, lse, delta, dq, key_bias, row_sums, a_tangent, m_tangent, dparameter, a_table, m_table,
    q_t, k_t, v_t, do_t, table_h, scale, H, Tq, Tk, q_offset,
    WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Write dQ of a tile of queries. With key biases, write the sum of each row's logit gradients. With a learned
    parameter, write each query's part of the parameter's gradient."""
    batch, head, tile = tile_of_program(tl.cdiv(Tq, QUERIES), H)
    start = (tl.cdiv(Tq, QUERIES) - 1 - tile) * QUERIES
    q += (batch * Tq + start) * q_t + head * HEAD_DIM
    k += batch * Tk * k_t + head * HEAD_DIM
    v += batch * Tk * v_t + head * HEAD_DIM
    do += (batch * Tq + start) * do_t + head * HEAD_DIM
    dq += ((batch * Tq + start) * H + head) * HEAD_DIM
    first_row = (batch * H + head) * Tq + start
    row, column, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    position = q_offset + start
    q_tile = load_rows(q, q_t, row, d, Tq - start, HEAD_DIM)
    do_tile = load_rows(do, do_t, row, d, Tq - start, HEAD_DIM)
    lse_row = tl.load(lse + first_row + row, row < Tq - start, float("inf"))  # beyond the end: P = 0
    delta_row = tl.load(delta + first_row + row, row < Tq - start, 0.0)

    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    learned = tl.zeros([QUERIES], tl.float32)
    for stretch in tl.static_range(3 if WINDOW else 2):
        begin, end = keys_of_stretch(stretch, position, Tk, WINDOW, QUERIES, KEYS)
        for n in range(begin, end, KEYS):
            at = tl.cast(n, tl.int64)
            k_tile = load_rows(k + at * k_t, k_t, column, d, Tk - n, HEAD_DIM)
            v_tile = load_rows(v + at * v_t, v_t, column, d, Tk - n, HEAD_DIM)
            qk = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            t = (position - n) + (row[:, None] - column[None, :])
            logits, slope = logits_of_tile(qk, t, a_table, m_table, head * table_h, scale, stretch != 1)
            if key_bias is not None:
                bias = tl.load(key_bias + (batch * H + head) * Tk + n + column, column < Tk - n, 0.0)
                logits += LOG2E * bias[None, :]
            p = tl.exp2(logits - lse_row[:, None])
            if stretch != 1:
                p = tl.where(sees(t, WINDOW), p, 0.0)
            dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
            ds = p * (dp - delta_row[:, None])
            if key_bias is not None:
                total += tl.sum(ds, 1)
            if dparameter is not None:
                at_t = head * table_h + tl.maximum(t, 0)
                learned += tl.sum(ds * (tl.load(a_tangent + at_t) * qk + tl.load(m_tangent + at_t)), 1)
            acc = tl.dot((ds * slope).to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    store_rows(dq, H * HEAD_DIM, row, d, Tq - start, acc * (scale * LN2), HEAD_DIM)
    if key_bias is not None:
        tl.store(row_sums + first_row + row, total, mask=row < Tq - start)
    if dparameter is not None:
        tl.store(dparameter + first_row + row, learned * LN2, mask=row < Tq - start)


@triton.jit
def key_gradient_kernel(
    q, k, v, do, lse, delta, dk, dv, key_bias, dkey_bias, a_table, m_table,
    q_t, k_t, v_t, do_t, table_h, scale, H, Tq, Tk, q_offset,
    WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of a tile of keys, and the gradients of their biases."""
    batch, head, tile = tile_of_program(tl.cdiv(Tk, KEYS), H)
    start = tile * KEYS
    q += batch * Tq * q_t + head * HEAD_DIM
    k += (batch * Tk + start) * k_t + head * HEAD_DIM
    v += (batch * Tk + start) * v_t + head * HEAD_DIM
    do += batch * Tq * do_t + head * HEAD_DIM
    dk += ((batch * Tk + start) * H + head) * HEAD_DIM
    dv += ((batch * Tk + start) * H + head) * HEAD_DIM
    lse += (batch * H + head) * Tq
    delta += (batch * H + head) * Tq
    row, column, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    k_tile = load_rows(k, k_t, column, d, Tk - start, HEAD_DIM)
    v_tile = load_rows(v, v_t, column, d, Tk - start, HEAD_DIM)
    if key_bias is not None:
        at_bias = (batch * H + head) * Tk + start + column
        bias = tl.load(key_bias + at_bias, column < Tk - start, 0.0)

    acc_k = tl.zeros([KEYS, BLOCK_D], tl.float32)
    acc_v = tl.zeros([KEYS, BLOCK_D], tl.float32)
    acc_bias = tl.zeros([KEYS], tl.float32)
    for stretch in tl.static_range(3 if WINDOW else 2):
        begin, end = queries_of_stretch(stretch, start, Tq, q_offset, WINDOW, QUERIES, KEYS)
        for m in range(begin, end, QUERIES):
            at = tl.cast(m, tl.int64)
            q_tile = load_rows(q + at * q_t, q_t, row, d, Tq - m, HEAD_DIM)
            do_tile = load_rows(do + at * do_t, do_t, row, d, Tq - m, HEAD_DIM)
            lse_row = tl.load(lse + m + row, row < Tq - m, float("inf"))  # beyond the end: P = 0
            delta_row = tl.load(delta + m + row, row < Tq - m, 0.0)
            qk = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # (KEYS, QUERIES)
            t = (q_offset + m - start) + (row[None, :] - column[:, None])
            logits, slope = logits_of_tile(qk, t, a_table, m_table, head * table_h, scale, stretch != 1)
            if key_bias is not None:
                logits += LOG2E * bias[:, None]
            p = tl.exp2(logits - lse_row[None, :])
            if stretch != 1:
                p = tl.where(sees(t, WINDOW), p, 0.0)
            acc_v = tl.dot(p.to(do_tile.dtype), do_tile, acc_v, input_precision="ieee")
            dp = tl.dot(v_tile, do_tile.T, input_precision="ieee")
            ds = p * (dp - delta_row[None, :])
            if key_bias is not None:
                acc_bias += tl.sum(ds, 1)
            acc_k = tl.dot((ds * slope).to(q_tile.dtype), q_tile, acc_k, input_precision="ieee")
    store_rows(dk, H * HEAD_DIM, column, d, Tk - start, acc_k * (scale * LN2), HEAD_DIM)
    store_rows(dv, H * HEAD_DIM, column, d, Tk - start, acc_v, HEAD_DIM)
    if key_bias is not None:
        tl.store(dkey_bias + at_bias, acc_bias, mask=column < Tk - start)


# ---- one tile --------------------------------------------------------------------------------------------------------


@triton.jit
def tile_of_program(num_tiles, num_heads):
    """Return batch, head and tile of this program. Successive programs share a head, so its keys stay in the cache."""
    program = tl.program_id(0)
    batch_head = program // num_tiles
    return (batch_head // num_heads).to(tl.int64), (batch_head % num_heads).to(tl.int64), program % num_tiles


@triton.jit
def load_rows(base, stride, row, d, rows_left, HEAD_DIM: tl.constexpr):
    """Return rows (R, BLOCK_D) that start at the pointer base. Entries beyond rows_left and HEAD_DIM are 0."""
    inside = row[:, None] < rows_left
    if HEAD_DIM < d.shape[0]:
        inside = inside & (d[None, :] < HEAD_DIM)
    return tl.load(base + row[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(base, stride, row, d, rows_left, value, HEAD_DIM: tl.constexpr):
    """Write value (R, BLOCK_D) to the rows that start at the pointer base, up to rows_left and HEAD_DIM."""
    at = base + row[:, None] * stride + d[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=(row[:, None] < rows_left) & (d[None, :] < HEAD_DIM))


@triton.jit
def load_entries(at):
    """Return the float32 number at each pointer. In a loop, tl.load would stage them in shared memory."""
    if IN_INTERPRETER:
        return tl.load(at)
    else:
        return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [at], tl.float32, is_pure=True, pack=1)


@triton.jit
def logits_of_tile(qk, t, a_table, m_table, at_head, scale, MASKED: tl.constexpr):
    """Return the logits in bits of products qk at distances t, and their derivative by qk, divided by scale."""
    if a_table is None:
        return qk * scale, 1.0
    else:
        if MASKED:
            t = tl.maximum(t, 0)
        a = load_entries(a_table + at_head + t)
        if m_table is None:
            return a * (qk * scale - a), a
        else:
            return a * qk + load_entries(m_table + at_head + t), a


@triton.jit
def sees(t, WINDOW: tl.constexpr):
    """Return whether a query sees a key at distance t."""
    if WINDOW:
        return (t >= 0) & (t < WINDOW)
    else:
        return t >= 0


@triton.jit
def keys_of_stretch(
    STRETCH: tl.constexpr, position, Tk, WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
):
    """Return where the keys of a stretch begin and end, for QUERIES queries from `position` on."""
    masked_from = position // KEYS * KEYS
    edge_from, edge_to = masked_from * 0, masked_from * 0
    if WINDOW:
        edge_from = tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
        edge_to = tl.minimum(tl.cdiv(tl.maximum(position + QUERIES - WINDOW, 0), KEYS) * KEYS, masked_from)
    if STRETCH == 0:
        return masked_from, tl.minimum(position + QUERIES, Tk)
    elif STRETCH == 1:
        return edge_to, masked_from
    else:
        return edge_from, edge_to


@triton.jit
def queries_of_stretch(
    STRETCH: tl.constexpr, start, Tq, q_offset, WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
):
    """Return where the queries of a stretch begin and end, for KEYS keys from `start` on."""
    masked_to = tl.cdiv(tl.maximum(start + KEYS - 1 - q_offset, 0), QUERIES) * QUERIES
    edge_from, edge_to = Tq, Tq
    if WINDOW:
        edge_from = tl.maximum(tl.maximum(start + WINDOW - q_offset, 0) // QUERIES * QUERIES, masked_to)
        edge_to = tl.minimum(Tq, tl.maximum(start + KEYS - 1 + WINDOW - q_offset, 0))
    if STRETCH == 0:
        return tl.maximum(start - q_offset, 0) // QUERIES * QUERIES, tl.minimum(masked_to, edge_to)
    elif STRETCH == 1:
        return masked_to, tl.minimum(edge_from, edge_to)
    else:
        return edge_from, edge_to

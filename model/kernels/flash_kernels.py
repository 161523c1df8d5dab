"""The Triton kernels of causal attention over L = a_t S + m_t, and of its gradients: what runs on the GPU.

As FlashAttention-2 (Dao 2023, arXiv 2307.08691): a program owns a tile of queries (or, for the gradients of keys and
values, of keys) and walks over the tiles that it sees in four stretches, so that no logit pays for what its tile does
not need:

    masked   tiles on the diagonal                      a, m from the table by distance
    near     tiles below it, without a mask             a, m from the table
    far      all tiles from coefficients.far on         a, m by the tile's polynomials, 3 multiply-adds a logit
    line     all tiles from coefficients.line on        a, m by the tile's lines, one multiply-add a logit

flash.py launches them; distance.py has the tables, the polynomials and the units. Nothing here depends on the method:
without functions of the distance (FUNCTIONS 0) it is plain causal attention, and with those of ALiBi all tiles are far
ones, by polynomials of degree 0 and 1. Capital arguments are constants of the compiled code; q_b, q_h and q_t are the
strides of q by batch, head and token, and so for the other tensors. D is the distance from a tile's first key to its
first query, row and column count queries and keys within it.
"""

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: tile by tile in numpy, on a CPU, for tests
IN_INTERPRETER = tl.constexpr(INTERPRETED)


# ---- inside a tile ---------------------------------------------------------------------------------------------------


@triton.jit
def load_rows(base, row, stride, d, rows_left, HEAD_DIM: tl.constexpr, PARTIAL: tl.constexpr):
    """Return rows (R, BLOCK_D) that start at the pointer base; 0 outside the head, and beyond rows_left if PARTIAL."""
    at = base + row[:, None] * stride + d[None, :]
    if PARTIAL and HEAD_DIM < d.shape[0]:
        return tl.load(at, mask=(row[:, None] < rows_left) & (d[None, :] < HEAD_DIM), other=0.0)
    elif PARTIAL:
        return tl.load(at, mask=row[:, None] < rows_left, other=0.0)
    elif HEAD_DIM < d.shape[0]:
        return tl.load(at, mask=d[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(base, row, stride, d, rows_left, value, HEAD_DIM: tl.constexpr):
    """Write value (R, BLOCK_D) to the rows that start at the pointer base, up to rows_left and the end of the head."""
    at = base + row[:, None] * stride + d[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=(row[:, None] < rows_left) & (d[None, :] < HEAD_DIM))


@triton.jit
def load_entries(at):
    """Return the float32 numbers at pointers, one each: tl.load in a loop would stage them in shared memory."""
    if IN_INTERPRETER:
        return tl.load(at)
    else:
        return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [at], tl.float32, is_pure=True, pack=1)


@triton.jit
def approximate_log2(x):
    """Return log2(x) as the special function unit gives it: Triton's own takes some 15 instructions more.

    The interpreter knows no assembly.
    """
    if IN_INTERPRETER:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def approximate_sqrt(x):
    """Return the square root of x in the same way."""
    if IN_INTERPRETER:
        return tl.sqrt(x)
    else:
        return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def function_of_tile(at, D, u, v, DEGREE: tl.constexpr, LINE: tl.constexpr):
    """Return a function at distances D + u + v of a tile (R, C), u (R, 1) and v (1, C), by the coefficients at `at`.

    A cubic is first turned into one in v for each row, of which a thread has few: then a logit costs three
    multiply-adds, and no register is spent on its distance. LINE: the cubics of this tile are lines.
    """
    c0 = tl.load(at)
    c1 = tl.load(at + 1)
    if DEGREE == 0:
        return c0
    elif DEGREE == 1:
        return (c0 + c1 * (D + u)) + c1 * v
    elif LINE:
        return (c0 + c1 * u) + c1 * v
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
    MASKED: tl.constexpr, FAR: tl.constexpr, LINE: tl.constexpr,
    FUNCTIONS: tl.constexpr, DEGREE_A: tl.constexpr, DEGREE_M: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the logits in bits of products qk at distances D + u + v, and their slope in qk, up to a factor."""
    if FUNCTIONS == 0:
        return qk * scale, 1.0
    else:
        if FAR:
            at = polynomials + (D - first_D) // STEP * 4
            a = function_of_tile(at, D, u.to(tl.float32), v.to(tl.float32), DEGREE_A, LINE)
        else:
            t = D + (u + v)
            if MASKED:
                t = tl.maximum(t, 0)
            a = load_entries(table + t)
        if FUNCTIONS == 1:
            return a * (qk * scale - a), a
        else:
            if FAR:
                at += polynomials_f
                m = function_of_tile(at, D, u.to(tl.float32), v.to(tl.float32), DEGREE_M, LINE)
            else:
                m = load_entries(table + table_f + t)
            return a * qk + m, a


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def which_tile(num_tiles, num_heads):
    """Return batch, head and tile of this program: head by head, so that few keys and values are in use at one time."""
    program = tl.program_id(0)
    batch_head = program // num_tiles
    return (batch_head // num_heads).to(tl.int64), (batch_head % num_heads).to(tl.int64), program % num_tiles


@triton.jit
def key_stretches(D0, far, line, NEAR: tl.constexpr, FAR: tl.constexpr, LINE: tl.constexpr, KEYS: tl.constexpr):
    """Return where the keys seen by queries from D0 on begin to be masked, and where they end to be far and lines."""
    masked_from = D0 // KEYS * KEYS
    far_to = masked_from
    line_to = masked_from * 0
    if NEAR:
        far_to *= 0
        if FAR:
            far_to = tl.where(D0 >= far, tl.minimum((D0 - far) // KEYS * KEYS + KEYS, masked_from), 0)
        if LINE:
            line_to = tl.where(D0 >= line, tl.minimum((D0 - line) // KEYS * KEYS + KEYS, masked_from), 0)
    return masked_from, far_to, line_to


@triton.jit
def forward_kernel(
    q, k, v, o, lse, table, polynomials,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    table_f, table_h, polynomials_f, polynomials_h, first_D, far, line, scale, H, Tq, Tk, q_offset,
    FUNCTIONS: tl.constexpr, DEGREE_A: tl.constexpr, DEGREE_M: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    LINE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Write the output o of a tile of queries, and lse, the logarithm to base 2 of the sum of their exp2(logits).

    If BOUNDED, no exp2(logit) is too large for float32 and each row's own key is not too small (distance.is_bounded):
    then they are summed as they are, without a running maximum.
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
    row, column, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    D0 = q_offset + start  # position of the first query
    q_tile = load_rows(q, row, q_t, d, Tq - start, HEAD_DIM, not EVEN)

    masked_from, far_to, line_to = key_stretches(D0, far, line, NEAR, FAR, LINE, KEYS)
    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], 0.0 if BOUNDED else float("-inf"), tl.float32)  # subtracted from the logits
    for stretch in tl.static_range(4):  # masked (first: then every row has seen a key), near, far, line
        if stretch == 0:
            begin, end = masked_from, tl.minimum(D0 + QUERIES, Tk)
        elif stretch == 1:
            begin, end = far_to, masked_from
        elif stretch == 2:
            begin, end = line_to, far_to
        else:
            begin, end = 0, line_to
        for n in range(begin, end, KEYS):
            at = tl.cast(n, tl.int64)
            k_tile = load_rows(k + at * k_t, column, k_t, d, Tk - n, HEAD_DIM, stretch == 0)
            v_tile = load_rows(v + at * v_t, column, v_t, d, Tk - n, HEAD_DIM, stretch == 0)
            logits, _ = logits_of_tile(
                tl.dot(q_tile, k_tile.T, input_precision=PRECISION), D0 - n, row[:, None], -column[None, :],
                table, polynomials, table_f, polynomials_f, first_D, scale,
                stretch == 0, stretch >= 2 or not NEAR, stretch == 3, FUNCTIONS, DEGREE_A, DEGREE_M, STEP,
            )  # fmt: skip
            if stretch == 0:
                logits = tl.where(D0 + row[:, None] >= n + column[None, :], logits, float("-inf"))
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
    q, k, v, do, dq, lse, delta, table, polynomials, tangent, dparameter,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    table_f, table_h, polynomials_f, polynomials_h, first_D, far, line, scale, unit, H, Tq, Tk, q_offset,
    FUNCTIONS: tl.constexpr, DEGREE_A: tl.constexpr, DEGREE_M: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    LINE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """Write dQ of a tile of queries; if LEARNED, also each query's part in the gradient of its head's parameter."""
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
    row, column, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    D0 = q_offset + start
    q_tile = load_rows(q, row, q_t, d, Tq - start, HEAD_DIM, not EVEN)
    do_tile = load_rows(do, row, do_t, d, Tq - start, HEAD_DIM, not EVEN)
    lse_row = tl.load(lse + first_row + row, row < Tq - start, float("inf"))  # beyond the end: P = 0
    delta_row = tl.load(delta + first_row + row, row < Tq - start, 0.0)

    masked_from, far_to, line_to = key_stretches(D0, far, line, NEAR, FAR, LINE, KEYS)
    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    learned = tl.zeros([QUERIES], tl.float32)
    for stretch in tl.static_range(4):  # masked, near, far, line
        if stretch == 0:
            begin, end = masked_from, tl.minimum(D0 + QUERIES, Tk)
        elif stretch == 1:
            begin, end = far_to, masked_from
        elif stretch == 2:
            begin, end = line_to, far_to
        else:
            begin, end = 0, line_to
        for n in range(begin, end, KEYS):
            at = tl.cast(n, tl.int64)
            k_tile = load_rows(k + at * k_t, column, k_t, d, Tk - n, HEAD_DIM, stretch == 0)
            v_tile = load_rows(v + at * v_t, column, v_t, d, Tk - n, HEAD_DIM, stretch == 0)
            qk = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
            logits, slope = logits_of_tile(
                qk, D0 - n, row[:, None], -column[None, :],
                table, polynomials, table_f, polynomials_f, first_D, scale,
                stretch == 0, stretch >= 2 or not NEAR, stretch == 3, FUNCTIONS, DEGREE_A, DEGREE_M, STEP,
            )  # fmt: skip
            p = tl.exp2(logits - lse_row[:, None])
            if stretch == 0:
                p = tl.where(D0 + row[:, None] >= n + column[None, :], p, 0.0)
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
    q, k, v, do, dk, dv, lse, delta, table, polynomials,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t,
    table_f, table_h, polynomials_f, polynomials_h, first_D, far, line, scale, unit, H, Tq, Tk, q_offset,
    FUNCTIONS: tl.constexpr, DEGREE_A: tl.constexpr, DEGREE_M: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    LINE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of a tile of keys."""
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

    first = tl.maximum(start - q_offset, 0)  # query that sees any of these keys
    masked_to = tl.cdiv(tl.maximum(start + KEYS - 1 - q_offset, 0), QUERIES) * QUERIES
    far_from = masked_to
    line_from = Tq
    if NEAR:
        far_from = Tq
        if FAR:  # far is at most 2^30 here, and so is line
            far_from = tl.maximum(tl.cdiv(tl.maximum(start - q_offset + far, 0), QUERIES) * QUERIES, masked_to)
        if LINE:
            line_from = tl.maximum(tl.cdiv(tl.maximum(start - q_offset + line, 0), QUERIES) * QUERIES, masked_to)
    acc_k = tl.zeros([KEYS, BLOCK_D], tl.float32)
    acc_v = tl.zeros([KEYS, BLOCK_D], tl.float32)
    for stretch in tl.static_range(4):  # masked, near, far, line
        if stretch == 0:
            begin, end = first // QUERIES * QUERIES, tl.minimum(masked_to, Tq)
        elif stretch == 1:
            begin, end = masked_to, tl.minimum(far_from, Tq)
        elif stretch == 2:
            begin, end = far_from, tl.minimum(line_from, Tq)
        else:
            begin, end = line_from, Tq
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
                stretch == 0, stretch >= 2 or not NEAR, stretch == 3, FUNCTIONS, DEGREE_A, DEGREE_M, STEP,
            )  # fmt: skip
            p = tl.exp2(logits - lse_row[None, :])
            if stretch == 0:
                p = tl.where(D + row[None, :] >= column[:, None], p, 0.0)
            acc_v = tl.dot(p.to(do_tile.dtype), do_tile, acc_v, input_precision=PRECISION)
            dp = tl.dot(v_tile, do_tile.T, input_precision=PRECISION)
            ds = (p * (dp - delta_row[None, :]) * slope).to(q_tile.dtype)
            acc_k = tl.dot(ds, q_tile, acc_k, input_precision=PRECISION)
    store_rows(dk, column, dk_t, d, Tk - start, acc_k * unit, HEAD_DIM)
    store_rows(dv, column, dk_t, d, Tk - start, acc_v, HEAD_DIM)

"""Functions of flash_kernels.py for one tile, and for the order of tiles. flash_kernels.py explains the names."""

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: tile by tile in numpy, on a CPU, for tests
IN_INTERPRETER = tl.constexpr(INTERPRETED)


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
    else:
        c2 = tl.load(at + 2)
        c3 = tl.load(at + 3)
        r0 = c0 + u * (c1 + u * (c2 + u * c3))
        r1 = c1 + u * (2 * c2 + u * (3 * c3))
        r2 = c2 + u * (3 * c3)
        return r0 + v * (r1 + v * (r2 + v * c3))


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


@triton.jit
def sees(query, key, WINDOW: tl.constexpr):
    """Return whether queries see keys, by their positions."""
    seen = query >= key
    if WINDOW:
        seen = seen & (query - WINDOW < key)
    return seen


# ---- stretches -------------------------------------------------------------------------------------------------------


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
def keys_of_stretch(
    STRETCH: tl.constexpr, D0, Tk, masked_from, far_to, line_to,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return where the tiles of keys of a stretch begin and end: masked ones, near, far, lines, the window's edge."""
    if STRETCH == 0:
        begin, end = masked_from, tl.minimum(D0 + QUERIES, Tk)
    elif STRETCH == 1:
        begin, end = far_to, masked_from
    elif STRETCH == 2:
        begin, end = line_to, far_to
    else:
        begin, end = line_to * 0, line_to
    if WINDOW and STRETCH > 0:
        edge_to = tl.minimum(tl.cdiv(tl.maximum(D0 + QUERIES - WINDOW, 0), KEYS) * KEYS, masked_from)
        if STRETCH == 4:
            begin, end = tl.maximum(D0 - WINDOW + 1, 0) // KEYS * KEYS, edge_to
        else:
            begin = tl.maximum(begin, edge_to)
    return begin, end


@triton.jit
def query_stretches(
    start, Tq, q_offset, far, line,
    NEAR: tl.constexpr, FAR: tl.constexpr, LINE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return the first query that sees any of the keys from `start` on, where the queries end to be masked, and where
    they begin to be far and lines."""
    first = tl.maximum(start - q_offset, 0)
    masked_to = tl.cdiv(tl.maximum(start + KEYS - 1 - q_offset, 0), QUERIES) * QUERIES
    far_from = masked_to
    line_from = Tq
    if NEAR:
        far_from = Tq
        if FAR:  # far is at most 2^30 here, and so is line
            far_from = tl.maximum(tl.cdiv(tl.maximum(start - q_offset + far, 0), QUERIES) * QUERIES, masked_to)
        if LINE:
            line_from = tl.maximum(tl.cdiv(tl.maximum(start - q_offset + line, 0), QUERIES) * QUERIES, masked_to)
    return first, masked_to, far_from, line_from


@triton.jit
def queries_of_stretch(
    STRETCH: tl.constexpr, start, Tq, q_offset, first, masked_to, far_from, line_from,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return where the tiles of queries of a stretch begin and end, in the order of keys_of_stretch."""
    if STRETCH == 0:
        begin, end = first // QUERIES * QUERIES, tl.minimum(masked_to, Tq)
    elif STRETCH == 1:
        begin, end = masked_to, tl.minimum(far_from, Tq)
    elif STRETCH == 2:
        begin, end = far_from, tl.minimum(line_from, Tq)
    else:
        begin, end = line_from, Tq
    if WINDOW:
        edge_from = tl.maximum(tl.maximum(start + WINDOW - q_offset, 0) // QUERIES * QUERIES, masked_to)
        if STRETCH == 4:
            begin, end = edge_from, Tq
        if STRETCH == 0 or STRETCH == 4:
            end = tl.minimum(end, tl.maximum(start + KEYS - 1 + WINDOW - q_offset, 0))
        else:
            end = tl.minimum(end, edge_from)
    return begin, end

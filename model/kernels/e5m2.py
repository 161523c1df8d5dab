"""Rounding of gradients to e5m2 in Triton. A program has a tile, which it reads once and writes by rows and by columns:
of the two products with a gradient, each wants the entries that it adds up next to each other."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.kernels.flash import on_its_gpu

BLOCK = 64


@triton.jit
def round_kernel(x, by_rows, by_columns, R, V, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seen = (row[:, None] < R) & (column[None, :] < V)
    tile = row[:, None] * V + column[None, :]
    y = (tl.load(x + tile, mask=seen).to(tl.float32) * SCALE).to(tl.float8e5)
    tl.store(by_rows + tile, y, mask=seen)
    tl.store(by_columns + column[:, None] * R + row[None, :], tl.trans(y), mask=tl.trans(seen))


@on_its_gpu
def round_to_e5m2(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return x (R, V), contiguous, times scale in e5m2: (R, V), and its transpose (V, R), both contiguous."""
    assert x.is_contiguous()
    R, V = x.shape
    by_rows, by_columns = (x.new_empty(shape, dtype=torch.float8_e5m2) for shape in ((R, V), (V, R)))
    grid = triton.cdiv(V, BLOCK), triton.cdiv(R, BLOCK)
    round_kernel[grid](x, by_rows, by_columns, R, V, SCALE=scale, BLOCK=BLOCK, num_warps=4)
    return by_rows, by_columns

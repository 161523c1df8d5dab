"""Products of numbers of 8 bits, which GPUs from compute capability 8.9 on (Ada, Hopper) do at twice bfloat16's rate.

A tensor is rounded to e4m3 (3 bits of mantissa, up to 448) or, gradients, to e5m2 (2 bits, up to 57344), after division
by a scale, one float32 for the whole tensor (Micikevicius et al. 2022, arXiv 2209.05433). Products are accumulated in
float32 and multiplied by the two scales.
"""

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from errors import require

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of which GPUs want every dimension of a product
OLDEST = (8, 9)


class Scaled(NamedTuple):
    """A matrix, values * scale."""

    values: Tensor  # of 8 bits
    scale: Tensor  # (), float32

    @property
    def mT(self) -> "Scaled":
        return Scaled(self.values.mT, self.scale)

    def __getitem__(self, rows: slice) -> "Scaled":
        return Scaled(self.values[rows], self.scale)

    def by_columns(self) -> "Scaled":
        """Return the same with the entries of a column next to each other, as the right side of a product wants it."""
        return Scaled(self.values.mT.contiguous().mT, self.scale)


def check_device(device: torch.device):
    """Raise ValueError for a GPU that has no such products. A CPU has none either: PyTorch makes them from float32."""
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        needs = f"needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or higher (Ada, Hopper)"
        require(found >= OLDEST, f"fp8_head {needs}, this one has {found[0]}.{found[1]}: use --no_fp8_head")


def to_e4m3(x: Tensor) -> Scaled:
    """Return x rounded to e4m3, its largest entry to 448. One that is not finite makes all of them NaN, or itself."""
    scale = x.abs().amax().float() / torch.finfo(E4M3).max
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)  # the head starts as zeros
    return Scaled((x / scale).to(E4M3), scale)


def to_e5m2_(x: Tensor) -> Scaled:
    """Return x, of entries from -1 to 1, rounded to e5m2; x is lost. Nothing has to look for its largest entry: 1
    becomes 2^15, and what is at least 2^-29 keeps its 2 bits of mantissa."""
    return Scaled(x.mul_(2**15).to(E5M2), x.new_full((), 2**-15, dtype=torch.float32))


def product(a: Scaled, b: Scaled, out: Tensor) -> Tensor:
    """Set out (M, N), and return it, to a (M, K) times b (K, N)."""
    a, b = Scaled(a.values.contiguous(), a.scale), b.by_columns()
    with no_onednn() if out.device.type == "cpu" else contextlib.nullcontext():
        return torch._scaled_mm(a.values, b.values, a.scale, b.scale, out_dtype=out.dtype, out=out)


@contextlib.contextmanager
def no_onednn():
    """Let PyTorch make the product from float32 matrices by itself: oneDNN's of e4m3 is a thousand times slower on a
    processor whose AMX units lack float16."""
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before

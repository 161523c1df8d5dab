"""Products of numbers of 8 bits, which GPUs from compute capability 8.9 on (Ada, Hopper) do at twice bfloat16's rate.

A tensor is rounded to e4m3 (3 bits of mantissa, up to 448) or, gradients, to e5m2 (2 bits, up to 57344), after division
by a scale, one float32 for the whole tensor (Micikevicius et al. 2022, arXiv 2209.05433). Products are accumulated in
float32 and multiplied by the two scales.
"""

import contextlib
import functools
import warnings
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from errors import require
from model.kernels import compare

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of which GPUs want every dimension of a product
OLDEST = (8, 9)
GRADIENT_SCALE = 2.0**15  # of softmax - onehot


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


def to_e5m2_(x: Tensor) -> tuple[Scaled, Scaled]:
    """Return x and x.mT, both by rows, of entries from -1 to 1, rounded to e5m2; x is lost. Nothing has to look for its
    largest entry: 1 becomes 2^15, and what is at least 2^-29 keeps its 2 bits of mantissa."""
    scale = x.new_full((), 1 / GRADIENT_SCALE, dtype=torch.float32)
    if triton_runs(x.device, x.dtype):
        from model.kernels.e5m2 import round_to_e5m2  # only now, as it needs Triton

        both = round_to_e5m2(x, GRADIENT_SCALE)
    else:
        both = plain_round_(x)
    return Scaled(both[0], scale), Scaled(both[1], scale)


def plain_round_(x: Tensor) -> tuple[Tensor, Tensor]:
    by_rows = x.mul_(GRADIENT_SCALE).to(E5M2)
    return by_rows, by_rows.mT.contiguous()


@functools.cache
def triton_runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether the Triton kernel runs there and passes its check in this dtype; warn if it fails that."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    if problem := check_kernel(device, dtype):
        warnings.warn(f"gradients are rounded to FP8 in plain PyTorch, which is slower: the Triton kernel {problem}")
    return problem is None


def check_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    """Round a matrix with the Triton kernel; return how it fails, or differs from plain_round_ here, or None."""
    from model.kernels.e5m2 import round_to_e5m2

    size = torch.linspace(-30, 0, 144, device=device).exp2()
    x = torch.rand(80, 144, generator=torch.Generator(device).manual_seed(0), device=device).sub_(0.5).mul_(2 * size)

    def run(function, *arguments):
        return [y.float() for y in function(x.to(dtype), *arguments)]

    return compare(lambda: run(round_to_e5m2, GRADIENT_SCALE), lambda: run(plain_round_), tolerance=0)


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

"""Times attention with formulas, kernels and tiles that this page alone compares.

    python -m results.gpu.attention --lengths 16384 --variants flex:si written:paper cudnn:plain flex-fwd-128-64-4-2:si

It is `python -m scripts.bench attention` with more backends and formulas. `written` is FlexAttention that evaluates the
formula at each logit: `paper` (scale-invariant with log and sqrt) or `softcap` (20 tanh(S / 20)). `cudnn` and `flash2`
(FlashAttention-2) are kernels of PyTorch for `plain`. flex-TILES has other tiles, such as bwd-64-128-128-64-8-1:
BLOCK_M1, N1, M2, N2, num_warps and num_stages of the backward pass.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.attention.check import LENGTHS
from model.attention.choose import BACKENDS
from model.attention.flex import Flex, make_score_mod
from model.attention.sdpa import SDPA, chosen_kernel
from model.methods import MECHANISMS
from model.methods.base import ScoreChange, Shape
from scripts.bench import __main__ as bench
from scripts.bench import attention as timings


class Paper(ScoreChange):
    """Computes a_t and m_t of scale-invariant attention as the paper writes them."""

    def __init__(self, shape: Shape):
        super().__init__()

    def coefficients(self, distance, head):
        growth = 2 * torch.log(1 + distance / 10)
        return torch.sqrt(1 + growth), -growth


class SoftCap(ScoreChange):
    """Bounds scores by a hyperbolic tangent, for which other projects have published speeds."""

    def __init__(self, shape: Shape):
        super().__init__()

    def change(self, score, distance, head):
        return 20 * torch.tanh(score / 20)


class FlexAsWritten(Flex):
    """FlexAttention that evaluates the formula at each logit and reads no table."""

    def prepare(self, plan, score_change):
        return super().prepare(plan, None) | {"score_mod": make_score_mod(score_change, plan)}


class OneKernel(SDPA):
    """PyTorch's attention by one of its kernels."""

    def __init__(self, kernel: SDPBackend):
        self.kernel = kernel

    def unsupported(self, method, device, dtype):
        with sdpa_kernel([self.kernel, SDPBackend.MATH], set_priority=True):
            chosen = chosen_kernel(device, dtype, method.head_dim, LENGTHS[0])
        missing = None if chosen == self.kernel.name else f"PyTorch cannot run {self.kernel.name} here"
        return super().unsupported(method, device, dtype) or missing

    def run(self, *arguments, **more):
        with sdpa_kernel(self.kernel):
            return super().run(*arguments, **more)


OPTIONS = {
    "fwd": "BLOCK_M BLOCK_N num_warps num_stages",
    "bwd": "BLOCK_M1 BLOCK_N1 BLOCK_M2 BLOCK_N2 num_warps num_stages",
}
TILES = (  # these compile for Hopper, and fit its shared memory in bfloat16 with head dimension 128
    "fwd-128-128-8-2 fwd-128-64-4-2 fwd-128-64-8-3 bwd-64-64-64-64-4-2 bwd-64-64-64-64-4-3 bwd-64-64-64-64-8-3 "
    "bwd-32-128-128-32-8-2 bwd-64-128-128-64-8-1 bwd-64-128-128-64-8-3"
).split()


def flex_with(tiles: str) -> Flex:
    """Return FlexAttention with these tiles."""
    kind, *sizes = tiles.split("-")
    options = [f"{kind}_{option}" for option in OPTIONS[kind].split()]
    backend = Flex()
    backend.tiles = dict(zip(options, map(int, sizes), strict=True))
    return backend


MORE_MECHANISMS = {"paper": Paper, "softcap": SoftCap}
MORE_BACKENDS = {
    "written": FlexAsWritten(),
    "cudnn": OneKernel(SDPBackend.CUDNN_ATTENTION),
    "flash2": OneKernel(SDPBackend.FLASH_ATTENTION),
}
for tiles in TILES:
    MORE_BACKENDS[f"flex-{tiles}"] = flex_with(tiles)


def main():
    # 1. This page's formulas and backends stand beside the product's.
    MECHANISMS.update(MORE_MECHANISMS)
    BACKENDS.update(MORE_BACKENDS)
    for name in MORE_MECHANISMS:
        timings.FORMULAS[name] = f"nope+{name}"
    timings.LENGTHS = LENGTHS[:1]  # the other lengths of the check compile other code than the timed ones
    timings.protocol.ROUND_SECONDS = 0.1  # many short rounds

    # 2. The benchmark.
    sys.argv[1:1] = ["attention"]
    bench.main()


if __name__ == "__main__":
    main()

"""RoPE: rotary position embedding (Su et al. 2021, arXiv 2104.09864). Base 10,000 as in the paper's appendix."""

import torch

from errors import require
from model.methods.base import Rotation

BASE = 10_000.0


class RoPE(Rotation):
    lengths = ("base",)  # the slowest wavelength is about 2 pi times the base

    def __init__(self, shape, base: float = BASE):
        super().__init__()
        problem = f"RoPE has head_dim {shape.head_dim} (model_dim / num_heads) and base {base}"
        require(shape.head_dim % 2 == 0 and base > 1, f"{problem}. Use an even head_dim and a base above 1.")
        self.head_dim = shape.head_dim
        self.train_length = shape.train_length
        self.base = base

    def geometric(self, base):
        """Return base^(-2k/d) for k = 0..d/2-1."""
        return base ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)

    def frequencies(self, target_length):
        return self.geometric(self.base), 1.0


class LengthScaledRoPE(RoPE):
    """RoPE whose frequencies follow s = target length / training length. Up to the training length s is 1: plain RoPE.

    If `stretch` is given, s is this number at every longer target length.
    """

    def __init__(self, shape, base: float = BASE, stretch: float | None = None):
        super().__init__(shape, base)
        require(stretch is None or stretch >= 1, f"stretch is {stretch}. Use at least 1.")
        self.stretch = stretch

    def length_ratio(self, target_length) -> float:
        if target_length <= self.train_length:
            return 1.0
        return self.stretch or target_length / self.train_length

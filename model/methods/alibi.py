"""ALiBi: a penalty linear in the distance, -slope_h t, and no other position encoding (Press et al. 2021,
arXiv 2108.12409)."""

import math

import torch

from errors import require
from model.methods.base import ScoreChange


def official_exponents(head, num_heads: int):
    """Return 8(h+1)/n for n heads, a power of two.

    For another number of heads: those of the power of two below it, then every second one of the set for twice as many,
    until there is one for each head (ofirpress/attention_with_linear_biases).
    """
    n = 2 ** (num_heads.bit_length() - 1)
    return torch.where(head < n, 8 * (head + 1) / n, 4 * (2 * (head - n) + 1) / n)


def geometric_exponents(head, num_heads: int):
    """Return 8(h+1)/H for any H, as in FlexAttention's blog post and attention-gym."""
    return 8 * (head + 1) / num_heads


EXPONENTS = {"official": official_exponents, "geometric": geometric_exponents}  # slope_h = 2^-exponent, h from 0


class ALiBi(ScoreChange):
    def __init__(self, num_heads, head_dim, train_length, slopes: str = "official", slope_scale: float = 1.0):
        """slope_scale multiplies the slopes, which are one over a length in tokens."""
        super().__init__()
        require(slopes in EXPONENTS, f"ALiBi slopes must be one of {', '.join(EXPONENTS)}, got {slopes!r}")
        finite = 0 <= slope_scale < math.inf
        require(finite, f"slope_scale must be a finite number of at least 0, got {slope_scale}")
        self.num_heads, self.exponents, self.slope_scale = num_heads, EXPONENTS[slopes], slope_scale

    @classmethod
    def scaled(cls, scale, options):
        return {"slope_scale": 1 / scale}

    def coefficients(self, distance, head):
        slope = self.slope_scale * torch.exp2(-self.exponents(head.to(distance.dtype), self.num_heads))
        return 1.0, -slope * distance

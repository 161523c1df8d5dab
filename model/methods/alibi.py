"""ALiBi: a penalty linear in the distance, -slope_h t, and no other position encoding (Press et al. 2021,
arXiv 2108.12409)."""

import math

import torch

from model.methods.base import ScoreChange


def official_slopes(num_heads: int) -> list[float]:
    """2^(-8h/n), h = 1..n, for n a power of two; otherwise those of the power of two below, then every second slope of
    the set for twice as many heads until there is one for each (ofirpress/attention_with_linear_biases)."""
    n = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * h / n) for h in range(1, n + 1)]
    return slopes if n == num_heads else slopes + official_slopes(2 * n)[::2][: num_heads - n]


def geometric_slopes(num_heads: int) -> list[float]:
    """2^(-8h/H), h = 1..H, for any H, as in FlexAttention's blog post and attention-gym."""
    return [2 ** (-8 * h / num_heads) for h in range(1, num_heads + 1)]


SLOPES = {"official": official_slopes, "geometric": geometric_slopes}


class ALiBi(ScoreChange):
    def __init__(self, num_heads, head_dim, train_length, slopes: str = "official"):
        super().__init__()
        if slopes not in SLOPES:
            raise ValueError(f"ALiBi slopes must be one of {', '.join(SLOPES)}, got {slopes!r}")
        self.register_buffer("slopes", torch.tensor(SLOPES[slopes](num_heads)), persistent=False)  # (H,)

    def coefficients(self, distance, head):
        return 1.0, -self.slopes[head] * distance

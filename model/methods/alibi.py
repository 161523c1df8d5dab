"""ALiBi: a penalty linear in the distance, -slope_h t, and no other position encoding (Press et al. 2021,
arXiv 2108.12409)."""

import torch

from model.methods.base import ScoreChange


def official_exponents(head, num_heads: int):
    """8(h+1)/n for n a power of two; otherwise those of the power of two below, then every second one of the set for
    twice as many heads until there is one for each (ofirpress/attention_with_linear_biases)."""
    n = 2 ** (num_heads.bit_length() - 1)
    return torch.where(head < n, 8 * (head + 1) / n, 4 * (2 * (head - n) + 1) / n)


def geometric_exponents(head, num_heads: int):
    """8(h+1)/H for any H, as in FlexAttention's blog post and attention-gym."""
    return 8 * (head + 1) / num_heads


EXPONENTS = {"official": official_exponents, "geometric": geometric_exponents}  # slope_h = 2^-exponent, h from 0


class ALiBi(ScoreChange):
    def __init__(self, num_heads, head_dim, train_length, slopes: str = "official"):
        super().__init__()
        if slopes not in EXPONENTS:
            raise ValueError(f"ALiBi slopes must be one of {', '.join(EXPONENTS)}, got {slopes!r}")
        self.num_heads, self.exponents = num_heads, EXPONENTS[slopes]

    def coefficients(self, distance, head):
        return 1.0, -torch.exp2(-self.exponents(head.to(distance.dtype), self.num_heads)) * distance

"""ALiBi: a penalty linear in the distance, -slope_h t, and no position encoding (Press et al. 2021, arXiv 2108.12409).

slope_h = 2^-exponent_h for head h = 0..H-1. Let n be the largest power of two up to H. The official exponents of the
first n heads are 8 (h + 1) / n. The other heads have every second exponent of 2 n heads, as in the authors' code
(ofirpress/attention_with_linear_biases). The geometric exponents are 8 (h + 1) / H, as in FlexAttention's blog post and
attention-gym. Anson et al. 2025 do not say which of the two their 6 heads have.
"""

import torch

from errors import require
from model.methods.base import ScoreChange


class ALiBi(ScoreChange):
    inverse_lengths = ("slope_scale",)

    def __init__(self, shape, slopes: str = "official", slope_scale: float = 1.0):
        """slope_scale: factor of all slopes. A slope is 1 / a length in tokens."""
        super().__init__()
        require(slopes in ("official", "geometric"), f"slopes is {slopes!r}. Use official or geometric.")
        self.num_heads = shape.num_heads
        self.slopes = slopes
        self.slope_scale = slope_scale

    def exponents(self, head):
        n = self.num_heads if self.slopes == "geometric" else 2 ** (self.num_heads.bit_length() - 1)
        of_2n_heads = 4 * (2 * (head - n) + 1) / n
        return torch.where(head < n, 8 * (head + 1) / n, of_2n_heads)

    def coefficients(self, distance, head):
        slope = self.slope_scale * torch.exp2(-self.exponents(head.to(distance.dtype)))
        return 1.0, -slope * distance

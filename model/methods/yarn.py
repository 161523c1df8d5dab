"""YaRN: NTK-by-parts interpolation with a temperature (Peng et al. 2023, arXiv 2309.00071), dynamic in the length.

Pairs that turn more than beta_fast times within the training length keep their frequency, those that turn less than
beta_slow times are slowed down by s, with a linear ramp over the pair index in between; cos and sin are multiplied by
0.1 ln s + 1 (so the logits by its square). Constants as in the authors' repository (jquesnelle/yarn).
"""

import math

import torch

from errors import require
from model.methods.rope import BASE, LengthScaledRoPE


class YaRN(LengthScaledRoPE):
    def __init__(
        self, num_heads, head_dim, train_length, base: float = BASE, factor: float | None = None,
        beta_fast: float = 32.0, beta_slow: float = 1.0, temperature: bool = True,
    ):  # fmt: skip
        super().__init__(num_heads, head_dim, train_length, base, factor)
        require(beta_fast > beta_slow > 0, f"YaRN needs beta_fast > beta_slow > 0, got {beta_fast} and {beta_slow}")
        self.beta_fast, self.beta_slow, self.temperature = beta_fast, beta_slow, temperature

    def pair_with_turns(self, turns: float) -> float:
        """Return the (fractional) index of the pair that makes this many turns within the training length."""
        return self.head_dim * math.log(self.train_length / (2 * math.pi * turns)) / (2 * math.log(self.base))

    def frequencies(self, target_length):
        s = self.length_ratio(target_length)
        if s == 1:
            return super().frequencies(target_length)
        low = max(math.floor(self.pair_with_turns(self.beta_fast)), 0)
        high = min(math.ceil(self.pair_with_turns(self.beta_slow)), self.head_dim - 1)
        pairs = torch.arange(self.head_dim // 2, dtype=torch.float64)
        ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)  # 0: kept, 1: interpolated
        frequencies = self.geometric(self.base)
        return frequencies * (1 - ramp) + frequencies / s * ramp, 0.1 * math.log(s) + 1 if self.temperature else 1.0

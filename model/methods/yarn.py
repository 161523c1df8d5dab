"""YaRN: NTK-by-parts interpolation with a temperature (Peng et al. 2023, arXiv 2309.00071), dynamic in the length.

Pairs with more than 32 turns within the training length keep their frequency. The frequency of pairs with less than
one turn is divided by s. Between them is a linear ramp over the pair index. cos and sin are multiplied by 0.1 ln s + 1,
so the logits are multiplied by its square. The constants are from the authors' repository (jquesnelle/yarn).
"""

import math

import torch

from model.methods.rope import LengthScaledRoPE

MOST_TURNS, FEWEST_TURNS = 32.0, 1.0  # within the training length


class YaRN(LengthScaledRoPE):
    def pair_with_turns(self, turns: float) -> float:
        """Return the (fractional) index of the pair that makes this many turns within the training length."""
        wavelength = self.train_length / (2 * math.pi * turns)
        return self.head_dim * math.log(wavelength) / (2 * math.log(self.base))

    def frequencies(self, target_length):
        s = self.length_ratio(target_length)
        if s == 1:
            return super().frequencies(target_length)
        low = max(math.floor(self.pair_with_turns(MOST_TURNS)), 0)
        high = min(math.ceil(self.pair_with_turns(FEWEST_TURNS)), self.head_dim - 1)
        pairs = torch.arange(self.head_dim // 2, dtype=torch.float64)
        ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)  # 0: the frequency is kept, 1: interpolated
        frequencies = self.geometric(self.base)
        return frequencies * (1 - ramp) + frequencies / s * ramp, 0.1 * math.log(s) + 1

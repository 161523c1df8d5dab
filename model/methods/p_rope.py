"""p-RoPE: RoPE without its low frequencies (Barbero et al. 2024, arXiv 2410.06205).

The paper gives "an effective base of 1024". We read this as the half-truncated form of modded-nanogpt (record #17, by
@YouJiacheng): d/4 frequencies from 1 down to 1/1024 in equal ratios, then d/4 pairs that do not rotate. Barbero's form
keeps the fastest of RoPE's frequencies, and the other pairs do not rotate. Its best share in their paper is 0.75. With
this share, both forms have the same losses within 0.02 nats on one seed (results/mini/tables.md, open_choices).
"""

import torch

from errors import require
from model.methods.rope import RoPE

DEFAULT_BASE = {"half_truncate": 1024.0, "barbero": 10_000.0}


class PRoPE(RoPE):
    def __init__(self, shape, base: float | None = None, form: str = "half_truncate", share: float = 0.5):
        """share: of the pairs that rotate."""
        require(form in DEFAULT_BASE, f"form of p-RoPE is {form!r}. Use {' or '.join(DEFAULT_BASE)}.")
        pairs = shape.head_dim // 2
        rotated = share * pairs
        problem = f"{rotated:g} of {pairs} pairs would rotate, for share {share} and head_dim {shape.head_dim}"
        remedy = "Use another share, or another head_dim (model_dim / num_heads)."
        require(rotated in range(1, pairs + 1), f"{problem}. {remedy}")
        super().__init__(shape, DEFAULT_BASE[form] if base is None else base)
        self.form = form
        self.pairs = int(rotated)

    @classmethod
    def scaled_defaults(cls, scale, given):
        return {"base": DEFAULT_BASE.get(given.get("form"), DEFAULT_BASE["half_truncate"]) * scale}

    def frequencies(self, target_length):
        if self.form == "half_truncate":
            rotated = self.base ** -torch.linspace(0, 1, self.pairs, dtype=torch.float64)
        else:
            rotated = self.geometric(self.base)[: self.pairs]
        return torch.nn.functional.pad(rotated, (0, self.head_dim // 2 - len(rotated))), 1.0

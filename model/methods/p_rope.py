"""p-RoPE: RoPE without its low frequencies (Barbero et al. 2024, arXiv 2410.06205).

The paper gives "an effective base of 1024". That is the half-truncated form of modded-nanogpt (record #17, by
@YouJiacheng). It has d/4 frequencies from 1 down to 1/1024 in equal ratios, then d/4 pairs that do not rotate.
Barbero's form keeps the faster half of RoPE's frequencies, and the other pairs do not rotate.
"""

import torch

from errors import require
from model.methods.rope import RoPE

DEFAULT_BASE = {"half_truncate": 1024.0, "barbero": 10_000.0}


class PRoPE(RoPE):
    def __init__(self, num_heads, head_dim, train_length, base: float | None = None, form: str = "half_truncate"):
        require(form in DEFAULT_BASE, f"form of p-RoPE is {form!r}. Use {' or '.join(DEFAULT_BASE)}.")
        possible = form != "half_truncate" or head_dim % 4 == 0
        require(
            possible, f"head_dim (model_dim / num_heads) is {head_dim}. The half_truncate form needs a multiple of 4."
        )
        super().__init__(num_heads, head_dim, train_length, DEFAULT_BASE[form] if base is None else base)
        self.form = form

    @classmethod
    def scaled_defaults(cls, scale, given):
        return {"base": DEFAULT_BASE.get(given.get("form"), DEFAULT_BASE["half_truncate"]) * scale}

    def frequencies(self, target_length):
        if self.form == "half_truncate":
            rotated = self.base ** -torch.linspace(0, 1, self.head_dim // 4, dtype=torch.float64)
        else:
            rotated = self.geometric(self.base)[: self.head_dim // 4]
        return torch.nn.functional.pad(rotated, (0, self.head_dim // 2 - len(rotated))), 1.0

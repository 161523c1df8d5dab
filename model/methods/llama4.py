"""Llama 4's temperature of its layers without positions (Meta 2025, in the released models' code):

    c(i) = 1 + 0.1 log(1 + floor((i + 1) / 8192)),

so that logits grow with the position, in steps of 8192 tokens. Every fourth layer has it, after three of RoPE (METHODS,
`llama4`). Two things differ here from those models: their RoPE layers attend in chunks of 8192 tokens, ours in
a sliding window (of 512 unless `window` says otherwise, as in SWAN), and their RoPE's base is 500,000, ours the usual.
"""

import math

import torch

from errors import require
from model.methods.base import QueryScale

FLOOR = 8192.0  # tokens


class PositionTemperature(QueryScale):
    def __init__(self, num_heads, head_dim, train_length, floor: float = FLOOR, strength: float = 0.1):
        """floor: the tokens of a step. strength: what multiplies the logarithm, 0.1 in the models."""
        super().__init__()
        require(0 < floor < math.inf, f"floor must be positive and finite, got {floor}")
        self.floor, self.strength = floor, strength

    @classmethod
    def scaled(cls, scale, options):
        return {"floor": FLOOR * scale}

    def table(self, positions, target_length):
        steps = torch.floor((positions + 1).double() / self.floor)
        return 1 + self.strength * torch.log(1 + steps)  # (T,)

    def multiplier(self, table, x):
        return table.unsqueeze(0)  # (1, T)

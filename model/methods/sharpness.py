"""Factors of the scores without distances: controls for how much of a method's gain is a sharper softmax.

Factor     c = factor, the same for every query; each head of each layer learns its own with learn_factor
LogRoot    c(i) = sqrt(1 + 2 log(i + 1)): the largest a_t of scale-invariant attention with tau 1, for all keys
"""

import torch
from torch import nn

from errors import require
from model.methods.base import QueryScale


class Factor(QueryScale):
    def __init__(self, num_heads, head_dim, train_length, factor: float = 2.0, learn_factor: bool = False):
        """factor: the constant, or the value from which each head learns its own."""
        super().__init__()
        require(factor > 0, f"factor must be positive, got {factor}")
        self.factor = factor
        self.learned = nn.Parameter(torch.full((num_heads,), float(factor))) if learn_factor else None

    def table(self, positions, target_length):
        return torch.full(positions.shape, 1.0 if self.learned is not None else self.factor, device=positions.device)

    def multiplier(self, table, x):  # (1, T) or (H, T)
        return table.unsqueeze(0) if self.learned is None else self.learned[:, None] * table


class LogRoot(QueryScale):
    def __init__(self, num_heads, head_dim, train_length):
        super().__init__()

    def table(self, positions, target_length):
        return torch.sqrt(1 + 2 * torch.log((positions + 1).double()))  # (T,)

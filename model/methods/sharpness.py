"""Factors of the scores that ignore distance: does scale-invariant attention gain only from a sharper softmax?

Factor     c = factor for every query. With learn_factor, each head of each layer learns c.
LogRoot    c(i) = sqrt(1 + 2 log(i + 1)): for all keys of query i, the a_t of its furthest key (t = i, tau = 1).
Power      c(i) = n^(2 / (d - 1)), n = i + 1, d the head dimension (blog post by nor, November 2025). QK-norm puts q
           and k on a sphere. For random directions, the difference of the two best of n scores falls as
           n^(-2 / (d - 1)). The factor keeps it constant.
"""

import torch
from torch import nn

from errors import require
from model.methods.base import QueryScale


class Factor(QueryScale):
    def __init__(self, shape, factor: float = 2.0, learn_factor: bool = False):
        """factor: c, or the initial value of a learned c."""
        super().__init__()
        require(factor > 0, f"factor is {factor}. Use a positive number.")
        self.factor = factor
        self.learned = nn.Parameter(torch.full((shape.num_heads,), float(factor))) if learn_factor else None

    def table(self, positions, target_length):
        return torch.full(positions.shape, 1.0 if self.learned is not None else self.factor, device=positions.device)

    def multiplier(self, table, x):  # ([B,] 1 or H, T)
        table = table.unsqueeze(-2)
        return table if self.learned is None else self.learned[:, None] * table


class LogRoot(QueryScale):
    def __init__(self, shape):
        super().__init__()

    def table(self, positions, target_length):
        return torch.sqrt(1 + 2 * torch.log((positions + 1).double()))  # (T,)


class Power(QueryScale):
    def __init__(self, shape):
        super().__init__()
        require(shape.head_dim > 1, f"head_dim (model_dim / num_heads) is {shape.head_dim}. n_power needs 2 or more.")
        self.exponent = 2 / (shape.head_dim - 1)

    def table(self, positions, target_length):
        return (positions + 1).double() ** self.exponent  # (T,)

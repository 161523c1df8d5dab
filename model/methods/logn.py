"""LogN scaling, also called SSMax (Nakanishi 2025, arXiv 2501.19399): logits times s log n.

Each head of each layer learns s. Query i sees n = i + 1 keys. The factor depends on the query alone, so we multiply q
by it. Then the method runs on any attention kernel, and autograd computes the gradient of s. Anson et al. 2025 state
neither whether n is the position or the length of the text, nor the initial s. Our s makes the mean factor over the
training length 1 (s = 0.1366 at 4096).
"""

import torch
from torch import nn

from errors import require
from model.methods.base import QueryScale


class LogN(QueryScale):
    def __init__(self, shape, context: str = "row"):
        """context "row": n = i + 1; "length": n = the target length for every query."""
        super().__init__()
        require(context in ("row", "length"), f"context of LogN is {context!r}. Use row or length.")
        self.context = context
        n = torch.arange(1, max(shape.train_length, 2) + 1, dtype=torch.float64, device="cpu")
        initial = 1 / n.log().mean().item()
        self.scale = nn.Parameter(torch.full((shape.num_heads,), initial))

    def table(self, positions, target_length):
        n = positions + 1 if self.context == "row" else torch.full_like(positions, target_length)
        return n.double().log().float()  # (T,)

    def multiplier(self, table, x):
        return self.scale[:, None] * table.unsqueeze(-2)  # ([B,] H, T)

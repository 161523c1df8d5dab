"""KERPLE: each head of each layer learns a penalty that grows with distance (Chi et al. 2022, arXiv 2205.09921):

    logarithm   L = S - p log(1 + a t),   p, a > 0          power   L = S - a t^p,   a > 0, 0 < p <= 2

There is no other position encoding. The authors' code draws p from U(0, 2) and a from U(0, 1). It clamps both, which
stops their gradients at the bounds. We start at p = 2 (h + 1/2) / H for head h and at a = 1/2. No random number is
drawn, so the other weights start equal for every method. We learn log a, and log p or the logit of p / 2.
"""

import math

import torch
from torch import nn

from model.methods.base import ScoreChange


class Kerple(ScoreChange):
    """Learns the coefficient a. Subclasses define learn_p, which creates the parameter for p. initial_p: (H,)."""

    lengths = ("unit",)

    def __init__(self, shape, unit: float = 1.0):
        """unit: a length in tokens. In the formulas, t is the distance divided by it."""
        super().__init__()
        self.unit = unit
        self.log_a = nn.Parameter(torch.full((shape.num_heads,), math.log(0.5)))
        self.learn_p(2 * (torch.arange(shape.num_heads, dtype=torch.float32) + 0.5) / shape.num_heads)


class KerpleLog(Kerple):
    def learn_p(self, initial_p):
        self.log_p = nn.Parameter(initial_p.log())

    def coefficients(self, distance, head):
        a, p = (torch.exp(x[head].to(distance.dtype)) for x in (self.log_a, self.log_p))
        return 1.0, -p * torch.log(1 + a * distance / self.unit)


class KerplePower(Kerple):
    def learn_p(self, initial_p):
        self.logit_p = nn.Parameter(torch.logit(initial_p / 2))

    def coefficients(self, distance, head):
        a = torch.exp(self.log_a[head].to(distance.dtype))
        p = 2 * torch.sigmoid(self.logit_p[head].to(distance.dtype))
        return 1.0, -a * torch.pow(distance / self.unit, p)

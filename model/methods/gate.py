"""Gated attention (Qiu et al. 2025, arXiv 2505.06708): each entry of the heads' outputs times sigmoid(W x), x the
layer's input. The gate comes before the output projection, which their study found best."""

import torch
import torch.nn.functional as F
from torch import nn

from model.methods.base import OutputGate, upcast


class SigmoidGate(OutputGate):
    """W starts at zero: all gates are 1/2, and a seed draws the same numbers for the rest of the model."""

    def __init__(self, num_heads, head_dim, train_length):
        super().__init__()
        self.num_heads = num_heads
        self.weight = nn.Parameter(torch.zeros(num_heads * head_dim, num_heads * head_dim))

    def gate(self, x):
        gate = upcast(F.linear(x, self.weight.to(x.dtype))).sigmoid().to(x.dtype)  # (B, T, C)
        return gate.unflatten(-1, (self.num_heads, -1))

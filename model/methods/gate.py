"""Gated attention (Qiu et al. 2025, arXiv 2505.06708): each entry of the heads' outputs is multiplied by
sigmoid(W x), with x the layer's input. The gate is before the output projection, the best place in their study."""

import torch
from torch import nn

from model.methods.base import OutputGate
from model.tensors import linear, upcast


class SigmoidGate(OutputGate):
    """W starts at zero, so all gates start at 1/2 and the rest of the model starts as with any method."""

    needs_input = True

    def __init__(self, shape):
        super().__init__()
        self.num_heads = shape.num_heads
        self.weight = nn.Parameter(torch.zeros(shape.model_dim, shape.model_dim))

    def change(self, y, v, x):
        gate = upcast(linear(x, self.weight)).sigmoid().to(x.dtype)  # (B, T, C)
        return y * gate.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

"""Forgetting attention (Lin et al. 2025, arXiv 2503.02130): each token multiplies earlier keys' weights by a gate f:

    L_ij = S_ij + sum of log f_l over l = j + 1..i,   f_l = sigmoid(w_h . x_l + b_h),   x the layer's input.

With c the running sum of log f, L_ij = S_ij + c_i - c_j. The softmax ignores c_i, so the bias depends only on the key.
c is float32, as in the authors' code. After 65,536 tokens with f = 1/2, its last bit is 0.004. The authors draw w from
N(0, 0.02). Ours starts at zero, so the rest of the model starts with the same weights for every method.
"""

import torch
import torch.nn.functional as F
from torch import nn

from model.methods.base import KeyBias
from model.tensors import linear, upcast


class Forgetting(KeyBias):
    fits_sinks = False

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape.num_heads, shape.model_dim))
        self.bias_of_gate = nn.Parameter(torch.zeros(shape.num_heads))

    def token_features(self, x):
        gate = upcast(linear(x, self.weight)) + self.bias_of_gate  # (B, T, H)
        return F.logsigmoid(gate).transpose(1, 2)

    def bias(self, token_features):
        return -token_features.cumsum(dim=-1)

"""Forgetting attention (Lin et al. 2025, arXiv 2503.02130): each token multiplies what came before it by a gate f,

    L_ij = S_ij + sum of log f_l over l = j + 1..i,   f_l = sigmoid(w_h . x_l + b_h),   x the layer's input.

With c the running sum of log f this is S_ij + c_i - c_j. The softmax ignores c_i, so the bias depends on the key alone.
c is float32, as in the authors' code; after 65,536 tokens of f = 1/2 its last bit is 0.004. w starts at zero, the
authors' at N(0, 0.02), so that a seed draws the same numbers for the rest of the model in every method.
"""

import torch
import torch.nn.functional as F
from torch import nn

from model.methods.base import KeyBias, upcast


class Forgetting(KeyBias):
    def __init__(self, num_heads, head_dim, train_length):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, num_heads * head_dim))
        self.bias_of_gate = nn.Parameter(torch.zeros(num_heads))

    def of_tokens(self, x):
        gate = upcast(F.linear(x, self.weight.to(x.dtype))) + self.bias_of_gate  # (B, T, H)
        return F.logsigmoid(gate).transpose(1, 2)

    def bias(self, of_tokens):
        return -of_tokens.cumsum(dim=-1)

"""NAPE with adaptive scaling (Vasylenko et al. 2025, arXiv 2506.16640): half of the heads have ALiBi, the others no
position encoding. The logits of the query that sees i keys are multiplied by

    1 + beta (log i)^gamma,   beta = softplus(w_b . x_i),   gamma = 2 tanh(w_g . x_i),   x the layer's input.

We use softmax instead of the paper's entmax, which gives most keys a weight of exactly zero. We chose five points that
the paper leaves open. The first half of the heads, rounded up, has the ALiBi slopes of so many heads. w_b and w_g start
at zero, have no bias and differ between heads. The constant is 1. All heads are scaled. The first query uses i = 2,
because log 1 = 0 has no negative powers.
"""

import torch
import torch.nn.functional as F
from torch import nn

from model.methods.alibi import ALiBi
from model.methods.base import QueryScale, upcast


class HalfALiBi(ALiBi):
    def __init__(self, num_heads, head_dim, train_length, slope_scale: float = 1.0):
        super().__init__((num_heads + 1) // 2, head_dim, train_length, slope_scale=slope_scale)

    def coefficients(self, distance, head):
        scale, bias = super().coefficients(distance, head)
        return scale, torch.where(head < self.num_heads, bias, 0.0)


class AdaptiveScale(QueryScale):
    needs_input = True

    def __init__(self, num_heads, head_dim, train_length):
        super().__init__()
        self.beta, self.gamma = (nn.Parameter(torch.zeros(num_heads, num_heads * head_dim)) for _ in range(2))

    def table(self, positions, target_length):
        return (positions + 1).clamp(min=2).double().log().log()  # (T,)

    def multiplier(self, table, x):
        beta, gamma = (upcast(F.linear(x, w.to(x.dtype))).transpose(1, 2) for w in (self.beta, self.gamma))  # (B, H, T)
        # softplus(beta) has a gradient with other strides than torch.compile expects, because beta is transposed.
        return 1 - F.logsigmoid(-beta) * torch.exp(2 * torch.tanh(gamma) * table.to(gamma.dtype))

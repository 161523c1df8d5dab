"""NAPE with adaptive scaling (Vasylenko et al. 2025, arXiv 2506.16640): half of the heads have ALiBi, the others no
position encoding. The logits of the query that sees i keys are multiplied by

    1 + beta (log i)^gamma,   beta = softplus(w_b . x_i),   gamma = 2 tanh(w_g . x_i),   x the layer's input.

`nape` has softmax attention, so every backend runs it. `nape_entmax` has the paper's entmax with alpha = 1.5, which
gives most keys a weight of exactly zero:

    entmax(z)_j = max(0, z_j / 2 - threshold)^2,   the threshold makes the sum 1.

We chose five points that the paper leaves open. The first half of the heads, rounded up, has the ALiBi slopes of so
many heads. w_b and w_g start at zero, have no bias and differ between heads. The constant is 1. All heads are scaled.
The first query uses i = 2, because log 1 = 0 has no negative powers. The authors' later code (deep-spin/asentmax) has
slopes 1, 1/2, 1/3, ..., scales only the heads without ALiBi, and takes log(i + 1).
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from model.methods.alibi import ALiBi
from model.methods.base import AttentionWeights, QueryScale, scores
from model.tensors import linear, sum_from_here, upcast


class HalfALiBi(ALiBi):
    def __init__(self, shape, slope_scale: float = 1.0):
        half = dataclasses.replace(shape, num_heads=(shape.num_heads + 1) // 2)
        super().__init__(half, slope_scale=slope_scale)

    def coefficients(self, distance, head):
        scale, bias = super().coefficients(distance, head)
        return scale, torch.where(head < self.num_heads, bias, 0.0)


class EntmaxOfHalfALiBi(AttentionWeights):
    inverse_lengths = ("slope_scale",)

    def __init__(self, shape, slope_scale: float = 1.0):
        super().__init__()
        self.half_alibi = HalfALiBi(shape, slope_scale=slope_scale)

    def weights(self, q, k, visible, token_features):
        distance = sum_from_here(visible) - 1  # 0 at the query's own key
        head = torch.arange(q.shape[1], device=q.device).view(-1, 1, 1)
        logits = scores(q, k)  # in float32, because rounding would choose other keys
        _, bias = self.half_alibi.coefficients(distance.to(logits.dtype), head)
        return entmax((logits + bias).masked_fill(~visible, -torch.inf))


def entmax(z):
    """Return entmax of the last dimension with alpha = 1.5, by Newton's method on the norm of sqrt(entmax)."""
    z = (z - z.detach().amax(dim=-1, keepdim=True)) / 2
    with torch.no_grad():
        threshold = torch.full_like(z[..., :1], -1.0)  # at most the solution, so Newton's steps only increase it
        for _ in range(10):  # 8 reach float64's rounding on 65,536 keys
            root = F.relu(z - threshold)
            norm = root.norm(dim=-1, keepdim=True)
            threshold += (norm - 1) * norm / root.sum(dim=-1, keepdim=True)
    # The last step has the gradient of the exact threshold.
    root = F.relu(z - threshold)
    excess = root.square().sum(dim=-1, keepdim=True) - 1
    threshold = threshold + excess / (2 * root.sum(dim=-1, keepdim=True))
    return F.relu(z - threshold).square()


class AdaptiveScale(QueryScale):
    needs_input = True

    def __init__(self, shape):
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(shape.num_heads, shape.model_dim))
        self.gamma = nn.Parameter(torch.zeros(shape.num_heads, shape.model_dim))

    def table(self, positions, target_length):
        return (positions + 1).clamp(min=2).double().log().log()  # (T,)

    def multiplier(self, table, x):
        beta, gamma = (self.by_head(x, weight) for weight in (self.beta, self.gamma))
        power = torch.exp(2 * torch.tanh(gamma) * table.unsqueeze(-2).to(gamma.dtype))
        # softplus(beta) has a gradient with other strides than torch.compile expects, because beta is transposed.
        return 1 - F.logsigmoid(-beta) * power

    def by_head(self, x, weight):
        return upcast(linear(x, weight)).transpose(1, 2)  # (B, H, T)

"""GRAPE-AP: additive path bias (Zhang et al. 2025, arXiv 2512.07805). Each token after a key lowers the key's logit:

    L_ij = S_ij + s_h sum over l = j + 1..i of log sigmoid(p_i . R_l norm(p_l) / w),   p = W x,   x the layer's input.

s_h is ALiBi's slope, w = 8 the width of p, R_l a rotation of all pairs by -l radians. There is no other position
encoding. The formula and W from N(0, 1 / 4C) are from the authors' code (model/llama-mha-grape-ap-v1.py). In it, p_i is
not rotated, so the bias depends on absolute positions. W starts at random, because W = 0 has no gradient.
"""

import torch
import torch.nn.functional as F
from torch import nn

from model.methods.alibi import ALiBi
from model.methods.base import AttentionWeights, scores
from model.tensors import linear, sum_from_here, upcast

WIDTH = 8  # of p


class GrapeAP(AttentionWeights):
    needs_input = True
    inverse_lengths = ("slope_scale",)

    def __init__(self, shape, slope_scale: float = 1.0):
        super().__init__()
        self.alibi = ALiBi(shape, slope_scale=slope_scale)
        self.weight = nn.Parameter(torch.zeros(shape.num_heads * WIDTH, shape.model_dim))

    def reset_parameters(self):
        self.weight.normal_(std=0.5 * self.weight.shape[1] ** -0.5)

    def token_features(self, x):
        p = linear(x, self.weight)
        return p.unflatten(-1, (-1, WIDTH)).transpose(1, 2)  # (B, H, T, WIDTH)

    def weights(self, q, k, visible, token_features):
        p = upcast(token_features)
        rotated_p = rotate(p)
        steps = F.logsigmoid(p[:, :, -q.shape[2] :] @ rotated_p.mT / WIDTH)  # (B, H, Tq, Tk)
        steps = steps.masked_fill(~visible, 0.0)
        path = sum_from_here(steps) - steps  # the sum over l = j + 1..i
        head = torch.arange(p.shape[1], device=p.device).view(-1, 1, 1)
        _, minus_slope = self.alibi.coefficients(p.new_ones(()), head)  # at distance 1, (H, 1, 1)
        logits = scores(q, k) - minus_slope * path
        return logits.masked_fill(~visible, -torch.inf).softmax(dim=-1)


def rotate(p):
    """Return R_l norm(p_l) for each token l, from p (B, H, T, WIDTH)."""
    angle = torch.arange(p.shape[2], device=p.device, dtype=p.dtype).unsqueeze(-1)
    a, b = F.rms_norm(p, (WIDTH,)).chunk(2, dim=-1)
    real = a * angle.cos() + b * angle.sin()
    imaginary = b * angle.cos() - a * angle.sin()
    return torch.cat((real, imaginary), dim=-1)

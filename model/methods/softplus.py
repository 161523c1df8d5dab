"""Length-scaled softplus attention with re-weighting, LSSAR (Gao et al. 2025, arXiv 2501.13428).

With n = i + 1 keys at query i:

    A_ij = softplus(log d log n cos(q_i, k_j)),   A_i <- A_i / sum A_i,
    A_ij <- relu(n A_ij - 1)^p,                   A_i <- A_i / sum A_i,

Keys below the mean weight 1/n get no weight, and the power p sharpens the others. As in the paper, the first three
queries do not subtract 1. If all keys of a later query have the same cosine, none is above the mean, and the output is
0. With QK-norm, cos = q.k / d, so query scales still work. The paper has RoPE: the method `lssar`. It compares p = 3
and 15, and 15 is better beyond the training length. The code is plain PyTorch in blocks of queries, in float32.
"""

import math

import torch
import torch.nn.functional as F

from errors import require
from model.methods.base import AttentionWeights
from model.tensors import upcast

ROUNDING = 1e-5  # limit of n A - 1 in float32 when all keys have the same cosine


class Softplus(AttentionWeights):
    def __init__(self, shape, power: float = 15.0):
        super().__init__()
        require(power >= 1, f"power is {power}. Use at least 1.")
        self.power = power

    def weights(self, q, k, visible, token_features):
        D = q.shape[-1]
        n = visible.sum(dim=-1, keepdim=True)  # visible keys of each query, (Tq, 1)

        # 1. Weights by a softplus. We upcast first, because the power would amplify the error of a rounded cosine.
        cosine = (upcast(q) / D) @ upcast(k).mT  # (B, H, Tq, Tk)
        log_n = n.to(cosine.dtype).log()
        weights = F.softplus(math.log(D) * log_n * cosine).masked_fill(~visible, 0.0)

        # 2. Sharpened. n^15 overflows float32, so the largest excess becomes 1. It cancels in the last division.
        relative = n * weights / weights.sum(dim=-1, keepdim=True)
        excess = F.relu(relative - (n > 3).to(weights.dtype))
        largest = excess.detach().amax(dim=-1, keepdim=True)
        largest = largest.masked_fill(largest < ROUNDING, torch.inf)
        weights = (excess / largest) ** self.power
        return weights / weights.sum(dim=-1, keepdim=True).clamp(min=1)

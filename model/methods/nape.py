"""NAPE with adaptive scaling (Vasylenko et al. 2025, arXiv 2506.16640): half of the heads have ALiBi, the others no
position encoding, and the logits of query i, which sees i keys, are multiplied by

    delta + beta (log i)^gamma,   beta = softplus(w_b . x_i),   gamma = 2 tanh(w_g . x_i),   x the input of the layer.

Softmax only: the paper's entmax, whose weights are exactly zero for most keys, is not built. Chosen here, as we have
not found it in the paper: the slopes are ALiBi's for as many heads as have them (the first half, rounded up), w_b and
w_g start at zero, have no bias, and differ between heads, delta is 1 and not learned, and all heads are scaled
(`scaled_heads nope`: those without position encoding alone). The first query, of which log i = 0, counts as the second:
what it sees is one key, whatever the factor.
"""

import torch
import torch.nn.functional as F
from torch import nn

from errors import require
from model.methods.alibi import ALiBi
from model.methods.base import QueryScale, upcast


def alibi_heads(num_heads: int) -> int:
    return (num_heads + 1) // 2


class HalfALiBi(ALiBi):
    def __init__(self, num_heads, head_dim, train_length, slopes: str = "official", slope_scale: float = 1.0):
        super().__init__(alibi_heads(num_heads), head_dim, train_length, slopes, slope_scale)

    def coefficients(self, distance, head):
        scale, bias = super().coefficients(distance, head)
        return scale, torch.where(head < self.num_heads, bias, 0.0)


class AdaptiveScale(QueryScale):
    needs_input = True

    def __init__(self, num_heads, head_dim, train_length, delta: float = 1.0, scaled_heads: str = "all"):
        super().__init__()
        require(scaled_heads in ("all", "nope"), f"scaled_heads must be all or nope, got {scaled_heads!r}")
        self.delta, self.first = delta, 0 if scaled_heads == "all" else alibi_heads(num_heads)
        self.beta, self.gamma = (nn.Parameter(torch.zeros(num_heads, num_heads * head_dim)) for _ in range(2))

    def table(self, positions, target_length):
        return (positions + 1).clamp(min=2).double().log().log()  # (T,)

    def multiplier(self, table, x):
        beta, gamma = (upcast(F.linear(x, w.to(x.dtype))).transpose(1, 2) for w in (self.beta, self.gamma))  # (B, H, T)
        # softplus(beta), whose own gradient has other strides than torch.compile expects, where beta is transposed
        factor = self.delta - F.logsigmoid(-beta) * torch.exp(2 * torch.tanh(gamma) * table.to(gamma.dtype))
        head = torch.arange(factor.shape[1], device=factor.device).unsqueeze(-1)
        return factor if self.first == 0 else torch.where(head < self.first, 1.0, factor)

"""Wall attention (Tilde Research 2026, blog.tilderesearch.com/blog/wall-attn): each channel of q.k decays by itself.

    L_ij = sum over channels n of q_in k_jn D_ijn / sqrt(d),   D_ijn = product of f_ln over l = j + 1..i,
    f_l = sigmoid(W x_l + b),   x the layer's input. There is no position encoding.

Forgetting attention adds the logarithm of a decay to S. Here decays multiply the parts of S, so a forgotten key has
L = 0, not -inf. The formula and b = 8 are from flash-linear-attention (fla/layers/wall_attn.py). With b = 8, a channel
forgets over exp(8) tokens. We scale this length like others. The authors draw W from N(0, 0.02). Ours starts at zero,
so the rest of the model starts with the same weights for every method.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.methods.base import AttentionWeights, upcast

SMALL_BLOCK = 16  # tokens of a block whose decays are computed pair by pair


class Wall(AttentionWeights):
    needs_input = True
    lengths = {"memory": 1}

    def __init__(self, num_heads, head_dim, train_length, memory: float = math.exp(8)):
        """memory: tokens over which a channel forgets at first, f = memory / (memory + 1)."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads * head_dim, num_heads * head_dim))
        self.bias = nn.Parameter(torch.full((num_heads, head_dim), math.log(memory)))

    def of_tokens(self, x):
        gate = upcast(F.linear(x, self.weight.to(x.dtype))).unflatten(-1, self.bias.shape) + self.bias  # (B, T, H, D)
        return F.logsigmoid(gate).transpose(1, 2)

    def weights(self, q, k, visible, of_tokens):
        logits = decayed_products(q * q.shape[-1] ** -0.5, k, of_tokens)
        return logits.masked_fill(~visible, -torch.inf).softmax(dim=-1)


def decayed_products(q: Tensor, k: Tensor, log_f: Tensor) -> Tensor:
    """Return L (B, H, Tq, Tk). q has the last Tq of the Tk tokens of k and log_f. Later keys get any finite number.

    Products of f over thousands of tokens underflow, and their inverses overflow. So no product is inverted: keys decay
    up to the first query, and queries decay from there on. The keys among the queries are halved until they are few.
    """
    Tq, Tk = q.shape[2], k.shape[2]
    first = Tk - Tq  # position of the first query
    if first > 0:
        decay_of_q = F.pad(log_f[:, :, first + 1 :].cumsum(dim=2), (0, 0, 1, 0)).exp()  # (B, H, Tq, D)
        decay_of_k = log_f[:, :, 1 : first + 1].flip(2).cumsum(dim=2).flip(2).exp()  # (B, H, first, D)
        earlier = (upcast(q) * decay_of_q).to(q.dtype) @ (upcast(k[:, :, :first]) * decay_of_k).to(q.dtype).mT
        later = decayed_products(q, k[:, :, first:], log_f[:, :, first:])
        return torch.cat((upcast(earlier), later), dim=-1)
    if Tq <= SMALL_BLOCK:
        log_f = log_f.cumsum(dim=2)
        decay = (log_f.unsqueeze(3) - log_f.unsqueeze(2)).clamp(max=0).exp()  # (B, H, Tq, Tk, D)
        return (upcast(q).unsqueeze(3) * upcast(k).unsqueeze(2) * decay).sum(dim=-1)
    half = Tq // 2
    first_half = decayed_products(*(x[:, :, :half] for x in (q, k, log_f)))
    return torch.cat((F.pad(first_half, (0, Tk - half)), decayed_products(q[:, :, half:], k, log_f)), dim=2)

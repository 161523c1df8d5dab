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

from model.methods.base import Replacement, in_blocks_of_queries, upcast

SMALL_BLOCK = 16  # tokens of a block whose decays are computed pair by pair


class Wall(Replacement):
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

    def attend(self, q, k, v, rotated_q, rotated_k, q_offset, causal_attention, of_tokens):
        return in_blocks_of_queries(attend_block, rotated_q, rotated_k, v, q_offset, of_tokens)


def attend_block(q, k, v, log_f):
    """Return the output (B, H, Tq, D). q has the last Tq of the Tk tokens of k and v. log_f (B, H, Tk or more, D).

    Products of f over thousands of tokens underflow, and their inverses overflow. So no product is inverted. The keys
    decay up to the block's first query, and the queries decay from there on.
    """
    Tq, Tk = q.shape[2], k.shape[2]
    first = Tk - Tq  # position of the first query
    q = q * q.shape[-1] ** -0.5
    log_decay = log_f[:, :, first + 1 : Tk].cumsum(dim=2)  # from the first query to the others
    log_decay = F.pad(log_decay, (0, 0, 1, 0))  # (B, H, Tq, D)
    log_decay_of_keys = log_f[:, :, 1 : first + 1].flip(2).cumsum(dim=2).flip(2)  # (B, H, first, D)
    earlier = product(q, log_decay, k[:, :, :first], log_decay_of_keys)  # (B, H, Tq, first)
    logits = torch.cat((earlier, logits_of_block(q, k[:, :, first:], log_decay)), dim=-1)  # (B, H, Tq, Tk)
    visible = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(first)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return weights.to(v.dtype) @ v


def product(q: Tensor, log_decay_of_q: Tensor, k: Tensor, log_decay_of_k: Tensor) -> Tensor:
    """Return the products (B, H, Tq, Tk) of queries and keys, which are multiplied by their decays (at most 1)."""
    decayed_q, decayed_k = (upcast(x) * decay.exp() for x, decay in ((q, log_decay_of_q), (k, log_decay_of_k)))
    return upcast(decayed_q.to(q.dtype) @ decayed_k.to(k.dtype).mT)


def logits_of_block(q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """Return the logits (B, H, T, T) of T queries and the keys of the same tokens.

    The halves of a block are blocks. Between them, the decay passes the second half's first token. log_decay
    (B, H, T, D): logarithm of the decay from one earlier token to each token. Later keys get any finite logit.
    """
    T = q.shape[2]
    if T <= SMALL_BLOCK:
        decay = (log_decay.unsqueeze(3) - log_decay.unsqueeze(2)).clamp(max=0).exp()  # (B, H, T, T, D)
        return (upcast(q).unsqueeze(3) * upcast(k).unsqueeze(2) * decay).sum(-1)
    half = T // 2
    (q1, q2), (k1, k2), (decay1, decay2) = (x.split((half, T - half), dim=2) for x in (q, k, log_decay))
    start = decay2[:, :, :1]
    earlier, later = logits_of_block(q1, k1, decay1), logits_of_block(q2, k2, decay2)
    across = product(q2, decay2 - start, k1, start - decay1)
    return torch.cat((F.pad(earlier, (0, T - half)), torch.cat((across, later), dim=-1)), dim=2)

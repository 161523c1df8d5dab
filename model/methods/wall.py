"""Wall attention (Tilde Research 2026, blog.tilderesearch.com/blog/wall-attn): each channel of q.k decays by itself.

    L_ij = sum over channels n of q_in k_jn D_ijn / sqrt(d),   D_ijn = product of f_ln over l = j + 1..i,
    f_l = sigmoid(W x_l + b),   x the layer's input. There is no position encoding.

Forgetting attention adds the logarithm of a decay to S. Here decays multiply the parts of S, so a forgotten key has
L = 0, not -inf. The formula and b = 8 are from flash-linear-attention (fla/layers/wall_attn.py). With b = 8, a channel
forgets over exp(8) tokens, and position_scale scales this length. The authors draw W from N(0, 0.02). Ours starts at
zero, so the rest of the model starts with the same weights for every method.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.methods.base import AttentionWeights
from model.tensors import linear, sum_from_here, upcast

SMALL_BLOCK = 16  # tokens of a block whose decays are computed pair by pair


class Wall(AttentionWeights):
    needs_input = True
    lengths = ("memory",)

    def __init__(self, shape, memory: float = math.exp(8)):
        """memory: tokens over which a channel forgets at first, f = memory / (memory + 1)."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape.model_dim, shape.model_dim))
        self.bias = nn.Parameter(torch.full((shape.num_heads, shape.head_dim), math.log(memory)))

    def token_features(self, x):
        gate = upcast(linear(x, self.weight)).unflatten(-1, self.bias.shape)  # (B, T, H, D)
        gate = gate + self.bias
        return F.logsigmoid(gate).transpose(1, 2)

    def weights(self, q, k, visible, token_features):
        logits = decayed_products(q * q.shape[-1] ** -0.5, k, token_features)
        return logits.masked_fill(~visible, -torch.inf).softmax(dim=-1)


def decayed_products(q: Tensor, k: Tensor, log_f: Tensor) -> Tensor:
    """Return L (B, H, Tq, Tk). q has the last Tq of the Tk tokens of k and log_f. L of later keys is unspecified.

    Products of f over thousands of tokens underflow, and their inverses overflow. So no product is inverted: the key
    decays up to a token between key and query, and the query decays from there on.
    """
    queries = q.shape[2]
    first = k.shape[2] - queries  # position of the first query
    earlier_k, own_k = k.split([first, queries], dim=2)
    log_f_before, log_f_after = log_f[:, :, 1:].split([first, queries - 1], dim=2)
    log_decay = log_f_after.cumsum(dim=2)
    log_decay = F.pad(log_decay, (0, 0, 1, 0))  # from the first query, (B, H, Tq, D)
    before = products_with_earlier_keys(q, earlier_k, log_decay, log_f_before)
    among = products_among_queries(upcast(q), upcast(own_k), log_decay)
    return torch.cat((upcast(before), among), dim=-1)


def products_with_earlier_keys(q: Tensor, k: Tensor, log_decay: Tensor, log_f: Tensor) -> Tensor:
    """Return L for keys before all queries. The key decays up to the first query.

    log_f (B, H, keys, D): of the tokens after each of these keys, up to the first query.
    """
    decayed_q = (upcast(q) * log_decay.exp()).to(q.dtype)
    decayed_k = (upcast(k) * sum_from_here(log_f, dim=2).exp()).to(q.dtype)
    return decayed_q @ decayed_k.mT


def products_among_queries(q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """Return L (B, H, Tq, Tq) for keys at the positions of the queries. All arguments are (B, H, Tq, D)."""
    Tq = q.shape[2]
    q, k, log_decay = (in_small_blocks(x) for x in (q, k, log_decay))

    # 1. Within a block, each pair of query and key has its own decay.
    pair_decay = decay(log_decay.unsqueeze(4), log_decay.unsqueeze(3))
    within = (q.unsqueeze(4) * k.unsqueeze(3) * pair_decay).sum(dim=-1)  # (B, H, blocks, queries, keys)

    # 2. Across blocks, the key decays up to the first token of the query's block.
    start = log_decay[:, :, :, :1]
    decayed_k = k.unsqueeze(2) * decay(start.unsqueeze(3), log_decay.unsqueeze(2))
    decayed_q = (q * decay(log_decay, start)).unsqueeze(3)
    across = decayed_q @ decayed_k.mT  # (B, H, blocks, blocks of keys, queries, keys)

    # 3. Both together, as one matrix a head.
    same_block = torch.eye(q.shape[2], dtype=torch.bool, device=q.device)[..., None, None]
    products = torch.where(same_block, within.unsqueeze(3), across)
    return products.transpose(3, 4).flatten(4).flatten(2, 3)[:, :, :Tq, :Tq]


def in_small_blocks(x: Tensor) -> Tensor:
    """Return x (B, H, T, D), padded, as (B, H, blocks, SMALL_BLOCK, D)."""
    padded = F.pad(x, (0, 0, 0, -x.shape[2] % SMALL_BLOCK))
    return padded.unflatten(2, (-1, SMALL_BLOCK))


def decay(log_decay: Tensor, earlier: Tensor) -> Tensor:
    """Return the decay between two tokens, at most 1, from both logarithms of decays from the first query."""
    return (log_decay - earlier).clamp(max=0).exp()

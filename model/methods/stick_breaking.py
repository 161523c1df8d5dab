"""Stick-breaking attention (Tan et al. 2024, arXiv 2410.17980): each query hands out a stick of length 1 to the keys
before it, from the nearest to the furthest, a share beta of what is left to each:

    A_ij = beta_ij prod over l = j + 1..i - 1 of (1 - beta_il),   beta_ij = sigmoid(q_i . k_j / sqrt(d)),   j < i,

and keeps the rest for its own value, as in the authors' code: y_i = sum of A_ij v_j + (1 - sum of A_ij) v_i. There is
no softmax and no position encoding: the nearest of equal keys gets most. Unlike in the paper, q and k have QK-norm. It
keeps beta above sigmoid(-sqrt(d)), so no key lets the whole stick pass. Plain PyTorch, in blocks of queries, in log
space and float32.
"""

import torch
import torch.nn.functional as F

from model.methods.base import Replacement, in_blocks_of_queries, upcast


class StickBreaking(Replacement):
    def __init__(self, num_heads, head_dim, train_length):
        super().__init__()

    def attend(self, q, k, v, rotated_q, rotated_k, q_offset, causal_attention):
        return in_blocks_of_queries(attend_block, rotated_q, rotated_k, v, q_offset)


def attend_block(q, k, v):
    """Return the output (B, H, Tq, D) of queries q that are the last Tq of the tokens of k and v (B, H, Tk, D)."""
    Tq, Tk = q.shape[2], k.shape[2]
    logits = upcast((q * q.shape[-1] ** -0.5) @ k.mT)  # (B, H, Tq, Tk)
    before = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq - 1)
    log_passed = F.logsigmoid(-logits).masked_fill(~before, 0.0)  # log(1 - beta)
    log_left = log_passed.flip(-1).cumsum(dim=-1).flip(-1)  # after the keys from j on
    weights = (logits + log_left).masked_fill(~before, -torch.inf).exp()  # beta = e^logit (1 - beta)
    own = log_left[..., :1].exp()  # what no key has taken
    return weights.to(v.dtype) @ v + own.to(v.dtype) * v[:, :, Tk - Tq :]

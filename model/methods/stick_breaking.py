"""Stick-breaking attention (Tan et al. 2024, arXiv 2410.17980): each query divides a stick of length 1 among the
earlier keys. From the nearest key to the furthest, each key takes a share beta of the remaining stick:

    A_ij = beta_ij prod_(j<l<i) (1 - beta_il),   beta_ij = sigmoid(q_i . k_j / sqrt(d)),   j < i

As in the authors' code, v_i gets the remainder: y_i = sum_j A_ij v_j + (1 - sum_j A_ij) v_i. There is no softmax and no
position encoding. Of equal keys, the nearest takes most. Unlike in Tan et al., q and k have QK-norm, so beta is above
sigmoid(-sqrt(d)). The code is plain PyTorch in blocks of queries, in log space and float32.
"""

import torch
import torch.nn.functional as F

from model.methods.base import AttentionWeights
from model.tensors import sum_from_here, upcast


class StickBreaking(AttentionWeights):
    def __init__(self, shape):
        super().__init__()

    def weights(self, q, k, visible, token_features):
        Tq, Tk = visible.shape
        logits = upcast((q * q.shape[-1] ** -0.5) @ k.mT)  # (B, H, Tq, Tk)
        earlier = visible.tril(Tk - Tq - 1)
        log_passed = F.logsigmoid(-logits).masked_fill(~earlier, 0.0)  # log(1 - beta)
        log_remaining = sum_from_here(log_passed)  # log of the stick that keys i - 1 down to j leave
        shares = (logits + log_remaining).masked_fill(~earlier, -torch.inf).exp()  # beta = e^logit (1 - beta)
        remainder = log_remaining[..., :1].exp()  # the part of the stick that no key takes
        return torch.where(visible & ~earlier, remainder, shares)

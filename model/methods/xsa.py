"""Exclusive self attention (Zhai 2026, arXiv 2603.09078): the output loses its part along the query's own value.

    y_i <- y_i - (y_i . v_i / v_i . v_i) v_i,   v_i the value of token i in the same head

modded-nanogpt's record #82 multiplies the removed part by tanh(a), and each head of each layer learns a, from 0 on.
"""

import torch
import torch.nn.functional as F
from torch import nn

from model.methods.base import OutputGate
from model.tensors import upcast


class ExclusiveSelfAttention(OutputGate):
    def __init__(self, shape, learn_share: bool = False):
        """learn_share: remove only the share tanh(a), with a learned a."""
        super().__init__()
        self.share = nn.Parameter(torch.zeros(shape.num_heads)) if learn_share else None

    def change(self, y, v, x):
        direction = F.normalize(upcast(v), dim=-1)  # zero for a value of zero
        removed = (upcast(y) * direction).sum(dim=-1, keepdim=True) * direction
        if self.share is not None:
            removed = self.share.tanh()[:, None, None] * removed
        return (upcast(y) - removed).to(y.dtype)

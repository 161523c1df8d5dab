"""Learned sinks, as in gpt-oss (OpenAI 2025, arXiv 2508.10925): each head's softmax has one more logit s_h, without a
key or a value. This lets a head attend to nothing: y_i = sum_j exp(L_ij) v_j / (exp(s_h) + sum_j exp(L_ij))."""

import torch
from torch import nn

from model.methods.base import Sink


class LearnedSink(Sink):
    def __init__(self, shape, sink_init: float = 0.0):
        """sink_init: the initial s. 0 is the logit of a key orthogonal to the query."""
        super().__init__()
        self.logit = nn.Parameter(torch.full((shape.num_heads,), float(sink_init)))

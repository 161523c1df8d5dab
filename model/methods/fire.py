"""FIRE (Li et al. 2023, arXiv 2310.04418): a learned function of the distance is added to the logit of query i, key j:

    L = S + f(psi(i - j) / psi(max(l, i))),   psi(x) = log(1 + c x).

f is a perceptron with 32 ReLUs and one output per head. Each layer learns f, c and the threshold l. There is no other
position encoding. f(...) depends on i and i - j, so it is not a ScoreChange. It runs in plain PyTorch.

The initial values are from public code (results/authors.md): c = 0.1, l = 512, and in f PyTorch's values for linear
layers. We keep c and l positive by learning their logarithms. The public code takes their absolute values. The output
of f has no learned constant, because softmax ignores it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from model.methods.base import AttentionWeights, scores

WIDTH = 32  # ReLUs


class FIRE(AttentionWeights):
    lengths = ("threshold",)
    inverse_lengths = ("c",)

    def __init__(self, shape, c: float = 0.1, threshold: float = 512.0):
        """c and threshold: the initial values of c and l."""
        super().__init__()
        self.c, self.threshold = c, threshold
        self.log_c = nn.Parameter(torch.zeros(1))  # log(c / initial c)
        self.log_threshold = nn.Parameter(torch.zeros(1))
        self.slope = nn.Parameter(torch.zeros(1, WIDTH))  # of each ReLU, the same for all heads
        self.offset = nn.Parameter(torch.zeros(1, WIDTH))
        self.output = nn.Parameter(torch.zeros(shape.num_heads, WIDTH))

    def reset_parameters(self):
        for weight, inputs in ((self.slope, 1), (self.offset, 1), (self.output, WIDTH)):
            weight.uniform_(-(inputs**-0.5), inputs**-0.5)

    def weights(self, q, k, visible, token_features):
        Tq, Tk = visible.shape
        logits = scores(q, k)  # (B, H, Tq, Tk)
        j = torch.arange(Tk, device=q.device, dtype=logits.dtype)
        i = j[Tk - Tq :, None]
        bias = self.bias(i, (i - j).clamp(min=0))
        return (logits + bias).masked_fill(~visible, -torch.inf).softmax(dim=-1)

    def bias(self, i, distance):
        """Return f (H, Tq, Tk) from positions i (Tq, 1) and distances (Tq, Tk)."""
        c = self.c * self.log_c.exp()
        threshold = self.threshold * self.log_threshold.exp()
        relative_distance = torch.log1p(c * distance) / torch.log1p(c * torch.maximum(i, threshold))
        hidden = F.relu(relative_distance[..., None] * self.slope[0] + self.offset[0])  # (Tq, Tk, WIDTH)
        return F.linear(hidden, self.output.to(hidden.dtype)).movedim(-1, 0)

"""BAM (Bianchessi et al. 2025, arXiv 2505.22842): each head learns a bias that depends on distance.

    L = S - e^alpha (t + eps)^beta,   eps = 1e-5,   alpha and beta learned

There is no other position encoding. The bias is the logarithm of a generalized Gaussian of the distance. beta = 1 is
ALiBi. With a negative beta, a head hides near keys and sees distant keys. The authors' released code has this formula
and starts at alpha = beta = 0. Their first version had e^alpha inside the power, beta = 1 and ALiBi's slopes.

Together with scalable softmax (logn.py), the authors multiply the whole logit by s log n. We multiply only S by it.
"""

import math

import torch
from torch import nn

from model.methods.base import ScoreChange

EPSILON = 1e-5  # tokens
# With a negative beta, the own key (t = 0) can get a logit of -10^10. Float32 rounds it to a multiple of 1024, so
# exp(L - logsumexp) of the first query, which sees only its own key, could overflow. Beside other keys, a key at -10^4
# already has no weight, so this bound changes nothing else.
LOG_LARGEST = math.log(1e4)


class BAM(ScoreChange):
    def __init__(self, shape):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(shape.num_heads))
        self.beta = nn.Parameter(torch.zeros(shape.num_heads))

    def coefficients(self, distance, head):
        alpha, beta = (x[head].to(distance.dtype) for x in (self.alpha, self.beta))
        log_penalty = alpha + beta * torch.log(distance + EPSILON)
        return 1.0, -torch.exp(log_penalty.clamp(max=LOG_LARGEST))

"""Scale-invariant attention (Anson, Wang and Aitchison 2025, arXiv 2505.17083), the paper of this repository.

With boundary condition a_0 = 1, m_0 = 0 (alpha = beta = e^0.5) equations (eq:gaussian_at, eq:gaussian_mt) become

    a_t = sqrt(1 + 2 log(1 + t/tau)),    m_t = 1 - a_t^2 = -2 log(1 + t/tau),

so that for Gaussian scores E[exp(L_t)] and E[exp(L_t) L_t] both fall as 1/(t/tau + 1): the total attention, and its
unnormalised sparsity, is the same in every range of distances [t, t Delta).
"""

import math

import torch
from torch import nn

from model.methods.base import ScoreChange


class ScaleInvariant(ScoreChange):
    def __init__(self, num_heads, head_dim, train_length, tau: float = 10.0, learn_tau: bool = False):
        """tau: the length, in tokens, of the local region that is left about unchanged.

        learn_tau: each head of each layer learns its own, from this one on, as log(tau). Ours, not the paper's.
        """
        super().__init__()
        if not 0 < tau < math.inf:
            raise ValueError(f"tau must be positive and finite, got {tau}")
        self.tau = tau
        self.log_tau = nn.Parameter(torch.full((num_heads,), math.log(tau))) if learn_tau else None

    def coefficients(self, distance, head):
        tau = self.tau if self.log_tau is None else torch.exp(self.log_tau[head].to(distance.dtype))
        a_squared = 1 + 2 * torch.log(1 + distance / tau)
        # x * rsqrt(x) rather than sqrt(x): compiled for CUDA, sqrt becomes a slow correctly rounded subroutine.
        return a_squared * torch.rsqrt(a_squared), 1 - a_squared

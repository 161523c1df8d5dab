"""Scale-invariant attention (Anson, Wang and Aitchison 2025, arXiv 2505.17083), the paper of this repository.

For Gaussian scores, E[exp(L_t)] and E[exp(L_t) L_t] that fall as 1 / (t/tau + 1) make the total attention, and its
unnormalised sparsity, the same in every range of distances [t, t Delta). With the boundary condition a_0 = 1, m_0 = 0,
the solution is (eq:gaussian_at, eq:gaussian_mt):

    a_t = sqrt(1 + 2 log(1 + t/tau)),    m_t = 1 - a_t^2 = -2 log(1 + t/tau).
"""

import math

import torch
from torch import nn

from errors import require
from model.methods.base import ScoreChange

TAU = 10.0  # in tokens; the paper uses it at every training length
TERMS = ("both", "a", "m")


class ScaleInvariant(ScoreChange):
    def __init__(
        self, num_heads, head_dim, train_length, tau: float = TAU, tau_ratio: float = 1.0,
        learn_tau: bool = False, learn_gain: bool = False, terms: str = "both",
    ):  # fmt: skip
        """tau: the length, in tokens, of the local region whose scores stay about unchanged.

        The other options are ours. tau_ratio: each head has this many times the tau of the head before it; the first
        head has tau. learn_tau: each head of each layer learns log(tau). learn_gain: each head learns a factor of its
        scores, whose standard deviation the theory takes to be 1. terms: "a" leaves out m_t, "m" leaves out a_t.
        """
        super().__init__()
        require(tau > 0 and tau_ratio > 0, f"tau and tau_ratio must be positive, got {tau} and {tau_ratio}")
        require(terms in TERMS, f"terms must be one of {', '.join(TERMS)}, got {terms!r}")
        self.tau, self.tau_ratio, self.terms = tau, tau_ratio, terms
        log_tau = math.log(tau) + math.log(tau_ratio) * torch.arange(num_heads, dtype=torch.float32)
        self.log_tau = nn.Parameter(log_tau) if learn_tau else None
        self.gain = nn.Parameter(torch.ones(num_heads)) if learn_gain else None

    def coefficients(self, distance, head):
        if self.log_tau is not None:
            tau = torch.exp(self.log_tau[head].to(distance.dtype))
        else:
            tau = self.tau if self.tau_ratio == 1 else self.tau * torch.pow(self.tau_ratio, head).to(distance.dtype)
        a_squared = 1 + 2 * torch.log(1 + distance / tau)
        # x * rsqrt(x) rather than sqrt(x): compiled for CUDA, sqrt becomes a slow correctly rounded subroutine.
        a = 1.0 if self.terms == "m" else a_squared * torch.rsqrt(a_squared)
        if self.gain is not None:
            a = a * self.gain[head].to(distance.dtype)
        return a, torch.zeros_like(a_squared) if self.terms == "a" else 1 - a_squared

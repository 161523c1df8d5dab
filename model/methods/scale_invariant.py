"""Scale-invariant attention (Anson, Wang and Aitchison 2025, arXiv 2505.17083), the paper of this repository.

For Gaussian scores, E[exp(L_t)] = alpha / (t/tau + 1) and E[exp(L_t) L_t] = beta / (t/tau + 1) make the total
attention, and its unnormalised sparsity, the same in every range of distances [t, t Delta). The solution (eq:solution):

    a_t^2 = 2 (log(1 + t/tau) - log(alpha) + beta/alpha),    m_t = beta/alpha - a_t^2    where beta >= alpha log(alpha).

The boundary condition a_0 = 1, m_0 = 0 gives alpha = beta = e^0.5, the default (eq:gaussian_at, eq:gaussian_mt):

    a_t = sqrt(1 + 2 log(1 + t/tau)),    m_t = 1 - a_t^2 = -2 log(1 + t/tau).
"""

import math

import torch
from torch import nn

from errors import require
from model.methods.base import ScoreChange

TAU = 10.0  # in tokens; the paper uses it at every training length
ROOT_E = math.exp(0.5)
TERMS = ("both", "a", "m")


class ScaleInvariant(ScoreChange):
    def __init__(
        self, num_heads, head_dim, train_length, tau: float = TAU, tau_ratio: float = 1.0,
        learn_tau: bool = False, learn_gain: bool = False,
        alpha: float = ROOT_E, beta: float = ROOT_E, terms: str = "both",
    ):  # fmt: skip
        """tau: the length, in tokens, of the local region whose scores stay about unchanged.

        alpha, beta: another boundary condition than the paper's. The other options are ours. tau_ratio: each head has
        this many times the tau of the head before it; the first head has tau. learn_tau: each head of each layer
        learns log(tau). learn_gain: each head learns a factor of its scores, whose standard deviation the theory takes
        to be 1. terms: "a" leaves out m_t, "m" leaves out a_t.
        """
        super().__init__()
        require(0 < tau < math.inf, f"tau must be positive and finite, got {tau}")
        finite = tau_ratio > 0 and abs(math.log(tau) + (num_heads - 1) * math.log(tau_ratio)) < 700  # in float64
        require(finite, f"tau_ratio must be positive, and tau finite in all {num_heads} heads, got {tau_ratio}")
        one = not (learn_tau and learn_gain)  # our GPU kernel has one learned number a head
        require(one, "learn_tau and learn_gain exclude each other. Choose one.")
        solvable = alpha > 0 and beta >= alpha * math.log(alpha)
        require(solvable, f"alpha must be positive and beta at least alpha log(alpha), got {alpha} and {beta}")
        require(terms in TERMS, f"terms must be one of {', '.join(TERMS)}, got {terms!r}")
        self.tau, self.tau_ratio, self.ratio, self.terms = tau, tau_ratio, beta / alpha, terms
        # Never 0, because coefficients divide by its root: the paper's inequality may be an equality.
        self.a_squared_at_0 = max(2 * (beta / alpha - math.log(alpha)), 1e-12)
        log_tau = math.log(tau) + math.log(tau_ratio) * torch.arange(num_heads, dtype=torch.float32)
        self.log_tau = nn.Parameter(log_tau) if learn_tau else None
        self.gain = nn.Parameter(torch.ones(num_heads)) if learn_gain else None

    def coefficients(self, distance, head):
        if self.log_tau is not None:
            tau = torch.exp(self.log_tau[head].to(distance.dtype))
        else:
            tau = self.tau if self.tau_ratio == 1 else self.tau * torch.pow(self.tau_ratio, head).to(distance.dtype)
        a_squared = self.a_squared_at_0 + 2 * torch.log(1 + distance / tau)
        # x * rsqrt(x) rather than sqrt(x): compiled for CUDA, sqrt becomes a slow correctly rounded subroutine.
        a = 1.0 if self.terms == "m" else a_squared * torch.rsqrt(a_squared)
        if self.gain is not None:
            a = a * self.gain[head].to(distance.dtype)
        return a, torch.zeros_like(a_squared) if self.terms == "a" else self.ratio - a_squared

"""Scale-invariant attention (Anson, Wang and Aitchison 2025, arXiv 2505.17083), the paper of this repository.

Let E[exp(L_t)] and E[exp(L_t) L_t] fall as 1 / (t/tau + 1). Then all ranges of distances [t, t Delta) with t far above
tau get the same expected total of unnormalised attention, and the same expected unnormalised sparsity. For scores that
are N(0, 1), and a_0 = 1, m_0 = 0, the solution is (eq:gaussian_at, eq:gaussian_mt):

    a_t = sqrt(1 + 2 log(1 + t/tau)),    m_t = 1 - a_t^2 = -2 log(1 + t/tau).

Scores S that are N(mu, sigma^2) have E[exp(L_t)] = exp(a_t mu + m_t + a_t^2 sigma^2 / 2), and E[exp(L_t) L_t] is
a_t mu + m_t + a_t^2 sigma^2 times this. Both fall as 1 / (t/tau + 1) if the factor is constant in t. So our solution is

    a_t = sqrt(1 + 2 log(1 + t/tau) / sigma^2),    m_t = (1 - a_t^2) sigma^2 + (1 - a_t) mu.
"""

import math

import torch
from torch import nn

from errors import require
from model.methods.base import ScoreChange

TAU = 10.0  # in tokens; the paper chose it at a training length of 4096 and names no other value
TERMS = ("both", "a", "m")


class ScaleInvariant(ScoreChange):
    def __init__(
        self, num_heads, head_dim, train_length, tau: float = TAU, tau_ratio: float = 1.0,
        learn_tau: bool = False, learn_gain: bool = False, learn_moments: bool = False, terms: str = "both",
        skip_first: bool = False,
    ):  # fmt: skip
        """tau: the length, in tokens, of the local region whose scores stay about unchanged.

        The other options are ours. tau_ratio: factor of tau from one head to the next; the first head has tau.
        learn_tau: each head of each layer learns log(tau). learn_gain: each head learns a factor of its scores, because
        the theory assumes scores with standard deviation 1. learn_moments: each head learns mu and sigma. They start at
        0 and 1, or at values of a trained model (model/scores.py). terms: "a" leaves out m_t, "m" leaves out a_t.
        skip_first: the first token has a = 1 and m = 0 at every distance, because its scores are not Gaussian (the
        paper leaves it out of its test of the scores). Our kernel for CPUs cannot do this.
        """
        super().__init__()
        require(tau > 0 and tau_ratio > 0, f"tau is {tau}, tau_ratio {tau_ratio}. Use positive numbers.")
        require(terms in TERMS, f"terms is {terms!r}. Use one of {', '.join(TERMS)}.")
        self.tau, self.tau_ratio, self.terms, self.skip_first = tau, tau_ratio, terms, skip_first
        log_tau = math.log(tau) + math.log(tau_ratio) * torch.arange(num_heads, dtype=torch.float32)
        self.log_tau = nn.Parameter(log_tau) if learn_tau else None
        self.gain = nn.Parameter(torch.ones(num_heads)) if learn_gain else None
        self.mean = nn.Parameter(torch.zeros(num_heads)) if learn_moments else None
        self.log_deviation = nn.Parameter(torch.zeros(num_heads)) if learn_moments else None

    def coefficients(self, distance, head):
        if self.log_tau is not None:
            tau = torch.exp(self.log_tau[head].to(distance.dtype))
        else:
            tau = self.tau if self.tau_ratio == 1 else self.tau * torch.pow(self.tau_ratio, head).to(distance.dtype)
        growth = 2 * torch.log(1 + distance / tau)
        if self.mean is not None:
            variance = torch.exp(2 * self.log_deviation[head].to(distance.dtype))
            growth = growth / variance
        a_squared = 1 + growth
        # Compiled for CUDA, sqrt(x) is a slow, correctly rounded subroutine, so we use x * rsqrt(x).
        a = 1.0 if self.terms == "m" else a_squared * torch.rsqrt(a_squared)
        m = 1 - a_squared
        if self.mean is not None:
            m = m * variance + (1 - a) * self.mean[head].to(distance.dtype)
        if self.gain is not None:
            a = a * self.gain[head].to(distance.dtype)
        return a, torch.zeros_like(a_squared) if self.terms == "a" else m

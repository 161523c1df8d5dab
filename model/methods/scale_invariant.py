"""Scale-invariant attention (Anson, Wang and Aitchison 2025, arXiv 2505.17083), the paper of this repository.

The logit at distance t is L_t = a_t S + m_t. Let E[exp(L_t)] and E[exp(L_t) L_t] fall as 1 / (t/tau + 1). Then all
ranges of distances [t, t Delta) with t far above tau get the same expected total of exp(L_t), the unnormalised
attention, and of exp(L_t) L_t, the unnormalised sparsity. For scores that are N(0, 1), and a_0 = 1, m_0 = 0, the
solution is (in the paper's source eq:gaussian_at and eq:gaussian_mt):

    a_t = sqrt(1 + 2 log(1 + t/tau)),    m_t = 1 - a_t^2 = -2 log(1 + t/tau).

`python -m model.methods.scale_invariant` prints both, and the share of the attention by decade of distance.
"""

import math

import torch
from torch import Tensor, nn

from errors import require
from model.methods.base import ScoreChange

TAU = 10.0  # in tokens; the paper chose it among 0.01 to 100, at a training length of 4096
TERMS = ("both", "a", "m")


def solution(t: Tensor, tau: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return a_t and m_t for scores that are N(0, 1)."""
    a_squared = 1 + 2 * torch.log(1 + t / tau)
    return root(a_squared), 1 - a_squared


def solution_for_moments(t: Tensor, tau: float | Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return a_t and m_t for scores that are N(mean, variance). This generalisation is ours.

    E[exp(L_t)] is exp(a_t mean + m_t + a_t^2 variance / 2), and E[exp(L_t) L_t] is this times
    a_t mean + m_t + a_t^2 variance. Both fall as 1 / (t/tau + 1) if this factor is constant in t.
    """
    a_squared = 1 + 2 * torch.log(1 + t / tau) / variance
    a = root(a_squared)
    return a, (1 - a_squared) * variance + (1 - a) * mean


def root(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x)  # compiled for CUDA, sqrt(x) is a slow, correctly rounded subroutine


class ScaleInvariant(ScoreChange):
    """The paper's a_t and m_t. All options but tau are ours."""

    def __init__(
        self,
        shape,
        tau: float = TAU,
        tau_ratio: float = 1.0,
        learn_tau: bool = False,
        learn_gain: bool = False,
        learn_moments: bool = False,
        terms: str = "both",
        skip_first: bool = False,
    ):
        """tau: a length in tokens. Scores change little at distances far below it.

        tau_ratio: factor of tau from one head to the next; the first head has tau. learn_tau: each head of each layer
        learns log(tau). learn_gain: each head learns a factor of its scores, because the theory assumes scores with
        standard deviation 1. learn_moments: each head learns mean and deviation of its scores. They start at 0 and 1,
        or at values of a trained model (model/scores.py). terms: "a" leaves out m_t, "m" leaves out a_t. skip_first:
        the first token has a = 1 and m = 0 at every distance, because its scores are not Gaussian (the paper leaves it
        out of its test of the scores). The backends read it; our kernel for CPUs cannot do this.
        """
        super().__init__()
        require(tau > 0 and tau_ratio > 0, f"tau is {tau}, tau_ratio {tau_ratio}. Use positive numbers.")
        require(terms in TERMS, f"terms is {terms!r}. Use one of {', '.join(TERMS)}.")
        self.tau = tau
        self.tau_ratio = tau_ratio
        self.terms = terms
        self.skip_first = skip_first
        log_tau = math.log(tau) + math.log(tau_ratio) * torch.arange(shape.num_heads, dtype=torch.float32)
        self.log_tau = nn.Parameter(log_tau) if learn_tau else None
        self.gain = nn.Parameter(torch.ones(shape.num_heads)) if learn_gain else None
        self.mean = nn.Parameter(torch.zeros(shape.num_heads)) if learn_moments else None
        self.log_deviation = nn.Parameter(torch.zeros(shape.num_heads)) if learn_moments else None
        self.calibrated = ("mean", "log_deviation") if learn_moments else ()  # what calibrate sets

    def coefficients(self, distance, head):
        tau = self.tau_of(head, distance.dtype)
        if self.mean is None:
            a, m = solution(distance, tau)
        else:
            mean, log_deviation = (p[head].to(distance.dtype) for p in (self.mean, self.log_deviation))
            a, m = solution_for_moments(distance, tau, mean, torch.exp(2 * log_deviation))
        if self.terms == "m":
            a = 1.0
        if self.gain is not None:
            a = a * self.gain[head].to(distance.dtype)
        return a, torch.zeros_like(m) if self.terms == "a" else m

    def calibrate(self, scores):  # (H, pairs)
        if self.calibrated:
            self.mean.copy_(scores.mean(dim=1))
            self.log_deviation.copy_(scores.std(dim=1).log())

    def tau_of(self, head: Tensor, dtype: torch.dtype) -> float | Tensor:
        if self.log_tau is not None:
            return torch.exp(self.log_tau[head].to(dtype))
        if self.tau_ratio == 1:
            return self.tau
        return self.tau * torch.pow(self.tau_ratio, head).to(dtype)


def main():
    """Print a_t and m_t. Print the expected share of the attention by decade, with and without them, for N(0, 1)."""
    t = torch.arange(100_000, dtype=torch.float64)
    a, m = solution(t, TAU)
    attention = torch.exp(m + a**2 / 2)  # E[exp(a_t S + m_t)]
    print("distance t      a_t       m_t    share from t to 10 t    without a_t and m_t")
    for start in (1, 10, 100, 1000, 10_000):
        decade = slice(start, 10 * start)
        share, plain = attention[decade].sum() / attention.sum(), 9 * start / len(t)
        print(f"{start:10,}  {a[start]:7.3f}  {m[start]:8.3f}  {share:21.1%}  {plain:21.2%}")


if __name__ == "__main__":
    main()

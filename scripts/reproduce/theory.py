"""Attention over independent Gaussian scores: the numbers behind the paper's theory.

figures.py draws them. Everything is float64, entropies are in nats, and t is the distance from the query back to the
key. L_t = a_t Z_t + m_t with Z_t ~ N(0, 1) (paper, eq:transformed_gaussian_logits), where a_t and m_t come from the
attention method that is trained, not from a second copy of the formula.
"""

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from scipy import stats
from torch import Tensor

from model.methods import make_method
from scripts.shared.tables import summarise

RANGES = ((10, 100), (100, 1_000), (1_000, 10_000))  # of distances t (fig:entropy, middle)
LOCAL = 100  # the previous tokens whose share of the attention is measured (fig:entropy, right)
CHUNK = 2**20  # scores in memory at once
DRAWS = 400  # of the scores of each context


def coefficients(distance: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return a_t and m_t at distances t, as the method in model/methods computes them."""
    method = make_method("scale_invariant_nope", num_heads=1, head_dim=1, train_length=1, tau=tau)
    return method.score_change.coefficients(distance.double(), head=torch.zeros(1))


def entropy(log_p: Tensor) -> Tensor:  # (..., T) -> (...)
    return -(log_p.exp() * log_p).sum(dim=-1)


def attention_statistics(logits: Tensor) -> dict[str, Tensor]:
    """Return what fig:entropy shows of softmax(logits), logits (..., T) in order of distance t = 0..T-1: tensors (...).

    entropy              of the whole
    entropy_{t1}_{t2}    within t1 <= t < t2 (eq:def:Htt), for each of RANGES that the context covers
    attention_{LOCAL}    the attention on t < LOCAL
    """
    log_p = logits.double().log_softmax(dim=-1)
    statistics = {"entropy": entropy(log_p)}
    for start, stop in RANGES:
        if stop <= log_p.shape[-1]:
            statistics[f"entropy_{start}_{stop}"] = entropy(log_p[..., start:stop].log_softmax(dim=-1))
    statistics[f"attention_{LOCAL}"] = log_p[..., :LOCAL].exp().sum(dim=-1)
    return statistics


def gaussian_scores(draws: int, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield independent N(0, 1) scores, (draws, length) in all, in chunks of draws that bound the memory."""
    size = max(1, CHUNK // length)
    for start in range(0, draws, size):
        yield torch.randn(min(size, draws - start), length, generator=generator, dtype=torch.float64)


def iid_entropy(lengths: list[int], draws: int, seed: int, *, logn_scale: float = 0.4, tau: float = 10.0) -> list[dict]:
    """Return fig:entropy's top row: attention_statistics of Gaussian scores in contexts of these lengths (tokens).

    Schemes: none (L = Z), logn (L = logn_scale log(T) Z) and scale_invariant. One row a scheme, length and quantity:
    mean and standard error over the draws, which the schemes share.
    """
    generator, samples = torch.Generator().manual_seed(seed), defaultdict(list)
    for length in lengths:
        schemes = dict(
            none=(1.0, 0.0),
            logn=(logn_scale * math.log(length), 0.0),
            scale_invariant=coefficients(torch.arange(length), tau=tau),
        )
        for scores in gaussian_scores(draws, length, generator):
            for scheme, (a, m) in schemes.items():
                for quantity, values in attention_statistics(a * scores + m).items():
                    samples[scheme, length, quantity] += values.tolist()
    return summarise(samples, "scheme", "length", "quantity", count="samples")


def iid_range_entropy(
    starts: list[int], factors: list[int], draws: int, seed: int, scale_invariant: bool, tau: float = 10.0
) -> list[dict]:
    """Return E[H] of the distances t..t Delta - 1 (eq:def:Htt) for starts t >= 1 and factors Delta > 1, integers.

    Fig:sublog with scale-invariant scores, fig:sublog_bounds_std without. One row a start and factor: mean and standard
    error over the draws, which the factors of one start share.
    """
    generator, samples = torch.Generator().manual_seed(seed), defaultdict(list)
    for start in starts:
        distance = torch.arange(start, start * max(factors))
        a, m = coefficients(distance, tau=tau) if scale_invariant else (1.0, 0.0)
        for scores in gaussian_scores(draws, len(distance), generator):
            logits = a * scores + m
            for factor in factors:
                within = logits[:, : start * (factor - 1)]
                samples[start, factor] += entropy(within.log_softmax(dim=-1)).tolist()
    return summarise(samples, "start", "factor", count="samples")


def linear_fit(x: list[float], y: list[float]) -> dict[str, float]:
    """Return the least-squares line through the points: slope, intercept, and the coefficient of determination R^2."""
    fit = stats.linregress(x, y)
    return dict(slope=fit.slope, intercept=fit.intercept, r_squared=fit.rvalue**2)

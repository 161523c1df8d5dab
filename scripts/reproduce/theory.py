"""Compute attention over independent Gaussian scores, as in the paper's theory. figures.py draws the numbers.

The logits are L_t = a_t Z_t + m_t with Z_t ~ N(0, 1) (paper, eq:transformed_gaussian_logits). t is the distance from
the query back to the key. a_t and m_t are computed by the code that also trains, not by a second copy of the formula.
Everything is float64. Entropies are in nats.
"""

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from model.methods.base import Shape
from model.methods.make import make_method
from scripts.shared.tables import summarise

RANGES = ((10, 100), (100, 1_000), (1_000, 10_000))  # ranges of distances t (fig:entropy, middle)
LOCAL = 100  # tokens of local attention (fig:entropy, right)
CHUNK = 2**20  # scores in memory at once
DRAWS = 400  # random draws per context


def coefficients(distance: Tensor, tau: float) -> tuple:
    """Return a_t and m_t at distances t, from the method in model/methods."""
    method = make_method("scale_invariant_nope", Shape(num_heads=1, head_dim=1, train_length=1), tau=tau)
    return method.score_change.coefficients(distance.double(), head=torch.zeros(1))


def entropy(log_p: Tensor) -> Tensor:  # (..., T) -> (...)
    return -(log_p.exp() * log_p).sum(dim=-1)


def attention_statistics(logits: Tensor) -> dict:
    """Return the quantities of fig:entropy, (...) each. logits (..., T) are ordered by distance t = 0..T-1.

    entropy              Entropy of softmax(logits).
    entropy_{t1}_{t2}    Entropy within t1 <= t < t2 (eq:def:Htt), for RANGES that fit into the context.
    attention_{LOCAL}    Sum of the attention on t < LOCAL.
    """
    log_p = logits.double().log_softmax(dim=-1)
    statistics = {"entropy": entropy(log_p)}
    for start, stop in RANGES:
        if stop <= log_p.shape[-1]:
            statistics[f"entropy_{start}_{stop}"] = entropy(log_p[..., start:stop].log_softmax(dim=-1))
    statistics[f"attention_{LOCAL}"] = log_p[..., :LOCAL].exp().sum(dim=-1)
    return statistics


def gaussian_scores(draws: int, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield (draws, length) independent N(0, 1) scores in chunks, which bound the memory."""
    size = max(1, CHUNK // length)
    for start in range(0, draws, size):
        yield torch.randn(min(size, draws - start), length, generator=generator, dtype=torch.float64)


def iid_entropy(
    lengths: list[int],
    draws: int,
    seed: int,
    *,
    logn_scale: float = 0.4,
    tau: float = 10.0,
) -> list[dict]:
    """Return the top row of fig:entropy: attention_statistics of Gaussian scores in contexts of these lengths (tokens).

    L is Z for p_rope, logn_scale log(T) Z for logn_p_rope, and a_t Z + m_t for scale_invariant_p_rope. A row has the
    mean and the standard error of one method, length and quantity. All methods use the same draws.
    """
    generator, samples = torch.Generator().manual_seed(seed), defaultdict(list)
    for length in lengths:
        methods = {
            "p_rope": (1.0, 0.0),
            "logn_p_rope": (logn_scale * math.log(length), 0.0),
            "scale_invariant_p_rope": coefficients(torch.arange(length), tau=tau),
        }
        for scores in gaussian_scores(draws, length, generator):
            for method, (a, m) in methods.items():
                for quantity, values in attention_statistics(a * scores + m).items():
                    samples[method, length, quantity] += values.tolist()
    return summarise(samples, "method", "length", "quantity")


def iid_range_entropy(
    starts: list[int], factors: list[int], draws: int, seed: int, scale_invariant: bool, tau: float = 10.0
) -> list[dict]:
    """Return E[H] of the distances t..t Delta - 1 (eq:def:Htt) for integer starts t >= 1 and factors Delta > 1.

    fig:sublog has scale-invariant scores, fig:sublog_bounds_std has not. A row has the mean and the standard error of
    one start and factor. All factors of a start use the same draws.
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
    return summarise(samples, "start", "factor")

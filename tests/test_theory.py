"""The numbers of the theory figures: against literal formulas, exact results, and values computed independently."""

import math

import numpy as np
import pytest
import reference
import torch
from numpy.polynomial.hermite_e import hermegauss
from scipy import stats

from scripts.reproduce import theory


def literal_statistics(logits):
    """eq:def:Htt and the local attention of logits (T,), term by term."""

    def entropy(weights):
        return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)

    weights = [math.exp(x) for x in logits.tolist()]
    statistics = {"entropy": entropy(weights), "attention_100": sum(weights[:100]) / sum(weights)}
    for start, stop in [(10, 100), (100, 1_000), (1_000, 10_000)]:
        if len(weights) >= stop:
            statistics[f"entropy_{start}_{stop}"] = entropy(weights[start:stop])
    return statistics


@pytest.mark.parametrize("length", [1, 99, 100, 1_003])
def test_statistics_are_the_definitions(length):
    logits = 3 * torch.randn(2, 3, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    statistics = theory.attention_statistics(logits)
    for b, h in np.ndindex(2, 3):
        one = {quantity: values[b, h].item() for quantity, values in statistics.items()}
        assert one == pytest.approx(literal_statistics(logits[b, h]), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("tau", [0.01, 10.0, 33.0])
def test_iid_entropy_follows_the_papers_formulas(tau):
    length, draws, logn_scale = 130, 7, 0.55
    rows = theory.iid_entropy([length], draws, 5, logn_scale=logn_scale, tau=tau)
    rows = {(row["scheme"], row["length"], row["quantity"]): row for row in rows}
    scores = torch.randn(draws, length, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    a, m = reference.scale_invariant(torch.arange(length, dtype=torch.float64), tau)
    logits = dict(none=scores, logn=logn_scale * math.log(length) * scores, scale_invariant=a * scores + m)
    for scheme, each in logits.items():
        statistics = [literal_statistics(one) for one in each]
        for quantity in statistics[0]:
            values = [s[quantity] for s in statistics]
            row = rows.pop((scheme, length, quantity))
            assert row["mean"] == pytest.approx(np.mean(values), rel=1e-10)
            assert row["stderr"] == pytest.approx(np.std(values, ddof=1) / draws**0.5, rel=1e-8)
            assert row["samples"] == draws
    assert not rows


def test_all_draws_are_made_in_bounded_chunks():
    chunks = list(theory.gaussian_scores(37, 100_000, torch.Generator().manual_seed(0)))
    assert sum(len(chunk) for chunk in chunks) == 37
    assert max(chunk.numel() for chunk in chunks) <= theory.CHUNK


def test_a_range_of_distances_starts_at_its_first_distance():
    (row,) = theory.iid_range_entropy([13], [3], 6, 2, True, tau=4.0)
    scores = torch.randn(6, 26, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    a, m = reference.scale_invariant(torch.arange(13, 39, dtype=torch.float64), 4.0)
    expected = [literal_statistics(logits)["entropy"] for logits in a * scores + m]
    assert row["mean"] == pytest.approx(np.mean(expected), rel=1e-10)


@pytest.mark.parametrize("scaled", [True, False])
def test_entropy_grows_as_sqrt_log_t_with_scaling_and_as_log_t_without(scaled):
    rows = theory.iid_range_entropy([10, 100, 1_000, 10_000], [2, 5, 10], 400, 0, scaled)
    for factor in (2, 5, 10):
        points = [row for row in rows if row["factor"] == factor]
        means, log_t = [row["mean"] for row in points], np.log([row["start"] for row in points])
        log, root = stats.linregress(log_t, means), stats.linregress(np.sqrt(log_t), means)
        if scaled:
            assert root.rvalue**2 > 0.98 and root.rvalue > log.rvalue  # without noise at least 0.996
        else:
            assert log.rvalue**2 > 0.999 and log.slope == pytest.approx(1, abs=0.03)
            for row in points[1:]:
                n = row["start"] * (factor - 1)
                expected = math.log(n) - 0.5 + (math.e + 1) / (2 * n)  # E[H] of n Gaussian scores to first order in 1/n
                assert abs(row["mean"] - expected) < 4 * row["stderr"]


@pytest.mark.parametrize("tau", [0.01, 1.0, 10.0, 100.0])
def test_lemmas_hold_to_rounding(tau):
    """E[exp L] and E[L exp L], by Gauss-Hermite quadrature, are exp(1/2) / (t/tau + 1) (eq:EA, eq:EAlogA)."""
    z, weights = hermegauss(100)  # far below rounding: the relative error for exp(a z) is about (a^2 e / 400)^100
    weights = weights / math.sqrt(2 * math.pi)
    for t in (0, 1, 7, 1_000, 1_000_000):
        a, m = (x.item() for x in theory.coefficients(torch.tensor(t), tau=tau))
        logits = a * z + m
        for value in (weights @ np.exp(logits), weights @ (logits * np.exp(logits))):
            assert value == pytest.approx(math.exp(0.5) / (t / tau + 1), rel=1e-10)

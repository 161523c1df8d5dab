"""The numbers of the theory figures: against literal formulas, exact results, and values computed independently."""

import math

import numpy as np
import reference
import torch
from attention_cases import random
from commands import parametrize
from numpy.polynomial.hermite_e import hermegauss
from pytest import approx
from scipy import stats

from model.methods.scale_invariant import main
from scripts.reproduce import theory


def literal_statistics(logits):
    """eq:def:Htt and the local attention of logits (T,)."""
    weights = logits.exp().tolist()
    statistics = {"entropy": stats.entropy(weights), "attention_100": sum(weights[:100]) / sum(weights)}
    for start in (10, 100, 1_000):
        if len(weights) >= 10 * start:
            statistics[f"entropy_{start}_{10 * start}"] = stats.entropy(weights[start : 10 * start])
    return statistics


def scale_invariant(scores, tau, start=0):
    """Return the logits of scores (draws, T) at the distances from `start` on."""
    a, m = reference.scale_invariant(torch.arange(start, start + scores.shape[1]).double(), tau)
    return a * scores + m


@parametrize("tau", [0.01, 10.0, 33.0])
def test_iid_entropy_follows_the_papers_formulas(tau):
    length, draws = 1_003, 3
    rows = theory.iid_entropy([length], draws, 5, logn_scale=0.55, tau=tau)
    rows = {(row["method"], row["length"], row["quantity"]): row for row in rows}
    scores = random(draws, length, seed=5)
    logits = dict(p_rope=scores, logn_p_rope=0.55 * math.log(length) * scores)
    logits["scale_invariant_p_rope"] = scale_invariant(scores, tau)
    for method, each in logits.items():
        statistics = [*map(literal_statistics, each)]
        for quantity in statistics[0]:
            values = [one[quantity] for one in statistics]
            row = rows.pop((method, length, quantity))
            found = [row["mean"], row["stderr"], row["seeds"]]
            assert found == approx([np.mean(values), stats.sem(values), draws], rel=1e-10)
    assert not rows


@parametrize("scaled", [True, False])
def test_entropies_of_ranges_of_distances_follow_the_papers_formula(scaled):
    rows = iter(theory.iid_range_entropy([13, 40], [3, 5], 6, 2, scaled, tau=4.0))
    generator = torch.Generator().manual_seed(2)
    for start in (13, 40):
        logits = torch.randn(6, 4 * start, generator=generator, dtype=torch.float64)
        if scaled:
            logits = scale_invariant(logits, 4.0, start)
        for factor in (3, 5):
            values = [literal_statistics(each)["entropy"] for each in logits[:, : start * (factor - 1)]]
            expected = dict(start=start, factor=factor, mean=np.mean(values), stderr=stats.sem(values), seeds=6)
            assert next(rows) == approx(expected, rel=1e-10)


@parametrize("tau", [0.01, 1.0, 10.0, 100.0])
def test_lemmas_hold_to_rounding(tau):
    """E[exp L] and E[L exp L], by Gauss-Hermite quadrature, are exp(1/2) / (t/tau + 1) (eq:EA, eq:EAlogA)."""
    z, weights = hermegauss(100)  # far below rounding: the relative error for exp(a z) is about (a^2 e / 400)^100
    weights = weights / math.sqrt(2 * math.pi)
    for t in (0, 1, 7, 1_000, 1_000_000):
        a, m = (x.item() for x in theory.coefficients(torch.tensor(t), tau=tau))
        logits = a * z + m
        for values in (np.exp(logits), logits * np.exp(logits)):
            assert weights @ values == approx(math.exp(0.5) / (t / tau + 1), rel=1e-10)


def test_the_printed_decades_are_the_papers_claim(capsys):
    """A share is a sum of 1 / (10 + t), because exp(m_t + a_t^2 / 2) is e^0.5 / (1 + t/10)."""
    main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[1] == "10 1.545 -1.386 18.6% 0.09%".split()
    assert [row[3] for row in rows] == "6.7% 18.6% 24.0% 24.8% 24.9%".split()

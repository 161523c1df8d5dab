"""The numbers of the theory figures: against literal formulas, exact results, and values computed independently."""

import math

import numpy as np
import pytest
import reference
import torch
from numpy.polynomial.hermite_e import hermegauss
from torch.testing import assert_close

from scripts.reproduce import theory

DRAWS, SEED = 400, 0

# Means and standard errors of 1000-2000 draws by another program: entropy (nats), attention on t < 100.
IID = {
    ("logn", 1_024): ((3.767, 0.015), (0.099, 0.002)),
    ("logn", 4_096): ((3.903, 0.018), (0.024, 0.001)),
    ("logn", 16_384): ((3.882, 0.025), (0.006, 0.001)),
    ("logn", 65_536): ((3.766, 0.034), (0.001, 0.001)),
    ("scale_invariant", 1_024): ((3.734, 0.012), (0.546, 0.003)),
    ("scale_invariant", 4_096): ((4.082, 0.013), (0.428, 0.003)),
    ("scale_invariant", 16_384): ((4.358, 0.016), (0.351, 0.003)),
    ("scale_invariant", 65_536): ((4.570, 0.023), (0.301, 0.003)),
}
# The same of the entropy in [t, t Delta), t = 10, 100, 1000, 10,000, each with a standard error of 0.05.
STARTS = [10, 100, 1_000, 10_000]
IN_RANGE = {
    (True, 2): (1.50, 2.40, 3.01, 3.51),
    (True, 5): (2.38, 3.10, 3.62, 4.12),
    (True, 10): (2.81, 3.44, 3.91, 4.30),
    (False, 2): (1.93, 4.12, 6.41, 8.71),
    (False, 10): (4.02, 6.30, 8.61, 10.91),
}


@pytest.fixture(scope="module")
def iid():
    """iid_entropy's rows by scheme, length and quantity; the quick lengths alone."""
    return by_key(theory.iid_entropy([1_024, 4_096, 16_384], DRAWS, SEED))


@pytest.fixture(scope="module", params=[True, False], ids=["scale_invariant", "none"])
def in_range(request):
    return request.param, theory.iid_range_entropy(STARTS, [2, 5, 10], DRAWS, SEED, request.param)


def by_key(rows):
    return {(row["scheme"], row["length"], row["quantity"]): row for row in rows}


def assert_mean(row, expected, stderr=0.0):
    assert abs(row["mean"] - expected) < 4 * math.hypot(row["stderr"], stderr), (row, expected)


def unscaled_entropy(n):
    """E[H] of n Gaussian scores to first order in 1/n: expand log Z and N/Z in the means of exp(Z) and Z exp(Z)."""
    return math.log(n) - 0.5 + (math.e + 1) / (2 * n)


# ---- iid_entropy -----------------------------------------------------------------------------------------------------


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


def test_statistics_of_huge_logits_are_finite():
    logits = torch.zeros(200)
    logits[3] = 1e5
    statistics = theory.attention_statistics(logits)
    assert statistics["entropy"] == 0 and statistics["attention_100"] == 1
    assert_close(statistics["entropy_10_100"].item(), math.log(90))


@pytest.mark.parametrize("tau", [0.01, 10.0, 33.0])
def test_iid_entropy_is_that_of_the_papers_formulas(tau):
    length, draws, logn_scale = 130, 7, 0.55
    rows = by_key(theory.iid_entropy([length], draws, 5, logn_scale=logn_scale, tau=tau))
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
            assert row["draws"] == draws
    assert not rows


@pytest.mark.parametrize("scheme, length", [key for key in IID if key[1] < 65_536])
def test_iid_values(iid, scheme, length):
    for quantity, (mean, stderr) in zip(["entropy", "attention_100"], IID[scheme, length]):
        assert_mean(iid[scheme, length, quantity], mean, stderr)


@pytest.mark.slow
def test_iid_values_at_65536():
    rows = by_key(theory.iid_entropy([65_536], DRAWS, SEED))
    for scheme in ["logn", "scale_invariant"]:
        for quantity, (mean, stderr) in zip(["entropy", "attention_100"], IID[scheme, 65_536]):
            assert_mean(rows[scheme, 65_536, quantity], mean, stderr)
    assert_mean(rows["none", 65_536, "entropy"], unscaled_entropy(65_536))


@pytest.mark.parametrize("length", [1_024, 4_096, 16_384])
def test_unscaled_entropy_is_the_expansion(iid, length):
    assert_mean(iid["none", length, "entropy"], unscaled_entropy(length))


@pytest.mark.parametrize("scheme", ["none", "logn"])
@pytest.mark.parametrize("length", [1_024, 4_096, 16_384])
def test_without_distance_the_local_attention_is_its_share_of_the_context(iid, scheme, length):
    assert_mean(iid[scheme, length, "attention_100"], 100 / length)


def test_all_draws_are_made_in_bounded_chunks():
    chunks = list(theory.gaussian_scores(37, 100_000, torch.Generator().manual_seed(SEED)))
    assert sum(len(chunk) for chunk in chunks) == 37
    assert max(chunk.numel() for chunk in chunks) <= theory.CHUNK


def test_one_draw_has_no_standard_error():
    with pytest.raises(ValueError, match="draws"):
        theory.iid_entropy([10], 1, SEED)


# ---- entropy in ranges -----------------------------------------------------------------------------------------------


def test_range_entropy_values(in_range):
    scaled, rows = in_range
    rows = {(row["start"], row["factor"]): row for row in rows}
    assert list(rows) == [(start, factor) for start in STARTS for factor in (2, 5, 10)]
    for (of_scaled, factor), values in IN_RANGE.items():
        if of_scaled == scaled:
            for start, value in zip(STARTS, values):
                assert_mean(rows[start, factor], value, 0.05)


def test_unscaled_range_entropy_is_the_expansion(in_range):
    scaled, rows = in_range
    for row in rows if not scaled else ():
        if row["start"] > 10:
            assert_mean(row, unscaled_entropy(row["start"] * (row["factor"] - 1)))


def test_a_range_of_distances_starts_where_it_says():
    (row,) = theory.iid_range_entropy([13], [3], 6, 2, True, tau=4.0)
    scores = torch.randn(6, 26, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    a, m = reference.scale_invariant(torch.arange(13, 39, dtype=torch.float64), 4.0)
    expected = [literal_statistics(logits)["entropy"] for logits in a * scores + m]
    assert row["mean"] == pytest.approx(np.mean(expected), rel=1e-10)


def test_entropy_grows_as_sqrt_log_t_with_scaling_and_as_log_t_without(in_range):
    scaled, rows = in_range
    fits = {(fit["factor"], fit["against"]): fit for fit in theory.range_fits(rows)}
    for factor in (2, 5, 10):
        log, root = fits[factor, "log t"], fits[factor, "sqrt(log t)"]
        if scaled:
            assert root["r_squared"] > 0.98 and root["r_squared"] > log["r_squared"]  # without noise at least 0.996
        else:
            assert log["r_squared"] > 0.999 and log["slope"] == pytest.approx(1, abs=0.03)


def test_linear_fit_solves_the_normal_equations():
    x, y = np.random.default_rng(0).normal(size=(2, 11))
    y += 2 * x
    fit = theory.linear_fit(list(x), list(y))
    residuals = y - fit["slope"] * x - fit["intercept"]
    assert residuals.sum() == pytest.approx(0, abs=1e-12) and residuals @ x == pytest.approx(0, abs=1e-12)
    assert fit["r_squared"] == pytest.approx(1 - residuals.var() / y.var())


# ---- the lemmas ------------------------------------------------------------------------------------------------------


def lemma_check(ts: list[int], tau=10.0, factors=(2, 5, 10)) -> list[dict]:
    """Return what lemmas 1 and 2 ask of the logits L_t, and what follows: one row a distance t and quantity.

    E[exp L] and E[L exp L], by Gauss-Hermite quadrature, against alpha / (t/tau + 1) and beta / (t/tau + 1) (eq:EA,
    eq:EAlogA): equal but for rounding. E[Z_t^{t Delta}] (eq:def:Z), for t > 0, against its limit alpha tau log(Delta):
    the relative error falls as 1/t.
    """
    alpha = beta = math.exp(0.5)
    z, weights = hermegauss(100)  # far below rounding: the relative error for exp(a z) is about (a^2 e / 400)^100
    weights = weights / math.sqrt(2 * math.pi)
    rows = []
    for t in ts:
        a, m = (x.item() for x in theory.coefficients(torch.tensor(t), tau=tau))
        logits = a * z + m
        checks = {
            "E[exp L]": (weights @ np.exp(logits), alpha / (t / tau + 1)),
            "E[L exp L]": (weights @ (logits * np.exp(logits)), beta / (t / tau + 1)),
        }
        for factor in factors if t > 0 else ():
            a, m = theory.coefficients(torch.arange(t, t * factor), tau=tau)
            total = (m + a.square() / 2).exp().sum().item()  # E[exp L] of L ~ N(m, a^2)
            checks[f"E[Z_t^{factor}t]"] = (total, alpha * tau * math.log(factor))
        for quantity, (value, limit) in checks.items():
            error = float(value / limit - 1 if limit else value)
            rows.append(dict(t=t, quantity=quantity, value=float(value), theory=limit, error=error))
    return rows


@pytest.mark.parametrize("tau", [0.01, 1.0, 10.0, 100.0])
def test_lemmas_hold_to_rounding(tau):
    rows = lemma_check([0, 1, 7, 1_000, 1_000_000], tau, factors=())
    assert len(rows) == 10
    for row in rows:
        assert row["theory"] == pytest.approx(math.exp(0.5) / (1 + row["t"] / tau), rel=1e-14)
        assert row["error"] == pytest.approx(row["value"] / row["theory"] - 1, abs=1e-15)
        assert abs(row["error"]) < 1e-10, row


@pytest.mark.parametrize("tau", [1.0, 10.0])
def test_total_attention_in_a_range_tends_to_its_limit_as_1_over_t(tau):
    """The sum of alpha tau / (j + tau) over t <= j < t Delta is alpha tau (log Delta - (tau - 1/2)(1 - 1/Delta)/t)."""
    rows = [row for row in lemma_check([0, 3_000, 30_000], tau, factors=(2, 7)) if "Z" in row["quantity"]]
    assert [(row["t"], row["quantity"]) for row in rows] == [
        (t, f"E[Z_t^{factor}t]") for t in (3_000, 30_000) for factor in (2, 7)
    ]
    for row, factor in zip(rows, (2, 7, 2, 7)):
        assert row["theory"] == pytest.approx(math.exp(0.5) * tau * math.log(factor))
        first_order = -(tau - 0.5) * (1 - 1 / factor) / math.log(factor) / row["t"]
        assert row["error"] == pytest.approx(first_order, rel=0.02)

"""Which differences between methods are more than chance, and whether their order is the paper's.

A few seeds of one method say little about its variance; the seeds of all methods together say much. So all methods
share one variance where Bartlett's test finds no difference between theirs. scipy does the statistics.
"""

import collections
import math
import statistics
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from scipy import stats

from scripts.reproduce.study import Study
from scripts.shared.looks import series_name
from scripts.shared.tables import markdown_table, mean_and_stderr, pivot_table

SIGNIFICANT = 0.05  # of a difference after Holm's correction, and of Bartlett's test


def compare(study: Study, losses: dict, reference: str, lengths: list[int], paper: dict, borrowers: Collection[str]):
    """Return sections on the differences of the series to the reference and on their order.

    losses: {(series, length): nats a token, one a seed}; paper: {(series, its length): mean}; borrowers: see
    differences.
    """
    rows = differences(losses, reference, lengths, borrowers)
    tested = sum(row["p"] is not None for row in rows)
    if not tested:  # one seed says nothing about chance
        return order(losses, lengths, study.base_length, paper)
    cells = collections.defaultdict(dict)
    for row in rows:
        cells[row["series"], f"{row['seeds']}, {row['reference_seeds']}"][row["length"]] = difference_cell(row)
    lines = [([series_name(series), seeds], found) for (series, seeds), found in cells.items()]
    columns = {length: study.times(length) for length in lengths}
    text = "Nats a token more (+) or fewer (-) than the reference \u00b1 the standard error of the difference, and p "
    text += f"of the t-test after Holm's correction for all {tested} comparisons; bold: below {SIGNIFICANT}. n: seeds "
    text += "of the method and of the reference. " + describe_variances(losses, lengths, borrowers)
    table = pivot_table([f"minus {series_name(reference)}", "n"], lines, columns)
    return ["### Differences", text, table] + order(losses, lengths, study.base_length, paper)


def differences(losses: dict, reference: str, lengths: list[int], borrowers: Collection[str] = ()) -> list[dict]:
    """Return a row a series and length: its difference to the reference, and how sure it is (None: too few seeds).

    borrowers: series that share the weights of another. Their spread over seeds adds nothing to the variance.
    """
    rows = []
    for (series, length), values in losses.items():
        of_reference = losses.get((reference, length), [])
        if series != reference and length in lengths and values and of_reference:
            stderr, p = t_test(values, of_reference, common_variance(losses, length, borrowers))
            row = dict(series=series, length=length, seeds=len(values), reference_seeds=len(of_reference))
            row["difference"] = statistics.fmean(values) - statistics.fmean(of_reference)
            rows.append(row | dict(stderr=stderr, p=p, p_holm=None))
    tested = [row for row in rows if row["p"] is not None]
    for row, p in zip(tested, holm([row["p"] for row in tested])):
        row["p_holm"] = p
    return rows


class CommonVariance(NamedTuple):
    variance: float  # within series, of all together; nan without any
    freedom: int  # its degrees of freedom: values less series
    p: float  # of Bartlett's test that the series differ in variance; nan with fewer than two

    @property
    def holds(self) -> bool:
        return self.p >= SIGNIFICANT


def common_variance(losses: dict, length: int, borrowers: Collection[str]) -> CommonVariance:
    """Return the variance of the losses at a length within series, pooled over series of two finite losses or more."""
    samples = [
        values
        for (series, at), values in losses.items()
        if at == length and series not in borrowers and len(values) > 1 and all(map(math.isfinite, values))
    ]
    freedom = sum(len(values) - 1 for values in samples)
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in samples)
    testable = len(samples) > 1 and all(len(set(values)) > 1 for values in samples)  # Bartlett's test takes logarithms
    p = stats.bartlett(*samples).pvalue if testable else math.nan
    return CommonVariance(squares / freedom if freedom else math.nan, freedom, p)


def t_test(a: list[float], b: list[float], common: CommonVariance) -> tuple[float | None, float | None]:
    """Return the standard error of the difference of the means, and the two-sided p that there is none.

    Student's t-test with the common variance where it holds, else Welch's. None, None: too few values.
    """
    if common.holds:
        stderr = math.sqrt(common.variance * (1 / len(a) + 1 / len(b)))
        t = (statistics.fmean(a) - statistics.fmean(b)) / stderr
        p = 2 * stats.t.sf(abs(t), common.freedom)
    elif min(len(a), len(b)) > 1:
        stderr = math.hypot(mean_and_stderr(a)[1], mean_and_stderr(b)[1])
        p = stats.ttest_ind(a, b, equal_var=False).pvalue
    else:
        return None, None
    return stderr, float(f"{p:.6g}")  # the same on every machine


def describe_variances(losses: dict, lengths: list[int], borrowers: Collection[str]) -> str:
    """Return sentences on the variances of the t-tests."""
    found = {length: common_variance(losses, length, borrowers) for length in lengths}
    shared = [f"{n}: p = {common.p:.2f}, {common.freedom}" for n, common in found.items() if common.holds]
    apart, text = [str(n) for n, common in found.items() if not common.holds], ""
    if shared:
        text += "The variance is that of the seeds of all methods together, where Bartlett's test finds no difference "
        text += f"between theirs (length: p of Bartlett's test, degrees of freedom: {'; '.join(shared)}). "
    if apart:
        text += f"At {', '.join(apart)} each method has its own variance (Welch's test): too few seeds, or the "
        text += "variances differ."
    return text.strip()


def holm(ps: list[float]) -> list[float]:
    """Return the p-values corrected for their number by Holm's step-down procedure, in the same order."""
    order = np.argsort(ps, kind="stable")
    corrected = np.empty(len(ps))
    corrected[order] = np.maximum.accumulate(np.minimum(1, np.arange(len(ps), 0, -1) * np.array(ps)[order]))
    return corrected.tolist()


def difference_cell(row: dict | None) -> str:
    """Return the difference with its standard error and p; without them where there are too few seeds."""
    if row is None:
        return ""
    if row["p_holm"] is None:
        return f"{row['difference']:+.3f}"
    p = f"p = {row['p_holm']:.2g}" if row["p_holm"] >= 0.001 else "p < 0.001"
    cell = f"{row['difference']:+.3f} \u00b1 {row['stderr']:.3f}"
    return f"**{cell}** ({p})" if row["p_holm"] < SIGNIFICANT else f"{cell} ({p})"


def order(losses: dict, lengths: list[int], base_length: int, paper: dict) -> list[str]:
    """Return a section that compares the order of the series with the paper's at the same multiples of the training
    length."""
    paper_base = min((length for _, length in paper), default=0)
    rows = []
    for length in lengths:
        targets = {series: mean for (series, at), mean in paper.items() if at * base_length == length * paper_base}
        means = {
            series: mean_and_stderr(losses[series, length])[0] for series in targets if losses.get((series, length))
        }
        if len(means) >= 3:
            rho = stats.spearmanr([*means.values()], [targets[series] for series in means]).statistic
            best = series_name(min(means, key=means.get)), series_name(min(means, key=targets.get))
            rows.append([f"{length} ({length / base_length:g}x)", f"{rho:+.2f}", str(len(means)), *best])
    if not rows:
        return []
    head = ["at", "Spearman's rho", "methods", "best here", "best in the paper"]
    return ["### Order", "Rank correlation of our means with the paper's.", markdown_table([head, *rows])]

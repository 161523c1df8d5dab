"""Test whether differences between methods are significant.

The few seeds of one method give a poor estimate of its variance. The seeds of all methods together give a good one. So
all methods share one variance at each length where Bartlett's test finds no difference between their variances.
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
from scripts.shared.tables import mean_and_stderr, pivot_table

SIGNIFICANT = 0.05  # level of a difference after Holm's correction, and of Bartlett's test


def compare(
    study: Study,
    losses: dict,
    reference: str,
    lengths: list[int],
    not_trained: Collection[str],
) -> list[str]:
    """Return a section with the differences between each series and the reference.

    A series (Study.series) is one curve: a method, with its options. losses: {(series, length): [nats per token of each
    seed]}. not_trained: see differences.
    """
    rows = differences(losses, reference, lengths, not_trained)
    tested = sum(row["p"] is not None for row in rows)
    if not tested:  # a test needs more than one seed
        return []
    cells = collections.defaultdict(dict)
    for row in rows:
        left = series_name(row["series"]), f"{row['seeds']}, {row['reference_seeds']}"
        cells[left][row["length"]] = difference_cell(row)
    columns = {length: study.length_label(length) for length in lengths}
    text = (
        "Loss minus the reference's loss in nats per token \u00b1 standard error of the difference. p: t-test after "
        f"Holm's correction for all {tested} comparisons; bold below {SIGNIFICANT}. n: seeds of the method and of "
        f"the reference. {describe_variances(losses, lengths, not_trained)}"
    )
    table = pivot_table([f"minus {series_name(reference)}", "n"], cells.items(), columns)
    return ["### Differences", text, table]


def differences(losses: dict, reference: str, lengths: list[int], not_trained: Collection[str] = ()) -> list[dict]:
    """Return a row per series and length: the difference to the reference, its standard error, and p-values.

    Standard error and p-values are None for too few seeds. not_trained: series that use the weights of another series.
    Their spread over seeds is no independent estimate, so the common variance leaves it out.
    """
    rows, common = [], {length: common_variance(losses, length, not_trained) for length in lengths}
    for (series, length), values in losses.items():
        ours = losses.get((reference, length))
        if series == reference or length not in common or not values or not ours:
            continue
        stderr, p = t_test(values, ours, common[length])
        row = {"series": series, "length": length, "seeds": len(values), "reference_seeds": len(ours)}
        row["difference"] = statistics.fmean(values) - statistics.fmean(ours)
        rows.append(row | {"stderr": stderr, "p": p, "p_holm": None})
    tested = [row for row in rows if row["p"] is not None]
    for row, p in zip(tested, holm([row["p"] for row in tested])):
        row["p_holm"] = p
    return rows


class CommonVariance(NamedTuple):
    variance: float  # within series, pooled over all; nan if no series has two values
    freedom: int  # degrees of freedom: number of values minus number of series
    p: float  # of Bartlett's test for different variances; nan for fewer than two series

    @property
    def holds(self) -> bool:  # False for nan
        return self.p >= SIGNIFICANT


def common_variance(losses: dict, length: int, not_trained: Collection[str]) -> CommonVariance:
    """Return the variance within series of the losses at a length, pooled over series with at least two losses."""
    samples = []
    for (series, at), values in losses.items():
        if at == length and series not in not_trained and len(values) > 1 and np.isfinite(values).all():
            samples.append(values)
    freedom = sum(map(len, samples)) - len(samples)
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in samples)
    testable = len(samples) > 1 and all(map(np.ptp, samples))  # variance 0 has no logarithm
    p = stats.bartlett(*samples).pvalue if testable else math.nan
    return CommonVariance(squares / freedom if freedom else math.nan, freedom, p)


def t_test(a: list, b: list, common: CommonVariance) -> tuple:
    """Return the standard error of the difference of the means, and the two-sided p-value.

    Student's t-test is used where the common variance holds, Welch's t-test otherwise. None, None: too few values.
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
    return stderr, float(f"{p:.6g}")  # rounded, so that every machine prints the same digits


def describe_variances(losses: dict, lengths: list[int], not_trained: Collection[str]) -> str:
    """Return sentences about the variances that the t-tests use."""
    shared, separate = [], []
    for length in lengths:
        common = common_variance(losses, length, not_trained)
        if common.holds:
            shared.append(f"{length}: p = {common.p:.2f}, {common.freedom}")
        else:
            separate.append(str(length))
    sentences = []
    if shared:
        sentences.append(
            "All methods share one variance where Bartlett's test finds no difference between their variances. "
            f"p of Bartlett's test and degrees of freedom by length: {'; '.join(shared)}."
        )
    if separate:
        sentences.append(
            f"At {', '.join(separate)} each method has its own variance (Welch's test), because the variances differ "
            "or there are too few seeds."
        )
    return " ".join(sentences)


def holm(ps: list) -> list:
    """Return the p-values after Holm's step-down correction for multiple tests, in the same order."""
    corrected, largest = [1.0] * len(ps), 0.0
    for rank, i in enumerate(np.argsort(ps, kind="stable")):  # the smallest first
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = largest
    return corrected


def format_p(p: float) -> str:
    return f"{p:.2g}" if p >= 0.001 else "< 0.001"


def difference_cell(row: dict) -> str:
    """Return the cell of a difference, with standard error and p unless there are too few seeds."""
    cell, p = f"{row['difference']:+.3f}", row["p_holm"]
    if p is None:
        return cell
    cell += f" \u00b1 {row['stderr']:.3f}"
    shown = f"(p = {format_p(p)})".replace("= <", "<")
    return f"**{cell}** {shown}" if p < SIGNIFICANT else f"{cell} {shown}"

"""Which differences between methods are more than chance, and whether their order is the paper's.

A few seeds of one method say little about its variance, those of all methods together much: where Bartlett's test finds
no difference between the methods' variances, all share one. scipy does the statistics.
"""

import collections
import math
import statistics
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from scipy import stats

from scripts.shared.looks import series_name
from scripts.shared.tables import markdown_table, mean_and_stderr, write_csv

SIGNIFICANT = 0.05  # of a difference after Holm's correction, and of Bartlett's test


def compare(
    path: Path,
    losses: dict,
    reference: str,
    lengths: list[int],
    base_length: int,
    paper: dict = {},
    borrowers: Collection[str] = (),
) -> list[str]:
    """Return sections on the differences of the series to the reference and on their order, and write the differences
    as CSV.

    losses: {(series, length): nats a token, one a seed}; paper: {(series, its length): mean}; borrowers: see
    differences.
    """
    rows = differences(losses, reference, lengths, borrowers)
    tested = sum(row["p"] is not None for row in rows)
    if not tested:  # one seed says nothing about chance
        return order(losses, lengths, base_length, paper)
    write_csv(path.with_name(f"{path.name}_differences.csv"), rows)
    by_series = collections.defaultdict(dict)
    for row in rows:
        by_series[row["series"]][row["length"]] = row
    head = [f"minus {series_name(reference)}", "n", *(f"{n} ({n / base_length:g}x)" for n in lengths)]
    cells = [
        [series_name(series), seeds(found), *(difference_cell(found.get(length)) for length in lengths)]
        for series, found in by_series.items()
    ]
    text = "Nats a token more (+) or fewer (-) than the reference \u00b1 the standard error of the difference, and p "
    text += f"of the t-test after Holm's correction for all {tested} comparisons; bold: below {SIGNIFICANT}. n: seeds "
    text += "of the method and of the reference. " + describe_variances(losses, lengths, borrowers)
    return ["## Differences", text, markdown_table([head, *cells]), *order(losses, lengths, base_length, paper)]


def differences(losses: dict, reference: str, lengths: list[int], borrowers: Collection[str] = ()) -> list[dict]:
    """Return a row a series and length: how much it loses to the reference, and how sure that is (None: too few
    seeds).

    borrowers: the series of other series' weights, whose spread over seeds is theirs and says nothing more.
    """
    rows, variances = [], {length: common_variance(losses, length, borrowers) for length in lengths}
    for (series, length), theirs in losses.items():
        ours = losses.get((reference, length), [])
        if series == reference or length not in lengths or not (ours and theirs):
            continue
        row = dict(series=series, length=length, seeds=len(theirs), reference_seeds=len(ours))
        row["difference"] = statistics.fmean(theirs) - statistics.fmean(ours)
        row["stderr"], row["p"] = t_test(theirs, ours, variances[length])
        rows.append(row)
    corrected = iter(holm([row["p"] for row in rows if row["p"] is not None]))
    return [row | dict(p_holm=next(corrected) if row["p"] is not None else None) for row in rows]


class CommonVariance(NamedTuple):
    variance: float  # within series, of all together; nan without any
    freedom: int  # its degrees of freedom: values less series
    p: float  # of Bartlett's test that the series differ in variance; nan with fewer than two

    @property
    def holds(self) -> bool:
        return self.p >= SIGNIFICANT


def common_variance(losses: dict, length: int, borrowers: Collection[str]) -> CommonVariance:
    """Return the variance within series of their losses at a length, pooled over those of two finite ones or more."""
    samples = [
        values
        for (series, at), values in losses.items()
        if at == length and series not in borrowers and len(values) > 1 and all(map(math.isfinite, values))
    ]
    freedom = sum(len(values) - 1 for values in samples)
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in samples)
    alike = len(samples) > 1 and all(len(set(values)) > 1 for values in samples)  # a variance of 0 is like no other
    return CommonVariance(
        squares / freedom if freedom else math.nan, freedom, stats.bartlett(*samples).pvalue if alike else math.nan
    )


def t_test(theirs: list[float], ours: list[float], common: CommonVariance) -> tuple[float | None, float | None]:
    """Return the standard error of the difference of the means, and the two-sided p that there is none: by Student's
    t-test with the common variance where it holds, else by Welch's; None, None of too few values."""
    if common.holds:
        stderr = math.sqrt(common.variance * (1 / len(theirs) + 1 / len(ours)))
        t = (statistics.fmean(theirs) - statistics.fmean(ours)) / stderr
        p = 2 * stats.t.sf(abs(t), common.freedom)
    elif min(len(theirs), len(ours)) > 1:
        stderr = math.hypot(mean_and_stderr(theirs)[1], mean_and_stderr(ours)[1])
        p = stats.ttest_ind(theirs, ours, equal_var=False).pvalue
    else:
        return None, None
    return stderr, float(f"{p:.6g}")  # the same on every machine


def describe_variances(losses: dict, lengths: list[int], borrowers: Collection[str]) -> str:
    """Return sentences on how the variances of the t-tests were found."""
    found = {length: common_variance(losses, length, borrowers) for length in lengths}
    student = {length: common for length, common in found.items() if common.holds}
    text = ""
    if student:
        cells = (f"{length}: p = {common.p:.2f}, {common.freedom}" for length, common in student.items())
        text = "The variance is that of the seeds of all methods together, where Bartlett's test finds no "
        text += f"difference between theirs (length: p of Bartlett's test, degrees of freedom: {'; '.join(cells)}). "
    if welch := [str(length) for length in found if length not in student]:
        text += f"At {', '.join(welch)} it is each method's own (Welch's test): too few seeds, or they differ in it."
    return text.strip()


def holm(ps: list[float]) -> list[float]:
    """Return the p-values corrected for their number by Holm's step-down procedure, in the same order."""
    corrected, highest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = highest
    return corrected


def seeds(found: dict[int, dict]) -> str:
    row = next(iter(found.values()))
    return f"{row['seeds']}, {row['reference_seeds']}"


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
    """Return a section on how much the series' order is the paper's at the same multiples of the training length."""
    paper_base = min((length for _, length in paper), default=0)
    rows = []
    for length in lengths:
        theirs = {series: mean for (series, at), mean in paper.items() if at * base_length == length * paper_base}
        shared = [series for series in theirs if losses.get((series, length))]
        if len(shared) < 3:
            continue
        ours = [mean_and_stderr(losses[series, length])[0] for series in shared]
        rho = stats.spearmanr(ours, [theirs[series] for series in shared]).statistic
        best = min(shared, key=lambda series: mean_and_stderr(losses[series, length])[0])
        cells = [f"{rho:+.2f}", str(len(shared)), series_name(best), series_name(min(shared, key=theirs.get))]
        rows.append([f"{length} ({length / base_length:g}x)", *cells])
    if not rows:
        return []
    head = ["at", "Spearman's rho", "methods", "best here", "best in the paper"]
    return ["## Order", "Rank correlation of our means with the paper's.", markdown_table([head, *rows])]

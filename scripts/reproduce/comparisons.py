"""Test whether differences between methods are significant, by Welch's t-test: each method has its own variance."""

import collections
import math
import statistics

import numpy as np
from scipy import stats

from scripts.reproduce.study import Study
from scripts.shared.looks import series_name
from scripts.shared.tables import mean_and_stderr, pivot_table

SIGNIFICANT = 0.05  # level of a difference after Holm's correction


def compare(study: Study, losses: dict, reference: str, lengths: list[int]) -> list[str]:
    """Return a section with the differences between each series and the reference.

    A series (Study.series) is one curve: a method, with its options. losses: {(series, length): [nats per token of each
    seed]}.
    """
    rows = differences(losses, reference, lengths)
    tested = sum(row["p"] is not None for row in rows)
    if not tested:  # a test needs more than one seed
        return []
    cells = collections.defaultdict(dict)
    for row in rows:
        left = series_name(row["series"]), f"{row['seeds']}, {row['reference_seeds']}"
        cells[left][row["length"]] = difference_cell(row)
    columns = {length: study.length_label(length) for length in lengths}
    text = (
        "Loss minus the reference's loss in nats per token \u00b1 standard error of the difference. p: Welch's t-test "
        f"after Holm's correction for all {tested} comparisons; bold below {SIGNIFICANT}. n: seeds of the method and "
        "of the reference. A method with one seed has no test."
    )
    table = pivot_table([f"minus {series_name(reference)}", "n"], cells.items(), columns)
    return ["### Differences", text, table]


def differences(losses: dict, reference: str, lengths: list[int]) -> list[dict]:
    """Return a row per series and length: the difference to the reference, its standard error, and p-values.

    Standard error and p-values are None for one seed.
    """
    rows = []
    for (series, length), values in losses.items():
        ours = losses.get((reference, length))
        if series == reference or length not in lengths or not ours:
            continue
        row = {"series": series, "length": length, "seeds": len(values), "reference_seeds": len(ours)}
        row["difference"] = statistics.fmean(values) - statistics.fmean(ours)
        row |= dict.fromkeys(("stderr", "p", "p_holm"))
        if min(len(values), len(ours)) > 1:
            row["stderr"] = math.hypot(mean_and_stderr(values)[1], mean_and_stderr(ours)[1])
            row["p"] = float(stats.ttest_ind(values, ours, equal_var=False).pvalue)
        rows.append(row)
    tested = [row for row in rows if row["p"] is not None]
    for row, p in zip(tested, holm([row["p"] for row in tested])):
        row["p_holm"] = p
    return rows


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

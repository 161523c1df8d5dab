"""Which differences between methods are more than chance, and whether their order is the paper's.

scipy does the statistics: Welch's t-test, as the variances of methods differ, and Spearman's rank correlation.
"""

import collections
import math
from pathlib import Path

from scipy import stats

from scripts.shared.looks import series_name
from scripts.shared.tables import markdown_table, mean_and_stderr, write_csv

SIGNIFICANT = 0.05  # after Holm's correction


def compare(path: Path, losses: dict, reference: str, lengths: list[int], base_length: int, paper: dict) -> list[str]:
    """Return sections on the differences of the series to the reference and on their order, and write the differences
    as CSV.

    losses: {(series, length): nats a token, one a seed}; paper: {(series, its length): mean}.
    """
    rows = differences(losses, reference, lengths)
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
    text = (
        "Nats a token more (+) or fewer (-) than the reference \u00b1 the standard error of the difference, and p of "
    )
    text += f"Welch's t-test after Holm's correction for all {tested} comparisons; bold: below {SIGNIFICANT}. n: seeds "
    text += "of the method and of the reference."
    return ["## Differences", text, markdown_table([head, *cells]), *order(losses, lengths, base_length, paper)]


def differences(losses: dict, reference: str, lengths: list[int]) -> list[dict]:
    """Return a row a series and length: how much it loses to the reference, and how sure that is (None: too few
    seeds)."""
    rows = []
    for (series, length), theirs in losses.items():
        ours = losses.get((reference, length), [])
        if series == reference or length not in lengths or not (ours and theirs):
            continue
        (mean, error), (our_mean, our_error) = mean_and_stderr(theirs), mean_and_stderr(ours)
        row = dict(series=series, length=length, seeds=len(theirs), reference_seeds=len(ours))
        row["difference"] = mean - our_mean
        if None in (error, our_error):
            rows.append(row | dict(stderr=None, p=None))
        else:
            p = float(f"{stats.ttest_ind(theirs, ours, equal_var=False).pvalue:.6g}")  # the same on every machine
            rows.append(row | dict(stderr=math.hypot(error, our_error), p=p))
    corrected = iter(holm([row["p"] for row in rows if row["p"] is not None]))
    return [row | dict(p_holm=next(corrected) if row["p"] is not None else None) for row in rows]


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

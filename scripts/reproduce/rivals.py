"""The newer methods beside the best of the paper's: which is best at each length, by how much, and what it costs."""

import collections

from model.methods import layer_pattern
from scripts.reproduce.comparisons import compare, difference_cell, differences
from scripts.reproduce.study import Study
from scripts.reproduce.tables import OURS, losses_page, read_losses
from scripts.shared.looks import method_name, series_name
from scripts.shared.tables import format_mean, markdown_table, mean_and_stderr, write_csv

REFERENCES = (OURS, "alibi")  # what the best are compared with


def table_rivals(study: Study) -> str:
    losses, lengths = read_losses(study)
    study.sections = best_at_each_length(losses, lengths, study.base_length)
    study.sections += compare(study.path, losses, OURS, lengths, study.base_length)
    study.sections += by_position(study, lengths)
    study.sections += costs(study)
    study.notes += cut_patterns(study)
    return losses_page(study, losses, lengths)


def cut_patterns(study: Study) -> list[str]:
    """Return a note on the methods of which a model has fewer layers than their pattern."""
    cut = {}
    for run in study.runs:
        pattern, layers = layer_pattern(run.config.method), run.config.num_layers
        if len(pattern) > layers:
            cut[method_name(run.config.method)] = ", ".join(f"`{part}`" for part in pattern[:layers])
    if not cut:
        return []
    words = "; ".join(f"{name}: {left}" for name, left in cut.items())
    return [
        f"The models have fewer layers than the patterns of some methods. Their layers are, from the first: {words}."
    ]


def best_at_each_length(losses: dict, lengths: list[int], base_length: int) -> list[str]:
    """Return a section that names the series of the lowest mean at each length, of those with the most seeds there,
    with its difference to each reference.

    losses: {(series, length): nats a token, one a seed}. The p-values are corrected for all series and lengths, as the
    best is chosen among all of them.
    """
    by_reference = {
        reference: {(row["series"], row["length"]): row for row in differences(losses, reference, lengths)}
        for reference in REFERENCES
    }
    rows = []
    for length in lengths:
        here = {series: values for (series, at), values in losses.items() if at == length and values}
        most = max(map(len, here.values()), default=0)
        means = {series: mean_and_stderr(values) for series, values in here.items() if len(values) == most}
        if means:
            best = min(means, key=lambda series: means[series][0])
            cells = [difference_cell(found.get((best, length))) for found in by_reference.values()]
            at, loss = f"{length} ({length / base_length:g}x)", format_mean(*means[best])
            rows.append([at, series_name(best), str(most), loss, *cells])
    if not rows:
        return []
    head = ["at", "best", "seeds", "loss", *(f"minus {series_name(reference)}" for reference in REFERENCES)]
    text = "The lowest mean at each length, of the methods with the most seeds. Differences are in nats a token \u00b1 "
    text += "their standard error, with p of the t-test (see below) after Holm's correction for the comparisons of all "
    text += "methods with that reference at all lengths, as the best is chosen among them."
    return ["## The best at each length", text, markdown_table([head, *rows])]


def by_position(study: Study, lengths: list[int]) -> list[str]:
    """Return a section on the loss by position in the longest sequences, and write it as CSV.

    The ranges begin at 0 and at each shorter length.
    """
    longest, starts = max(lengths), [0, *sorted(lengths)[:-1]]
    stops = [*starts[1:], longest]
    found = collections.defaultdict(list)  # of each series and range, one a seed
    for run, stored in study.finished:
        validations = [
            record["val_loss_by_position"] for record in stored.metrics() if "val_loss_by_position" in record
        ]
        octaves = validations[-1].get(str(longest)) if validations else None
        for series in study.series(run) if octaves else ():
            for start, stop in zip(starts, stops):
                found[series, start].append(mean_between(octaves, start, stop))
    shown = [series for series in study.all_series if (series, 0) in found]
    if not shown:
        return []
    rows, cells = [], [["method", *(f"{start}-{stop - 1}" for start, stop in zip(starts, stops))]]
    for series in shown:
        means = [mean_and_stderr(found[series, start]) for start in starts]
        for start, stop, (mean, stderr) in zip(starts, stops, means):
            seeds = len(found[series, start])
            rows.append(dict(series=series, first=start, last=stop - 1, mean=mean, stderr=stderr, seeds=seeds))
        cells.append([series_name(series), *(format_mean(*mean) for mean in means)])
    write_csv(study.path.with_name(f"{study.path.name}_positions.csv"), rows)
    text = f"Nats a token by position in sequences of {longest}: mean \u00b1 standard error over seeds. Compare "
    text += "within a column: each range is another part of the text."
    return ["## By position", text, markdown_table(cells)]


def mean_between(octaves: list[float], start: int, stop: int) -> float:
    """Return the mean over positions start .. stop - 1, start 0 or a power of 2, from the means that a run leaves:
    entry 0 is of position 0, entry k of positions 2^(k-1) .. 2^k - 1 (the last one's end with the sequence)."""
    begins = [0, *(2**k for k in range(len(octaves) - 1))]
    ends = [*begins[1:], max(stop, begins[-1] + 1)]
    inside = [(end - begin, loss) for begin, end, loss in zip(begins, ends, octaves) if start <= begin < stop]
    return sum(count * loss for count, loss in inside) / sum(count for count, _ in inside)


def costs(study: Study) -> list[str]:
    """Return a section on how many parameters each method has and how fast it trained, and write it as CSV."""
    found = collections.defaultdict(list)
    for run, stored in study.finished:
        for series in study.series(run):
            found[series].append(stored.summary)
    rows = []
    for series in [series for series in study.all_series if series in found]:
        rates = [summary["tokens_per_second"] for summary in found[series] if summary.get("tokens_per_second")]
        rate, stderr = mean_and_stderr(rates)
        parameters = max((summary.get("parameters") or 0 for summary in found[series]), default=0) or None
        rows.append(dict(series=series, parameters=parameters, tokens_per_second=rate, stderr=stderr, runs=len(rates)))
    if not rows:
        return []
    write_csv(study.path.with_name(f"{study.path.name}_costs.csv"), rows)
    cells = [["method", "parameters", "tokens/s", "runs"]]
    for row in rows:
        error = "" if row["stderr"] is None else f" \u00b1 {row['stderr']:,.0f}"
        rate = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}{error}"
        parameters = "" if row["parameters"] is None else f"{row['parameters']:,}"
        cells.append([series_name(row["series"]), parameters, rate, str(row["runs"])])
    text = "Parameters, and tokens a second of training: the mean over runs of each run's median step \u00b1 its "
    text += "standard error. Runs that shared their machine with others are slower for it."
    return ["## What they cost", text, markdown_table(cells)]

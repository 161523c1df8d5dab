"""Studies beyond the paper: tau by training length, heads that learn, and newer methods."""

import collections
import math
import re

from model.methods import layer_pattern
from scripts.reproduce.comparisons import compare, difference_cell, differences
from scripts.reproduce.drawing import draw_lines
from scripts.reproduce.figures import NO_FIGURE, tau_of
from scripts.reproduce.study import Study
from scripts.reproduce.tables import losses_page, read_losses, reference_of, table_losses
from scripts.shared.looks import method_name, series_label, series_name
from scripts.shared.runs import final_losses
from scripts.shared.tables import format_mean, markdown_table, mean_and_stderr

RATIOS = (1, 4, 16, 64)  # of the validation length to the training length
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#0072B2")
LEARNED = math.inf  # in place of tau where every head learns its tau
# What a head can learn (model/methods/scale_invariant.py): its sign, and its value from the parameter of that name.
PARAMETERS = dict(log_tau=("\u03c4", math.exp), gain=("gain", float))

# ---- tau and heads ---------------------------------------------------------------------------------------------------


def tau_by_length(study: Study) -> str:
    """Draw the loss against tau for each training length, and tabulate it with the best tau of each."""
    losses = collections.defaultdict(list)
    for run, stored in study.finished:
        config = run.config
        tau = LEARNED if config.method_options.get("learn_tau") else tau_of(config)
        for length, loss in final_losses(stored.summary).items():
            if length / config.train_length in RATIOS:
                losses[config.train_length, tau, length / config.train_length].append(loss)
    rows = []
    for (length, tau, ratio), values in sorted(losses.items()):
        mean, stderr = mean_and_stderr(values)
        rows.append(dict(train_length=length, tau=tau, ratio=ratio, mean=mean, stderr=stderr, seeds=len(values)))
    study.write_csv(rows)
    if not rows:
        return NO_FIGURE
    study.sections = learned_by_heads(study)
    panels = collections.defaultdict(list)
    for length in sorted({row["train_length"] for row in rows}):
        for ratio, colour in zip(RATIOS, COLOURS):
            line = [row for row in rows if (row["train_length"], row["ratio"]) == (length, ratio)]
            fixed = [row for row in line if row["tau"] != LEARNED]
            points = [[row[key] for row in fixed] for key in ("tau", "mean", "stderr")]
            panels[f"trained at {length}"].append((dict(fmt="o-", color=colour, label=f"at {ratio}x"), *points))
            for row in (row for row in line if row["tau"] == LEARNED and fixed):
                ends, look = [points[0][0], points[0][-1]], dict(color=colour, linestyle=":", linewidth=0.8)
                panels[f"trained at {length}"].append((look, ends, [row["mean"]] * 2, [None] * 2))
    draw_lines(study.figure(), panels, x="\u03c4 (tokens)", y="nats a token", columns=len(RATIOS))
    text = "Validation loss of scale-invariant p-RoPE in nats a token against its lengthscale \u03c4 (in tokens), for "
    text += "three training lengths (each on equally many tokens) and at multiples of them. Dotted: \u03c4 learned by "
    text += "heads. Bars: \u00b1 1 standard error over seeds. In bold, the best \u03c4 of each training length."
    return "\n\n".join([text, study.picture(), tau_table(rows)])


def tau_table(rows: list[dict]) -> str:
    """Return the rows as a table, a line a training length and tau, a column a validation length."""
    best, cells, seeds = {}, collections.defaultdict(dict), {}
    for row in rows:
        where, mean = (row["train_length"], row["ratio"]), round(row["mean"], 3)
        best[where] = min(mean, best.get(where, mean))
    for row in rows:
        line, ratio, cell = (row["train_length"], row["tau"]), row["ratio"], format_mean(row["mean"], row["stderr"])
        is_best = round(row["mean"], 3) == best[line[0], ratio]
        cells[line][ratio], seeds[line] = f"**{cell}**" if is_best else cell, row["seeds"]
    table = [["trained at", "\u03c4", "\u03c4 / length", "seeds", *(f"{ratio}x" for ratio in RATIOS)]]
    for (length, tau), by_ratio in cells.items():
        names = ["learned", ""] if tau == LEARNED else [f"{tau:.3g}", f"{tau / length:.2g}"]
        losses = [by_ratio.get(ratio, "") for ratio in RATIOS]
        table.append([str(length), *names, str(seeds[length, tau]), *losses])
    return markdown_table(table)


def scale_invariant_by_head(study: Study) -> str:
    """Tabulate the losses of scale-invariant p-RoPE whose heads differ, and what heads learned."""
    page = table_losses(study)
    study.sections += learned_by_heads(study)
    return page


def learned_by_heads(study: Study) -> list[str]:
    """Return a section on what the heads of each layer have learned at the end of training, and write it as CSV."""
    rows = []
    for run, stored in study.finished:
        for name, values in (stored.last("method_parameters") or {}).items():
            layer, parameter = re.fullmatch(r"blocks\.(\d+)\..*\.(\w+)", name).groups()
            sign, value_of = PARAMETERS[parameter]
            where = dict(method=series_label(run.config), train_length=run.config.train_length, seed=run.config.seed)
            where |= dict(learned=sign, layer=int(layer) + 1)
            rows += [where | dict(head=head, value=value_of(value)) for head, value in enumerate(values, start=1)]
    if not rows:
        return []
    study.write_csv(rows, "_learned")
    cells = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        key = (row["method"], row["train_length"], row["seed"], row["learned"])
        cells[key][row["layer"]].append(f"{row['value']:.2f}")
    layers = sorted({row["layer"] for row in rows})
    table = [["method", "trained at", "seed", *(f"layer {layer}" for layer in layers)]]
    for (series, length, seed, _), heads in cells.items():
        table.append([series_name(series), str(length), str(seed), *(", ".join(heads[layer]) for layer in layers)])
    text = "\u03c4 (in tokens), or the factor of its scores (gain), that each head of a layer had learned at the end."
    return ["### What heads learned", text, markdown_table(table)]


# ---- newer methods ---------------------------------------------------------------------------------------------------


def table_rivals(study: Study) -> str:
    """Tabulate the newer methods beside the best of the paper's: losses, the best, by position, and costs."""
    losses, lengths = read_losses(study)
    study.sections = best_at_each_length(study, losses, lengths)
    study.sections += compare(study, losses, reference_of(study), lengths, {}, ())
    study.sections += by_position(study, lengths)
    study.sections += costs(study)
    cut = {}
    for run in study.runs:
        pattern, layers = layer_pattern(run.config.method), run.config.num_layers
        if len(pattern) > layers:
            cut[method_name(run.config.method)] = ", ".join(f"`{part}`" for part in pattern[:layers])
    if cut:
        layers = "; ".join(f"{name}: {left}" for name, left in cut.items())
        study.notes.append(f"The models have fewer layers than some patterns. Their layers, from the first: {layers}.")
    return losses_page(study, losses, lengths)


def best_at_each_length(study: Study, losses: dict, lengths: list[int]) -> list[str]:
    """Return a section on the lowest mean at each length, of the series with the most seeds there.

    losses: {(series, length): nats a token, one a seed}. The p-values are corrected for all series and lengths, as the
    best is chosen among all of them.
    """
    references = (reference_of(study), "alibi")
    rows_of = [differences(losses, reference, lengths) for reference in references]
    found = [{(row["series"], row["length"]): row for row in rows} for rows in rows_of]
    rows = []
    for length in lengths:
        here = {series: values for (series, at), values in losses.items() if at == length and values}
        most = max(map(len, here.values()), default=0)
        means = {series: mean_and_stderr(values) for series, values in here.items() if len(values) == most}
        if means:
            best = min(means, key=lambda series: means[series][0])
            cells = [difference_cell(of_reference.get((best, length))) for of_reference in found]
            at, loss = f"{length} ({length / study.base_length:g}x)", format_mean(*means[best])
            rows.append([at, series_name(best), str(most), loss, *cells])
    if not rows:
        return []
    head = ["at", "best", "seeds", "loss", *(f"minus {series_name(reference)}" for reference in references)]
    text = "The lowest mean at each length, of the methods with the most seeds. Differences are in nats a token \u00b1 "
    text += "their standard error, with p of the t-test (see below) after Holm's correction for the comparisons of all "
    text += "methods with that reference at all lengths, as the best is chosen among them."
    return ["### The best at each length", text, markdown_table([head, *rows])]


def by_position(study: Study, lengths: list[int]) -> list[str]:
    """Return a section on the loss by position in the longest sequences, and write it as CSV.

    The ranges begin at 0 and at each shorter length.
    """
    longest, starts = max(lengths), [0, *sorted(lengths)[:-1]]
    stops = [*starts[1:], longest]
    found = collections.defaultdict(list)  # of each series and range, one a seed
    for run, stored in study.finished:
        octaves = (stored.last("val_loss_by_position") or {}).get(str(longest))
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
    study.write_csv(rows, "_positions")
    text = f"Nats a token by position in sequences of {longest}: mean \u00b1 standard error over seeds. Compare "
    text += "within a column: each range is another part of the text."
    return ["### By position", text, markdown_table(cells)]


def mean_between(octaves: list[float], start: int, stop: int) -> float:
    """Return the mean over positions start .. stop - 1, start 0 or a power of 2, from the means of octaves.

    Entry 0 is of position 0, entry k of positions 2^(k-1) .. 2^k - 1. The last octave ends with the sequence.
    """
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
        parameters = max(summary.get("parameters") or 0 for summary in found[series]) or None
        rows.append(dict(series=series, parameters=parameters, tokens_per_second=rate, stderr=stderr, runs=len(rates)))
    if not rows:
        return []
    study.write_csv(rows, "_costs")
    cells = [["method", "parameters", "tokens/s", "runs"]]
    for row in rows:
        error = "" if row["stderr"] is None else f" \u00b1 {row['stderr']:,.0f}"
        rate = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}{error}"
        parameters = "" if row["parameters"] is None else f"{row['parameters']:,}"
        cells.append([series_name(row["series"]), parameters, rate, str(row["runs"])])
    text = "Parameters, and tokens a second of training: the mean over runs of each run's median step \u00b1 its "
    text += "standard error. Runs that shared their machine with others are slower for it."
    return ["### What they cost", text, markdown_table(cells)]

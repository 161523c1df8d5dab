"""What the lengthscale tau of scale-invariant attention does, beyond what the paper shows."""

import collections
import math
import re
from pathlib import Path

from scripts.reproduce.drawing import drawing, legend_below
from scripts.reproduce.figures import NO_FIGURE, picture, tau_of
from scripts.reproduce.study import Study, final_losses
from scripts.reproduce.tables import table_losses
from scripts.shared.looks import series_label, series_name
from scripts.shared.tables import format_mean, markdown_table, mean_and_stderr, write_csv

RATIOS = (1, 4, 16, 64)  # of the validation length to the training length
LEARNED = math.inf  # in place of tau where every head learns its own
# What a head can learn (model/methods/scale_invariant.py): its sign, and what it is from the parameter of that name.
PARAMETERS = dict(log_tau=("\u03c4", math.exp), gain=("gain", float))
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#0072B2")


def tau_by_length(study: Study) -> str:
    """Draw the loss against tau for each training length, and tabulate it with the best tau of each."""
    losses = collections.defaultdict(list)
    for run, stored in study.finished:
        config = run.config
        tau = LEARNED if config.method_options.get("learn_tau") else tau_of(config)
        for length, loss in final_losses(stored).items():
            losses[config.train_length, tau, length / config.train_length].append(loss)
    rows = []
    for (length, tau, ratio), values in sorted(losses.items()):
        mean, stderr = mean_and_stderr(values)
        row = dict(train_length=length, tau=tau, ratio=ratio, mean=mean, stderr=stderr, seeds=len(values))
        rows += [row] if ratio in RATIOS else []
    write_csv(study.path.with_suffix(".csv"), rows)
    if not rows:
        return NO_FIGURE
    study.sections = learned_by_heads(study)
    draw_tau_by_length(study.path, rows)
    text = "Validation loss of scale-invariant p-RoPE in nats a token against its lengthscale \u03c4 (in tokens), for "
    text += "three training lengths (each on equally many tokens) and at multiples of them. Vertical lines: the "
    text += "paper's share of the training length, \u03c4 / length = 10 / 4096. Horizontal: \u03c4 learned by heads, "
    text += "from there on. Bars: \u00b1 1 standard error over seeds. In bold, the best \u03c4 of each training length."
    return "\n\n".join([text, picture(study.item), tau_table(rows)])


def tau_table(rows: list[dict]) -> str:
    """Return the rows as a table, a line a training length and tau, a column a validation length."""
    best = {}
    for row in rows:
        where, mean = (row["train_length"], row["ratio"]), round(row["mean"], 3)
        best[where] = min(mean, best.get(where, mean))
    cells, seeds = collections.defaultdict(dict), {}
    for row in rows:
        line, ratio = (row["train_length"], row["tau"]), row["ratio"]
        cell, is_best = format_mean(row["mean"], row["stderr"]), round(row["mean"], 3) == best[line[0], ratio]
        cells[line][ratio], seeds[line] = f"**{cell}**" if is_best else cell, row["seeds"]
    table = [["trained at", "\u03c4", "\u03c4 / length", "seeds", *(f"{ratio}x" for ratio in RATIOS)]]
    for (length, tau), by_ratio in cells.items():
        names = ["learned", ""] if tau == LEARNED else [f"{tau:.3g}", f"{tau / length:.2g}"]
        own = [by_ratio.get(ratio, "") for ratio in RATIOS]
        table.append([str(length), *names, str(seeds[length, tau]), *own])
    return markdown_table(table)


def draw_tau_by_length(path: Path, rows: list[dict]):
    """Draw a panel a training length: loss against tau, a line a validation length."""
    lengths = sorted({row["train_length"] for row in rows})
    with drawing(path, 1, len(lengths), height=2.2, sharex=True, sharey=True) as (figure, axes):
        for axis, length in zip(axes[0], lengths):
            for ratio, colour in zip(RATIOS, COLOURS):
                mine = [row for row in rows if (row["train_length"], row["ratio"]) == (length, ratio)]
                fixed = [row for row in mine if row["tau"] != LEARNED]
                x, y = ([row[key] for row in fixed] for key in ("tau", "mean"))
                axis.errorbar(x, y, [row["stderr"] or 0 for row in fixed], fmt="o-", color=colour, label=f"at {ratio}x")
                for row in (row for row in mine if row["tau"] == LEARNED):
                    axis.axhline(row["mean"], color=colour, linestyle=":", linewidth=0.8)
            axis.axvline(length * 10 / 4096, color="0.7", linewidth=0.6, zorder=0)
            axis.set(title=f"trained at {length}", xscale="log", xlabel="\u03c4 (tokens)")
        axes[0, 0].set_ylabel("nats a token")
        legend_below(figure, axes, len(RATIOS))


def scale_invariant_by_head(study: Study) -> str:
    """Tabulate the losses of scale-invariant p-RoPE with something of its own in each head, and what heads learned."""
    page = table_losses(study)
    study.sections += learned_by_heads(study)
    return page


def learned_by_heads(study: Study) -> list[str]:
    """Return a section on what the heads of each layer have learned at the end of training, and write it as CSV."""
    rows = []
    for run, stored in study.finished:
        parameters = next((r["method_parameters"] for r in reversed(stored.metrics()) if "method_parameters" in r), {})
        for name, values in parameters.items():
            layer, parameter = re.fullmatch(r"blocks\.(\d+)\..*\.(\w+)", name).groups()
            sign, value_of = PARAMETERS[parameter]
            where = dict(method=series_label(run.config), train_length=run.config.train_length, seed=run.config.seed)
            where |= dict(learned=sign, layer=int(layer) + 1)
            rows += [where | dict(head=head, value=value_of(value)) for head, value in enumerate(values, start=1)]
    if not rows:
        return []
    write_csv(study.path.with_name(f"{study.path.name}_learned.csv"), rows)
    cells = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        key = (row["method"], row["train_length"], row["seed"], row["learned"])
        cells[key][row["layer"]].append(f"{row['value']:.2f}")
    layers = sorted({row["layer"] for row in rows})
    table = [["method", "trained at", "seed", *(f"layer {layer}" for layer in layers)]]
    for (series, length, seed, _), own in cells.items():
        table.append([series_name(series), str(length), str(seed), *(", ".join(own[layer]) for layer in layers)])
    text = "\u03c4 (in tokens), or the factor of its scores (gain), that each head of a layer had learned at the end."
    return ["## What heads learned", text, markdown_table(table)]

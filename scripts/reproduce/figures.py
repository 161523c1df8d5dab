"""Draw the paper's figures. Each function draws one, and returns the Markdown that shows it."""

import collections
import itertools
import json
import math

import numpy as np
from scipy import stats

from files import replace_text
from scripts.reproduce import logits, theory
from scripts.reproduce.drawing import Line, Panel, draw_panels, row_lines
from scripts.reproduce.study import Study, abbreviate_length
from scripts.shared.looks import plot_styles
from scripts.shared.runs import StoredRun, measured, val_tokens
from scripts.shared.tables import markdown_table, summarise

WINDOWS = 4  # windows of validation text, for the attention of trained models
OPEN_CIRCLE = {
    "label": "_",
    "linestyle": "",
    "marker": "o",
    "markersize": 3.5,
    "markerfacecolor": "white",
    "markeredgewidth": 0.7,
}

# ---- validation curves -----------------------------------------------------------------------------------------------


CURVES = {  # by item: the rest of the sentence "Validation loss ...", with the training lengths in braces
    "figure_train_lengths": "at the training length, for three training lengths",
    "figure_train_4k": "of the models trained at {0}, at three validation lengths",
    "figure_train_16k": "of the models trained at {1}, at three validation lengths",
    "figure_304m": "of the large model, at three validation lengths",
    "figure_tau": "of scale-invariant p-RoPE with different lengthscales \u03c4 (tokens)",
    "figure_scale_invariant_variants": "of scale-invariant attention with three positional encodings",
}
NOPE_PANELS = {"figure_train_lengths": 1, "figure_train_4k": 1, "figure_train_16k": 2}  # from the left; else all


def curve_figure(study: Study) -> str:
    """Draw one panel per validation length. Return the Markdown: a sentence, then the figure."""
    # 1. What the paper shows in this figure.
    at_train_length = study.item == "figure_train_lengths"  # show models only at their training length
    zoom = study.item == "figure_train_4k"
    nope_panels = NOPE_PANELS.get(study.item, 3)

    # 2. The panels.
    rows = validation_curves(study)
    looks = plot_styles(dict.fromkeys(row["series"] for row in rows))
    looks = {series: looks[series] for series in study.all_series if series in looks}
    grid = [[], []] if zoom else [[]]
    for number, n in enumerate(study.lengths):
        shown = []
        for row in rows:
            at_n = row["val_length"] == n and (row["train_length"] == n or not at_train_length)
            if at_n and (row["series"] != "nope" or number < nope_panels):
                shown.append(row)
        lines = curve_lines(shown, looks)
        if shown and study.scale == "paper" and study.item != "figure_304m":  # the paper marks its smaller model's 3.28
            lines.append(
                Line({"color": "0.6", "linestyle": "--"}, [0, max(row["step"] for row in shown)], [3.28, 3.28])
            )
        title = f"{'train and ' if at_train_length else ''}val @{abbreviate_length(n)}"
        for zoomed, panels in enumerate(grid):
            panels.append(Panel(title + " (zoom)" * zoomed, lines, limits(shown, zoomed)))
    draw_panels(study.figure_path(), grid, x="training step", y="nats a token", height=2.2 - 0.45 * zoom, bands=True)

    # 3. The notes.
    several = any(row["seeds"] > 1 for row in rows)
    place = "shown in the left panel only" if nope_panels == 1 else "left out of the right panel"
    notes = {
        "Bottom row: the last fifth of training, for the better half of the methods.": zoom,
        f"NoPE is {place}, as in the paper.": nope_panels < 3,
        "Bands: \u00b1 1 standard error over seeds." if several else "No bands: there is one seed.": True,
        "Open circles: validation on part of the tokens (`--val_profile fast`).": (
            len({row["val_tokens"] for row in rows}) > 1
        ),
    }
    study.notes += [note for note, holds in notes.items() if holds]
    of = CURVES[study.item].format(*map(abbreviate_length, study.lengths))
    return f"Validation loss {of}.\n\n{study.figure_markdown()}"


def curve_lines(rows: list[dict], looks: dict) -> list[Line]:
    """Return the lines of a panel of validation curves. Open circles mark validation on part of the tokens."""
    full = max((row["val_tokens"] for row in rows), default=0)
    lines = []
    for line in row_lines(rows, "series", "step", looks):
        markers = {"markevery": max(1, len(line.xs) // 6)}
        lines.append(line._replace(look=line.look | markers))
    circles = {series: OPEN_CIRCLE | {"color": look["color"]} for series, look in looks.items()}
    partial = row_lines([row for row in rows if row["val_tokens"] < full], "series", "step", circles)
    return lines + [line._replace(errors=()) for line in partial]


def limits(rows: list[dict], zoomed: int) -> dict:
    """Return limits of the axes. The high losses of the first fifth of the steps would hide the rest, so y leaves them
    out. zoomed: show the last fifth of the steps, and the half of the series with the lowest final losses."""
    rows = [row for row in rows if math.isfinite(row["mean"])]
    if not rows:
        return {}
    last = max(row["step"] for row in rows)
    first = (0.8 if zoomed else 0.2) * last
    final = sorted((row["mean"], row["series"]) for row in rows if row["step"] == last)
    best = {series for _, series in (final[: (len(final) + 1) // 2] if zoomed else final)}
    shown = [row["mean"] for row in rows if row["step"] >= first and row["series"] in best]
    low, high = min(shown), max(shown)
    margin = 0.06 * (high - low) or 0.01
    return {"xlim": (first if zoomed else 0, 1.02 * last), "ylim": (low - margin, high + margin)}


def validation_curves(study: Study) -> list[dict]:
    """Return mean validation losses over seeds, one row per series, training length, validation length and step.

    Steps that were not validated with all seeds on the same tokens are left out.
    """
    losses, seeds = collections.defaultdict(list), collections.Counter()
    for run, stored in study.finished:
        curves = {series: validation_curve(stored, method) for series, method in study.series(run).items()}
        wanted = [n for n in study.lengths if n in run.config.val_lengths]
        if absent := [str(n) for n in wanted if any(n not in curve for curve in curves.values())]:
            study.missing.append((run.name, f"not validated at {', '.join(absent)} during training"))
        for n, (series, curve) in itertools.product(wanted, curves.items()):
            line = series, run.config.train_length, n
            seeds[line] += n in curve
            for (step, tokens), loss in curve.get(n, {}).items():
                loss = math.nan if loss is None else loss  # the metrics have null for a loss that is not finite
                losses[*line, step, tokens].append(loss)
    complete = {key: values for key, values in losses.items() if len(values) == seeds[key[:3]]}
    return summarise(complete, "series", "train_length", "val_length", "step", "val_tokens")


def validation_curve(stored: StoredRun, method: str | None) -> dict:
    """Return a run's losses by validation length, then by step and tokens. method: as in Study.series."""
    curve = collections.defaultdict(dict)
    for record in stored.validations():
        tokens = val_tokens(record)
        for length, loss in measured(record, "val_loss", method).items():
            curve[int(length)][record["step"], tokens[length]] = loss
    return curve


# ---- theory and trained models ---------------------------------------------------------------------------------------

SCALINGS = {  # of figure_entropy: names in the legend, by method
    "p_rope": "no scaling",
    "logn_p_rope": "LogN",
    "scale_invariant_p_rope": "scale-invariant",
}
RANGE_STYLES = ("-", "--", ":")


def figure_entropy(study: Study) -> str:
    study.computed = True
    lengths = [2**k for k in range(7, 17)]  # 128 .. 65,536
    sources = {"iid scores": theory.iid_entropy(lengths, theory.DRAWS, seed=0)}
    trained = trained_entropy(study, [n for n in lengths if n <= study.lengths[-1]])
    kept = study.out / "figure_entropy.json"  # the numbers outlive the weights
    if trained:
        replace_text(kept, json.dumps(trained))
    if kept.exists():
        sources["trained models"] = json.loads(kept.read_text())
    grid = [entropy_panels(source, rows) for source, rows in sources.items()]
    draw_panels(
        study.figure_path(), grid, x="context length (tokens)", y="nats", log=10, height=1.75, bands=True, sharex=True
    )
    text = (
        "Attention with no scaling, with LogN, and scale-invariant. Top: independent Gaussian scores (LogN s = 0.4, "
        f"\u03c4 = 10), mean over {theory.DRAWS} draws. Bottom: last query of each context in p-RoPE models, mean "
        f"over seeds, layers, heads and {WINDOWS} windows of validation text. Bands: \u00b1 1 standard error "
        "over draws, or over seeds and windows."
    )
    if not kept.exists():
        study.notes.append("The bottom row is left out, because there is no trained model.")
    return f"{text}\n\n{study.figure_markdown()}"


def entropy_panels(source: str, rows: list[dict]) -> list[Panel]:
    """Return three panels against the context length: entropy, entropy in ranges of distances, local attention."""
    looks = {method: look | {"label": SCALINGS[method]} for method, look in plot_styles(SCALINGS).items()}

    def lines(quantity: str, **changes) -> list[Line]:
        shown = [row for row in rows if row["quantity"] == quantity]
        return row_lines(shown, "method", "length", {method: look | changes for method, look in looks.items()})

    ranged = []
    for (start, stop), style in zip(theory.RANGES, RANGE_STYLES):
        ranged += lines(f"entropy_{start}_{stop}", linestyle=style, label="_")
        ranged.append(Line({"color": "0.4", "linestyle": style, "label": f"{start:,} to {stop:,} tokens ago"}, [], []))
    return [
        Panel(f"{source}: entropy", lines("entropy")),
        Panel("in a range of distances", ranged),
        Panel(f"attention on last {theory.LOCAL} tokens", lines(f"attention_{theory.LOCAL}")),
    ]


def trained_entropy(study: Study, lengths: list[int]) -> list[dict]:
    """Return attention_statistics of trained models, one row per method, length and quantity."""
    samples = collections.defaultdict(list)  # one value per window and seed
    for config, model, windows in logits.trained_models(study, WINDOWS, lengths[-1]):
        for (length, quantity), values in logits.attention_profile(model, windows, lengths).items():
            samples[config.method, length, quantity] += values
    return summarise(samples, "method", "length", "quantity")


def figure_sublog(study: Study) -> str:
    study.computed = True
    scale_invariant = study.item == "figure_sublog"  # the other item is figure_sublog_unscaled
    starts = [10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000]
    colours = {2: "#0072B2", 5: "#D55E00", 10: "#000000"}  # by factor, the paper's Delta
    rows = theory.iid_range_entropy(starts, [*colours], theory.DRAWS, 0, scale_invariant)

    # 1. A panel for each way to draw the distance, with linear fits.
    panels, cells = [], [["linear fit", "slope", "intercept", "R^2"]]
    for against, power in {"log t": 1, "sqrt(log t)": 0.5}.items():
        lines = []
        for factor, colour in colours.items():
            points = [row | {"x": math.log(row["start"]) ** power} for row in rows if row["factor"] == factor]
            look = {"color": colour, "marker": "o", "linestyle": "", "label": f"$\\Delta$ = {factor}"}
            (line,) = row_lines(points, "factor", "x", {factor: look})
            fit = stats.linregress(line.xs, line.means)
            fitted = fit.slope * np.array(line.xs) + fit.intercept
            lines += [line, Line({"color": colour, "linestyle": "--", "linewidth": 0.8}, line.xs, fitted)]
            numbers = [f"{value:.4f}" for value in (fit.slope, fit.intercept, fit.rvalue**2)]
            cells.append([f"\u0394 = {factor}, against {against}", *numbers])
        panels.append(Panel(f"against {against}", lines))
    y = "expected entropy in $[t, t\\Delta)$ (nats)"
    draw_panels(study.figure_path(), [panels], x="", y=y, sharey=True)

    # 2. The section.
    scores = "scale-invariant with \u03c4 = 10." if scale_invariant else "not scaled."
    text = (
        "Expected entropy (nats) of attention at distances in [t, t\u0394), against log t and against sqrt(log t), "
        f"for independent Gaussian scores, {scores} Mean over {theory.DRAWS} draws; bars: \u00b1 1 standard error. "
        "Dashed: best linear fits."
    )
    return f"{text}\n\n{study.figure_markdown()}\n\n{markdown_table(cells)}"

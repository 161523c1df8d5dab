"""Draw the figures with matplotlib, each saved as PNG. The callers decide what they show."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from scripts.shared.looks import import_matplotlib, plot_style

OPEN_CIRCLE = dict(linestyle="", marker="o", markersize=3.5, markerfacecolor="white", markeredgewidth=0.7)
TEXT_WIDTH = 6.75  # inches: what a figure over the full width of the page has
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.1,
    "lines.markersize": 3,
    "legend.frameon": False,
    "savefig.dpi": 200,
}


@contextmanager
def drawing(path: Path, rows: int, columns: int, height: float, **subplots) -> Iterator:
    """Give a figure over the page's width and its axes (rows, columns), and save it as path.png.

    height: inches of a row. The figure is made without pyplot, so no window system or global state is needed.
    """
    import_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(TEXT_WIDTH, height * rows + 0.45), layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **subplots)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path.with_name(f"{path.name}.png"))


def picture(name: str) -> str:
    """Return the Markdown that shows a figure beside its page."""
    return f"![{name}]({name}.png)"


def legend_below(figure, axes, columns: int):
    """Add one legend for all panels, outside of them: each label once, in the order of first appearance, in as many
    columns as fit the figure, but not more than `columns`."""
    entries = {}
    for panel in axes.flat:
        entries |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels()) if label not in entries}
    look = dict(loc="outside lower center", handlelength=2.6)
    legend = figure.legend(entries.values(), entries.keys(), ncols=columns, **look)
    while columns > 1 and legend.get_window_extent().width > figure.bbox.width:
        legend.remove()
        columns -= 1
        legend = figure.legend(entries.values(), entries.keys(), ncols=columns, **look)


def draw_lines(
    path: Path,
    panels: dict[str, list],
    *,
    x: str,
    y: str,
    columns: int,
    base: int | None = 10,
    same_y: bool = True,
    **limits,
):
    """Draw a panel a title, side by side: lines with error bars over x.

    panels: by title, lines of (look, xs, means, standard errors or None). x, y: labels of the axes (y: one, or one a
    panel, separated by |). columns: of the legend. base: of a logarithmic x (None: linear). limits: for axis.set.
    """
    with drawing(path, 1, len(panels), height=2.2, sharey=same_y) as (figure, axes):
        for axis, (title, lines), label in zip(axes[0], panels.items(), itertools.cycle(y.split("|"))):
            for look, xs, means, errors in lines:
                axis.errorbar(xs, means, [error or 0 for error in errors], elinewidth=0.8, **look)
            if base:
                axis.set_xscale("log", base=base)
            if base == 2:
                axis.minorticks_off()
                axis.xaxis.set_major_formatter("{x:.0f}")
            axis.set(title=title, xlabel=x, ylabel=label if axis is axes[0, 0] or not same_y else "", **limits)
        legend_below(figure, axes, columns)


def draw_curves(
    path: Path, panels: list[tuple[str, list[dict]]], looks: dict, baseline: float | None = None, zoom: bool = False
):
    """Draw validation loss against the training step, one panel beside the other.

    panels: title and rows, dicts with series, step, mean, stderr (None: one seed, no band), val_tokens (where they are
    fewer than elsewhere, the mark is an open circle); looks: keyword arguments of plot by series, in the order of the
    legend. baseline: a loss to mark. zoom: a second row of panels, with the end of the training and the better half of
    the series.
    """
    full = max((row["val_tokens"] for _, rows in panels for row in rows), default=0)
    on_part = any(row["val_tokens"] < full for _, rows in panels for row in rows)
    with drawing(path, 1 + zoom, len(panels), height=1.75 if zoom else 2.0) as (figure, axes):
        for (row, column), axis in np.ndenumerate(axes):
            title, rows = panels[column]
            for number, (series, look) in enumerate(looks.items()):
                points = [point for point in rows if point["series"] == series]
                # Some six markers a line, not all at the same steps: they tell the lines apart in grey, hiding none.
                whole = [i for i, point in enumerate(points) if point["val_tokens"] == full]
                every = max(1, len(whole) // 6)
                draw_line(axis, "step", points, look | dict(markevery=whole[number % every :: every]))
                part = [(point["step"], point["mean"]) for point in points if point["val_tokens"] < full]
                if part:
                    axis.plot(*zip(*part), **OPEN_CIRCLE, color=look["color"])
            if baseline is not None:
                axis.axhline(baseline, color="0.6", linestyle="--", linewidth=0.8, zorder=0)
            limit_curves(axis, rows, zoomed=row == 1)
            axis.set(title=title + (" (zoom)" if row == 1 else ""), xlabel="training step" if row == zoom else "")
        for axis in axes[:, 0]:
            axis.set_ylabel("validation loss (nats a token)")
        if on_part:
            axes[0, 0].plot([], [], **OPEN_CIRCLE, color="0.4", label="on a part of the validation tokens")
        legend_below(figure, axes, columns=4 if on_part else 5)


def limit_curves(axis, rows: list[dict], zoomed: bool):
    """Set limits that leave out the first steps, which would hide all the rest; zoomed: the last fifth of the training,
    and of the series the half with the lowest losses at the end."""
    finite = [row for row in rows if math.isfinite(row["mean"])]
    if not finite:
        return
    steps = sorted({row["step"] for row in finite})
    first, last = 0.2 * steps[-1], steps[-1]
    if zoomed:
        first = min(0.8 * last, steps[-2:][0])
        final = sorted((row for row in finite if row["step"] == last), key=lambda row: row["mean"])
        best = [row["series"] for row in final[: (len(final) + 1) // 2]]
        finite = [row for row in finite if row["series"] in best]
    shown = [row["mean"] for row in finite if row["step"] >= first]
    margin = 0.06 * (max(shown) - min(shown)) or 0.01
    axis.set_xlim(first if zoomed else 0, last + 0.02 * (last - first if zoomed else last))
    axis.set_ylim(min(shown) - margin, max(shown) + margin)


def tau_looks(taus: list[float]) -> dict[float, dict]:
    """Return the looks of the lengthscales tau, from dark to light in the order of size; the colour-blind see it."""
    import_matplotlib()
    from matplotlib import colormaps

    colours = colormaps["viridis"].resampled(len(taus) + 1).colors  # without the last, a yellow that paper swallows
    looks = zip(sorted(taus), colours, itertools.cycle("osD^v"))
    return {tau: dict(color=colour, marker=marker, label=f"$\\tau$ = {tau:g}") for tau, colour, marker in looks}


SCHEMES = dict(  # of figure_entropy: the method whose colour it has, and the name in the legend
    none=("p_rope", "no scaling"),
    logn=("logn_p_rope", "LogN"),
    scale_invariant=("scale_invariant_p_rope", "scale-invariant"),
)
RANGE_STYLES = ("-", "--", ":")


def draw_entropy(path: Path, sources: dict[str, list[dict]], ranges: tuple, local: int):
    """Draw entropy, entropy in the ranges and attention on the last `local` tokens (columns) against the context
    length, for each source of rows (scheme, quantity, length, mean, stderr): Gaussian scores, trained models."""
    ranged = [f"entropy_{start}_{stop}" for start, stop in ranges]
    columns = {"entropy": ["entropy"], "entropy in a range of distances": ranged}
    columns[f"attention on last {local} tokens"] = [f"attention_{local}"]
    with drawing(path, len(sources), 3, height=1.75, sharex=True) as (figure, axes):
        for row, (source, points) in enumerate(sources.items()):
            for axis, (title, quantities) in zip(axes[row], columns.items()):
                alone = len(quantities) == 1
                for number, (scheme, (method, label)) in enumerate(SCHEMES.items()):
                    look = plot_style(method) | dict(label=label if alone else "_")
                    look |= dict(markevery=(number % 2, 2)) if alone else {}
                    for quantity, style in zip(quantities, RANGE_STYLES):
                        mine = [p for p in points if (p["scheme"], p["quantity"]) == (scheme, quantity)]
                        draw_line(axis, "length", mine, look | dict(linestyle=style))
                axis.set(xscale="log", ylabel="entropy (nats)", title=title if row == 0 else "")
                axis.set_ylim(bottom=0)
            for (start, stop), style in zip(ranges, RANGE_STYLES):
                axes[row, 1].plot([], [], color="0.4", linestyle=style, label=f"{start:,} to {stop:,} tokens ago")
            axes[row, 0].set_ylabel(f"{source}\nentropy (nats)")
            axes[row, 2].set_ylabel("share of attention")
        for axis in axes[-1]:
            axis.set_xlabel("context length (tokens)")
        legend_below(figure, axes, columns=3)


def draw_sublog(path: Path, rows: list[dict], fits: list[dict]):
    """Draw the expected entropy in [t, t Delta) against log t and sqrt(log t), with the linear fits of theory.py."""
    panels = {}
    for against, power in (("log t", 1), ("sqrt(log t)", 0.5)):
        for factor, colour in zip(sorted({row["factor"] for row in rows}), ("#0072B2", "#D55E00", "#000000")):
            points = [row for row in rows if row["factor"] == factor]
            x = np.log([row["start"] for row in points]) ** power
            look = dict(color=colour, fmt="o", label=f"$\\Delta$ = {factor}")
            means, errors = ([row[key] for row in points] for key in ("mean", "stderr"))
            fit = next(f for f in fits if (f["factor"], f["against"]) == (factor, against))
            line = (
                dict(color=colour, linestyle="--", linewidth=0.8),
                x,
                fit["slope"] * x + fit["intercept"],
                [None] * len(x),
            )
            panels.setdefault(against, []).extend([(look, x, means, errors), line])
    draw_lines(path, panels, x="", y="expected entropy in $[t, t\\Delta)$ (nats)", columns=3, base=None)


def draw_qq(path: Path, blocks: dict[str, list[list[tuple[list, list]]]]):
    """Draw quantiles of the scores against those of a Gaussian, a panel a layer. blocks: by title (without and with
    rotation), the lines of each layer: one pair (Gaussian, sample quantiles), or one a head, drawn thin."""
    layers = max(map(len, blocks.values()))
    columns = min(6, layers)
    rows = -(-layers // columns)
    with drawing(path, rows * len(blocks), columns, height=1.35 if columns > 3 else 1.8) as (figure, axes):
        for block, (title, points) in enumerate(blocks.items()):
            panels = axes[block * rows : (block + 1) * rows].flat
            for layer, axis in enumerate(panels):
                if layer >= len(points):
                    axis.remove()
                    continue
                lines = points[layer]
                ends = [min(min(gaussian) for gaussian, _ in lines), max(max(gaussian) for gaussian, _ in lines)]
                over = 1 if len(lines) == 1 else 3  # the lines of the heads together would hide it
                axis.plot(ends, ends, color="#D00000", linewidth=0.8, label="Gaussian", zorder=over)
                look = dict(linewidth=1.2, label="scores") if len(lines) == 1 else dict(linewidth=0.5, label="one head")
                for gaussian, sample in lines:
                    axis.plot(gaussian, sample, color="#0072B2", zorder=2, **look)
                axis.set_title(f"layer {layer + 1}, {title}" if columns <= 3 else f"layer {layer + 1}")
                if layer % columns == 0:
                    axis.set_ylabel("score quantile" if columns <= 3 else f"{title}\nscore quantile")
                if block == len(blocks) - 1 and layer + columns >= layers:
                    axis.set_xlabel("Gaussian quantile" if columns <= 3 else "Gaussian")
        legend_below(figure, axes, columns=2)


def draw_line(axis, x: str, points: list[dict], look: dict):
    """Draw the means of the points against their x, with a band of +-1 standard error where there is one."""
    xs, means = [p[x] for p in points], np.array([p["mean"] for p in points], dtype=float)
    errors = np.array([p["stderr"] for p in points], dtype=float)  # None is NaN, which fill_between leaves out
    axis.plot(xs, means, **look)
    axis.fill_between(xs, means - errors, means + errors, color=look["color"], alpha=0.25, linewidth=0)

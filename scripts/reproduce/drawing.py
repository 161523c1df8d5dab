"""How figures look: one name, colour and line a method throughout, and every figure saved with the data behind it."""

import csv
import io
import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from runtime.files import replace_file

NAMES = dict(
    rope="RoPE",
    p_rope="p-RoPE",
    nope="NoPE",
    rope_ntk="RoPE+NTK",
    yarn="YaRN",
    logn_rope="LogN+RoPE",
    logn_p_rope="LogN+p-RoPE",
    logn_ntk="LogN+NTK",
    alibi="ALiBi",
    scale_invariant_p_rope="Scale-invariant p-RoPE",
    scale_invariant_rope="Scale-invariant RoPE",
    scale_invariant_nope="Scale-invariant NoPE",
    infini_rope="Infini-RoPE",
    infini_p_rope="Infini-p-RoPE",
)
OPTION_NAMES = {
    "slope_scale=1": "official slopes",
    "tau=10": "\u03c4 = 10",
    "terms=a": "a_t alone",
    "terms=m": "m_t alone",
}
# Okabe and Ito's palette and two darker tones of Tol's, which colour-blind readers can tell apart; lines differ too,
# for print in grey. Ours is black, as in the paper.
LINES = dict(
    rope=("#E69F00", "-", "o"),
    p_rope=("#56B4E9", "-", "s"),
    nope=("#999999", "-", "x"),
    rope_ntk=("#D55E00", "--", "o"),
    yarn=("#A6761D", ":", "o"),
    logn_rope=("#0072B2", "-", "^"),
    logn_p_rope=("#CC79A7", "-", "v"),
    logn_ntk=("#882255", "--", "^"),
    alibi=("#009E73", "-", "D"),
    scale_invariant_p_rope=("#000000", "-", "*"),
    scale_invariant_rope=("#555555", "--", "*"),
    scale_invariant_nope=("#555555", ":", "*"),
    infini_rope=("#332288", "-", "P"),
    infini_p_rope=("#332288", "--", "P"),
)
# Methods that are not listed take these in turn, a colour and a marker each and then the next dashes.
OTHERS = [
    (colour, dashes, marker)
    for dashes in ("-.", ":", "--")
    for colour, marker in zip(("#6699CC", "#CC6677", "#661100", "#999933", "#4B0092"), "osvD^")
]
OPEN_CIRCLE = dict(linestyle="", marker="o", markersize=3.5, markerfacecolor="white", markeredgewidth=0.7)


def method_name(method: str) -> str:
    return NAMES.get(method, method)


def looks(methods: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """Colour, line style and marker of each method; those that are not listed share no look until there are too many,
    and have the same one whatever the order of the methods."""
    others = sorted({*methods} - {*LINES})
    return LINES | {method: OTHERS[i % len(OTHERS)] for i, method in enumerate(others)}


def series(method: str, options: dict) -> str:
    """What a row or line shows, as it is called in data: the method, and the options that it was given."""
    return " ".join([method, *(f"{option}={number(options[option])}" for option in sorted(options))])


def series_name(series: str) -> str:
    method, *options = series.split(" ")
    return ", ".join([method_name(method), *(OPTION_NAMES.get(o, o.replace("=", " ")) for o in options)])


def number(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def line(series: str, beside: Iterable[str] = ()) -> dict:
    """Keyword arguments of matplotlib's plot for this line, with its name for the legend; paler with options. beside:
    all series of the figure."""
    method, *options = series.split(" ")
    colour, style, marker = looks([method, *(other.split(" ")[0] for other in beside)])[method]
    pale = dict(alpha=0.45) if options else {}
    return dict(color=colour, linestyle=style, marker=marker, label=series_name(series)) | pale


def write_csv(path: Path, rows: list[dict]):
    """The rows, dicts with the same keys, whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write(text.getvalue().encode()))


# ---- drawing ---------------------------------------------------------------------------------------------------------

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
    "pdf.fonttype": 42,  # TrueType, which publishers ask for, not Type 3
}


@contextmanager
def drawing(path: Path, rows: int, columns: int, height: float, **subplots) -> Iterator:
    """A figure over the page's width and its axes (rows, columns), saved as path.png and path.pdf at the end.

    height: inches of a row. The figure is made without pyplot, so no window system or global state is needed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(TEXT_WIDTH, height * rows + 0.45), layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **subplots)
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in ("png", "pdf"):
            figure.savefig(path.with_name(f"{path.name}.{suffix}"))


def legend_below(figure, axes, columns: int):
    """One legend for all panels, outside of them: each label once, in the order of first appearance."""
    entries = {}
    for panel in axes.flat:
        entries |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels()) if label not in entries}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, handlelength=2.6)


def draw_curves(
    path: Path, panels: list[tuple[str, list[dict]]], looks: dict, *, baseline: float | None = None, zoom: bool = False
):
    """Validation loss against the training step, one panel beside the other.

    panels: title and rows, dicts with series, step, mean, stderr (None: one seed, no band), val_tokens (where they are
    fewer than elsewhere, the mark is an open circle); looks: keyword arguments of plot by series, in the order of the
    legend. baseline: a loss to mark. zoom: a second row of panels, with the end of the training and the better half of
    the series.
    """
    full = max((row["val_tokens"] for _, rows in panels for row in rows), default=0)
    with drawing(path, 1 + zoom, len(panels), height=1.75 if zoom else 2.0) as (figure, axes):
        for row, column in itertools.product(range(1 + zoom), range(len(panels))):
            axis, (title, rows) = axes[row, column], panels[column]
            for number, (series, look) in enumerate(looks.items()):
                points = [point for point in rows if point["series"] == series]
                # Some six markers a line, not all at the same steps: they tell the lines apart in grey, hiding none.
                whole = [i for i, point in enumerate(points) if point["val_tokens"] == full]
                every = max(1, len(whole) // 6)
                look = look | dict(markevery=whole[number % every :: every])
                draw_line(axis, [point["step"] for point in points], points, look)
                part = [point for point in points if point["val_tokens"] < full]
                circles = OPEN_CIRCLE | dict(color=look["color"])
                axis.plot([point["step"] for point in part], [point["mean"] for point in part], **circles)
            if baseline is not None:
                axis.axhline(baseline, color="0.6", linestyle="--", linewidth=0.8, zorder=0)
            limit_curves(axis, rows, zoomed=row == 1)
            axis.set_title(title + (" (zoom)" if row == 1 else ""))
            if row == zoom:
                axis.set_xlabel("training step")
            if column == 0:
                axis.set_ylabel("validation loss (nats a token)")
        on_part = any(row["val_tokens"] < full for _, rows in panels for row in rows)
        if on_part:
            note = "on a part of the validation tokens"
            axes[0, 0].plot([], [], **OPEN_CIRCLE, color="0.4", label=note)
        legend_below(figure, axes, columns=4 if on_part else 5)


def limit_curves(axis, rows: list[dict], zoomed: bool):
    """Limits that leave out the first steps, which would hide all the rest; zoomed: the last fifth of the training,
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
    axis.set_xlim(first if zoomed else 0, last + 0.02 * (last - first * zoomed))
    axis.set_ylim(min(shown) - margin, max(shown) + margin)


def tau_lines(taus: list[float]) -> dict[float, dict]:
    """Lines of the lengthscales tau, from dark to light in the order of size; the colour-blind see the order too."""
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
    """Entropy, entropy in the ranges and attention on the last `local` tokens (columns) against the context length, for
    each source of rows (scheme, quantity, length, mean, stderr): independent Gaussian scores, trained models."""
    titles = ["entropy", "entropy in a range of distances", f"attention on last {local} tokens"]
    columns = [["entropy"], [f"entropy_{start}_{stop}" for start, stop in ranges], [f"attention_{local}"]]
    with drawing(path, len(sources), 3, height=1.75, sharex=True) as (figure, axes):
        for row, (source, points) in enumerate(sources.items()):
            for axis, title, quantities in zip(axes[row], titles, columns):
                for number, (scheme, (method, label)) in enumerate(SCHEMES.items()):
                    look = line(method) | (dict(markevery=(number % 2, 2)) if len(quantities) == 1 else {})
                    for quantity, style in zip(quantities, RANGE_STYLES):
                        mine = [p for p in points if (p["scheme"], p["quantity"]) == (scheme, quantity)]
                        look |= dict(linestyle=style, label=label if len(quantities) == 1 else "_")
                        draw_line(axis, [p["length"] for p in mine], mine, look)
                axis.set_xscale("log")
                axis.set_ylim(bottom=0)
                axis.set_title(title if row == 0 else "")
                if row == len(sources) - 1:
                    axis.set_xlabel("context length (tokens)")
            for (start, stop), style in zip(ranges, RANGE_STYLES):
                axes[row, 1].plot([], [], color="0.4", linestyle=style, label=f"{start:,} to {stop:,} tokens ago")
            axes[row, 0].set_ylabel(f"{source}\nentropy (nats)")
            axes[row, 1].set_ylabel("entropy (nats)")
            axes[row, 2].set_ylabel("share of attention")
        legend_below(figure, axes, columns=3)


def draw_sublog(path: Path, rows: list[dict], fits: list[dict]):
    """Expected entropy in [t, t Delta) against log t and sqrt(log t), with the best linear fits (scripts/theory.py)."""
    factors = sorted({row["factor"] for row in rows})
    colours = dict(zip(factors, ("#0072B2", "#D55E00", "#000000")))
    with drawing(path, 1, 2, height=2.1, sharey=True) as (figure, axes):
        for axis, (against, scale) in zip(axes[0], {"log t": lambda x: x, "sqrt(log t)": np.sqrt}.items()):
            for factor in factors:
                mine = [row for row in rows if row["factor"] == factor]
                x = scale(np.log([row["start"] for row in mine]))
                fit = next(f for f in fits if (f["factor"], f["against"]) == (factor, against))
                means, errors = [row["mean"] for row in mine], [row["stderr"] for row in mine]
                look = dict(color=colours[factor], label=f"$\\Delta$ = {factor}", fmt="o", elinewidth=0.8)
                axis.errorbar(x, means, errors, **look)
                axis.plot(x, fit["slope"] * x + fit["intercept"], color=colours[factor], linestyle="--", linewidth=0.8)
            axis.set_xlabel({"log t": "$\\log\\,t$", "sqrt(log t)": "$\\sqrt{\\log\\,t}$"}[against])
        axes[0, 0].set_ylabel("expected entropy in $[t, t\\Delta)$ (nats)")
        axes[0, 1].plot([], [], color="0.4", linestyle="--", linewidth=0.8, label="linear fit")
        legend_below(figure, axes, columns=4)


def draw_qq(path: Path, blocks: dict[str, list[tuple[list, list]]]):
    """Quantiles of the scores against those of a Gaussian, a panel a layer. blocks: by title (without and with
    rotation), a pair (Gaussian, sample quantiles) a layer."""
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
                gaussian, sample = points[layer]
                ends = [min(gaussian), max(gaussian)]
                axis.plot(ends, ends, color="#D00000", linewidth=0.8, label="Gaussian", zorder=1)
                axis.plot(gaussian, sample, color="#0072B2", linewidth=1.2, label="scores", zorder=2)
                axis.set_title(f"layer {layer + 1}, {title}" if columns <= 3 else f"layer {layer + 1}")
                if layer % columns == 0:
                    axis.set_ylabel("score quantile" if columns <= 3 else f"{title}\nscore quantile")
                if block == len(blocks) - 1 and layer + columns >= layers:
                    axis.set_xlabel("Gaussian quantile" if columns <= 3 else "Gaussian")
        legend_below(figure, axes, columns=2)


def draw_line(axis, x, points: list[dict], look: dict):
    """Means with a band of +-1 standard error, where there is one."""
    means = np.array([p["mean"] for p in points], dtype=float)
    errors = np.array([p["stderr"] for p in points], dtype=float)  # None is NaN, which fill_between leaves out
    axis.plot(x, means, **look)
    axis.fill_between(x, means - errors, means + errors, color=look["color"], alpha=0.25, linewidth=0)

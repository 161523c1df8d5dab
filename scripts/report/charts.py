"""The charts of the report: every run is a thin line, the mean of a group of several runs a thick one.

matplotlib draws them as SVG. Each line names its runs in the attribute data-runs, by which page.js hides it.
"""

import collections
import html
import io
import math
import re
from collections.abc import Callable, Collection, Set

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from scripts.report.reading import mean

STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # the same runs give the same page
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d0d7de",
    "lines.markersize": 5,
}
LOSS = "loss (nats a token)"
Lines = list[tuple[dict, list[tuple[dict, dict]]]]  # groups, each with its runs and their points {x: y}


def draw_charts(groups: list[dict]) -> str:
    """Return all charts as HTML; those without numbers are left out."""
    lengths = sorted({n for g in groups for run in g["runs"] for n in run["validation"]}, key=int)
    drawn = [over_tokens(groups, f"Validation loss at {n} tokens", n, "loss", ylabel=LOSS) for n in lengths]
    drawn += last_validation(groups)
    drawn.append(over_tokens(groups, "Training loss", "train", "loss", ylabel=LOSS))
    drawn.append(over_tokens(groups, "Gradient norm", "train", "grad_norm", yscale="log"))
    return "".join(drawn) or "<p>Nothing to draw yet.</p>"


def over_tokens(groups: list[dict], title: str, curve: str, column: str, **axes) -> str:
    """Return a chart of a column of the runs' curves, without the first tenth of the tokens, where losses are so high
    that they would hide the rest. curve: "train", or the length of a validation."""
    runs = [run for g in groups for run in g["runs"]]
    start = 0.1 * max(run["tokens"] for run in runs)

    def points(run: dict, column: str) -> dict:
        values = run["train"] if curve == "train" else run["validation"].get(curve, {})
        return {x: y for x, y in zip(values.get("tokens", ()), values.get(column, ())) if x >= start}

    lines = [(g, [(run, points(run, column)) for run in g["runs"]]) for g in groups]
    on_part = {(run["index"], x) for run in runs for x, part in points(run, "part").items() if part}
    return draw_chart(title, lines, marks=curve != "train", on_part=on_part, xlabel="tokens trained on", **axes)


def last_validation(groups: list[dict]) -> list[str]:
    """Return the charts of the last validation: of the finished runs or, before any is finished, of those of each group
    that came furthest."""
    runs = [run for g in groups for run in g["runs"]]
    finished = any(run["state"] == "finished" for run in runs)
    ends = []
    for g in groups:
        last = [run for run in g["runs"] if run["final"] and (run["state"] == "finished" or not finished)]
        furthest = max((run["final"]["step"] for run in last), default=None)
        ends.append((g, [run for run in last if run["final"]["step"] == furthest]))
    longest = max((n for _, last in ends for run in last for n in run["final"]["val_loss"]), key=int, default=None)
    trained = {run["config"].train_length for run in runs if run["config"]}
    parts = {math.log2(length) + 0.5 for length in trained}  # between the ranges of positions that it parts
    when = "Last validation" if finished else "Last validation of unfinished runs"

    def chart(title: str, points: Callable[[dict], dict], tick_text=str, upright=(), **axes) -> str:
        lines = [(g, [(run, points(run["final"])) for run in last]) for g, last in ends]
        return draw_chart(f"{when}: {title}", lines, tick_text=tick_text, upright=upright, **axes)

    def by_length(final: dict) -> dict:
        return {int(length): loss for length, loss in final["val_loss"].items()}

    def by_position(final: dict) -> dict:
        return dict(enumerate(final.get("val_loss_by_position", {}).get(longest, ())))

    def by_layer(key: str) -> Callable[[dict], dict]:
        return lambda final: dict(enumerate(final.get(key, ())))

    lengths = dict(xlabel="validation length (tokens)", ylabel=LOSS, xscale="log", upright=trained)
    positions = dict(xlabel="position (tokens), each range by its first", ylabel=LOSS, upright=parts)
    positions["tick_text"] = lambda k: str(k and 2 ** (k - 1))
    return [
        chart("loss against length", by_length, **lengths),
        chart("loss by position in the longest sequences", by_position, **positions),
        chart("mean of the attention scores", by_layer("scores_mean"), xlabel="layer"),
        chart("standard deviation of the attention scores", by_layer("scores_std"), xlabel="layer"),
    ]


def draw_chart(
    title: str,
    lines: Lines,
    marks: bool = True,
    on_part: Set[tuple[int, float]] = frozenset(),
    upright: Collection[float] = (),
    tick_text: Callable[[float], str] | None = None,
    **axes,
) -> str:
    """Return a chart as HTML, "" if there is nothing to draw.

    marks: draw the points on the lines. on_part: run and x of the losses on a part of the validation tokens, which are
    open circles. upright: training lengths; a single one is marked. tick_text: the text below each x; None: they are
    numbers of tokens. axes: arguments of axis.set.
    """
    lines = [(g, [(run, finite) for run, points in runs if (finite := mean_points([points]))]) for g, runs in lines]
    xs = sorted({x for _, runs in lines for _, points in runs for x in points})
    if not xs:
        return ""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.2))
        axis = figure.add_axes((0.11, 0.15, 0.88, 0.82))
        axis.set(**axes)
        names = {}
        for g, runs in lines:
            names |= plot_group(axis, g, runs, marks, on_part) if runs else {}
        for x in upright if len(upright) == 1 else ():
            if xs[0] <= x <= xs[-1]:
                axis.axvline(x, color="0.5", linestyle=":")
                axis.text(x, 1, " training length", transform=axis.get_xaxis_transform(), va="top", fontsize=8)
        if tick_text:
            ticks = xs[:: 1 + len(xs) // 14]  # so few that their texts do not overlap
            axis.set_xticks(ticks, map(tick_text, ticks))
            axis.minorticks_off()
        else:
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        if axis.get_yscale() == "log":
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.minorticks_off()
        return f"<figure><figcaption>{title}</figcaption>{to_svg(figure, names)}</figure>"


def plot_group(axis, g: dict, runs: list[tuple[dict, dict]], marks: bool, on_part: Set) -> dict[str, str]:
    """Plot the lines of a group's runs, if there are several, and of their mean; the arguments are draw_chart's. Return
    the name of each line, by the runs that it is of."""
    names = {}

    def plot(of: list[dict], points: dict, name: str, **look):
        identity = " ".join(str(run["index"]) for run in of)
        names[identity] = name
        look = dict(linestyle=g["dash"], color=g["color"], alpha=g["opacity"]) | look
        axis.plot(points.keys(), points.values(), gid=f"runs {identity}", **look)

    for run, points in runs if len(runs) > 1 else ():
        plot([run], points, run["name"], linewidth=0.5)
    of_all, means = [run for run, _ in runs], mean_points([points for _, points in runs])
    marked = list(means)[:: max(1, len(means) // 10)] if marks else []
    part = {x: means[x] for x in marked if any((run["index"], x) in on_part for run in of_all)}
    full = [i for i, x in enumerate(means) if x in marked and x not in part]
    plot(of_all, means, g["label"], marker=g["marker"], markevery=full)
    plot(of_all, part, g["label"], linestyle="", marker="o", markerfacecolor="white")
    return names


def mean_points(lines: list[dict]) -> dict:
    """Return the points {x: y} of the mean of the lines, at each x of those that have a finite number there."""
    at = collections.defaultdict(list)
    for points in lines:
        for x, y in points.items():
            at[x].append(y)
    means = {x: mean(at[x]) for x in sorted(at)}
    return {x: y for x, y in means.items() if y is not None}


def draw_swatch(g: dict) -> str:
    """Return the line and mark of a group, as in a legend."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.4, 0.16))
        axis = figure.add_axes((0, 0, 1, 1))
        axis.axis("off")
        look = dict(color=g["color"], linestyle=g["dash"], alpha=g["opacity"], marker=g["marker"])
        axis.plot(range(3), [0] * 3, markevery=[1], **look)
        return to_svg(figure, {}).replace("<svg", '<svg class="swatch" aria-hidden="true"')


def to_svg(figure: Figure, names: dict[str, str]) -> str:
    """Return the figure as an <svg> element, in which the line with the gid "runs 0 2" has them as data-runs, and its
    name as a title, which shows when pointed at."""

    def line(match: re.Match) -> str:
        return f'<g data-runs="{match[1]}"><title>{html.escape(names[match[1]])}</title>'

    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg)  # it would be of the whole page
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # they would be several times in the page
    svg = re.sub(r"(\.\d)\d{2,}", r"\1", svg)  # a tenth of a point is enough
    return re.sub(r'<g id="runs ([\d ]+)">', line, svg)

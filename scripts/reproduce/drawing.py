"""Draw figures with matplotlib: panels of lines. The callers decide what the lines show."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from files import replace_file

TEXT_WIDTH = 6.75  # inches: what a figure over the full width of the page has
STYLE = {
    "font.size": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.1,
    "lines.markersize": 3,
    "legend.frameon": False,
    "savefig.dpi": 200,
}


class Line(NamedTuple):
    """Holds a line of a panel. look: keyword arguments of matplotlib's plot."""

    look: dict
    xs: Sequence[float]
    means: Sequence[float]
    errors: Sequence[float | None] = ()  # standard errors; None where there is one seed


class Panel(NamedTuple):
    """Holds a panel of a figure. axes: keyword arguments of matplotlib's Axes.set."""

    title: str
    lines: list[Line]
    axes: dict = {}


def row_lines(rows: Iterable[dict], by: str, x: str, looks: dict) -> list[Line]:
    """Return a line for each value of column `by` in looks: the means of its rows against column x."""
    found = {key: [row for row in rows if row[by] == key] for key in looks}
    columns = {key: [[row[name] for row in mine] for name in (x, "mean", "stderr")] for key, mine in found.items()}
    return [Line(looks[key], *columns[key]) for key in looks if found[key]]


def draw_panels(
    path: Path,
    grid: list[list[Panel]],
    *,
    x: str,
    y: str,
    log: int | None = None,
    height: float = 2.2,
    bands: bool = False,
    **subplots,
):
    """Draw rows of panels over the page's width, with one legend below, and write path.png.

    x: label below the last row. y: label beside the first column. log: base of a logarithmic x. height: inches of a
    row. bands: show standard errors as bands instead of bars. subplots: for Figure.subplots.
    """
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot, which keeps global state

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(TEXT_WIDTH, height * len(grid) + 0.45), layout="constrained")
        axes = figure.subplots(len(grid), max(map(len, grid)), squeeze=False, **subplots)
        for row, panels in zip(axes, grid):
            for axis in row[len(panels) :]:
                axis.remove()
            for axis, panel in zip(row, panels):
                draw_lines(axis, panel.lines, bands)
                if log:
                    axis.set_xscale("log", base=log)
                if log == 2:
                    axis.xaxis.set_major_formatter("{x:.0f}")
                labels = dict(xlabel=x if panels is grid[-1] else "", ylabel="" if axis in axes[:, 1:] else y)
                axis.set(title=panel.title, **labels | panel.axes)
        legend_below(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path.with_name(f"{path.name}.png"), lambda file: figure.savefig(file, format="png"))


def draw_lines(axis, lines: list[Line], bands: bool):
    """Draw the lines on matplotlib's axes."""
    for look, xs, means, errors in lines:
        if bands or not errors:
            (line,) = axis.plot(xs, means, **look)
        else:
            axis.errorbar(xs, means, [error or 0 for error in errors], elinewidth=0.8, **look)
        if bands and errors:
            means, errors = np.array(means, float), np.array(errors, float)  # None is NaN, which has no band
            axis.fill_between(xs, means - errors, means + errors, color=line.get_color(), alpha=0.25, linewidth=0)


def legend_below(figure):
    """Add one legend for all panels below them: each label once, in the order of first appearance."""
    entries = {}
    for axis in figure.axes:
        entries |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels()) if label not in entries}
    widest = 0.6 + 0.06 * max(map(len, entries))  # inches of an entry
    columns = max(1, int(TEXT_WIDTH / widest))
    figure.legend(entries.values(), entries.keys(), ncols=columns, loc="outside lower center", handlelength=2.6)

"""Draw figures with matplotlib: a grid of panels with lines."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from files import replace_file

TEXT_WIDTH = 6.75  # inches, the full width of a page
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
    """A line of a panel. look: keyword arguments of matplotlib's plot."""

    look: dict
    xs: Sequence[float]
    means: Sequence[float]
    errors: Sequence[float | None] = ()  # standard errors; None for one seed


class Panel(NamedTuple):
    """A panel of a figure. axes: keyword arguments of matplotlib's Axes.set."""

    title: str
    lines: list[Line]
    axes: dict = {}
    train_length: int | None = None  # tokens; marked on the x axis


def row_lines(rows: list[dict], by: str, x: str, looks: dict) -> list[Line]:
    """Return a line per key of looks: column "mean" against column x, of the rows with this key in column `by`."""
    lines = []
    for key, look in looks.items():
        found = [(row[x], row["mean"], row["stderr"]) for row in rows if row[by] == key]
        if found:
            lines.append(Line(look, *map(list, zip(*found))))
    return lines


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
    """Draw rows of panels with one legend below them. Write path.png.

    x: label of the last row. y: label of the first column. log: base of a logarithmic x axis. height: inches per row.
    bands: show standard errors as bands instead of bars. subplots: arguments of Figure.subplots.
    """
    import matplotlib
    from matplotlib.figure import Figure  # pyplot would keep global state

    with matplotlib.rc_context(STYLE):
        # 1. The panels.
        figure = Figure(figsize=(TEXT_WIDTH, height * len(grid) + 0.45), layout="constrained")
        axes = figure.subplots(len(grid), max(map(len, grid)), squeeze=False, **subplots)
        for row, panels in zip(axes, grid):
            for axis in row[len(panels) :]:
                axis.remove()
            for axis, panel in zip(row, panels):
                draw_lines(axis, panel.lines, bands)
                if panel.train_length:
                    axis.axvline(panel.train_length, color="0.6", linestyle=":", label="training length")
                if log:
                    axis.set_xscale("log", base=log)
                if log == 2:
                    axis.xaxis.set_major_formatter("{x:.0f}")
                labels = {"xlabel": x if panels is grid[-1] else "", "ylabel": "" if axis in axes[:, 1:] else y}
                axis.set(title=panel.title, **labels | panel.axes)

        # 2. The legend and the file.
        legend_below(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path.with_name(f"{path.name}.png"), lambda file: figure.savefig(file, format="png"))


def draw_lines(axis, lines: list[Line], bands: bool):
    """Draw the lines on matplotlib's axes."""
    for look, xs, means, errors in lines:
        if errors and not bands:
            axis.errorbar(xs, means, [error or 0 for error in errors], elinewidth=0.8, **look)
            continue
        (line,) = axis.plot(xs, means, **look)
        if errors:
            means, errors = np.array((means, errors), float)  # None is NaN, which has no band
            axis.fill_between(xs, means - errors, means + errors, color=line.get_color(), alpha=0.25, linewidth=0)


def legend_below(figure):
    """Add one legend below all panels. It has each label once, in the order of first appearance."""
    entries = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    longest = max(map(len, entries), default=0)  # letters
    columns = max(1, int(TEXT_WIDTH / (0.6 + 0.054 * longest)))
    rows = math.ceil(len(entries) / columns)
    figure.set_figheight(figure.get_figheight() + 0.16 * max(0, rows - 2))
    figure.legend(entries.values(), entries.keys(), ncols=columns, loc="outside lower center", handlelength=2.6)

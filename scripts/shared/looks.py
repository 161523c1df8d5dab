"""Names, colours and line styles of the methods, the same in every figure and page.

looks.csv has a row for each method, each mechanism in a sum such as p_rope+forget+gate, and each option with a name of
its own. The methods of the paper have a colour, a line style and a marker in matplotlib's notation. Colour-blind
readers can tell the colours apart: they are the palette of Okabe and Ito, and two darker tones of Tol's. Line styles
differ too, for print in grey.
"""

import csv
import functools
import itertools
from collections.abc import Iterable
from pathlib import Path

from configs.config import Config

LOOK = ("color", "linestyle", "marker")  # arguments of matplotlib's plot
# Other methods, and methods with options, take these styles in turn.
OTHERS = [
    (colour, dashes, marker)
    for dashes in ("-.", ":", "--")
    for colour, marker in zip(("#6699CC", "#CC6677", "#661100", "#999933", "#4B0092"), "osvD^")
]


@functools.cache
def named() -> dict:
    """Return the rows of looks.csv by method, mechanism or option, in the order of the tables."""
    with open(Path(__file__).with_name("looks.csv"), newline="", encoding="utf-8") as file:
        return {row["label"]: row for row in csv.DictReader(file)}


def name_of(label: str, otherwise: str) -> str:
    return named()[label]["name"] if label in named() else otherwise


def method_name(method: str) -> str:
    """Return the name of a method in tables and legends."""
    layers = [(layer, len([*same])) for layer, same in itertools.groupby(method.split(","))]
    return "; ".join((f"{count} x " if count > 1 else "") + layer_name(layer) for layer, count in layers)


def layer_name(layer: str) -> str:
    first, *others = layer.split("+")
    prefix = "Scale-invariant " if "scale_invariant" in others else ""
    parts = [first, *(part for part in others if part != "scale_invariant")]
    return prefix + ", ".join(name_of(part, part) for part in parts)


def series_label(config: Config, method: str | None = None) -> str:
    """Return a run's label in data files: its method (or one of validate_as), then OPTION=VALUE for each option."""
    options = (f"{option}={plain_number(value)}" for option, value in sorted(config.method_options.items()))
    return " ".join([method or config.method, *options])


def series_name(series: str) -> str:
    """Return the name in tables and legends of a series (see series_label)."""
    method, *options = series.split(" ")
    return ", ".join([method_name(method), *map(option_name, options)])


def option_name(option: str) -> str:
    name, value = option.split("=", maxsplit=1)
    shown = {"tau": f"\u03c4 = {value}", "slope_scale": f"slopes \u00d7 {value}"}.get(name, f"{name} {value}")
    return name_of(option, shown)


def plain_number(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def plot_styles(shown: Iterable[str]) -> dict:
    """Return the arguments of matplotlib's plot by series or method. Their order in a figure has no effect.

    The first series of a method, by alphabet, looks like the method if the method itself is not shown.
    """
    # 1. The series that look like a method.
    shown = [*shown]
    of_paper = {method: [row[key] for key in LOOK] for method, row in named().items() if row["color"]}
    lines = dict(of_paper)
    for method, look in of_paper.items():
        forms = [series for series in shown if series.split(" ")[0] == method]
        if forms:
            lines[min(forms)] = look

    # 2. The others.
    others = [series for series in sorted({*shown}) if series not in lines]
    lines |= dict(zip(others, itertools.cycle(OTHERS)))
    return {series: dict(zip(LOOK, lines[series])) | {"label": series_name(series)} for series in shown}

"""The paper's own numbers, which stand beside ours."""

import collections
import csv
import math
from pathlib import Path

from scripts.reproduce.study import short
from scripts.shared.looks import series_name


def paper_targets(table: str) -> dict[tuple[str, int], dict]:
    """Return the paper's numbers of one table by method and validation length: mean, stderr and seeds (None where it
    has none), note, and what is odd about the number, in words (remark)."""

    def number(text: str, kind: type):
        return kind(text) if text else None

    with open(Path(__file__).with_name("paper_targets.csv"), newline="") as file:
        return {
            (row["method"], int(row["val_length"])): dict(
                mean=float(row["mean"]),
                stderr=number(row["stderr"], float),
                seeds=number(row["seeds"], int),
                note=row["note"],
                remark=row["remark"],
            )
            for row in csv.DictReader(file)
            if row["table"] == table
        }


def paper_column(length: int, ratio: float, targets: dict[str, dict]) -> dict[str, dict]:
    """Return one column, {head: {method: cell}}. targets: the paper's numbers at this length by method."""
    cells = {}
    for method, target in targets.items():
        stderr = f" \u00b1 {target['stderr']:.3f}" if target["stderr"] is not None else ""
        cell = f"{target['mean']:.3f}{stderr}"
        cells[method] = f"**{cell}**" if "bold" in target["note"] else cell
    return {f"paper {short(length)} ({ratio:g}x)": cells}


def difference_column(length: int, ours: dict[str, tuple], targets: dict[str, dict]) -> dict[str, dict]:
    """Return one column, {head: {method: cell}}: our means minus the paper's, and in units of the standard error."""
    cells = {}
    for method, (mean, stderr) in ours.items():
        target, distance = targets.get(method), in_stderrs((mean, stderr), targets.get(method))
        units = "n/a" if distance is None else f"{distance:+.1f}"
        cells[method] = f"{mean - target['mean']:+.3f} ({units})" if target and mean is not None else ""
    return {f"difference at {short(length)} (s.e.)": cells}


def in_stderrs(ours: tuple, target: dict | None) -> float | None:
    """Return the difference to the paper's mean in units of the combined standard error; None where there is none.

    ours: mean and standard error.
    """
    mean, stderr = ours
    if target is None or stderr is None or target["stderr"] is None:
        return None
    combined = math.hypot(stderr, target["stderr"])
    return (mean - target["mean"]) / combined if combined else None


def remarks(paper: dict, methods: list[str]) -> dict[str, list[str]]:
    """Return what is odd about the paper's numbers, with the names of the methods that it is odd of."""
    found = collections.defaultdict(dict)
    for (method, _), target in paper.items():
        if target["remark"] and method in methods:
            found[target["remark"]][series_name(method)] = None
    return {remark: list(names) for remark, names in found.items()}

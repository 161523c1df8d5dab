"""Makes Markdown tables of results, and computes the numbers in their cells."""

import statistics
from collections.abc import Callable, Iterable

from scipy import stats


def loss_table(results: list[dict]) -> str:
    """Return a table with one row for each run: name, loss at each length, and rise of the loss.

    The rise is the loss at the longest length minus the loss at the shortest.
    results: dicts with name, train_length (tokens) and val_loss {length: nats a token}."""
    lengths = sorted({int(length) for r in results for length in r["val_loss"]})
    train_length, *others = {r["train_length"] for r in results}
    columns = {str(n): str(n) if others else f"{n} ({n / train_length:g}x)" for n in lengths}
    first, last = str(lengths[0]), str(lengths[-1])
    lines = []
    for r in results:
        losses = r["val_loss"]
        cells = {length: f"{loss:.3f}" for length, loss in losses.items()}
        if {first, last} <= losses.keys():
            cells["rise"] = f"{losses[last] - losses[first]:+.3f}"
        lines.append(([r["name"]], cells))
    return pivot_table(["run"], lines, columns | {"rise": f"{last} - {first}"})


def markdown_table(rows: list[list[str]]) -> str:
    """Return the rows as a table. The first row is the head. The first column is text, the others are numbers."""
    first_width, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths)]
        lines.append(" | ".join(["", first.ljust(first_width), *cells, ""]).strip())
    rules = ["-" * (width + 1) + ":" for width in widths]
    lines.insert(1, "|".join(["", "-" * (first_width + 2), *rules, ""]))
    return "\n".join(lines)


def pivot_table(heads: list[str], lines: Iterable[tuple], columns: dict) -> str:
    """Return a table with a row for each line. A line has a list of left cells, and a dict {key: cell} of right cells.

    heads: headers of the left columns. columns: {key: header} of the right columns. A missing cell is empty."""
    body = [[*left, *(right.get(key, "") for key in columns)] for left, right in lines]
    return markdown_table([[*heads, *columns.values()], *body])


def summarise(samples: dict, *names: str) -> list[dict]:
    """Return a dict for each key: the key's parts under `names`, mean, stderr, and the sample size under "seeds"."""
    rows = []
    for key, values in samples.items():
        row = zip((*names, "mean", "stderr", "seeds"), (*key, *mean_and_stderr(values), len(values)))
        rows.append(dict(row))
    return rows


def mean_and_stderr(values: list[float]) -> tuple:
    """Return mean and standard error, sd / sqrt(n) with n - 1 in the variance. Each is None for too few values."""
    mean = statistics.fmean(values) if values else None
    return mean, float(stats.sem(values)) if len(values) > 1 else None


def format_mean(mean: float | None, stderr: float | None) -> str:
    """Return the cell "mean ± standard error", as in the paper, with "n/a" for a missing standard error."""
    return "" if mean is None else f"{mean:.3f} \u00b1 {'n/a' if stderr is None else f'{stderr:.3f}'}"


def mean_cells(numbers: dict, best: Callable = min) -> dict:
    """Return the cells of (mean, stderr) pairs. The best printed mean is bold, ties included."""
    printed = {key: round(mean, 3) for key, (mean, _) in numbers.items() if mean is not None}
    cells = {key: format_mean(*pair) for key, pair in numbers.items()}
    for key, mean in printed.items():
        if mean == best(printed.values()):
            cells[key] = f"**{cells[key]}**"
    return cells

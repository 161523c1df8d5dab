"""Makes Markdown tables of results, and computes the numbers in their cells."""

import math
import statistics
from collections.abc import Callable, Iterable


def loss_table(results: list[dict]) -> str:
    """Return a table with a row a run: name, validation loss (nats a token) at each length, and longest - shortest.

    results: dicts with name, train_length and val_loss {length: nats}."""
    lengths = sorted({int(length) for r in results for length in r["val_loss"]})
    base = results[0]["train_length"]
    same_base = all(r["train_length"] == base for r in results)
    heads = [f"{n} ({n / base:g}x)" if same_base else str(n) for n in lengths]
    rows = [["run", *heads, f"{lengths[-1]} - {lengths[0]}"]]
    for r in results:
        loss = {int(length): value for length, value in r["val_loss"].items()}
        rise = f"{loss[lengths[-1]] - loss[lengths[0]]:+.3f}" if {lengths[0], lengths[-1]} <= loss.keys() else ""
        rows.append([r["name"], *(f"{loss[n]:.3f}" if n in loss else "" for n in lengths), rise])
    return markdown_table(rows)


def markdown_table(rows: list[list[str]]) -> str:
    """Return the rows as a table. The first row is the head. The first column is text, the others are numbers."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [[row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], others))] for row in rows]
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    rule = "|".join(["", "-" * (first + 2), *("-" * (width + 1) + ":" for width in others), ""])
    return "\n".join([head, rule, *body])


def pivot_table(heads: list[str], lines: Iterable[tuple[list[str], dict]], columns: dict) -> str:
    """Return a table of the lines. A line is a list of its first cells, and a dict of its other cells by column.

    heads: column heads of the first cells. columns: heads of the other columns, by column.
    """
    body = [[*first, *(cells.get(column, "") for column in columns)] for first, cells in lines]
    return markdown_table([[*heads, *columns.values()], *body])


def summarise(samples: dict[tuple, list[float]], *names: str, count: str = "seeds") -> list[dict]:
    """Return a row for each key of the samples: the key's parts by name, then mean, stderr, and the count."""
    rows = []
    for key, values in samples.items():
        mean, stderr = mean_and_stderr(values)
        rows.append(dict(zip(names, key)) | {"mean": mean, "stderr": stderr, count: len(values)})
    return rows


def mean_and_stderr(values: list[float]) -> tuple[float | None, float | None]:
    """Return mean and standard error, sd / sqrt(n) with n - 1 in the variance. None: too few values."""
    if not values:
        return None, None
    n, mean = len(values), statistics.fmean(values)
    # A loss that is not finite must give NaN, so statistics.stdev, which raises, cannot be used.
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n) if n > 1 else None


def format_mean(mean: float | None, stderr: float | None) -> str:
    """Return the cell "mean ± standard error", as in the paper, with "n/a" for a missing standard error."""
    if mean is None:
        return ""
    return f"{mean:.3f} \u00b1 " + ("n/a" if stderr is None else f"{stderr:.3f}")


def mean_cells(numbers: dict, best: Callable = min) -> dict:
    """Return the cells of (mean, stderr) pairs. The best printed mean is bold, ties included."""
    printed = {key: round(mean, 3) for key, (mean, _) in numbers.items() if mean is not None}
    winners = {key for key in printed if printed[key] == best(printed.values())}
    cells = {key: format_mean(*pair) for key, pair in numbers.items()}
    return {key: f"**{cell}**" if key in winners else cell for key, cell in cells.items()}

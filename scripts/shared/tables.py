"""Tables of results, as Markdown, and the paper's own numbers."""

import csv
import math
import statistics
from pathlib import Path


def loss_table(results: list[dict]) -> str:
    """One row a run: its name and the validation loss (nats a token) at each length, and how far it rises from the
    training length to the longest. results: dicts with name, train_length and val_loss {length: nats}."""
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
    """The first row is the head; the first column is text, the others are numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    pad = lambda row: (
        "| " + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths)))
    )
    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    head, *body = (pad(row) + " |" for row in rows)
    return "\n".join([head, rule, *body])


def mean_and_stderr(values: list[float]) -> tuple[float | None, float | None]:
    """Mean and standard error, sd / sqrt(n) with n - 1 in the variance; None for what too few values do not have."""
    if not values:
        return None, None
    n, mean = len(values), statistics.fmean(values)
    # Not statistics.stdev, which refuses NaN: a loss that is not finite gives NaN here.
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n) if n > 1 else None


def pm(mean: float | None, stderr: float | None) -> str:
    """A cell: mean and standard error as the paper prints them; "n/a" for a standard error that there is not."""
    if mean is None:
        return ""
    return f"{mean:.3f} \u00b1 " + ("n/a" if stderr is None else f"{stderr:.3f}")


def bold(cells: dict[str, str], means: dict[str, float | None], best=min) -> dict[str, str]:
    """The cells, those whose mean is the best as printed in bold, ties included."""
    printed = {key: round(mean, 3) for key, mean in means.items() if mean is not None}
    winners = {key for key in printed if printed[key] == best(printed.values())}
    return {key: f"**{cell}**" if key in winners else cell for key, cell in cells.items()}


def paper_targets(table: str) -> dict[tuple[str, int], dict]:
    """The paper's numbers of one table by method and validation length: mean, stderr and seeds (None where it has
    none), note, and what is odd about the number, in words (remark)."""
    number = lambda text, kind: kind(text) if text else None
    with open(Path(__file__).parents[1] / "reproduce" / "paper_targets.csv", newline="") as file:
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

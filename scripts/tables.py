"""Tables of results, as Markdown."""


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

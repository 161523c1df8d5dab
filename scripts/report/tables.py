"""The tables of the report, as HTML."""

import collections
import html
from pathlib import Path

from scripts.report.chart import swatch
from scripts.report.groups import method
from scripts.report.reading import by_number
from scripts.shared.looks import method_name
from scripts.shared.run_files import val_tokens


def overview(runs: list[dict], groups: list[dict]) -> str:
    """Return the table of all runs, which page.js makes sort and filter."""
    lengths = by_number({n for run in runs for n in run["final"].get("val_loss", {})})
    needles = by_number({n for run in runs for n in run["needle"]})
    heads = ["run", "method", "state", "seed", "train length", "steps", *(f"loss at {n}" for n in lengths), "rise"]
    heads += [*(f"needle at {n}" for n in needles), "tokens", "parameters", "tokens/s"]
    rows = []
    for run in runs:
        g, config, loss = groups[run["group"]], run["config"], run["final"].get("val_loss", {})
        late = "" if run["state"] == "finished" else f"*at step {run['final'].get('step')}"
        cells = [
            cell(method_name(method(run)), method(run)),
            cell(run["state"], run["state"]),
            number(config and config.seed, "d"),
            number(config and config.train_length, ",d"),
            cell(f"{run['step']:,} / {config.steps:,}" if config else f"{run['step']:,}", run["step"], "n"),
            *(number(loss.get(n), ".4f", late) for n in lengths),
            number(rise(loss), "+.4f", late),
            *(number(run["needle"].get(n), ".1%") for n in needles),
            number(run["tokens"], ",.0f"),
            number(run["parameters"], ",.0f"),
            number(run["rate"], ",.0f"),
        ]
        rows.append(
            f'<tr><td class="pick"></td><th scope="row" data-value="{html.escape(run["name"])}">'
            f"{swatch(g)} {html.escape(run['name'])}</th>{''.join(cells)}</tr>"
        )
    head = "".join(f'<th scope="col">{head.replace(" ", "<br>", 1)}</th>' for head in heads)
    return (
        f'<table id="runs"><thead><tr><td class="pick">shown</td>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def other_texts(runs: list[dict], groups: list[dict]) -> str:
    """Return the losses on other text than the runs' own (`scripts.evaluate --data`), one column a text, number of
    tokens of it and length; "" if there are none. Different texts in folders of one name show their fingerprints."""
    cells = {}  # (folder's name, fingerprint, tokens, length): by run, the loss and the step if that is not the last
    for index, run in enumerate(runs):
        for fingerprint, found in run["other_texts"].items():
            step = int(found["step"].removeprefix("step_"))
            late = "" if step == run["final"].get("step") else f"*at step {step}"
            for length, tokens in val_tokens(found).items():
                key = Path(found["data"]).name, fingerprint, tokens, int(length)
                cells.setdefault(key, {})[index] = found["val_loss"][length], late
    if not cells:
        return ""
    columns = sorted(cells)
    names = collections.Counter(name for name, _ in {(key[0], key[1]) for key in columns})
    heads = []
    for name, fingerprint, tokens, length in columns:
        mark = f" ({fingerprint[:6]})" if names[name] > 1 else ""
        heads.append(f"{html.escape(name)}{mark}<br>{tokens:,} tokens<br>loss at {length}")
    rows = [
        (run, "".join(number(loss, ".4f", late) for loss, late in (cells[c].get(i, (None, "")) for c in columns)))
        for i, run in enumerate(runs)
        if run["other_texts"]
    ]
    return section("texts-head", "Losses on other text", ["run", *heads], rows, groups)


def as_others(runs: list[dict], groups: list[dict]) -> str:
    """Return the losses of the runs' weights run as methods that train identically (validate_as), one row a run and
    method; "" if there are none."""
    shown = [
        (run, other, {n: loss for n, loss in losses.items() if n in run["final"]["val_loss"]})
        for run in runs
        for other, losses in run["final"].get("val_loss_as", {}).items()
    ]
    lengths = by_number({n for _, _, losses in shown for n in losses})
    if not lengths:
        return ""
    rows = [
        (run, cell(method_name(other), other) + "".join(number(losses.get(n), ".4f") for n in lengths))
        for run, other, losses in shown
    ]
    heads = ["run", "run as", *(f"loss at {n}" for n in lengths)]
    return section("as-head", "The same weights as other methods", heads, rows, groups)


def section(name: str, title: str, heads: list[str], rows: list[tuple[dict, str]], groups: list[dict]) -> str:
    """Return a section with a table. name: the id of its heading; rows: of a run each, with their cells as HTML."""
    head = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{swatch(groups[run["group"]])} {html.escape(run["name"])}</th>{cells}</tr>'
        for run, cells in rows
    )
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title.lower()}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def rise(loss: dict) -> float | None:
    """Return how much higher the loss is at the longest validation length than at the shortest, in nats."""
    ends = [loss[length] for length in by_number(loss)]
    return ends[-1] - ends[0] if len(ends) > 1 and None not in (ends[0], ends[-1]) else None


def cell(text: str, value, kind: str = "") -> str:
    attributes = f' class="{kind}"' if kind else ""
    return f'<td{attributes} data-value="{html.escape(str(value))}">{html.escape(text)}</td>'


def number(value: float | None, form: str, note: str = "") -> str:
    """Return a cell, sorted by its value. Of the note, as in "*at step 5", the first letter is there, and the rest
    shows when pointed at."""
    if value is None:
        return '<td class="n"></td>'
    mark = f'<abbr title="{html.escape(note[1:])}">{note[0]}</abbr>' if note else ""
    return f'<td class="n" data-value="{value!r}">{value:{form}}{mark}</td>'


def configs(runs: list[dict]) -> str:
    """Return the fields in which the runs differ, one row a run, and those that they have in common, folded."""
    known = [run for run in runs if run["config"]]
    fields = [f for f in dict.fromkeys(f for run in known for f in run["fields"]) if f not in ("name", "runs_dir")]
    values = {f: [run["fields"].get(f) for run in known] for f in fields}
    differ = [f for f in fields if any(value != values[f][0] for value in values[f])]
    head = "".join(f'<th scope="col">{html.escape(f)}</th>' for f in ("run", *differ))
    rows = "".join(
        f'<tr><th scope="row">{html.escape(run["name"])}</th>'
        + "".join(f"<td>{plain(run['fields'].get(f))}</td>" for f in differ)
        + "</tr>"
        for run in known
    )
    common = "".join(
        f"<tr><th>{html.escape(f)}</th><td>{plain(values[f][0])}</td></tr>" for f in fields if f not in differ
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"<details><summary>the {len(fields) - len(differ)} fields that all have in common</summary>"
        f"<table><tbody>{common}</tbody></table></details>"
    )


def plain(value) -> str:
    """Return a field's value as HTML."""
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return "" if value is None else html.escape(text)

"""The tables of the report, as HTML. A row is a list of cells, each made by one of the functions below."""

import collections
import html
from pathlib import Path

from scripts.report.reading import sort_lengths
from scripts.shared.looks import method_name
from scripts.shared.run_files import val_tokens


def overview(runs: list[dict]) -> str:
    """Return the table of all runs, which page.js makes sort and filter."""
    lengths = sort_lengths({n for run in runs for n in run["final"].get("val_loss", {})})
    needles = sort_lengths({n for run in runs for n in run["needle"]})
    heads = ["run", "method", "state", "seed", "train length", "steps", *(f"loss at {n}" for n in lengths), "rise"]
    heads += [*(f"needle at {n}" for n in needles), "tokens", "parameters", "tokens/s"]
    rows = []
    for run in runs:
        config, loss = run["config"], run["final"].get("val_loss", {})
        late = "" if run["state"] == "finished" else f"at step {run['final'].get('step')}"
        row = [run_head(run, chooses=True), text_cell(method_name(run["method"])), text_cell(run["state"])]
        row += [number_cell(config and config.seed, "d"), number_cell(config and config.train_length, ",d")]
        row.append(number_cell(run["step"], ",d", behind=f" / {config.steps:,}" if config else ""))
        row += [*(number_cell(loss.get(n), ".4f", late) for n in lengths), number_cell(rise(loss), "+.4f", late)]
        row += [number_cell(run["needle"].get(n), ".1%") for n in needles]
        row += [number_cell(run[key], ",.0f") for key in ("tokens", "parameters", "rate")]
        rows.append(row)
    return table([head.replace(" ", "<br>", 1) for head in heads], rows, ' id="runs"')


def rise(loss: dict) -> float | None:
    """Return how much higher the loss is at the longest validation length than at the shortest, in nats."""
    ends = [loss[length] for length in sort_lengths(loss)]
    return ends[-1] - ends[0] if len(ends) > 1 and None not in (ends[0], ends[-1]) else None


def other_texts(runs: list[dict]) -> str:
    """Return the losses on other text than the runs' own (`scripts.evaluate --data`), one column a text, number of
    tokens of it and length; "" if there are none. Different texts in folders of one name show their fingerprints."""
    cells = {}  # (folder's name, fingerprint, tokens, length): by run, the loss and the step if that is not the last
    for index, run in enumerate(runs):
        for fingerprint, found in run["other_texts"].items():
            step = int(found["step"].removeprefix("step_"))
            late = "" if step == run["final"].get("step") else f"at step {step}"
            for length, tokens in val_tokens(found).items():
                key = Path(found["data"]).name, fingerprint, tokens, int(length)
                cells.setdefault(key, {})[index] = number_cell(found["val_loss"][length], ".4f", late)
    columns = sorted(cells)
    names = collections.Counter(name for name, _ in {key[:2] for key in columns})
    heads = ["run"]
    for name, fingerprint, tokens, length in columns:
        mark = f" ({fingerprint[:6]})" if names[name] > 1 else ""
        heads.append(f"{html.escape(name)}{mark}<br>{tokens:,} tokens<br>loss at {length}")
    rows = [
        [run_head(run), *(cells[column].get(index, number_cell(None)) for column in columns)]
        for index, run in enumerate(runs)
        if run["other_texts"]
    ]
    return section("texts-head", "Losses on other text", heads, rows)


def as_others(runs: list[dict]) -> str:
    """Return the losses of the runs' weights run as methods that train identically (validate_as), one row a run and
    method; "" if there are none."""
    shown = [
        (run, other, {n: loss for n, loss in losses.items() if n in run["final"]["val_loss"]})
        for run in runs
        for other, losses in run["final"].get("val_loss_as", {}).items()
    ]
    lengths = sort_lengths({n for _, _, losses in shown for n in losses})
    rows = [
        [run_head(run), text_cell(method_name(other)), *(number_cell(losses.get(n), ".4f") for n in lengths)]
        for run, other, losses in shown
    ]
    heads = ["run", "run as", *(f"loss at {n}" for n in lengths)]
    return section("as-head", "The same weights as other methods", heads, rows if lengths else [])


def configs(runs: list[dict]) -> str:
    """Return the fields in which the runs differ, one row a run, and those that they have in common, folded."""
    known = [run for run in runs if run["config"]]
    fields = dict.fromkeys(f for run in known for f in run["fields"] if f not in ("name", "runs_dir"))
    values = {f: [run["fields"].get(f) for run in known] for f in fields}
    differ = [f for f in fields if any(value != values[f][0] for value in values[f])]
    common = [[f"<th>{html.escape(f)}</th>", text_cell(values[f][0])] for f in fields if f not in differ]
    rows = [[run_head(run), *(text_cell(run["fields"].get(f)) for f in differ)] for run in known]
    return (
        f'<div class="scroll">{table(["run", *map(html.escape, differ)], rows)}</div>'
        f"<details><summary>the {len(common)} fields that all have in common</summary>{table([], common)}</details>"
    )


# ---- what the tables have in common ----------------------------------------------------------------------------------


def section(name: str, title: str, heads: list[str], rows: list[list[str]]) -> str:
    """Return a section with a table, "" without rows. name: the id of its heading."""
    if not rows:
        return ""
    return f'<section><h2 id="{name}">{title}</h2><div class="scroll">{table(heads, rows)}</div></section>'


def table(heads: list[str], rows: list[list[str]], attributes: str = "") -> str:
    head = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f"<table{attributes}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def run_head(run: dict, chooses: bool = False) -> str:
    """Return the first cell of a run's row. chooses: with the box that says whether it is in the charts."""
    name = html.escape(run["name"])
    box = f'<input type="checkbox" checked aria-label="show {name} in the charts"> ' if chooses else ""
    return f'<th scope="row">{box}{run["swatch"]} {name}</th>'


def text_cell(value) -> str:
    """Return a cell with a word or the value of a field."""
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"<td>{'' if value is None else html.escape(text)}</td>"


def number_cell(value: float | None, form: str = "", late: str = "", behind: str = "") -> str:
    """Return a cell, sorted by its value, with the text behind it. late: what an asterisk says when pointed at."""
    if value is None:
        return '<td class="n"></td>'
    mark = f'<abbr title="{late}">*</abbr>' if late else ""
    return f'<td class="n" data-value="{value!r}">{value:{form}}{behind}{mark}</td>'

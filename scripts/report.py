"""One static HTML page over any runs: a table, training curves, loss by length, and copy gain by gap.

    python -m scripts.report                                      all runs in runs/, into report.html
    python -m scripts.report runs/mini-*/ --out mini.html

The page is one file without scripts, and its figures are PNG inside it. Runs whose names differ in the seed alone
(NAME-s0, NAME-s1) look the same and have one entry in a legend.
"""

import argparse
import base64
import dataclasses
import html
import io
import itertools
import math
import re
import statistics
from pathlib import Path

from errors import exit_on_user_error, require
from files import replace_text
from scripts.shared.looks import choose_looks, method_name
from scripts.shared.runs import StoredRun, failures, read_run, stored_state

STYLE = """body { font: 15px sans-serif; margin: 2em; } table { border-collapse: collapse; }
td, th { border-bottom: 1px solid #ddd; padding: 3px 9px; text-align: right; }
td:first-child, th:first-child { text-align: left; } img { width: 46em; max-width: 100%; }"""
CURVE_POINTS = 150  # of a training curve, each a mean over equally many steps
Points = dict[float, float]


@dataclasses.dataclass
class Shown:
    """The numbers of a run, or of its weights run as another method. Losses are in nats a token."""

    name: str
    method: str
    cells: dict[str, str]  # of the table: heading -> text
    charts: dict[tuple[str, str], Points]  # title and label of the horizontal axis -> the line


def numbers(values: dict[str, float | None]) -> Points:
    """Return the finite numbers by length or gap, in order."""
    found = {int(key): value for key, value in values.items() if value is not None and math.isfinite(value)}
    return dict(sorted(found.items()))


def describe_run(stored: StoredRun) -> list[Shown]:
    """Return the run, then one entry for each method of validate_as. Raise ValueError for damaged files."""
    require(not stored.problems, "; ".join(stored.problems))
    config, records, validations = stored.config, stored.metrics(), stored.validations()
    last = stored.summary or (validations[-1] if validations else {"val_loss": {}})
    step = records[-1]["step"] if records else 0
    cells = {"method": method_name(config.method), "state": stored_state(stored), "seed": str(config.seed)}
    cells |= {"steps": f"{step} of {config.steps}", "length": str(config.train_length)}
    if stored.summary:
        cells |= {"parameters": f"{last['parameters']:,}", "tokens/s": f"{last['tokens_per_second'] or 0:,}"}
    run = describe_losses(stored.path.name, config.method, cells, last["val_loss"], last.get("copy_gain", {}))
    needles = (stored.needle or {}).get("greedy", {})
    run.cells |= {f"needle at {n}": f"{share:.1%}" for n, share in numbers(needles).items()}

    start = 0.1 * records[-1]["tokens"] if records else 0  # losses before it are so high that they would hide the rest
    late = [record for record in records if record["tokens"] >= start]
    curves = {"Training loss": mean_in_bins([r for r in late if r.get("train_loss") is not None])}
    for n in sorted({n for r in validations for n in r["val_loss"]}, key=int):
        curve = {r["tokens"]: r["val_loss"][n] for r in late if r.get("val_loss", {}).get(n) is not None}
        curves[f"Validation loss at {n} tokens"] = curve
    run.charts |= {(title, "tokens trained on"): points for title, points in curves.items()}
    shown = [run]
    for method, losses in last.get("val_loss_as", {}).items():
        name, gains = f"{run.name} as {method}", last.get("copy_gain_as", {}).get(method, {})
        shown.append(describe_losses(name, method, {"method": method_name(method)}, losses, gains))
    return shown


def describe_losses(name: str, method: str, cells: dict[str, str], losses: dict, copy_gain: dict) -> Shown:
    """Return an entry with the last losses by length and copy gains by kind and gap."""
    losses = numbers(losses)
    cells = {"run": name} | cells | {f"loss at {n}": f"{loss:.4f}" for n, loss in losses.items()}
    charts = {("Last validation: loss by length", "tokens"): losses}
    charts |= {(f"Copy gain, {kind} spans", "gap (tokens)"): numbers(gains) for kind, gains in copy_gain.items()}
    return Shown(name, method, cells, charts)


def mean_in_bins(records: list[dict]) -> Points:
    """Return the training loss as means over bins of equally many steps."""
    size = max(1, -(-len(records) // CURVE_POINTS))
    bins = (records[i : i + size] for i in range(0, len(records), size))
    return {part[-1]["tokens"]: statistics.fmean(r["train_loss"] for r in part) for part in bins}


def draw(chart: tuple[str, str], lines: dict[str, list[Points]], looks: dict[str, dict]) -> str:
    """Return a chart as HTML. lines: by group, one a run. looks: matplotlib's arguments by group."""
    from matplotlib.figure import Figure

    title, xlabel = chart
    figure = Figure(figsize=(9, 4))
    axis = figure.subplots()
    scale = "linear" if xlabel == "tokens trained on" else "log"
    axis.set(title=title, xlabel=xlabel, ylabel="nats a token", xscale=scale)
    axis.grid(color="0.9")
    for group, members in lines.items():
        for number, points in enumerate(members):
            label, every = "_" if number else group, max(1, len(points) // 10)
            axis.plot(*zip(*points.items()), label=label, markevery=every, **looks[group])
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7, frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
    image = base64.b64encode(file.getvalue()).decode()
    return f'<p><img alt="{html.escape(title)}" src="data:image/png;base64,{image}"></p>\n'


def draw_charts(runs: list[Shown]) -> str:
    """Return all charts as HTML. A group has the colour of its method and a line style of its own."""
    methods, looks, charts = choose_looks(run.method for run in runs), {}, {}
    styles = {method: itertools.cycle((methods[method][1], "--", ":", "-.")) for method in methods}
    for run in runs:
        group = re.sub(r"-s\d+(?= as |$)", "", run.name)
        if group not in looks:
            colour, _, marker = methods[run.method]
            looks[group] = dict(color=colour, marker=marker, markersize=4, linestyle=next(styles[run.method]))
        for chart, points in run.charts.items():
            if points:
                charts.setdefault(chart, {}).setdefault(group, []).append(points)
    return "".join(draw(chart, lines, looks) for chart, lines in charts.items())


def make_page(runs: list[Shown], problems: list[str]) -> str:
    """Return the page's HTML."""
    heads = list(dict.fromkeys(head for run in runs for head in run.cells))
    rows = [[run.cells.get(head, "") for head in heads] for run in runs]
    table = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    head = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    named = "".join(f"<li>{html.escape(problem)}</li>\n" for problem in problems) or "<li>none</li>"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<title>Training runs</title><style>{STYLE}</style></head><body><h1>Training runs</h1>
<p>Losses are in nats a token. Runs that differ in the seed alone look the same.</p>
<table><tr>{head}</tr>
{table}</table>
{draw_charts(runs)}<h2>Problems</h2><ul>{named}</ul></body></html>
"""


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m scripts.report", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders (default: all in --runs-dir)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where the run folders are")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page")
    args = parser.parse_args(argv)
    with exit_on_user_error():
        paths = args.runs or [path.parent for path in sorted(args.runs_dir.glob("*/config.json"))]
        require(paths, f"{args.runs_dir} holds no runs. Name run folders or another --runs-dir.")
        runs, problems = [], []
        for path in dict.fromkeys(paths):
            try:
                runs += describe_run(read_run(path))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"{path} is left out: {error}")
            problems += [f"{path.name} failed: {line}" for line in failures(path)[-1:]]
        replace_text(args.out, make_page(runs, problems))
    print(f"{args.out}: {len(paths)} runs, {len(problems)} problems")


if __name__ == "__main__":
    main()

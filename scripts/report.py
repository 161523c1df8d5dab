"""Write one static HTML page about any runs: a table, training curves, and loss by length.

    python -m scripts.report                                      all runs in runs/; writes report.html
    python -m scripts.report runs/mini-*/ --out mini.html

The page is one file without scripts. Its figures are embedded as PNG. Runs whose names differ only in the seed
(NAME-s0, NAME-s1) have one line style and one entry in the legend.
"""

import argparse
import base64
import dataclasses
import html
import itertools
import math
import re
import statistics
import tempfile
from pathlib import Path

from errors import exit_on_user_error, require
from files import replace_text
from scripts.reproduce.drawing import Line, Panel, draw_panels
from scripts.shared.looks import method_name, plot_styles
from scripts.shared.runs import StoredRun, read_run
from scripts.shared.states import failures, stored_state

STYLE = """body { font: 15px sans-serif; margin: 2em; } table { border-collapse: collapse; }
td, th { border-bottom: 1px solid #ddd; padding: 3px 9px; text-align: right; }
td:first-child, th:first-child { text-align: left; } img { width: 70em; max-width: 100%; }"""
CURVE_POINTS = 150  # of a training curve; each point is a mean over equally many steps
BY_LENGTH = "Last validation: loss by length"
Points = dict[float, float]  # tokens -> loss in nats per token


@dataclasses.dataclass
class RunView:
    """The numbers that the page shows of a run."""

    name: str
    method: str
    cells: dict[str, str]  # column heading -> cell of the table
    charts: dict[str, Points]  # chart title -> the run's line


def finite_values(values: dict[str, float | None]) -> Points:
    """Return the finite values by length, sorted by length."""
    found = {int(key): value for key, value in values.items() if value is not None and math.isfinite(value)}
    return dict(sorted(found.items()))


def describe_run(stored: StoredRun) -> RunView:
    """Return the numbers of a run. Raise ValueError for damaged files."""
    require(not stored.problems, "; ".join(stored.problems))
    config, records, validations = stored.config, stored.metrics(), stored.validations()
    last = stored.summary or (validations[-1] if validations else {"val_loss": {}})
    step, losses = records[-1]["step"] if records else 0, finite_values(last["val_loss"])
    cells = {"run": stored.path.name, "method": method_name(config.method), "state": stored_state(stored)}
    cells |= {"seed": str(config.seed), "steps": f"{step} of {config.steps}", "length": str(config.train_length)}
    if stored.summary:
        cells |= {"parameters": f"{last['parameters']:,}", "tokens/s": f"{last['tokens_per_second'] or 0:,}"}
    cells |= {f"loss at {n}": f"{loss:.4f}" for n, loss in losses.items()}
    needles = (stored.needle or {}).get("greedy", {})
    cells |= {f"needle at {n}": f"{share:.1%}" for n, share in finite_values(needles).items()}

    start = 0.1 * records[-1]["tokens"] if records else 0  # earlier losses are so high that they would hide the rest
    late = [record for record in records if record["tokens"] >= start]
    charts = {"Training loss": mean_in_bins([r for r in late if r.get("train_loss") is not None])}
    for n in sorted({n for r in validations for n in r["val_loss"]}, key=int):
        curve = {}
        for record in late:
            loss = record.get("val_loss", {}).get(n)
            if loss is not None:
                curve[record["tokens"]] = loss
        charts[f"Validation loss at {n} tokens"] = curve
    return RunView(stored.path.name, config.method, cells, charts | {BY_LENGTH: losses})


def mean_in_bins(records: list[dict]) -> Points:
    """Return the mean training loss over bins of equally many steps, by the last token of the bin."""
    size = max(1, -(-len(records) // CURVE_POINTS))
    bins = (records[i : i + size] for i in range(0, len(records), size))
    return {part[-1]["tokens"]: statistics.fmean(r["train_loss"] for r in part) for part in bins}


def draw_charts(runs: list[RunView]) -> str:
    """Return all charts as one HTML image. The seeds of a run share one colour and line style."""
    methods, looks, charts = plot_styles({run.method for run in runs}), {}, {}
    styles = {method: itertools.cycle((look["linestyle"], "--", ":", "-.")) for method, look in methods.items()}
    for run in runs:
        group = re.sub(r"-s\d+$", "", run.name)
        if group not in looks:
            looks[group] = methods[run.method] | dict(label=group, linestyle=next(styles[run.method]))
        for title, points in run.charts.items():
            look = looks[group] | dict(markevery=max(1, len(points) // 10))
            if points:
                charts.setdefault(title, []).append(Line(look, [*points], [*points.values()]))
    axes = {BY_LENGTH: dict(xscale="log", xlabel="tokens in a sequence")}
    panels = [Panel(title, lines, axes.get(title, {})) for title, lines in charts.items()]
    if not panels:
        return ""
    rows = [panels[i : i + 2] for i in range(0, len(panels), 2)]
    with tempfile.TemporaryDirectory() as folder:
        draw_panels(Path(folder, "charts"), rows, x="tokens trained on", y="nats a token")
        image = base64.b64encode(Path(folder, "charts.png").read_bytes()).decode()
    return f'<p><img alt="Training curves, and loss by length" src="data:image/png;base64,{image}"></p>\n'


def make_page(runs: list[RunView], problems: list[str]) -> str:
    """Return the page's HTML."""
    heads = list(dict.fromkeys(head for run in runs for head in run.cells))
    rows = [[run.cells.get(head, "") for head in heads] for run in runs]
    table = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    head = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    problem_items = "".join(f"<li>{html.escape(problem)}</li>\n" for problem in problems) or "<li>none</li>"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<title>Training runs</title><style>{STYLE}</style></head><body><h1>Training runs</h1>
<p>Losses are in nats per token. Runs that differ only in the seed have one line style.</p>
<table><tr>{head}</tr>
{table}</table>
{draw_charts(runs)}<h2>Problems</h2><ul>{problem_items}</ul></body></html>
"""


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m scripts.report", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders (default: all in runs/)")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="output file (default: report.html)")
    args = parser.parse_args(argv)
    with exit_on_user_error():
        paths = args.runs or [path.parent for path in sorted(Path("runs").glob("*/config.json"))]
        require(paths, "runs/ holds no runs. Name run folders on the command line.")
        runs, problems = [], []
        for path in dict.fromkeys(paths):
            try:
                runs.append(describe_run(read_run(path)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"{path} is left out: {error}")
            problems += [f"{path.name} failed: {line}" for line in failures(path)[-1:]]
        replace_text(args.out, make_page(runs, problems))
    print(f"{args.out}: {len(paths)} runs, {len(problems)} problems", *problems, sep="\n")


if __name__ == "__main__":
    main()

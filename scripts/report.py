"""One static HTML page over any runs: a table, training curves, loss by length and position, and copy gain by gap.

    python -m scripts.report                                      all runs in runs/, into report.html
    python -m scripts.report runs/mini-*/ --out mini.html --title "mini, 3 seeds"

The page is one file without scripts, and its figures are PNG inside it. Runs whose names differ in the seed alone
(NAME-s0, NAME-s1) are a group: thin lines are its runs, the thick one is their mean.
"""

import argparse
import base64
import collections
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
from scripts.evaluate import join
from scripts.shared.looks import choose_looks, import_matplotlib, method_name
from scripts.shared.runs import OTHER_TEXTS, StoredRun, failures, on_own_text, read_run, stored_state

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
    curves: dict[str, Points]  # "training", or a validation length -> {tokens trained on: loss}
    by_length: Points
    by_position: Points  # in the longest sequences, at the first position of each octave
    copy_gain: dict[str, Points]  # kind of span -> {gap: nats}

    @property
    def group(self) -> str:
        return re.sub(r"-s\d+(?= as |$)", "", self.name)


def numbers(values: dict[str, float | None]) -> Points:
    """Return the finite numbers by length or gap, in order."""
    found = {int(key): value for key, value in values.items() if value is not None and math.isfinite(value)}
    return dict(sorted(found.items()))


def describe_run(stored: StoredRun) -> list[Shown]:
    """Return the run, then one entry for each method of validate_as. Raise ValueError for damaged files."""
    require(not stored.problems, "; ".join(stored.problems))
    config, records = stored.config, stored.metrics()
    training = [r for r in records if r.get("train_loss") is not None]
    validations = [r for r in records if "val_loss" in r]
    last = stored.summary or (validations[-1] if validations else {"val_loss": {}})
    evaluation = stored.json("evaluation.json") or {}
    step = stored.summary["steps"] if stored.summary else records[-1]["step"] if records else 0
    if (own := on_own_text(evaluation)) and int(own["step"].removeprefix("step_")) == step:
        last = join(own, last)

    cells = {"run": stored.path.name, "method": method_name(config.method), "state": stored_state(stored)}
    cells |= {"seed": str(config.seed), "steps": f"{step} of {config.steps}", "length": str(config.train_length)}
    if stored.summary:
        cells |= {"parameters": f"{last['parameters']:,}", "tokens/s": f"{last['tokens_per_second'] or 0:,}"}
    cells |= {f"loss at {n}": f"{loss:.4f}" for n, loss in numbers(last["val_loss"]).items()}
    for other in evaluation.get(OTHER_TEXTS, {}).values():
        text = Path(other["data"]).name
        cells |= {f"{text}, loss at {n}": f"{loss:.4f}" for n, loss in numbers(other["val_loss"]).items()}
    needles = (stored.json("needle/summary.json") or {}).get("greedy", {})
    cells |= {f"needle at {n}": f"{share:.1%}" for n, share in numbers(needles).items()}

    start = 0.1 * records[-1]["tokens"] if records else 0  # losses before it are so high that they would hide the rest
    curves = {"training": mean_in_bins([r for r in training if r["tokens"] >= start])}
    late = [r for r in validations if r["tokens"] >= start]
    for n in sorted({n for r in late for n in r["val_loss"]}, key=int):
        curves[n] = {r["tokens"]: r["val_loss"][n] for r in late if r["val_loss"].get(n) is not None}
    by_position = (validations[-1] if validations else {}).get("val_loss_by_position", {})
    longest = max(by_position, key=int, default=None)
    positions = {2 ** (k - 1) if k else 0.5: loss for k, loss in enumerate(by_position.get(longest, []))}
    gains = {kind: numbers(by_gap) for kind, by_gap in last.get("copy_gain", {}).items()}
    shown = [Shown(cells["run"], config.method, cells, curves, numbers(last["val_loss"]), positions, gains)]
    for method, losses in last.get("val_loss_as", {}).items():
        name, losses = f"{cells['run']} as {method}", numbers(losses)
        gains = {k: numbers(by_gap) for k, by_gap in last.get("copy_gain_as", {}).get(method, {}).items()}
        row = {"run": name, "method": method_name(method)} | {f"loss at {n}": f"{x:.4f}" for n, x in losses.items()}
        shown.append(Shown(name, method, row, {}, losses, {}, gains))
    return shown


def mean_in_bins(records: list[dict]) -> Points:
    """Return the training loss as means over bins of equally many steps."""
    size = max(1, -(-len(records) // CURVE_POINTS))
    bins = (records[i : i + size] for i in range(0, len(records), size))
    return {part[-1]["tokens"]: statistics.fmean(r["train_loss"] for r in part) for part in bins}


# ---- the page --------------------------------------------------------------------------------------------------------


def draw(title: str, lines: list[tuple[Shown, Points]], looks: dict[str, dict], **axes) -> str:
    """Return a chart as HTML, "" if there is nothing to draw. looks: matplotlib's arguments by group."""
    from matplotlib.figure import Figure

    groups = collections.defaultdict(list)
    for shown, points in lines:
        if points:
            groups[shown.group].append(points)
    if not groups:
        return ""
    figure = Figure(figsize=(9, 4))
    axis = figure.subplots()
    axis.set(title=title, **axes)
    axis.grid(color="0.9")
    for group, members in groups.items():
        for points in members if len(members) > 1 else ():
            axis.plot(*zip(*points.items()), linewidth=0.5, color=looks[group]["color"])
        shared = sorted(set(members[0]).intersection(*members))
        mean = [statistics.fmean(points[x] for points in members) for x in shared]
        axis.plot(shared, mean, label=group, markevery=max(1, len(shared) // 10), **looks[group])
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7, frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
    image = base64.b64encode(file.getvalue()).decode()
    return f'<p><img alt="{html.escape(title)}" src="data:image/png;base64,{image}"></p>\n'


def draw_charts(runs: list[Shown]) -> str:
    """Return all charts as HTML."""
    methods, looks, loss = choose_looks(run.method for run in runs), {}, "loss (nats a token)"
    styles = {method: itertools.cycle((methods[method][1], "--", ":", "-.")) for method in methods}  # one a group
    for run in runs:
        if run.group not in looks:
            colour, _, marker = methods[run.method]
            looks[run.group] = dict(color=colour, marker=marker, markersize=4, linestyle=next(styles[run.method]))
    tokens, octaves = dict(xlabel="tokens trained on", ylabel=loss), dict(ylabel=loss, xscale="log")
    charts = []
    for curve in dict.fromkeys(curve for run in runs for curve in run.curves):
        title = "Training loss" if curve == "training" else f"Validation loss at {curve} tokens"
        charts.append(draw(title, [(run, run.curves.get(curve, {})) for run in runs], looks, **tokens))
    title = "Last validation: loss against length"
    charts.append(draw(title, [(run, run.by_length) for run in runs], looks, xlabel="tokens", **octaves))
    title = "Last validation: loss by position in the longest sequences"
    charts.append(draw(title, [(run, run.by_position) for run in runs], looks, xlabel="position", **octaves))
    for kind in dict.fromkeys(kind for run in runs for kind in run.copy_gain):
        lines, title = [(run, run.copy_gain.get(kind, {})) for run in runs], f"Copy gain, {kind} spans"
        charts.append(draw(title, lines, looks, xlabel="gap (tokens)", ylabel="gain (nats a token)", xscale="log"))
    return "".join(charts)


def make_page(title: str, runs: list[Shown], problems: list[str]) -> str:
    """Return the page's HTML."""
    heads = list(dict.fromkeys(head for run in runs for head in run.cells))
    rows = [[run.cells.get(head, "") for head in heads] for run in runs]
    table = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    head = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    named = "".join(f"<li>{html.escape(problem)}</li>\n" for problem in problems) or "<li>none</li>"
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>
<p>Losses are in nats a token. Thin lines are runs, thick ones means of runs that differ in the seed alone.</p>
<table><tr>{head}</tr>
{table}</table>
{draw_charts(runs)}<h2>Problems</h2><ul>{named}</ul></body></html>
"""


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.report", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders (default: all in --runs-dir)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where the run folders are")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page")
    parser.add_argument("--title", default="Training runs", help="its title")
    args = parser.parse_args()
    import_matplotlib()
    with exit_on_user_error():
        paths = args.runs or [path.parent for path in sorted(args.runs_dir.glob("*/config.json"))]
        require(paths, f"{args.runs_dir} holds no runs. Name run folders or another --runs-dir.")
        for path in paths:
            require((path / "config.json").exists(), f"{path} is not a run folder: it has no config.json.")
        require(not args.out.is_dir(), f"--out {args.out} is a folder. Name a file.")
        runs, problems = [], []
        for path in dict.fromkeys(paths):
            try:
                runs += describe_run(read_run(path))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"{path} is left out: {error}")
            problems += [f"{path.name} failed: {line}" for line in failures(path)[-1:]]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(args.out, make_page(args.title, runs, problems))
    print(f"{args.out}: {len(paths)} runs, {len(problems)} problems")


if __name__ == "__main__":
    main()

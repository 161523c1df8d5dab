"""The report's page, from its parts."""

import collections
import html
import re
from pathlib import Path

from scripts.report.charts import draw_charts, draw_swatch
from scripts.report.groups import group_runs
from scripts.report.tables import as_others, configs, other_texts, overview


def make_page(title: str, runs: list[dict], strays: list[tuple[str, str]] = ()) -> str:
    """Return the page's HTML. runs: those of describe_run; strays: (name, problem) of what is no run."""
    names = collections.Counter(run["name"] for run in runs)
    for index, run in enumerate(runs):
        run |= dict(index=index, name=run["name"] if names[run["name"]] == 1 else run["path"])
    groups, legend = group_runs(runs), []
    for g in groups:
        line = draw_swatch(g)
        for run in g["runs"]:
            run["swatch"] = line
        indices = " ".join(str(run["index"]) for run in g["runs"])
        legend.append(f'<li data-runs="{indices}">{line} {html.escape(g["label"])}</li>')
    states = collections.Counter(run["state"] for run in runs)
    problems = [f"<li><b>{html.escape(run)}</b>: {html.escape(text)}</li>" for run, text in problem_list(runs, strays)]
    # One pass over the template, so that a run's name cannot be taken for a part of it.
    parts = dict(
        title=html.escape(title),
        count=f"{len(runs)} runs: " + ", ".join(f"{n} {state}" for state, n in sorted(states.items())),
        problem_count=str(len(problems)),
        css=asset("page.css"),
        js=asset("page.js"),
        overview=overview(runs),
        legend="".join(legend),
        charts=draw_charts(groups),
        texts=as_others(runs) + other_texts(runs),
        configs=configs(runs),
        problems="".join(problems) or "<li>none</li>",
    )
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def problem_list(runs: list[dict], strays: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(run["name"], text) for run in runs for text in run["problems"]] + list(strays)


def asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text()

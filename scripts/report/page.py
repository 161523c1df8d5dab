"""The report's page, from its parts."""

import collections
import html
import re
from pathlib import Path

from runtime.files import to_json
from scripts.report.chart import static_chart, style
from scripts.report.groups import flat, group
from scripts.report.tables import as_others, configs, other_texts, overview


def page(title: str, runs: list[dict], strays: list[tuple[str, str]] = ()) -> str:
    """Return the page's HTML. runs: those of describe; strays: (name, problem) of what is no run."""
    names = collections.Counter(run["name"] for run in runs)
    for run in runs:
        text = {"data": run["data"]} if run["data"] else {}
        run |= dict(name=run["name"] if names[run["name"]] == 1 else run["path"], fields=flat(run["config"]) | text)
    groups = group(runs)
    methods = list(dict.fromkeys(g["method"] for g in groups))
    for g in groups:
        g["class"] = f"m{methods.index(g['method'])}"
    states = collections.Counter(run["state"] for run in runs)
    problems = problem_list(runs, strays)
    # One pass over the template, so that a run's name cannot be taken for a part of it.
    parts = dict(
        title=html.escape(title),
        count=f"{len(runs)} runs: " + ", ".join(f"{n} {state}" for state, n in sorted(states.items())),
        problem_count=str(len(problems)),
        css=asset("page.css") + colours({g["class"]: g["look"][0] for g in groups}),
        js=asset("draw.js") + asset("page.js"),
        overview=overview(runs, groups),
        chart=static_chart(groups),
        texts=as_others(runs, groups) + other_texts(runs, groups),
        configs=configs(runs),
        problems="".join(f"<li><b>{html.escape(name)}</b>: {html.escape(text)}</li>" for name, text in problems)
        or "<li>none</li>",
        data=embedded(dict(runs=[drawn(run) for run in runs], groups=[style(g) for g in groups])),
    )
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def problem_list(runs: list[dict], strays: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(run["name"], text) for run in runs for text in run["problems"]] + list(strays)


def asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def embedded(data: dict) -> str:
    """Return the data as JSON inside a <script>, which no text can then close."""
    return to_json(data, separators=(",", ":")).replace("<", "\\u003c")


def drawn(run: dict) -> dict:
    """Return what page.js reads of a run."""
    keys = ("name", "group", "state", "train", "validation")
    final = ("step", "val_loss", "val_loss_by_position", "scores_mean", "scores_std")
    config = run["config"]
    return {key: run[key] for key in keys} | dict(
        steps=config.steps if config else None,
        train_length=config.train_length if config else None,
        final={key: run["final"][key] for key in final if key in run["final"]},
    )


def colours(classes: dict[str, str]) -> str:
    """Return a style a method: its colour, on a dark page made light enough to be seen."""
    light = "".join(f".{name}{{color:{colour}}}" for name, colour in classes.items())
    dark = "".join(f".{name}{{color:{on_dark(colour)}}}" for name, colour in classes.items())
    return f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}"


def on_dark(colour: str) -> str:
    """Return the colour mixed with white until its relative luminance (WCAG 2) is at least 0.2, 4:1 on a dark page."""
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    if rgb == [0, 0, 0]:  # ours stays the one that stands out
        return "#FFFFFF"
    while luminance(rgb) < 0.2:
        rgb = [c + 0.1 * (1 - c) for c in rgb]
    return "#" + "".join(f"{round(255 * c):02X}" for c in rgb)


def luminance(rgb: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))

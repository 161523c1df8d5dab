"""One HTML page over any set of runs: table, curves, losses by length and position, configs compared, problems.

    python -m scripts.report                                      all runs in runs/, into report.html
    python -m scripts.report runs/mini-*/ --out mini.html --title "mini, 3 seeds"

The page holds its data, styles and scripts, and asks for nothing else: it opens from any disk, without a network.
Python writes the tables and one chart, which are there without JavaScript too; report.js draws the other charts.
"""

import argparse
import collections
import dataclasses
import html
import json
import math
import re
import statistics
from pathlib import Path

from configs.command_line import user_errors
from configs.config import NOT_MATHEMATICS, Config, config_hash, require
from runtime.files import replace_file, to_json
from scripts.shared.looks import LINES, looks, method_name
from scripts.shared.run_files import OTHER_TEXTS, check_record, on_own_text, val_tokens
from scripts.shared.runs import (
    StoredRun,
    check_page,
    failures,
    read_run,
    stored_state,
)

POINTS = 400  # of a curve at most; 60 runs of any length make a page of about 2 MB
DASHES = {"-": "", "--": "7 4", ":": "2 3", "-.": "8 3 2 3"}  # matplotlib's line styles in SVG
MARKERS = {  # and its markers, as SVG paths about (0, 0)
    "o": "M-3.5,0a3.5,3.5 0 1 0 7,0a3.5,3.5 0 1 0 -7,0z",
    "s": "M-3,-3h6v6h-6z",
    "x": "M-3,-3l6,6M3,-3l-6,6",
    "^": "M0,-4l4,7h-8z",
    "v": "M0,4l4,-7h-8z",
    "D": "M0,-4.5l4.5,4.5l-4.5,4.5l-4.5,-4.5z",
    "*": "M0,-5l1.3,3.2l3.5,.2l-2.7,2.2l.9,3.4l-3,-1.9l-3,1.9l.9,-3.4l-2.7,-2.2l3.5,-.2z",
    "P": "M-1.5,-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    ".": "M-2,0a2,2 0 1 0 4,0a2,2 0 1 0 -4,0z",
}
COMPUTED = ("dtype", "device", "compile", "attention_backend", "context_parallel", "micro_batch_tokens")  # how
LENGTHWISE = ("val_loss", "val_loss_by_position")
UNKNOWN = "unknown"  # the method of a run whose config is damaged


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.report", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders (default: all in --runs-dir)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where the run folders are")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page")
    parser.add_argument("--title", default="Training runs", help="its title")
    parser.add_argument("--force", action="store_true", help="write over a page that was made from more runs too")
    args = parser.parse_args()
    with user_errors():
        for path in args.runs:
            hint = f" (for all runs in it: --runs-dir {path})" if path.is_dir() else ""
            require((path / "config.json").exists(), f"{path} is not a run folder: it has no config.json{hint}")
        require(not args.out.is_dir(), f"--out {args.out} is a folder: name the page in it, {args.out / 'report.html'}")
        paths, strays = (args.runs, []) if args.runs else look_through(args.runs_dir)
        if not args.force:
            check_page(args.out, r"^<p>(\d+) runs: ", len({*paths}))
        runs = [describe(path) for path in dict.fromkeys(paths)]
        text = page(args.title, runs, strays)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(args.out, lambda file: file.write(text.encode()))
    print(f"{args.out}: {len(runs)} runs, problems: {len(problem_list(runs, strays))}, {len(text) / 1e6:.1f} MB")


# ---- reading ---------------------------------------------------------------------------------------------------------


def look_through(runs_dir: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """The run folders in runs_dir, and (name, problem) of what looks like a run and is none."""
    require(runs_dir.is_dir(), f"there is no folder {runs_dir}: train a run first, or give --runs-dir")
    folders = sorted(path for path in runs_dir.iterdir() if path.is_dir())
    runs = [path for path in folders if (path / "config.json").exists()]
    require(runs, f"{runs_dir} holds no run folder: none of the {len(folders)} folders in it has a config.json")
    strays = [(path.name, "not a run folder: it has no config.json") for path in folders if path not in runs]
    for path in sorted(runs_dir.glob("*.failures.txt")):
        run = path.with_name(path.name.removesuffix(".failures.txt"))
        if not run.exists() and failures(run):
            strays.append((run.name, f"never began: {failures(run)[-1]}"))
    return runs, strays


def describe(path: Path) -> dict:
    """What the page shows of a run. What is wrong with it is in `problems`, one line each, never an exception."""
    folder = read_run(path)
    problems = list(folder.problems)
    damaged = folder.summary is None and (path / "summary.json").exists()
    state = "damaged" if damaged else stored_state(folder)
    run = dict(name=path.name, path=str(path), config=folder.config, state=state, problems=problems)
    run |= dict(data=folder.data.get("train"), validation_text=folder.data.get("validation"))
    try:
        require(not damaged, "see above")
        run |= measured(folder, problems)
    except (ValueError, KeyError) as error:
        problems.append(f"its numbers are left out, as they are not what a run writes ({error})")
        run |= dict(step=0, tokens=0, parameters=None, rate=None, needle={}, train={}, validation={}, final={})
        run |= dict(other_texts={})
    if state not in ("finished", "damaged"):
        steps = folder.config.steps if folder.config else "?"
        problems += [f"{run['state']} at step {run['step']} of {steps}", *failures(path)[-1:]]
    return run


def measured(folder: StoredRun, problems: list[str]) -> dict:
    """The run's numbers; appends to problems what is missing or not shown."""
    records = read_records(folder.path / "metrics.jsonl", problems)
    train = [r for r in records if "train_loss" in r]
    validations = [r for r in records if "val_loss" in r]
    full = folder.config.val_tokens if folder.config else 0
    final = full_passes(validations[-1], full) if validations else {}
    summary = folder.summary or {}
    if summary and final.get("step") != summary["steps"]:
        problems.append("metrics.jsonl lacks the last validation: the losses are those of summary.json")
        final = dict(step=summary["steps"], **{k: summary[k] for k in ("tokens", "val_loss", "val_tokens")})
    if not records:
        problems.append("no metrics yet")
    if diverged := [r["step"] for r in train if r["train_loss"] is None]:
        problems.append(f"training loss not finite in {len(diverged)} steps, first in step {diverged[0]}")

    evaluations = read_json(folder, "evaluation.json", problems)
    evaluation = on_own_text(evaluations)  # of lengths that were not validated during training
    if evaluation:
        step = int(evaluation["step"].removeprefix("step_"))  # the name of the checkpoint
        theirs, ours = ({*val_tokens(r).values()} if r else set() for r in (evaluation, final))
        if (step, theirs) == (final.get("step"), ours):
            for key in LENGTHWISE:
                final[key] = {**evaluation.get(key, {}), **final.get(key, {})}
        else:
            problems.append(
                f"evaluation.json is not shown: it is of step {step} on {listed(theirs)} tokens, "
                f"the last full validation of step {final.get('step')} on {listed(ours)}"
            )
    needle = read_json(folder, "needle/summary.json", problems)
    rates = [r["tokens_per_second"] for r in train if r.get("tokens_per_second")]
    steps = folder.config.steps if folder.config else max(1, *(r["step"] for r in records), 1)
    last = max(records, key=lambda r: r["step"], default=final)
    return dict(
        data=folder.data.get("train") or summary.get("data"),
        other_texts=evaluations.get(OTHER_TEXTS, {}),
        step=last.get("step", 0),
        tokens=last.get("tokens", 0),
        parameters=summary.get("parameters"),
        rate=summary.get("tokens_per_second") or (round(statistics.median(rates)) if rates else None),
        needle=needle.get("greedy", {}),
        train=thin(train, steps, dict(loss=lambda r: r["train_loss"], grad_norm=lambda r: r.get("grad_norm"))),
        validation={
            n: curve(validations, steps, n, full) for n in by_number({n for r in validations for n in r["val_loss"]})
        },
        final=final,
    )


def listed(tokens: set[int]) -> str:
    return " and ".join(map(str, sorted(tokens))) or "no"


def curve(validations: list[dict], steps: int, length: str, full: int) -> dict:
    """The losses at this length, and 1 for those on a part of the tokens."""
    on_part = lambda r: 1 if val_tokens(r)[length] < full else None
    columns = dict(loss=lambda r: r["val_loss"][length], part=on_part)
    return thin([r for r in validations if length in r["val_loss"]], steps, columns)


def full_passes(record: dict, full: int) -> dict:
    """The record of a validation without the lengths that were validated on a part of the tokens only."""
    whole = {length for length, tokens in val_tokens(record).items() if tokens >= full}
    parts = {key: {n: value for n, value in record[key].items() if n in whole} for key in LENGTHWISE if key in record}
    return record | parts | dict(val_tokens={n: tokens for n, tokens in val_tokens(record).items() if n in whole})


def read_records(path: Path, problems: list[str]) -> list[dict]:
    """The records of metrics.jsonl that can be read; each other line goes to problems. ValueError for a record that no
    run writes."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            what = "half-written" if number == len(lines) else "damaged"
            problems.append(f"line {number} of {len(lines)} of metrics.jsonl is {what}: left out")
            continue
        check_record(record, f"line {number} of metrics.jsonl")
        records.append(record)
    return records


def read_json(folder: StoredRun, name: str, problems: list[str]) -> dict:
    try:
        return folder.json(name) or {}
    except ValueError as error:
        problems.append(f"{name} is damaged ({error}): not shown")
        return {}


def thin(records: list[dict], steps: int, columns: dict) -> dict:
    """Tokens and columns {name: function of a record}, as means over at most POINTS bins of equally many steps, so
    that bins of different seeds are the same; step 0 is a bin of its own. None where no value of a bin is finite."""
    width = math.ceil(steps / POINTS)
    bins = collections.defaultdict(list)
    for record in records:
        bins[math.ceil(record["step"] / width)].append(record)
    columns = dict(tokens=lambda r: r["tokens"]) | columns
    return {name: [mean(map(function, part)) for part in bins.values()] for name, function in columns.items()}


def mean(values) -> float | None:
    values = [value for value in values if value is not None]
    return values[0] if len(values) == 1 else float(f"{statistics.fmean(values):.7g}") if values else None


def by_number(lengths) -> list[str]:
    return sorted(lengths, key=int)


# ---- groups: the same config up to the seed --------------------------------------------------------------------------


def group(runs: list[dict]) -> list[dict]:
    """The groups of the runs, in the order of the methods; sets run["group"], an index into them."""
    members = collections.defaultdict(list)
    for run in runs:
        members[group_key(run)].append(run)
    parts, apart = [], set()
    for same in members.values():
        for part, told in one_a_seed(same):
            parts.append(part)
            apart |= told
    for same in parts:
        texts = collections.Counter(run["validation_text"] for run in same if run["validation_text"])
        for run in same:
            if run["validation_text"] not in (None, *dict(texts.most_common(1))):
                run["problems"].append("validated on another text than most runs of its group")
    order = [*LINES]
    rank = lambda method: order.index(method) if method in order else len(order)
    groups = [dict(method=method(same[0]), runs=same, fields=same[0]["fields"]) for same in parts]
    groups.sort(key=lambda g: (rank(g["method"]), g["method"], g["fields"].get("train_length", 0)))
    look = looks(g["method"] for g in groups)
    for g, label in zip(groups, labels(groups, apart)):
        same = [other for other in groups if other["method"] == g["method"]]
        # One colour a method: its second and later groups are paler.
        g |= dict(
            label=label, look=look[g["method"]], opacity=round(1 - 0.4 * same.index(g) / max(1, len(same) - 1), 2)
        )
    for index, g in enumerate(groups):
        for run in g["runs"]:
            run["group"] = index
    return groups


def one_a_seed(runs: list[dict]) -> list[tuple[list[dict], set[str]]]:
    """Runs of the same config up to the seed, in parts in which each seed is once; and the fields that tell the parts.

    Two runs of one seed are no two seeds: they are told by how they were computed where that differs. One that remains
    is a part of its own, and is named among its problems.
    """
    by_seed = collections.defaultdict(list)
    for run in runs:
        by_seed[run["config"] and run["config"].seed].append(run["config"])
    if len(by_seed) == len(runs):
        return [(runs, set())]
    differ = lambda field, configs: len({getattr(config, field) for config in configs}) > 1
    told = [field for field in COMPUTED if any(differ(field, configs) for configs in by_seed.values())]
    parts = collections.defaultdict(dict)  # by seed
    for run in runs:
        part = parts[tuple(getattr(run["config"], field) for field in told)]
        first = part.setdefault(run["config"].seed, run)
        if first is not run:
            run["problems"].append(f"another run of the seed and configuration of {first['name']}: shown apart")
            parts[run["path"],][None] = run
    return [([*part.values()], {*told}) for part in parts.values()]


def group_key(run: dict) -> tuple:
    config = run["config"]
    if config is None:
        return (run["path"],)
    text = run["data"] or config.data_dir  # the fingerprint where it is known: a folder can move, or be filled anew
    return config_hash(dataclasses.replace(config, seed=0)), text, config.val_tokens, config.val_profile


def method(run: dict) -> str:
    return run["config"].method if run["config"] else UNKNOWN


def flat(config: Config | None) -> dict:
    """The fields, each of the method's options as one of them."""
    fields = config.to_dict() if config else {}
    options = fields.pop("method_options", {})
    return fields | {f"method_options.{option}": value for option, value in options.items()}


def labels(groups: list[dict], apart: set[str]) -> list[str]:
    """For each group its method and the fewest fields that tell it from the others of that method. apart: of the fields
    outside the mathematics those that tell groups apart too."""
    result = [method_name(g["method"]) for g in groups]
    skipped = NOT_MATHEMATICS - {"data_dir", "val_tokens", "val_profile"} - apart | {"seed", "method"}
    fields = dict.fromkeys(field for g in groups for field in g["fields"] if field not in skipped)
    for field in sorted(fields, key=lambda f: (f != "train_length", not f.startswith("method_options."))):
        values = collections.defaultdict(set)
        for label, g in zip(result, groups):
            values[label].add(repr(g["fields"].get(field)))
        result = [
            f"{label}, {field.removeprefix('method_options.')} {g['fields'][field]}"
            if len(values[label]) > 1 and field in g["fields"]
            else label
            for label, g in zip(result, groups)
        ]
    again = collections.Counter(result)
    return [f"{label}, {g['runs'][0]['name']}" if again[label] > 1 else label for label, g in zip(result, groups)]


# ---- the page --------------------------------------------------------------------------------------------------------


def page(title: str, runs: list[dict], strays: list[tuple[str, str]] = ()) -> str:
    """The page's HTML. runs: those of describe; strays: (name, problem) of what is no run."""
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
        css=beside("page.css") + colours({g["class"]: g["look"][0] for g in groups}),
        js=beside("page.js"),
        overview=overview(runs, groups),
        chart=static_chart(groups),
        texts=as_others(runs, groups) + other_texts(runs, groups),
        configs=configs(runs),
        problems="".join(f"<li><b>{html.escape(name)}</b>: {html.escape(text)}</li>" for name, text in problems)
        or "<li>none</li>",
        data=embedded(dict(runs=[drawn(run) for run in runs], groups=[style(g) for g in groups])),
    )
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], beside("page.html"))


def beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def embedded(data: dict) -> str:
    """As JSON inside a <script>, which no text can then close."""
    return to_json(data, separators=(",", ":")).replace("<", "\\u003c")


def drawn(run: dict) -> dict:
    """What report.js reads of a run."""
    keys = ("name", "group", "state", "train", "validation")
    final = ("step", "val_loss", "val_loss_by_position", "scores_mean", "scores_std")
    config = run["config"]
    return {key: run[key] for key in keys} | dict(
        steps=config.steps if config else None,
        train_length=config.train_length if config else None,
        final={key: run["final"][key] for key in final if key in run["final"]},
    )


def style(g: dict) -> dict:
    """What report.js reads of a group."""
    _, dash, marker = g["look"]
    shown = {key: g[key] for key in ("label", "class", "opacity")}
    return shown | dict(dash=DASHES[dash], marker=MARKERS[marker], runs=len(g["runs"]))


def colours(classes: dict[str, str]) -> str:
    """A style a method: its colour, on a dark page made light enough to be seen."""
    light = "".join(f".{name}{{color:{colour}}}" for name, colour in classes.items())
    dark = "".join(f".{name}{{color:{on_dark(colour)}}}" for name, colour in classes.items())
    return f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}"


def on_dark(colour: str) -> str:
    """The colour mixed with white until its relative luminance (WCAG 2) is at least 0.2, 4:1 on a dark page."""
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = lambda c: c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
    if rgb == [0, 0, 0]:  # ours stays the one that stands out
        return "#FFFFFF"
    while sum(weight * linear(c) for weight, c in zip((0.2126, 0.7152, 0.0722), rgb)) < 0.2:
        rgb = [c + 0.1 * (1 - c) for c in rgb]
    return "#" + "".join(f"{round(255 * c):02X}" for c in rgb)


# ---- tables ----------------------------------------------------------------------------------------------------------


def overview(runs: list[dict], groups: list[dict]) -> str:
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
    """The losses on other text than the runs' own (`scripts.evaluate --data`), one column a text, number of tokens of
    it and length; "" if there are none. Folders of the same name with different text are told by the fingerprint."""
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
    heads = [
        f"{html.escape(name)}{f' ({fingerprint[:6]})' * (names[name] > 1)}<br>{tokens:,} tokens<br>loss at {length}"
        for name, fingerprint, tokens, length in columns
    ]
    rows = [
        f'<tr><th scope="row">{swatch(groups[run["group"]])} {html.escape(run["name"])}</th>'
        + "".join(number(loss, ".4f", late) for loss, late in (cells[c].get(i, (None, "")) for c in columns))
        + "</tr>"
        for i, run in enumerate(runs)
        if run["other_texts"]
    ]
    head = "".join(f'<th scope="col">{head}</th>' for head in ("run", *heads))
    return (
        '<section aria-labelledby="texts-head"><h2 id="texts-head">Losses on other text</h2>'
        '<div class="scroll" tabindex="0" role="region" aria-label="losses on other text">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def as_others(runs: list[dict], groups: list[dict]) -> str:
    """The losses of the runs' weights run as methods that train identically (validate_as), one row a run and method;
    "" if there are none."""
    shown = [
        (run, other, {n: loss for n, loss in losses.items() if n in run["final"]["val_loss"]})
        for run in runs
        for other, losses in run["final"].get("val_loss_as", {}).items()
    ]
    lengths = by_number({n for _, _, losses in shown for n in losses})
    if not lengths:
        return ""
    rows = [
        f'<tr><th scope="row">{swatch(groups[run["group"]])} {html.escape(run["name"])}</th>'
        + cell(method_name(other), other)
        + "".join(number(losses.get(n), ".4f") for n in lengths)
        + "</tr>"
        for run, other, losses in shown
    ]
    heads = ["run", "run as", *(f"loss at {n}" for n in lengths)]
    head = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return (
        '<section aria-labelledby="as-head"><h2 id="as-head">The same weights as other methods</h2>'
        '<div class="scroll" tabindex="0" role="region" aria-label="the same weights as other methods">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def rise(loss: dict) -> float | None:
    """From the shortest to the longest validation length, in nats."""
    ends = [loss[length] for length in by_number(loss)]
    return ends[-1] - ends[0] if len(ends) > 1 and None not in (ends[0], ends[-1]) else None


def cell(text: str, value, kind: str = "") -> str:
    attributes = f' class="{kind}"' if kind else ""
    return f'<td{attributes} data-value="{html.escape(str(value))}">{html.escape(text)}</td>'


def number(value: float | None, form: str, note: str = "") -> str:
    """A cell, sorted by its value; the note, as in "*at step 5", leaves its first letter and shows when pointed at."""
    if value is None:
        return '<td class="n"></td>'
    mark = f'<abbr title="{html.escape(note[1:])}">{note[0]}</abbr>' if note else ""
    return f'<td class="n" data-value="{value!r}">{value:{form}}{mark}</td>'


def swatch(g: dict) -> str:
    look = style(g)
    return (
        f'<svg class="swatch {g["class"]}" viewBox="-14 -6 28 12" width="28" height="12" aria-hidden="true" '
        f'opacity="{g["opacity"]}"><path d="M-14,0H14" class="line" stroke-dasharray="{look["dash"]}"/>'
        f'<path d="{look["marker"]}" class="mark"/></svg>'
    )


def configs(runs: list[dict]) -> str:
    """The fields in which the runs differ, one row a run, and those that they have in common, folded."""
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
    return html.escape("" if value is None else ", ".join(map(str, value)) if isinstance(value, tuple) else str(value))


def problem_list(runs: list[dict], strays: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(run["name"], text) for run in runs for text in run["problems"]] + list(strays)


# ---- the chart without JavaScript ------------------------------------------------------------------------------------


def static_chart(groups: list[dict]) -> str:
    """Last validation loss against length as SVG, of each group the mean over its finished runs; before any run is
    finished, over those that came furthest."""
    any_finished = any(run["state"] == "finished" for g in groups for run in g["runs"])
    width, height, left, top, below = 720, 320, 60, 10, 50
    lines = []
    for g in groups:
        ends = [r["final"] for r in g["runs"] if r["final"] and (r["state"] == "finished" or not any_finished)]
        furthest = max((end["step"] for end in ends), default=None)
        losses = [end["val_loss"] for end in ends if end["step"] == furthest]
        points = {int(n): mean(loss.get(n) for loss in losses) for n in by_number({n for loss in losses for n in loss})}
        points = {length: loss for length, loss in points.items() if loss is not None}
        if points:
            lines.append((g, points))
    if not lines:
        return "<p>No validation yet.</p>"
    lengths = sorted({length for _, points in lines for length in points})
    losses = [loss for _, points in lines for loss in points.values()]
    low, high = min(losses), max(losses)
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)
    span = math.log2(lengths[-1] / lengths[0]) or 1
    x = lambda length: round(left + (width - left - 20) * math.log2(length / lengths[0]) / span, 1)
    y = lambda loss: round(top + (height - top - below) * (high - loss) / (high - low), 1)
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= (high - low) / 6)
    marks = [f'<text x="{x(n)}" y="{height - below + 18}" text-anchor="middle">{n}</text>' for n in lengths]
    for k in range(math.ceil(low / step), math.floor(high / step) + 1):
        at = y(k * step)
        marks.append(f'<path class="grid" d="M{left},{at}H{width - 20}"/>')
        marks.append(f'<text x="{left - 6}" y="{at + 4}" text-anchor="end">{k * step:.5g}</text>')
    for g, points in lines:
        look = style(g)
        path = "L".join(f"{x(n)},{y(loss)}" for n, loss in points.items())
        dots = "".join(
            f'<path class="mark" d="{look["marker"]}" transform="translate({x(n)} {y(loss)})"/>'
            for n, loss in points.items()
        )
        marks.append(
            f'<g class="{g["class"]}" opacity="{g["opacity"]}"><title>{html.escape(g["label"])}</title>'
            f'<path class="line" stroke-dasharray="{look["dash"]}" d="M{path}"/>{dots}</g>'
        )
    marks.append(
        f'<text x="{(left + width) / 2}" y="{height - 8}" text-anchor="middle">validation length (tokens)</text>'
    )
    across = f"translate(14 {(height - below) / 2}) rotate(-90)"
    marks.append(f'<text transform="{across}" text-anchor="middle">loss (nats a token)</text>')
    legend = "".join(f"<li>{swatch(g)} {html.escape(g['label'])}</li>" for g, _ in lines)
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="last validation loss against validation length">'
        f'{"".join(marks)}</svg><ul class="legend">{legend}</ul>'
    )


if __name__ == "__main__":
    main()

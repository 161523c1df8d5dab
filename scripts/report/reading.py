"""What the report shows of each run, read from its folder."""

import collections
import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from configs.config import Config
from errors import require
from scripts.shared.run_files import OTHER_TEXTS, check_record, on_own_text, val_tokens
from scripts.shared.runs import StoredRun, failures, read_run, stored_state

POINTS = 100  # of a curve at most: losses of single batches are too noisy to compare
UNKNOWN = "unknown"  # the method of a run whose config is damaged
LENGTHWISE = ("val_loss", "val_loss_by_position")


def find_runs(runs_dir: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """Return the run folders in runs_dir, and (name, problem) of what looks like a run and is none."""
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


def describe_run(path: Path) -> dict:
    """Return what the page shows of a run. What is wrong with it is in `problems`, one line each, never raised."""
    stored = read_run(path)
    problems, config = list(stored.problems), stored.config
    damaged = stored.summary is None and (path / "summary.json").exists()
    run = dict(name=path.name, path=str(path), config=config, method=config.method if config else UNKNOWN)
    run |= dict(state="damaged" if damaged else stored_state(stored), problems=problems)
    run |= dict(data=stored.data.get("train"), validation_text=stored.data.get("validation"))
    try:
        require(not damaged, "see above")
        run |= read_numbers(stored, problems)
    except (ValueError, KeyError) as error:
        problems.append(f"its numbers are left out, as they are not what a run writes ({error})")
        run |= dict(step=0, tokens=0, parameters=None, rate=None)
        run |= dict(needle={}, train={}, validation={}, final={}, other_texts={})
    if run["state"] not in ("finished", "damaged"):
        steps = config.steps if config else "?"
        problems += [f"{run['state']} at step {run['step']} of {steps}", *failures(path)[-1:]]
    return run | dict(fields=flat_fields(config) | ({"data": run["data"]} if run["data"] else {}))


def flat_fields(config: Config | None) -> dict:
    """Return the fields of a config, each of the method's options as one of them; none if it is damaged."""
    fields = config.to_dict() if config else {}
    options = fields.pop("method_options", {})
    return fields | {f"method_options.{option}": value for option, value in options.items()}


def read_numbers(stored: StoredRun, problems: list[str]) -> dict:
    """Return the run's numbers, and append to problems what is missing or not shown."""
    records = read_records(stored.path / "metrics.jsonl", problems)
    train = [r for r in records if "train_loss" in r]
    validations = [r for r in records if "val_loss" in r]
    full = stored.config.val_tokens if stored.config else 0
    final = full_passes(validations[-1], full) if validations else {}
    summary = stored.summary or {}
    if summary and final.get("step") != summary["steps"]:
        problems.append("metrics.jsonl lacks the last validation: the losses are those of summary.json")
        final = dict(step=summary["steps"], **{k: summary[k] for k in ("tokens", "val_loss", "val_tokens")})
    if not records:
        problems.append("no metrics yet")
    if diverged := [r["step"] for r in train if r["train_loss"] is None]:
        problems.append(f"training loss not finite in {len(diverged)} steps, first in step {diverged[0]}")

    evaluations = read_json(stored, "evaluation.json", problems)
    if own := on_own_text(evaluations):
        add_evaluation(final, own, problems)
    rates = [r["tokens_per_second"] for r in train if r.get("tokens_per_second")]
    columns = dict(loss=lambda r: r["train_loss"], grad_norm=lambda r: r.get("grad_norm"))
    lengths = sort_lengths({n for r in validations for n in r["val_loss"]})
    last = max(records, key=lambda r: r["step"], default=final)
    steps = stored.config.steps if stored.config else last.get("step", 1)
    return dict(
        data=stored.data.get("train") or summary.get("data"),
        other_texts=evaluations.get(OTHER_TEXTS, {}),
        step=last.get("step", 0),
        tokens=last.get("tokens", 0),
        parameters=summary.get("parameters"),
        rate=summary.get("tokens_per_second") or (round(statistics.median(rates)) if rates else None),
        needle=read_json(stored, "needle/summary.json", problems).get("greedy", {}),
        train=average_in_bins(train, steps, columns),
        validation={n: validation_curve(validations, steps, n, full) for n in lengths},
        final=final,
    )


def add_evaluation(final: dict, evaluation: dict, problems: list[str]):
    """Add the lengths that were not validated during training to the last validation, or say why not."""
    step = int(evaluation["step"].removeprefix("step_"))  # the name of the checkpoint
    theirs, ours = ({*val_tokens(r).values()} if r else set() for r in (evaluation, final))
    if (step, theirs) == (final.get("step"), ours):
        for key in LENGTHWISE:
            final[key] = {**evaluation.get(key, {}), **final.get(key, {})}
    else:
        a, b = (" and ".join(map(str, sorted(tokens))) or "no" for tokens in (theirs, ours))
        problems.append(
            f"evaluation.json is not shown: it is of step {step} on {a} tokens, "
            f"the last full validation of step {final.get('step')} on {b}"
        )


def validation_curve(validations: list[dict], steps: int, length: str, full: int) -> dict:
    """Return the losses at this length, and 1 for those on a part of the tokens."""
    there = [r for r in validations if length in r["val_loss"]]
    columns = dict(loss=lambda r: r["val_loss"][length], part=lambda r: 1 if val_tokens(r)[length] < full else None)
    return average_in_bins(there, steps, columns)


def full_passes(record: dict, full: int) -> dict:
    """Return the record of a validation without the lengths that were validated on a part of the tokens only."""
    whole = {length for length, tokens in val_tokens(record).items() if tokens >= full}
    parts = {key: {n: value for n, value in record[key].items() if n in whole} for key in LENGTHWISE if key in record}
    return record | parts | dict(val_tokens={n: tokens for n, tokens in val_tokens(record).items() if n in whole})


def read_records(path: Path, problems: list[str]) -> list[dict]:
    """Return the records of metrics.jsonl that can be read; each other line goes to problems. Raises ValueError for a
    record that no run writes."""
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


def read_json(stored: StoredRun, name: str, problems: list[str]) -> dict:
    """Return what a file of the folder holds, {} if it is damaged, which goes to problems, or not there."""
    try:
        return stored.json(name) or {}
    except ValueError as error:
        problems.append(f"{name} is damaged ({error}): not shown")
        return {}


def average_in_bins(records: list[dict], steps: int, columns: dict[str, Callable]) -> dict:
    """Return tokens and columns {name: function of a record}, as means over at most POINTS bins of equally many steps,
    so that bins of different seeds are the same; step 0 is a bin of its own. None where no value of a bin is finite."""
    width = max(1, math.ceil(steps / POINTS))
    bins = collections.defaultdict(list)
    for record in records:
        bins[math.ceil(record["step"] / width)].append(record)
    columns = dict(tokens=lambda r: r["tokens"]) | columns
    return {name: [mean(map(function, part)) for part in bins.values()] for name, function in columns.items()}


def mean(values: Iterable) -> float | None:
    """Return the mean of the values that are not None, to 7 digits, None if there are none."""
    values = [value for value in values if value is not None]
    return values[0] if len(values) == 1 else float(f"{statistics.fmean(values):.7g}") if values else None


def sort_lengths(lengths: Iterable[str]) -> list[str]:
    return sorted(lengths, key=int)

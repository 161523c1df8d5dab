"""Runs as the scripts see them: what a run holds, its state, and which stored run is the one that a sweep asks for.

A run is stored as a run folder, or as one line of a runs.jsonl that scripts.keep wrote. `read_runs` reads both.
"""

import dataclasses
import fcntl
import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path

from configs.config import NOT_MATHEMATICS, Config, config_hash
from configs.presets import preset
from configs.runs import Needle, Run
from data.shards import open_split
from errors import require
from runtime.build import config_of
from runtime.metrics import read_metrics

DAMAGE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, OSError, RecursionError)


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """What is stored of a run. A damaged file is a line in `problems`, never an exception."""

    path: Path  # of a kept run: its name below the file that holds its line
    config: Config | None
    summary: dict | None  # of a finished run, with what scripts.evaluate added to it
    data: dict = dataclasses.field(default_factory=dict)  # data.json
    problems: tuple[str, ...] = ()
    line: dict | None = None  # of a kept run

    @functools.cached_property
    def identity(self) -> str | None:
        """Return the hash of its mathematics."""
        return self.config and config_hash(self.config)

    @property
    def text(self) -> str | None:  # the fingerprint of the training text
        return (self.summary or {}).get("data") or self.data.get("train")

    @property
    def needle(self) -> dict | None:
        """Return the scores on the needle task. None: it was not scored."""
        return self.line.get("needle") if self.line else read_object(self.path / "needle/summary.json")

    def metrics(self) -> list[dict]:
        path = self.path / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def validations(self) -> list[dict]:  # ValueError: a damaged line
        if self.line:
            return [{"val_tokens": self.line["val_tokens"]} | record for record in self.line["curve"]]
        return [record for record in self.metrics() if "val_loss" in record]

    def last(self, field: str):
        """Return this field of the last validation that has it. None: none has."""
        if self.line:
            return self.line.get(field)
        return next((record[field] for record in reversed(self.validations()) if record.get(field)), None)

    def logged(self, key: str) -> list[str]:
        """Return the different values of "commit", "device" or "torch" in the log. A resumed run logs them again."""
        if self.line:
            return self.line.get(key) or ["unknown"]
        path = self.path / "log.txt"
        text = path.read_text(errors="replace") if path.exists() else ""
        pattern = r"^python [^,\n]+, torch ([^,\n]+), numpy " if key == "torch" else rf"^{key}: (.+)$"
        return list(dict.fromkeys(re.findall(pattern, text, re.MULTILINE))) or ["unknown"]


def read_object(path: Path) -> dict | None:
    """Return what a JSON file holds. None: there is no such file. Raises ValueError if it is damaged."""
    value = json.loads(path.read_text()) if path.is_file() else None
    require(value is None or isinstance(value, dict), f"{path} holds no object")
    return value


def read_runs(place: Path) -> list[StoredRun]:
    """Return the runs in a folder of run folders, in the order of their names, or in a file of lines."""
    if place.suffix == ".jsonl":
        return [read_line(place, text) for text in place.read_text().splitlines()] if place.exists() else []
    if not place.is_dir():
        return []
    return [read_run(path) for path in sorted(place.iterdir()) if (path / "config.json").exists()]


def read_line(file: Path, text: str) -> StoredRun:
    """Return the run of one line that scripts.keep wrote."""
    line = json.loads(text)
    path, data = file / line["name"], line["data"]
    changes = {field: tuple(value) if isinstance(value, list) else value for field, value in line["changes"].items()}
    changes |= {field: line[field] for field in ("name", "method", "method_options", "seed")}
    try:
        config, problems = dataclasses.replace(preset(line["preset"]), **changes), ()
    except (ValueError, TypeError) as error:
        config, problems = None, (f"{path} is of an older version: {error}",)
    return StoredRun(path, config, line | {"data": data.get("train")}, data, problems, line)


def read_run(path: Path) -> StoredRun:
    """Return the run of a run folder."""
    config, problems, summary, data = None, [], None, {}
    try:
        config = stored_config(path)
    except ValueError as error:
        problems.append(str(error))
    for name in ("summary.json", "data.json", "evaluation.json"):
        try:
            value = read_object(path / name) or {}
            if name == "summary.json" and value:
                final_losses(value), single_val_tokens(value)
                require(type(value["steps"]) is int, "steps is no number")
                summary = value
            elif name == "data.json":
                data = value
            elif summary:
                summary = with_evaluation(summary, value)
        except DAMAGE as error:
            problems.append(f"{path / name} is damaged ({error}). Delete it.")
    return StoredRun(path, config, summary, data, tuple(problems))


def stored_config(path: Path) -> Config:
    """Return the configuration in a run folder. Raises ValueError if there is none or it is damaged."""
    require((path / "config.json").exists(), f"{path} is not a run folder: it has no config.json")
    try:
        return config_of(json.loads((path / "config.json").read_text()))
    except DAMAGE as error:
        raise ValueError(f"{path}/config.json is damaged ({error})") from error


def with_evaluation(summary: dict, evaluation: dict) -> dict:
    """Return the summary with the losses (on as many tokens) and copy gains that scripts.evaluate added."""
    if evaluation.get("step") != f"step_{summary['steps']:06d}":
        return summary
    comparable = single_val_tokens(evaluation) == single_val_tokens(summary)
    names = [name for name in evaluation if name.startswith("copy_") or comparable and name.startswith("val_loss")]
    return summary | {name: join(evaluation[name], summary.get(name, {})) for name in names}


def join(old: dict, new: dict) -> dict:
    """Return both nested dictionaries as one. The values of `new` win."""
    nested = {key: join(old[key], new[key]) for key in old.keys() & new.keys() if isinstance(new[key], dict)}
    return old | new | nested


def val_tokens(record: dict) -> dict[str, int]:
    """Return the validation tokens by length, of a validation's record, a summary or an evaluation."""
    tokens = record["val_tokens"]
    return tokens if isinstance(tokens, dict) else dict.fromkeys(record["val_loss"], tokens)


def single_val_tokens(record: dict) -> int:
    """Return the validation tokens of a record. Raises ValueError if they differ by length."""
    (tokens,) = {*val_tokens(record).values()}
    return tokens


def final_losses(summary: dict, method: str | None = None) -> dict[int, float]:
    """Return nats a token by validation length at the end of a run. Raises ValueError if one is not finite.

    method: as which the weights were validated. None: the method that was trained.
    """
    losses = summary["val_loss"] if method is None else summary.get("val_loss_as", {}).get(method, {})
    require(None not in losses.values(), "a loss is not a number, so the run diverged")
    return {int(length): float(value) for length, value in losses.items()}


def data_fingerprint(config: Config) -> str | None:
    """Return the fingerprint of the training text that the run reads. None: the text is not on this machine."""
    try:
        stream = open_split(config.data_dir, "train", config.vocab_size)
        return stream.fingerprint(config.steps * config.batch_tokens)
    except (OSError, ValueError):
        return None


# ---- which run, and in which state -----------------------------------------------------------------------------------


def find_stored(run: Run, stored_runs: list[StoredRun], data: str | None = None) -> StoredRun | None:
    """Return this run as it is stored, whatever its name: a finished one if there is one, else the one of that name.

    data: the fingerprint of the training text that the run reads here. A run on another text is another run. None: any.
    """
    identity = config_hash(run.config)
    same = [stored for stored in stored_runs if stored.identity == identity and data in (None, stored.text or data)]
    return max(same, key=lambda s: (s.summary is not None, s.path.name == run.name), default=None)


def describe_differences(ours: Config, theirs: Config, also: Iterable[str] = ()) -> str:
    """Name the fields that differ, with both values: of those that change the mathematics, and of `also`."""
    a, b = ours.to_dict(), theirs.to_dict()
    compared = [field for field in a if field not in NOT_MATHEMATICS or field in also]
    return ", ".join(f"{field} {b[field]} there, {a[field]} here" for field in compared if a[field] != b[field])


def run_state(
    run: Run, stored_runs: list[StoredRun], runs_dir: Path, data: str | None = None
) -> tuple[str, str, StoredRun | None]:
    """Return the state of this run, the reason, and the run as it is stored. data: as in find_stored.

    States: finished, running, interrupted, failed, missing; pretrained: trained but not yet fine-tuned on the needle
    task, which the run asks for; other: the folder of that name holds something else.
    """
    stored = find_stored(run, stored_runs, data)
    path = stored.path if stored else runs_dir / run.name
    named = stored or next((other for other in stored_runs if other.path == path), None)
    if named and named.problems:
        return "other", named.problems[0], stored
    if named and not stored:
        differ = describe_differences(run.config, named.config) or f"data of {run.config.data_dir}"
        return "other", f"{path} is of another config or text ({differ}). Rename it, or use another --runs-dir", None
    state = stored_state(stored) if stored else "failed" if failures(path) else "missing"
    if state == "finished" and run.needle:
        return *needle_state(stored, run.needle), stored
    if state == "failed":
        return state, f"{path}: {failures(path)[-1]}", stored
    return state, "" if state == "missing" else str(path), stored


def needle_state(stored: StoredRun, needle: Needle) -> tuple[str, str]:
    """Return the state of the fine-tuning of a trained run on the needle task, and the reason: see run_state."""
    path = stored.path / "needle"
    if is_running(path):
        return "running", str(path)
    try:
        scores = stored.needle or {}
        found = scores or read_object(path / "settings.json") or {}
    except ValueError as error:
        return "other", f"{path} is damaged ({error}): delete it"
    wanted = dataclasses.asdict(needle) | {"pretrained": f"step_{stored.config.steps:06d}"}
    changed = [
        f"{key} {found[key]} there, {value} here" for key, value in wanted.items() if found.get(key, value) != value
    ]
    if changed:
        return "other", f"{path} is of another fine-tuning ({', '.join(changed)}): delete it to start again"
    lengths = {str(length) for length in needle.lengths(stored.config.train_length)}
    scored = [scores, *(scores.get("as", {}).get(method, {}) for method in stored.config.validate_as)]
    if all(lengths <= {*of.get("greedy", ())} for of in scored):
        return "finished", str(stored.path)
    if failures(stored.path):
        return "failed", f"{stored.path}: {failures(stored.path)[-1]}"
    return ("interrupted", str(path)) if found else ("pretrained", "")


def stored_state(stored: StoredRun) -> str:
    """Return finished, running, failed or interrupted."""
    if stored.summary is not None:
        return "finished"
    return "running" if is_running(stored.path) else "failed" if failures(stored.path) else "interrupted"


def failures(path: Path) -> list[str]:
    """Return one line for each time that the run failed."""
    file = sidecar(path, ".failures.txt")
    return file.read_text(errors="replace").splitlines() if file.exists() else []


def sidecar(path: Path, suffix: str) -> Path:
    """Return the path of a file of the sweep beside a run folder."""
    return path.with_name(path.name + suffix)


def is_running(path: Path) -> bool:
    """Return whether a process holds the folder's lock."""
    try:
        with open(path / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:  # BlockingIOError: it is locked; others: there is no lock
        return isinstance(error, BlockingIOError)

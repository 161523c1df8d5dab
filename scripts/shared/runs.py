"""Reads stored runs, finds the runs of a sweep among them, and tells their states.

A run is stored as a run folder, or as one line of a runs.jsonl that scripts.keep wrote. `read_runs` reads both.
"""

import dataclasses
import fcntl
import functools
import json
import re
from pathlib import Path

from configs.config import Config, config_hash, describe_differences
from configs.presets import preset
from configs.runs import Needle, Run
from data.shards import open_split
from errors import UserError, require
from runtime.build import config_of
from runtime.metrics import read_metrics

# Exceptions that a damaged file can raise.
DAMAGE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, OSError, RecursionError)


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """The files of a run, read. A damaged file raises no exception, but adds a line to `problems`."""

    path: Path  # run folder; for a kept run FILE.jsonl/NAME
    config: Config | None
    summary: dict | None  # of a finished run, with the results of scripts.evaluate
    data: dict = dataclasses.field(default_factory=dict)  # data.json
    problems: tuple[str, ...] = ()
    line: dict | None = None  # of a kept run in its runs.jsonl

    @functools.cached_property
    def identity(self) -> str | None:
        """Return the hash of the fields that change the losses."""
        return self.config and config_hash(self.config)

    @property
    def text(self) -> str | None:  # the fingerprint of the training text
        return (self.summary or {}).get("data") or self.data.get("train")

    @property
    def needle(self) -> dict | None:
        """Return the scores on the needle task, or None without scores."""
        return self.line.get("needle") if self.line else read_object(self.path / "needle/summary.json")

    def metrics(self) -> list[dict]:
        return read_metrics(path) if (path := self.path / "metrics.jsonl").exists() else []

    def validations(self) -> list[dict]:  # raises ValueError for a damaged line
        if self.line:
            return [{"val_tokens": self.line["val_tokens"]} | record for record in self.line["curve"]]
        return [record for record in self.metrics() if "val_loss" in record]

    def last(self, field: str):
        """Return this field of the last validation that has it, or None."""
        if self.line:
            return self.line.get(field)
        return next((record[field] for record in reversed(self.validations()) if record.get(field)), None)

    def logged(self, key: str) -> list[str]:
        """Return the distinct values of "commit", "device", "torch" or "started" in the log.

        A resumed run logs them again.
        """
        if self.line:
            return self.line.get(key) or ["unknown"]
        path = self.path / "log.txt"
        text = path.read_text(errors="replace") if path.exists() else ""
        pattern = r"^python [^,\n]+, torch ([^,\n]+), numpy " if key == "torch" else rf"^{key}: (.+)$"
        return list(dict.fromkeys(re.findall(pattern, text, re.MULTILINE))) or ["unknown"]


def read_object(path: Path) -> dict | None:
    """Return the object in a JSON file, or None without a file. Raise ValueError if the file is damaged."""
    value = json.loads(path.read_text()) if path.is_file() else None
    require(value is None or isinstance(value, dict), f"{path} is not a JSON object")
    return value


def read_runs(place: Path) -> list[StoredRun]:
    """Return the runs in a runs.jsonl, or in a folder of run folders, sorted by name."""
    if place.suffix == ".jsonl":
        return [read_line(place, text) for text in place.read_text().splitlines()] if place.exists() else []
    if not place.is_dir():
        return []
    return [read_run(path) for path in sorted(place.iterdir()) if (path / "config.json").exists()]


def read_line(file: Path, text: str) -> StoredRun:
    """Return the run in one line of a runs.jsonl."""
    try:
        line = json.loads(text)
    except ValueError as error:
        raise UserError(f"{file} has a damaged line ({error}). Restore the file.") from error
    path, data = file / line["name"], line["data"]
    changes = {field: tuple(value) if isinstance(value, list) else value for field, value in line["changes"].items()}
    changes |= {field: line[field] for field in ("name", "method", "method_options", "seed")}
    try:
        config, problems = dataclasses.replace(preset(line["preset"]), **changes), ()
    except (ValueError, TypeError) as error:
        config, problems = None, (f"{path} was kept by an older version of the code ({error}). Keep the run again.",)
    return StoredRun(path, config, line | {"data": data.get("train")}, data, problems, line)


def read_run(path: Path) -> StoredRun:
    """Return the run in a run folder."""
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
                require(type(value["steps"]) is int, "steps is not a number")
                summary = value
            elif name == "data.json":
                data = value
            elif summary:
                summary = with_evaluation(summary, value)
        except DAMAGE as error:
            problems.append(f"{path / name} is damaged ({error}). Delete it.")
    return StoredRun(path, config, summary, data, tuple(problems))


def stored_config(path: Path) -> Config:
    """Return the configuration in a run folder. Raise ValueError if config.json is missing or damaged."""
    require((path / "config.json").exists(), f"{path} has no config.json. Name a run folder.")
    try:
        return config_of(json.loads((path / "config.json").read_text()))
    except DAMAGE as error:
        raise UserError(f"{path}/config.json is damaged ({error}). Restore it, or delete the folder.") from error


def with_evaluation(summary: dict, evaluation: dict) -> dict:
    """Return the summary with the results of scripts.evaluate: copy gain, far gain, losses on as many tokens."""
    if evaluation.get("step") != f"step_{summary['steps']:06d}":
        return summary
    comparable = single_val_tokens(evaluation) == single_val_tokens(summary)
    prefixes = ("copy_", "far_", "val_loss") if comparable else ("copy_", "far_")
    names = [name for name in evaluation if name.startswith(prefixes)]
    return summary | {name: join(evaluation[name], summary.get(name, {})) for name in names}


def join(old: dict, new: dict) -> dict:
    """Return the union of two nested dictionaries. The values of `new` replace the values of `old`."""
    nested = {key: join(old[key], new[key]) for key in old.keys() & new.keys() if isinstance(new[key], dict)}
    return old | new | nested


def val_tokens(record: dict) -> dict[str, int]:
    """Return the validation tokens by length of a metrics record, a summary or an evaluation."""
    tokens = record["val_tokens"]
    return tokens if isinstance(tokens, dict) else dict.fromkeys(record["val_loss"], tokens)


def single_val_tokens(record: dict) -> int:
    """Return the validation tokens of a record. Raise ValueError if they differ by length."""
    (tokens,) = {*val_tokens(record).values()}
    return tokens


def measured(record: dict, field: str, method: str | None = None) -> dict:
    """Return a field, such as far_gain, of a summary or metrics record.

    method: the method of validation, one of validate_as. None: the trained method.
    """
    return record.get(field, {}) if method is None else record.get(f"{field}_as", {}).get(method, {})


def copy_gains(record: dict, method: str | None = None) -> dict[int, float]:
    """Return the copy gain in nats by gap. Its spans are random, so only copying can predict them."""
    return {int(gap): nats for gap, nats in measured(record, "copy_gain", method).get("random", {}).items()}


def final_losses(summary: dict, method: str | None = None) -> dict[int, float]:
    """Return the final loss in nats a token by validation length. Raise ValueError if one is not finite."""
    losses = measured(summary, "val_loss", method)
    require(None not in losses.values(), "the run diverged, as a loss is not finite")
    return {int(length): float(value) for length, value in losses.items()}


def data_fingerprint(config: Config) -> str | None:
    """Return the fingerprint of the run's training text, or None if it is unknown: no text, or one that continues."""
    if config.init_from:
        return None
    try:
        stream = open_split(config.data_dir, "train", config.vocab_size)
        return stream.fingerprint(config.steps * config.batch_tokens)
    except (OSError, ValueError):
        return None


# ---- the runs of a sweep and their states ----------------------------------------------------------------------------


def find_stored(run: Run, stored_runs: list[StoredRun], data: str | None = None) -> StoredRun | None:
    """Return the stored run with the same hash, under any name. A finished run is preferred, then the same name.

    data: fingerprint of the training text. A stored run on another text does not count. None: any text.
    """
    identity = config_hash(run.config)
    same = [stored for stored in stored_runs if stored.identity == identity and data in (None, stored.text or data)]
    return max(same, key=lambda s: (s.summary is not None, s.path.name == run.name), default=None)


def run_state(
    run: Run, stored_runs: list[StoredRun], runs_dir: Path, data: str | None = None
) -> tuple[str, str, StoredRun | None]:
    """Return the state of a run, the reason, and the stored run. data: as in find_stored.

    States: finished, running, interrupted, failed, missing, pretrained, other. "pretrained" lacks the fine-tuning on
    the needle task. "other" means that the folder of that name holds another run.
    """
    stored = find_stored(run, stored_runs, data)
    path = stored.path if stored else runs_dir / run.name
    same_name = stored or next((other for other in stored_runs if other.path == path), None)
    if same_name and same_name.problems:
        return "other", same_name.problems[0], stored
    if same_name and not stored:
        differences = describe_differences(run.config, same_name.config) or f"the text in {run.config.data_dir}"
        return "other", f"{path} is another run ({differences}). Rename it, or use another --runs-dir.", None
    state = stored_state(stored) if stored else "failed" if failures(path) else "missing"
    if state == "finished" and run.needle:
        return *needle_state(stored, run.needle), stored
    if state == "failed":
        return state, f"{path}: {failures(path)[-1]}", stored
    return state, "" if state == "missing" else str(path), stored


def needle_state(stored: StoredRun, needle: Needle) -> tuple[str, str]:
    """Return the state of a trained run's fine-tuning on the needle task, and the reason. States: see run_state."""
    path = stored.path / "needle"
    if is_running(path):
        return "running", str(path)
    try:
        scores = stored.needle or {}
        found = scores or read_object(path / "settings.json") or {}
    except ValueError as error:
        return "other", f"{path} is damaged ({error}). Delete it."
    wanted = dataclasses.asdict(needle) | {"pretrained": f"step_{stored.config.steps:06d}"}
    changed = [f"{key} {found[key]}, not {value}" for key, value in wanted.items() if found.get(key, value) != value]
    if changed:
        return "other", f"{path} is another fine-tuning ({', '.join(changed)}). Delete it to fine-tune again."
    lengths = {str(length) for length in needle.lengths(stored.config.train_length)}
    by_method = [scores, *(scores.get("as", {}).get(method, {}) for method in stored.config.validate_as)]
    if all(lengths <= {*method_scores.get("greedy", ())} for method_scores in by_method):
        return "finished", str(stored.path)
    if failures(stored.path):
        return "failed", f"{stored.path}: {failures(stored.path)[-1]}"
    return ("interrupted", str(path)) if found else ("pretrained", "")


def stored_state(stored: StoredRun) -> str:
    """Return the state of a stored run: finished, running, failed or interrupted."""
    if stored.summary is not None:
        return "finished"
    return "running" if is_running(stored.path) else "failed" if failures(stored.path) else "interrupted"


def failures(path: Path) -> list[str]:
    """Return the failures of a run, one line each."""
    file = sidecar(path, ".failures.txt")
    return file.read_text(errors="replace").splitlines() if file.exists() else []


def sidecar(path: Path, suffix: str) -> Path:
    """Return the path of a file that a sweep writes beside a run folder."""
    return path.with_name(path.name + suffix)


def is_running(path: Path) -> bool:
    """Return whether a process holds the folder's lock."""
    try:
        with open(path / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:  # BlockingIOError: locked; any other: the file is missing
        return isinstance(error, BlockingIOError)

"""Runs on disk as the scripts see them: what each holds, its state, and which one is the run that a sweep asks for."""

import dataclasses
import fcntl
import json
import re
from collections.abc import Iterable
from pathlib import Path

from configs.config import NOT_MATHEMATICS, Config, config_hash
from configs.runs import Needle, Run
from data.shards import open_split
from errors import require
from runtime.build import config_of
from runtime.checkpoint import latest_checkpoint
from runtime.metrics import read_metrics
from scripts.shared.run_files import FILES, check_record, read_json

STATES = ("finished", "pretrained", "running", "interrupted", "failed", "other", "missing")


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """What a run folder holds. What is wrong with it is in `problems`, one line each, never an exception."""

    path: Path
    config: Config | None
    summary: dict | None  # of a finished run
    data: dict = dataclasses.field(default_factory=dict)  # data.json; empty for runs of before it
    problems: tuple[str, ...] = ()

    @property
    def text(self) -> str | None:
        """Return the fingerprint of its training data, None where it is not known."""
        return (self.summary or {}).get("data") or self.data.get("train")

    def metrics(self) -> list[dict]:
        """Return the records of metrics.jsonl. Raises ValueError, which names the line, if one is damaged."""
        path = self.path / "metrics.jsonl"
        records = read_metrics(path) if path.exists() else []
        for number, record in enumerate(records, start=1):
            check_record(record, f"{path}, line {number}")
        return records

    def json(self, name: str) -> dict | None:
        """Return what is in a file of the folder (one of FILES), None where there is none. Raises ValueError, which
        does not name the file, if it is damaged."""
        return read_json(self.path / name, FILES[name])


def data_fingerprint(config: Config) -> str | None:
    """Return the fingerprint of the training data that the run reads, None where it is not on this machine."""
    try:
        stream = open_split(config.data_dir, "train", config.vocab_size)
        return stream.fingerprint(config.steps * config.batch_tokens)
    except (OSError, ValueError):
        return None


def stored_config(path: Path) -> Config:
    """Return the configuration in a run folder. Raises ValueError if there is none or it is damaged."""
    if not (path / "config.json").exists():
        raise ValueError(f"{path} is not a run folder: it has no config.json")
    try:
        return config_of(json.loads((path / "config.json").read_text()))
    except (ValueError, TypeError, AttributeError, RecursionError, KeyError, ArithmeticError) as error:
        raise ValueError(f"{path}/config.json is damaged ({error})") from error


def read_run(path: Path) -> StoredRun:
    config, problems = None, []
    try:
        config = stored_config(path)
    except ValueError as error:
        problems.append(str(error))
    found, mends = {}, {"summary.json": "delete it and run the sweep again", "data.json": "delete it"}
    for name, mend in mends.items():
        try:
            found[name] = read_json(path / name, FILES[name])
        except ValueError as error:
            problems.append(f"{path}/{name} is damaged ({error}): {mend}")
    return StoredRun(path, config, found.get("summary.json"), found.get("data.json") or {}, tuple(problems))


def read_runs(runs_dir: Path) -> list[StoredRun]:
    """Return what every run folder in runs_dir holds, in the order of their names."""
    if not runs_dir.is_dir():
        return []
    return [read_run(path) for path in sorted(runs_dir.iterdir()) if (path / "config.json").exists()]


def find_stored(run: Run, stored_runs: list[StoredRun], data: str | None = None) -> StoredRun | None:
    """Return this run as it is on disk, whatever its name: a finished one if there is one, else the one of that name.

    data: the fingerprint of the training data that the run reads here; what was trained on other data is another run.
    None: not known, or any will do.
    """
    same = [stored for stored in stored_runs if stored.config and is_same_run(stored, run, data)]
    return max(same, key=lambda s: (s.summary is not None, s.path.name == run.name), default=None)


def is_same_run(stored: StoredRun, run: Run, data: str | None) -> bool:
    """Return whether a stored run has the run's mathematics, its distinguishing fields and its data."""
    known = None not in (data, stored.text)  # then the name of the data folder, which may have moved, says nothing
    fields = [field for field in run.distinguishing if not (known and field == "data_dir")]
    same = all(getattr(stored.config, field) == getattr(run.config, field) for field in fields)
    return same and (not known or stored.text == data) and config_hash(stored.config) == config_hash(run.config)


def train_state(run: Run, stored_runs: list[StoredRun], runs_dir: Path, data: str | None = None) -> tuple[str, str]:
    """Return the state of the training of this run (one of STATES but pretrained; see needle_state), and the reason.

    other: the folder of that name holds something else, which is left alone. data: as in find_stored.
    """
    stored = find_stored(run, stored_runs, data)
    path = stored.path if stored else runs_dir / run.name
    if stored is None and (named := next((s for s in stored_runs if s.path.name == run.name), None)):
        if named.config is None:
            return "other", named.problems[0]
        if differ := describe_differences(run.config, named.config, run.distinguishing):
            return "other", f"{named.path} is of another config ({differ}): rename it"
        return "other", f"trained on other data than {run.config.data_dir}: use another --runs-dir"
    if stored and stored.problems:
        return "other", stored.problems[0]
    state = stored_state(stored) if stored else "failed" if failures(path) else "missing"
    if state == "failed":
        return state, describe_failures(path)
    if state == "interrupted":
        return state, describe_progress(path)
    return state, "" if state == "missing" else str(path)


def needle_state(stored: StoredRun, needle: Needle) -> tuple[str, str]:
    """Return the state of the fine-tuning of a trained run on the needle task, and the reason; "pretrained" when it has
    not begun.

    other: it was fine-tuned or scored with other settings, or its files are damaged, and it is left alone.
    """
    path = stored.path / "needle"
    if is_running(path):
        return "running", str(path)
    found, mends = {}, {"settings.json": path, "summary.json": path / "summary.json"}
    for name, mend in mends.items():
        try:
            found[name] = stored.json(f"needle/{name}") or {}
        except ValueError as error:
            return "other", f"{path / name} is damaged ({error}): delete {mend}"
    settings, summary = found.values()
    wanted = {key: getattr(needle, key) for key in ("haystack", "steps", "sequences", "curriculum")}
    wanted["pretrained"] = f"step_{stored.config.steps:06d}"
    have = summary or settings
    if have and (changed := [f"{k} {have.get(k)} there, {v} here" for k, v in wanted.items() if have.get(k) != v]):
        return "other", f"{path} is of another fine-tuning ({', '.join(changed)}): delete it to start again"
    if summary and (examples := summary.get("examples")) != needle.examples:
        scored = f"{path} is scored on other examples ({examples} a length there, {needle.examples} here)"
        return "other", f"{scored}: delete {mends['summary.json']} to score again"
    lengths = {str(length) for length in needle.lengths(stored.config.train_length)}
    scored = [summary, *(summary.get("as", {}).get(method, {}) for method in stored.config.validate_as)]
    if all(lengths <= {*of.get("greedy", ())} for of in scored):
        return "finished", str(stored.path)
    if failures(stored.path):
        return "failed", describe_failures(stored.path)
    return ("interrupted", describe_progress(path)) if have else ("pretrained", "not fine-tuned yet")


def describe_failures(path: Path) -> str:
    failed = failures(path)
    return f"{path} failed {len(failed)} time{'s' if len(failed) > 1 else ''}: {failed[-1]}"


def describe_progress(path: Path) -> str:
    checkpoint = latest_checkpoint(path / "checkpoints") if (path / "checkpoints").exists() else None
    return f"{path}, {f'after {checkpoint.stem}' if checkpoint else 'without a checkpoint'}"


def stored_state(stored: StoredRun) -> str:
    """Return finished, running, failed or interrupted."""
    if stored.summary is not None:
        return "finished"
    if is_running(stored.path):
        return "running"
    return "failed" if failures(stored.path) else "interrupted"


def describe_differences(ours: Config, theirs: Config, also: Iterable[str] = ()) -> str:
    """Name the fields that differ, with both values: of those that change the mathematics, and of `also`."""
    a, b = ours.to_dict(), theirs.to_dict()
    compared = [field for field in a if field not in NOT_MATHEMATICS or field in also]
    return ", ".join(f"{field} {b[field]} there, {a[field]} here" for field in compared if a[field] != b[field])


def failures(path: Path) -> list[str]:
    """Return one line for each time that the run failed."""
    file = sidecar(path, ".failures.txt")
    return file.read_text(errors="replace").splitlines() if file.exists() else []


def sidecar(path: Path, suffix: str) -> Path:
    """Return the path of a file of the sweep about a run: beside its folder, which a refused run does not have."""
    return path.with_name(path.name + suffix)


def is_running(path: Path) -> bool:
    """Return whether a process holds the folder's lock."""
    try:
        with open(path / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or what is called so is no file
        return False
    return False


def log_values(folder: Path, key: str) -> list[str]:
    """Return what log.txt says after "commit: " or "device: ", once each; a resumed run says it again."""
    path = folder / "log.txt"
    text = path.read_text(errors="replace") if path.exists() else ""
    return list(dict.fromkeys(re.findall(rf"^{key}: (.+)$", text, re.MULTILINE))) or ["unknown"]


def require_as_many_runs(page: Path, pattern: str, runs: int, what: str = "runs"):
    """Raise ValueError if the page at this path says that it was made from more runs than these. pattern: a regular
    expression around the number. what: they are, if not runs."""
    found = re.search(pattern, page.read_text(errors="replace"), re.MULTILINE) if page.exists() else None
    there = int(found[1]) if found else 0
    mend = ": --force writes over it" if runs else ""  # with none there is nothing to write
    require(there <= runs, f"{page} was made from {there} {what}, and now there are {runs}{mend}")

"""Finds the runs of a sweep among the stored runs, and tells their states."""

import dataclasses
import fcntl
from pathlib import Path

from configs.config import config_hash, describe_differences
from configs.runs import Needle, Run
from runtime.metrics import read_record
from scripts.shared.runs import StoredRun


def find_stored(run: Run, stored_runs: list[StoredRun], data: str | None = None) -> StoredRun | None:
    """Return the stored run with the same hash, under any name. A finished run is preferred, then the same name.

    data: fingerprint of the training text. A stored run on another text does not count. None: any text.
    """
    identity = config_hash(run.config)
    same = (each for each in stored_runs if each.identity == identity and data in (None, each.text or data))
    return max(same, key=lambda stored: (stored.summary is not None, stored.path.name == run.name), default=None)


def run_state(run: Run, stored_runs: list[StoredRun], runs_dir: Path, data: str | None = None) -> tuple:
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
    if stored and stored.summary:
        return *(needle_state(stored, run.needle) if run.needle else ("finished", str(path))), stored
    if stored and is_running(path):
        return "running", str(path), stored
    if failed := failures(path):
        return "failed", f"{path}: {failed[-1]}", stored
    return *(("interrupted", str(path)) if stored else ("missing", "")), stored


def needle_state(stored: StoredRun, needle: Needle) -> tuple:
    """Return the state of a trained run's fine-tuning on the needle task, and the reason. States: see run_state."""
    # 1. Is it this fine-tuning?
    path = stored.path / "needle"
    if is_running(path):
        return "running", str(path)
    try:
        scores = stored.needle or {}
        found = scores or read_record(path / "settings.json") or {}
    except ValueError as error:
        return "other", f"{path} is damaged ({error}). Delete it."
    wanted = dataclasses.asdict(needle) | {"pretrained": f"step_{stored.config.steps:06d}"}
    changed = [f"{key} {found[key]}, not {value}" for key, value in wanted.items() if found.get(key, value) != value]
    if changed:
        return "other", f"{path} is another fine-tuning ({', '.join(changed)}). Delete it to fine-tune again."

    # 2. Is it scored at all lengths, with all methods?
    lengths = {str(length) for length in needle.lengths(stored.config.train_length)}
    by_method = [scores, *(scores.get("as", {}).get(method, {}) for method in stored.config.validate_as)]
    if all(lengths <= {*method_scores.get("greedy", ())} for method_scores in by_method):
        return "finished", str(stored.path)
    if failed := failures(stored.path):
        return "failed", f"{stored.path}: {failed[-1]}"
    return ("interrupted", str(path)) if found else ("pretrained", "")


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

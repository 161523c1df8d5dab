"""The run folder: everything that a run leaves behind, and the lock that keeps a second process out."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any, Sequence, TextIO

import numpy
import torch

from files import append, open_own, refuse_link, replace_file, to_json
from runtime.device import device_name


class RunFolder:
    """runs/<name>/, used by one process at a time. Only the main process has one.

    config.json    the resolved configuration
    data.json      fingerprints of its training and validation text, its tokenizer, training tokens, those distinct
    log.txt        what the run said, below the code and the versions that it ran with
    metrics.jsonl  one record a line (runtime/metrics.py)
    summary.json   the result; it is written last, so a folder that has it is a finished run
    checkpoints/   step_000500.pt ... (runtime/checkpoint.py)
    interrupted    the signal that ended the run before its time; gone when it goes on
    lock           locked while a process uses the folder, which a killed process no longer does
    """

    def __init__(self, path: Path, lock: TextIO, created: bool = False) -> None:
        self.path = path
        self.created = created  # by this process, just now
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self._lock = lock

    @classmethod
    def create(cls, root: str | Path, name: str, resume: str = "never", need_bytes: int = 0) -> RunFolder:
        """Make root/name and lock it; `resume` "auto" also takes one that exists.

        Raises ValueError when the folder exists and is not to be continued, when another process uses it, when there
        is a symbolic link in it (it may be one itself), when the disk has less than `need_bytes` free, or when it
        cannot be made; then nothing new is left behind.
        """
        path = Path(root) / name
        try:
            _check_space(path, need_bytes)
            path.parent.mkdir(parents=True, exist_ok=True)
            created = _mkdir(path)
            if not created and resume != "auto":
                raise ValueError(f"{path} exists: choose another --name, or continue it with --resume auto")
            try:
                for entry in path.iterdir():
                    refuse_link(entry)
                lock = _take_lock(path / "lock")
                (path / "checkpoints").mkdir(exist_ok=True)
                (path / "interrupted").unlink(missing_ok=True)
            except OSError:
                if created:
                    shutil.rmtree(path)
                raise
        except OSError as error:
            raise ValueError(f"cannot use {path} as the run folder: {error}") from error
        return cls(path, lock, created)

    def discard(self) -> None:
        """Remove the folder, if this process has made it: for a run that could not begin."""
        if self.created:
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()

    def mark_interrupted(self, signal: str) -> None:
        """For the shell that started torchrun, whose exit code cannot say it."""
        replace_file(self.path / "interrupted", lambda file: file.write(signal.encode() + b"\n"))

    def write_json(self, name: str, record: dict[str, Any]) -> None:
        """Write config.json or summary.json, whole or not at all; what JSON lacks (a path, a dtype) as a string."""
        text = to_json(record, indent=2, default=str) + "\n"
        replace_file(self.path / name, lambda file: file.write(text.encode()))

    def log(self, text: str) -> None:
        """Append a line (or more) to log.txt."""
        append(self.path / "log.txt", text + "\n")

    def log_header(self, sources: Sequence[Path], device: torch.device) -> None:
        """Log what is needed to repeat the run: versions, device, git commit and the source text itself."""
        versions = f"python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}"
        commit = git_commit(Path(__file__).parent) or "unknown"
        self.log(f"{versions}\ndevice: {device_name(device)}\ncommit: {commit}")
        for source in sources:
            self.log(f"==== {source} ====\n{source.read_text(encoding='utf-8')}")
        self.log("=" * 100)


def _check_space(path: Path, need_bytes: int) -> None:
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < need_bytes:
        raise ValueError(f"{path} needs {in_words(need_bytes)} of disk, but {in_words(free)} are free: make room")


def in_words(num_bytes: int) -> str:
    """A size in the unit in which it is at least 1."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def _mkdir(path: Path) -> bool:
    """Whether this call made the folder: of two processes at the same moment, one is told so."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _take_lock(path: Path) -> TextIO:
    lock = open_own(path, "a+")  # "w" would wipe out the holder's name
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system drops it when the process dies, however it dies
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise ValueError(f"{path.parent} is in use by {holder}: wait for it, or choose another --name") from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}\n")
    lock.flush()
    return lock


def git_commit(folder: Path) -> str | None:
    """The commit's hash, with "-dirty" when files differ from it; None outside a repository or without git.

    Not those in results/: they are made by the code and do not make it, and one page after the other is written there.
    """

    def git(*words):
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("diff", "HEAD", "--name-only", "--", ":(top)", ":(top,exclude)results")
        return git("rev-parse", "HEAD").strip() + "-dirty" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None

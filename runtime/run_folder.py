"""The run folder: everything that a run leaves behind, and the lock that keeps a second process out."""

import fcntl
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TextIO

import numpy
import torch

from errors import require
from files import append, open_own, refuse_link, replace_text, to_json
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

    def __init__(self, path: Path, lock: TextIO, created: bool = False):
        self.path = path
        self.created = created  # by this process, just now
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self._lock = lock

    @classmethod
    def create(cls, root: str | Path, name: str, resume: str = "never", need_bytes: int = 0) -> Self:
        """Make root/name, lock it and return it; `resume` "auto" also takes one that exists.

        Raise ValueError when the folder exists and is not to be continued, when another process uses it, when there
        is a symbolic link in it (it may be one itself), when the disk has less than `need_bytes` free, or when it
        cannot be made; then nothing new is left behind.
        """
        path = Path(root) / name
        try:
            check_space(path, need_bytes)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()  # of two processes at the same moment, one succeeds
                created = True
            except FileExistsError:
                created = False
            mend = "choose another --name, or continue it with --resume auto"
            require(created or resume == "auto", f"{path} exists: {mend}")
            try:
                for entry in path.iterdir():
                    refuse_link(entry)
                lock = take_lock(path / "lock")
                (path / "checkpoints").mkdir(exist_ok=True)
                (path / "interrupted").unlink(missing_ok=True)
            except OSError:
                if created:
                    shutil.rmtree(path)
                raise
        except OSError as error:
            raise ValueError(f"cannot use {path} as the run folder: {error}") from error
        return cls(path, lock, created)

    def discard(self):
        """Remove the folder, if this process has made it: for a run that could not begin."""
        if self.created:
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self):
        """Let another process use the folder."""
        self._lock.close()

    def mark_interrupted(self, signal: str):
        """Leave the signal's name for the shell that started torchrun, whose exit code cannot say it."""
        replace_text(self.path / "interrupted", f"{signal}\n")

    def write_json(self, name: str, record: dict[str, Any]):
        """Write config.json or summary.json, whole or not at all; what JSON lacks (a path, a dtype) as a string."""
        replace_text(self.path / name, to_json(record, indent=2, default=str) + "\n")

    def log(self, text: str):
        """Append a line (or more) to log.txt."""
        append(self.path / "log.txt", text + "\n")

    def log_header(self, sources: Sequence[Path], device: torch.device):
        """Log what is needed to repeat the run: versions, device, git commit and the source text itself."""
        versions = f"python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}"
        commit = git_commit(Path(__file__).parent) or "unknown"
        self.log(f"{versions}\ndevice: {device_name(device)}\ncommit: {commit}")
        for source in sources:
            self.log(f"==== {source} ====\n{source.read_text(encoding='utf-8')}")
        self.log("=" * 100)


def check_space(path: Path, need_bytes: int):
    """Raise ValueError when the disk that this path is on has less than so many bytes free."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    words = f"{path} needs {format_bytes(need_bytes)} of disk, but {format_bytes(free)} are free: make room"
    require(free >= need_bytes, words)


def format_bytes(num_bytes: int) -> str:
    """Return a size in the unit in which it is at least 1."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def take_lock(path: Path) -> TextIO:
    """Return the locked file. Raise ValueError, which names the process that has locked it, where one has."""
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
    """Return the commit's hash, with "-dirty" when files differ from it; None outside a repository or without git.

    Not those in results/: they are made by the code and do not make it, and one page after the other is written there.
    """

    def git(*words):
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("diff", "HEAD", "--name-only", "--", ":(top)", ":(top,exclude)results")
        return git("rev-parse", "HEAD").strip() + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None

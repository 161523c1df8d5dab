"""The run folder: everything that a run leaves behind, and the lock that keeps a second process out."""

import fcntl
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from errors import UserError, require
from files import append, open_own, replace_text, to_json


class RunFolder:
    """runs/<name>/, used by one process at a time. Only the main process has one.

    config.json    the resolved configuration
    data.json      fingerprints of training and validation text, tokenizer, tokens in all, distinct tokens
    log.txt        what the run printed, below the code and the versions that it ran with
    metrics.jsonl  one record a line (runtime/metrics.py)
    summary.json   the result; it is written last, so a folder that has it is a finished run
    checkpoints/   step_000500.pt ... (runtime/checkpoint.py)
    interrupted    the name of the signal that ended the run early; deleted when the run continues
    lock           locked while a process uses the folder; the system unlocks it when the process dies
    """

    def __init__(self, root: str | Path, name: str, resume: str = "never"):
        """Make root/name and lock it. With `resume` "auto" an existing folder is taken as well.

        Raise ValueError when the folder exists and is not to be continued, and when another process uses it. Raise
        OSError when it cannot be made.
        """
        self.path = path = Path(root) / name
        self.checkpoints, self.metrics = path / "checkpoints", path / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()  # of two processes at the same moment, one succeeds
            self.is_new = True
        except FileExistsError:
            advice = "Choose another --name, or continue the run with --resume auto."
            require(resume == "auto", f"{path} exists. {advice}")
            self.is_new = False
        self._lock = open_own(path / "lock", "a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise UserError(f"{path} is in use (see its file lock). Wait for it, or choose another --name.") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {platform.node()}\n")
        self._lock.flush()
        self.checkpoints.mkdir(exist_ok=True)
        (path / "interrupted").unlink(missing_ok=True)

    def close(self):
        """Let another process use the folder."""
        self._lock.close()

    def mark_interrupted(self, signal: str):
        """Record the signal's name: under torchrun, an exit code cannot say it."""
        replace_text(self.path / "interrupted", f"{signal}\n")

    def write_json(self, name: str, record: dict[str, Any]):
        """Write a JSON file, whole or not at all."""
        replace_text(self.path / name, to_json(record, indent=2) + "\n")

    def log(self, text: str):
        """Append a line (or more) to log.txt."""
        append(self.path / "log.txt", text + "\n")


def git_commit(folder: Path) -> str | None:
    """Return the commit's hash, with "-dirty" when files outside of results/ differ from it.

    Return None outside a repository, and without git.
    """

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("diff", "HEAD", "--name-only", "--", ":(top)", ":(top,exclude)results")
        return git("rev-parse", "HEAD").strip() + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None

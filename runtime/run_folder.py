"""Makes the run folder, locks it against a second process, and writes its files."""

import fcntl
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from errors import UserError
from files import append, open_no_symlink, replace_text, to_json
from runtime.processes import World


class RunFolder:
    """The folder runs/NAME/ of a run. Only rank 0 has this object.

    config.json    configuration, with all fields
    data.json      fingerprints of training and validation text, tokenizer, training tokens (all, distinct)
    tokenizer.json copy of the tokenizer, which gpt2 does not need
    log.txt        versions, commit, source code of train_gpt.py, model/ and optim/, and all lines that the run printed
    metrics.jsonl  one record a line (runtime/metrics.py)
    summary.json   results; written last, so its presence marks a finished run
    checkpoints/   step_000500.pt ... (runtime/checkpoint.py)
    interrupted    name of the signal that stopped the run; deleted when the run continues
    failed         error that ended a rank; deleted when the run continues
    lock           locked while a process uses the folder; the system unlocks it when the process ends
    """

    def __init__(self, root: str | Path, name: str, resume: str = "never"):
        """Make root/name and lock it. `resume` "auto" also accepts an existing folder.

        The folder of a run that failed before its second step is used again. Raise ValueError if another folder exists
        and `resume` is "never", or if another process uses it. Raise OSError if the folder cannot be made.
        """
        self.path = path = Path(root) / name
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"

        # 1. Make it.
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()  # if two processes call mkdir at the same time, only one succeeds
            self.is_new = True
        except FileExistsError:
            self.is_new = False
            is_run = (path / "lock").exists()
            if resume != "auto" and (self.has_begun() or not is_run):
                problem = f"{path} exists. Choose another --name, or continue the run with --resume auto."
                raise UserError(problem) from None

        # 2. Lock it.
        self._lock = open_no_symlink(path / "lock", "a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            owner = (path / "lock").read_text().strip() or "another process"
            raise UserError(f"{path} is in use by {owner}. Wait until it ends, or choose another --name.") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {platform.node()}\n")
        self._lock.flush()

        # 3. Prepare it for this process.
        self.checkpoints.mkdir(exist_ok=True)
        for mark in ("interrupted", "failed"):
            (path / mark).unlink(missing_ok=True)

    def has_begun(self) -> bool:
        """Return True if the folder holds more than the start of a run."""
        metrics = self.metrics.read_bytes() if self.metrics.exists() else b""
        is_finished = (self.path / "summary.json").exists()  # even a run of 0 steps
        return is_finished or b'"train_loss"' in metrics or any(self.checkpoints.glob("step_*"))

    def close(self):
        """Unlock the folder for other processes."""
        self._lock.close()

    def mark_interrupted(self, signal: str):
        """Record the signal's name in a file, because torchrun does not pass on exit codes."""
        replace_text(self.path / "interrupted", f"{signal}\n")

    def write_json(self, name: str, record: dict[str, Any]):
        """Replace a JSON file of the folder."""
        replace_text(self.path / name, to_json(record, indent=2) + "\n")

    def log(self, text: str):
        """Append one or more lines to log.txt."""
        append(self.path / "log.txt", text + "\n")


def make_folder(root: str, name: str, resume: str, world: World) -> RunFolder | None:
    """Return the run folder on rank 0, and None on others. All ranks call this, and raise UserError if rank 0 fails."""
    folder = problem = None
    if world.is_main:
        try:
            folder = RunFolder(root, name, resume)
        except (UserError, OSError) as error:
            problem = str(error)
    problem, *_ = world.gather(problem)
    if problem is not None:
        raise UserError(problem)
    return folder


def git_commit(folder: Path) -> str | None:
    """Return the hash of the commit, with "-dirty" if tracked files outside results/ differ from it.

    Return None outside a repository or without git.
    """

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        commit = git("rev-parse", "HEAD").strip()
        changed = git("diff", "HEAD", "--name-only", "--", ":(top)", ":(top,exclude)results")
        return f"{commit}-dirty" if changed else commit
    except (OSError, subprocess.CalledProcessError):
        return None

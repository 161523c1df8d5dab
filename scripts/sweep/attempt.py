"""One attempt at a run: the command, the process, and how it ended."""

import datetime
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from configs.interrupt import INTERRUPTED
from configs.sweeps import Run
from runtime.files import append, open_own
from scripts.shared.runs import failures, is_running, sidecar

ROOT = Path(__file__).parents[2]
USER_ERROR = 2  # exit code of train_gpt.py; INTERRUPTED is another
GRACE = 60  # seconds that a run has to save and end after SIGTERM


def train_command(run: Run, processes: int) -> list[str]:
    """Return the command that trains the run, by torchrun if on more than one process."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [sys.executable, *(launcher if processes > 1 else []), str(ROOT / "train_gpt.py"), *run.arguments]


def fine_tune_command(run: Run) -> list[str]:
    """Return the command that fine-tunes the run, which is one process always."""
    where = ["--device", run.config.device, "--compile", run.config.compile]
    return [sys.executable, "-m", "scripts.needle", str(run.path), *run.needle.arguments, *where]


class Attempt:
    """A process that trains the run or, when that is done, fine-tunes it, in a process group of its own; its output
    goes to the end of NAME.log.

    environment: what differs from ours. processes: more than 1 are started by torchrun.
    """

    def __init__(self, run: Run, environment: dict[str, str], processes: int):
        self.path, self.log = run.path, sidecar(run.path, ".log")
        fine_tunes = run.needle is not None and (run.path / "summary.json").exists()
        self.locked = run.path / "needle" if fine_tunes else run.path  # the folder that the process locks
        self.is_last = fine_tunes or run.needle is None
        command = fine_tune_command(run) if fine_tunes else train_command(run, processes)
        with open_own(self.log, "ab") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the sweep, which then stops its runs in order
            )

    def stop(self):
        """Ask the run to end, and end it and all that it started when it does not."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the compiler's workers too
        self.process.wait()

    def outcome(self) -> str | None:
        """Return how it ended (see record_outcome), None while it runs. To be called once after the end."""
        code = self.process.poll()
        if code is None:
            return None
        with open(self.log, "rb") as log:
            log.seek(self.log_start)
            output = log.read().decode(errors="replace")
        return record_outcome(self.path, code, output, self.locked, self.is_last)


def record_outcome(path: Path, code: int, output: str, locked: Path | None = None, is_last: bool = True) -> str:
    """Return how an attempt at the run in this folder ended, and bring the files beside the folder up to date.

    finished; pretrained, if fine-tuning follows (not is_last); interrupted, to be resumed; running, as another process
    has the folder; failed; refused, which is a user's error, so that trying again does not help. code and output: of
    the process. locked: the folder that it locked, if not `path`.
    """
    if code == 1 and (codes := re.findall(r"exitcode\s*: (-?\d+)", output)):
        code = int(codes[-1])  # torchrun's own is 1 whatever that of its processes is
    locked = locked or path
    marked = (locked / "interrupted").exists()  # under torchrun the exit code does not tell
    if code == INTERRUPTED or marked and code != USER_ERROR:
        return "interrupted"
    if code == 0:
        for suffix in (".log", ".failures.txt", *([".job"] if is_last else [])):
            sidecar(path, suffix).unlink(missing_ok=True)
        return "finished" if is_last else "pretrained"
    if code == USER_ERROR and is_running(locked):
        return "running"
    when = datetime.datetime.now().isoformat(timespec="seconds")
    append(sidecar(path, ".failures.txt"), f"{when} exit code {code}: {last_error_line(output)}\n")
    return "refused" if code == USER_ERROR else "failed"


def last_error_line(output: str) -> str:
    """Return the last line that names an error, which torchrun follows with a table of its own, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"[eE]rror: ", line)]
    return (errors or lines or ["no output"])[-1]


def may_retry(path: Path, retries: int) -> bool:
    """Return whether the run has failed at most `retries` times; the user's errors, mended by now, do not count."""
    return sum(not re.match(rf"\S+ exit code {USER_ERROR}:", line) for line in failures(path)) <= retries

"""The runs of a sweep on this machine: an attempt at one of them, and several at a time."""

import collections
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from tqdm import tqdm

from configs.interrupt import INTERRUPTED
from configs.sweeps import Run
from files import append, open_own
from scripts.shared.runs import failures, is_running, sidecar

ROOT = Path(__file__).parents[2]
USER_ERROR = 2  # exit code of train_gpt.py; INTERRUPTED is another
GRACE = 60  # seconds that a run has to save and end after SIGTERM
POLL = 0.5  # seconds


# ---- one run ---------------------------------------------------------------------------------------------------------


def train_command(run: Run, processes: int) -> list[str]:
    """Return the command that trains the run, by torchrun if on more than one process."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [sys.executable, *(torchrun if processes > 1 else []), str(ROOT / "train_gpt.py"), *run.arguments]


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
        self.run, self.environment, self.log = run, environment, sidecar(run.path, ".log")
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
        return record_outcome(self.run.path, code, output, self.locked, self.is_last)


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


# ---- several runs ----------------------------------------------------------------------------------------------------


def train(runs: list[Run], at_once: int | None = None, gpus_per_run: int = 1, retries: int = 2):
    """Train the runs, each on GPUs of its own or, without any, on its share of the cores, then fine-tune them. A run
    that fails is tried again and the others go on: their folders say what became of them. Exits with 130 when told to
    stop."""
    if not runs:
        return
    free = share_devices(runs, at_once, gpus_per_run)
    title = f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {min(len(free), len(runs))} at a time"
    waiting, running = collections.deque(runs), []
    with (
        stop_requests() as requests,
        tqdm(
            total=sum(run.config.steps + (run.needle.steps if run.needle else 0) for run in runs),
            initial=steps_done(runs),
            unit="step",
            desc=title,
            mininterval=POLL if sys.stderr.isatty() else 60,  # else a log file fills with bars
        ) as bar,
    ):
        try:
            while (waiting or running) and not requests:
                while waiting and free:
                    running.append(Attempt(waiting.popleft(), free.pop(0), gpus_per_run))
                time.sleep(POLL)
                for attempt in list(running):
                    if (outcome := attempt.outcome()) is None:
                        continue
                    running.remove(attempt)
                    free.append(attempt.environment)
                    again = outcome == "failed" and may_retry(attempt.run.path, retries)
                    if outcome == "pretrained":
                        waiting.appendleft(attempt.run)  # fine-tuned next, on what it has left
                    elif again:
                        waiting.append(attempt.run)
                    bar.write(describe_outcome(attempt.run, outcome) + ("; trying again" if again else ""))
                bar.update(steps_done(runs) - bar.n)
        finally:
            for attempt in running:
                attempt.process.terminate()  # all at once
            for attempt in running:
                attempt.stop()
    if requests:
        print("stopped; the same command resumes what is not finished", file=sys.stderr)
        sys.exit(130)


def share_devices(runs: list[Run], at_once: int | None, gpus_per_run: int) -> list[dict[str, str]]:
    """Return the environment variables of each of the runs that train at the same time: its GPUs, or its number of
    threads. Raises ValueError if there are fewer GPUs than one run needs.

    Without GPUs it is one run a core: models so small gain little from a second core, and a thread that waits for
    another, on a machine that has other work too, costs a lot.
    """
    on_cpu = all(run.config.device == "cpu" for run in runs)
    gpus = [] if on_cpu else visible_gpus()
    if not on_cpu and gpus_per_run > max(1, len(gpus)):
        raise ValueError(f"--gpus-per-run {gpus_per_run}, but torch sees {len(gpus)} GPUs here")
    if gpus:
        groups = [gpus[i : i + gpus_per_run] for i in range(0, len(gpus) - gpus_per_run + 1, gpus_per_run)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(groups[i % len(groups)])} for i in range(at_once or len(groups))]
    cores = len(os.sched_getaffinity(0))
    at_once = at_once or max(1, min(cores // gpus_per_run, len(runs)))
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // at_once // gpus_per_run)))
    return [{"OMP_NUM_THREADS": threads}] * at_once


def visible_gpus() -> list[str]:
    """Return the GPUs by the names that CUDA_VISIBLE_DEVICES takes."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(i) for i in range(count)]


@contextmanager
def stop_requests():
    """Collect the signals that ask the sweep to stop (Ctrl-C, SIGTERM, a closed terminal) in a list, so that it stops
    between two of its actions and knows every process that it has started."""
    requests = []
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    caught = [number for number in stops if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {s: signal.signal(s, lambda number, frame: requests.append(number)) for s in caught}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe_outcome(run: Run, outcome: str) -> str:
    """Return one line about an attempt that has ended (see record_outcome)."""
    if outcome in ("finished", "pretrained"):
        file, key, what = "summary.json", "val_loss", "validation loss"
        if outcome == "finished" and run.needle:
            file, key, what = "needle/summary.json", "greedy", "needles found"
        by_length = json.loads((run.path / file).read_text())[key]
        said = f"{what} " + ", ".join(f"{value:.3f} at {length}" for length, value in by_length.items())
    elif outcome == "interrupted":
        said = "interrupted; the same command resumes it"
    elif outcome == "running":
        said = "left alone, another process trains it"
    else:
        said = f"{failures(run.path)[-1]} (see {sidecar(run.path, '.log')})"
    return f"{run.path.name}: {said}"


def steps_done(runs: list[Run]) -> int:
    """Return how many steps of training and fine-tuning there are on disk."""
    trained = sum(min(last_step(run.path), run.config.steps) for run in runs)
    return trained + sum(min(last_step(run.path / "needle"), run.needle.steps) for run in runs if run.needle)


def last_step(folder: Path) -> int:
    """Return the last step in metrics.jsonl, read from its end, as it is asked for twice a second."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65_536))
            steps = re.findall(rb'^{"step": (\d+),', file.read(), re.MULTILINE)
    except FileNotFoundError:
        return 0
    return int(steps[-1]) if steps else 0

"""The runs of a sweep on this machine: an attempt at one run, and several runs at a time."""

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

from configs.runs import Run
from errors import require
from files import append, open_own
from runtime.signals import INTERRUPTED
from scripts.shared.runs import failures, sidecar

ROOT = Path(__file__).parents[2]
USER_ERROR = 2  # exit code of train_gpt.py
GRACE = 60  # seconds in which a run saves and ends after SIGTERM
POLL = 0.5  # seconds


# ---- one run ---------------------------------------------------------------------------------------------------------


class Attempt:
    """A process that trains a run, or fine-tunes it if it is trained. Its output goes to the end of NAME.log.

    environment: variables that differ from ours. processes: more than 1 are started by torchrun.
    """

    def __init__(self, run: Run, environment: dict[str, str], processes: int):
        self.run, self.environment, self.log = run, environment, sidecar(run.path, ".log")
        self.fine_tunes = run.needle is not None and (run.path / "summary.json").exists()
        with open_own(self.log, "ab") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, *self._arguments(processes)],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then stops its runs in order
            )

    def _arguments(self, processes: int) -> list[str]:
        if self.fine_tunes:
            config, needle = self.run.config, self.run.needle.arguments
            machine = ["--device", config.device, "--compile", config.compile]
            return ["-m", "scripts.needle", str(self.run.path), *needle, *machine]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return [*(torchrun if processes > 1 else []), str(ROOT / "train_gpt.py"), *self.run.arguments]

    def stop(self):
        """Ask the process to end. Kill it, and all that it started, if it does not."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # compiler workers too
        self.process.wait()

    def outcome(self) -> str | None:
        """Return how the attempt ended (see record_outcome), None while it runs. Call this once after the end."""
        code = self.process.poll()
        if code is None:
            return None
        with open(self.log, "rb") as log:
            log.seek(self.log_start)
            output = log.read().decode(errors="replace")
        locked = self.run.path / "needle" if self.fine_tunes else self.run.path
        return record_outcome(self.run.path, code, output, locked, self.fine_tunes or self.run.needle is None)


def record_outcome(path: Path, code: int, output: str, locked: Path | None = None, is_last: bool = True) -> str:
    """Return how an attempt at the run in this folder ended, and update the files beside the folder.

    code, output: of the process. locked: the folder that it locked, if not `path`. is_last: False if fine-tuning
    follows. Outcomes: "finished", "pretrained" (fine-tuning follows), "interrupted" (to be resumed), "failed", and
    "refused" (a user's error, which a second attempt would repeat).
    """
    if code == 1 and (codes := re.findall(r"exitcode\s*: (-?\d+)", output)):
        code = int(codes[-1])  # torchrun exits with 1, whatever the exit code of its processes is
    marked = ((locked or path) / "interrupted").exists()  # under torchrun the exit code does not tell
    if code == INTERRUPTED or marked and code != USER_ERROR:
        return "interrupted"
    if code == 0:
        for suffix in (".log", ".failures.txt", *([".job"] if is_last else [])):
            sidecar(path, suffix).unlink(missing_ok=True)
        return "finished" if is_last else "pretrained"
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if re.search(r"[eE]rror: ", line)]  # torchrun writes a table after them
    when = datetime.datetime.now().isoformat(timespec="seconds")
    append(sidecar(path, ".failures.txt"), f"{when} exit code {code}: {(errors or lines)[-1]}\n")
    return "refused" if code == USER_ERROR else "failed"


def may_retry(path: Path, retries: int) -> bool:
    """Return whether the run has failed at most `retries` times, not counting user errors."""
    return sum(f" exit code {USER_ERROR}: " not in line for line in failures(path)) <= retries


def describe_outcome(run: Run, outcome: str) -> str:
    """Return one line about an attempt that has ended."""
    if outcome in ("failed", "refused"):
        return f"{run.path.name}: {failures(run.path)[-1]} (see {sidecar(run.path, '.log')})"
    if outcome == "interrupted":
        return f"{run.path.name}: interrupted"
    is_tuned = run.needle and outcome == "finished"
    scores = json.loads((run.path / ("needle/summary.json" if is_tuned else "summary.json")).read_text())
    measure, by_length = ("needles found", scores["greedy"]) if is_tuned else ("validation loss", scores["val_loss"])
    return f"{run.path.name}: {measure} {', '.join(f'{value:.3f} at {length}' for length, value in by_length.items())}"


# ---- several runs ----------------------------------------------------------------------------------------------------


def train(
    runs: list[Run], at_once: int | None = None, gpus_per_run: int = 1, retries: int = 2,
    stops: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
):  # fmt: skip
    """Train and fine-tune the runs, each on GPUs of its own or on its share of the cores.

    A failed run is tried again, and the others go on; results and failures are in the folders. Exit with 130 after one
    of the signals `stops`. Raise ValueError for too few GPUs.
    """
    if not runs:
        return
    free = share_devices(runs, at_once, gpus_per_run)
    waiting, running = collections.deque(runs), []
    bar = tqdm(
        total=sum(run.config.steps + (run.needle.steps if run.needle else 0) for run in runs),
        initial=steps_done(runs),
        unit="step",
        desc=f"{len(runs)} runs, {min(len(free), len(runs))} at a time",
        mininterval=POLL if sys.stderr.isatty() else 60,  # fewer lines in a log file
    )
    with stop_requests(stops) as requests, bar:
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
                        waiting.appendleft(attempt.run)  # to be fine-tuned next
                    elif again:
                        waiting.append(attempt.run)
                    bar.write(describe_outcome(attempt.run, outcome) + ("; trying again" if again else ""))
                bar.update(steps_done(runs) - bar.n)
        finally:
            for attempt in running:
                attempt.process.terminate()  # all at once, then wait for each
            for attempt in running:
                attempt.stop()
    if requests:
        print("stopped; the same command resumes unfinished runs", file=sys.stderr)
        sys.exit(130)


def share_devices(runs: list[Run], at_once: int | None, gpus_per_run: int) -> list[dict[str, str]]:
    """Return the environment variables of each of the runs that train at the same time: GPUs, or number of threads.

    Without GPUs each core trains one run, because models this small gain little from a second core. Raise ValueError
    for too few GPUs.
    """
    on_cpu = all(run.config.device == "cpu" for run in runs)
    gpus = [] if on_cpu else visible_gpus()
    enough = on_cpu or gpus_per_run <= max(1, len(gpus))
    require(enough, f"--gpus-per-run {gpus_per_run}, but torch sees {len(gpus)} GPUs here. Lower it.")
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
def stop_requests(stops: tuple[signal.Signals, ...]):
    """Collect these signals in a list. So a sweep stops between two actions, when it knows all of its processes."""
    requests = []
    caught = [number for number in stops if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {s: signal.signal(s, lambda number, frame: requests.append(number)) for s in caught}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def steps_done(runs: list[Run]) -> int:
    """Return the steps of training and fine-tuning that are on the disk."""
    trained = sum(min(last_step(run.path), run.config.steps) for run in runs)
    return trained + sum(min(last_step(run.path / "needle"), run.needle.steps) for run in runs if run.needle)


def last_step(folder: Path) -> int:
    """Return the last step in metrics.jsonl. Only the end of the file is read, twice a second."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65_536))
            steps = re.findall(rb'^{"step": (\d+),', file.read(), re.MULTILINE)
    except FileNotFoundError:
        return 0
    return int(steps[-1]) if steps else 0

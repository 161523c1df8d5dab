"""Trains the runs of a sweep on this machine, several at a time."""

import collections
import datetime
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from tqdm import tqdm

from configs.runs import Run
from errors import require
from files import append, open_no_symlink
from runtime.signals import INTERRUPTED, SIGNALS
from scripts.shared.states import failures, sidecar

ROOT = Path(__file__).parents[2]
USER_ERROR = 2  # exit code of train_gpt.py
GRACE = 60  # seconds for a run to save and end after SIGTERM
POLL = 0.5  # seconds between checks of the processes


class Attempt:
    """A process that trains a run, or fine-tunes a trained run. Its output goes to NAME.log.

    environment: variables to set for the process. processes: ranks of the run, started by torchrun if more than 1.
    program: Python's arguments in place of train_gpt.py.
    """

    def __init__(self, run: Run, environment: dict, processes: int, program: Sequence[str]):
        # 1. The command.
        self.run, self.environment, self.folder = run, environment, run.path
        self.fine_tunes = run.needle is not None and (run.path / "summary.json").exists()
        command = [*(program or [str(ROOT / "train_gpt.py")]), *run.arguments]
        if processes > 1:
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *command]
        if self.fine_tunes:
            self.folder = run.path / "needle"
            machine = ["--device", run.config.device, "--compile", run.config.compile]
            command = ["-m", "scripts.needle", str(run.path), *run.needle.arguments, *machine]

        # 2. The process.
        for mark in ("interrupted", "failed"):  # of an earlier attempt
            (self.folder / mark).unlink(missing_ok=True)
        with open_no_symlink(sidecar(run.path, ".log"), "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach only the sweep, which then lets its runs save
            )


def record_outcome(path: Path, locked: Path, code: int) -> str:
    """Return the outcome of an attempt at the run in this folder, and update the files beside the folder.

    locked: the folder that the process locked. code: exit code. Outcomes: "finished", "interrupted" (can be resumed),
    "failed", and "refused" (a user's mistake, so another attempt would fail too).
    """
    # 1. torchrun passes no exit codes on. If a rank dies, torchrun stops the others, and rank 0 may mark a signal.
    log = sidecar(path, ".log")
    text = log.read_text(errors="replace")
    marked = (locked / "interrupted").exists() and not (locked / "failed").exists()
    if code == INTERRUPTED or marked and code != USER_ERROR and "ChildFailedError" not in text:
        return "interrupted"

    # 2. The end of the log has the reason.
    if code == 0:
        log.unlink(missing_ok=True)
        sidecar(path, ".failures.txt").unlink(missing_ok=True)
        return "finished"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if re.search(r"[eE]rror: ", line)]  # torchrun's table comes after these
    when = datetime.datetime.now().isoformat(timespec="seconds")
    append(sidecar(path, ".failures.txt"), f"{when} exit code {code}: {(errors or lines)[-1]}\n")
    refused = code == USER_ERROR or re.search(rf"exitcode *: {USER_ERROR}\b", text)  # of a rank, in torchrun's table
    return "refused" if refused else "failed"


def train(
    runs: list[Run],
    at_once: int | None = None,
    gpus_per_run: int = 1,
    retries: int = 2,
    program: Sequence[str] = (),
):
    """Train and fine-tune the runs, each on its own GPUs or on its share of the cores.

    A failed run is retried, and does not stop the others. One of the signals stops all runs and ends the process with
    exit code 130. Raise ValueError for too few GPUs.
    """
    # 1. Devices and signals.
    if not runs:
        return
    require(at_once is None or at_once >= 1, f"--jobs {at_once} would start no run. Use 1 or more.")
    free = share_devices(runs, at_once, gpus_per_run)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
            signal.signal(number, stop)

    # 2. Start runs where there is room, and read how they ended.
    waiting, running, failures_of = collections.deque(runs), [], collections.Counter()
    bar = tqdm(total=len(runs), unit="run", desc=f"{min(len(free), len(runs))} runs at a time", disable=None)
    try:
        while waiting or running:
            while waiting and free:
                running.append(Attempt(waiting.popleft(), free.pop(0), gpus_per_run, program))
            time.sleep(POLL)
            for attempt in [attempt for attempt in running if attempt.process.poll() is not None]:
                running.remove(attempt)
                free.append(attempt.environment)
                run = attempt.run
                outcome = record_outcome(run.path, attempt.folder, attempt.process.returncode)
                if outcome == "finished" and run.needle and not attempt.fine_tunes:
                    waiting.appendleft(run)  # fine-tuning comes next
                elif outcome == "finished":
                    bar.update()
                elif outcome == "failed":
                    failures_of[run.name] += 1
                    if failures_of[run.name] <= retries:
                        waiting.append(run)
                reason = f": {failures(run.path)[-1]}" if outcome in ("failed", "refused") else ""
                bar.write(f"{run.path.name}: {'fine-tuning' if attempt.fine_tunes else 'training'} {outcome}{reason}")
    finally:
        bar.close()
        for attempt in running:
            attempt.process.terminate()  # all runs save at the same time
        for process in [attempt.process for attempt in running]:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # compile workers may still live
            process.wait()


def stop(number: int, frame: object):
    """Handle a signal: end the process by SystemExit."""
    print("stopping all runs. The same command resumes them.", file=sys.stderr)
    sys.exit(130)


def share_devices(runs: list[Run], at_once: int | None, gpus_per_run: int) -> list[dict]:
    """Return a list with the environment variables of each simultaneous run: its GPUs, or its number of threads.

    Without GPUs each core trains one run, because models this small gain little from a second core. Raise ValueError
    for too few GPUs.
    """
    # 1. The GPUs of this process.
    on_cpu = all(run.config.device == "cpu" for run in runs)
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [*map(str, range(count))]
    gpus = [] if on_cpu else gpus[:count]
    most = max(1, len(gpus))
    fits = gpus_per_run >= 1 and (on_cpu or gpus_per_run <= most)
    require(fits, f"--gpus-per-run {gpus_per_run} does not fit {len(gpus)} GPUs. Use at most {most}.")

    # 2. Groups of GPUs, which more runs than groups share.
    if gpus:
        starts = range(0, len(gpus) - gpus_per_run + 1, gpus_per_run)
        groups = [",".join(gpus[i : i + gpus_per_run]) for i in starts]
        return [{"CUDA_VISIBLE_DEVICES": groups[i % len(groups)]} for i in range(at_once or len(groups))]

    # 3. Shares of the cores.
    cores = len(os.sched_getaffinity(0)) // gpus_per_run
    at_once = at_once or max(1, min(cores, len(runs)))
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // at_once)))
    return [{"OMP_NUM_THREADS": threads}] * at_once

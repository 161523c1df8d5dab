"""Trains the runs of a sweep, and fine-tunes those of the needle task: what is finished is not repeated, what was
interrupted is resumed.

    python -m scripts.sweep SWEEP [--scale small] [--seeds 0 1] [--methods rope alibi] [fields of train_gpt.py]
    python -m scripts.sweep table_losses --dry-run               what there is and what would be done
    python -m scripts.sweep all --scale mini --steps 60
    python -m scripts.sweep table_losses --executor slurm --slurm partition=gpu time=1440
    python -m scripts.sweep table_needle --needle haystack=shards examples=100

The sweeps are functions in configs/sweeps.py; `all` is every run of theirs, once. Fields of train_gpt.py are set in
every run; one that the sweep sets itself is refused. A run of table_needle is fine-tuned (scripts/needle.py) as soon as
it is trained, in the same place: a GPU, a share of the cores, a job of the cluster. Beside the run folder NAME/ there
can be
    NAME.log             what a run printed that is not finished
    NAME.failures.txt    one line for each time that it failed: time, exit code, last line; delete it to try again
    NAME.job             its job on the cluster
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
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

from configs.command_line import named_fields, read_config, user_errors
from configs.config import Config, require
from configs.interrupt import INTERRUPTED
from configs.sweeps import SCALES, SET_BY_SWEEPS, SWEEPS, Needle, Run, sweep
from data.needle import C4, fetch_c4
from model.methods import METHODS, check_options, make_alternative, make_method
from optim.schedule import check_schedule
from runtime.files import append, open_own, replace_file
from scripts.shared.runs import (
    Folder,
    beside,
    data_fingerprint,
    failures,
    find,
    is_running,
    needle_state,
    read_folders,
    state,
)

ROOT = Path(__file__).parents[2]
USER_ERROR = 2  # exit code of train_gpt.py; INTERRUPTED is another
GRACE = 60  # seconds that a run has to save and end when it is told to stop
POLL = 0.5  # seconds


def main():
    args, fields = parse_arguments()
    with user_errors():
        changes, needle = field_changes(SCALES[args.scale].base, fields), needle_changes(args.needle)
        runs = sweep(args.sweep, args.scale, args.seeds, args.methods, changes, needle)
        for run in runs:
            check_run(run)
        require(not needle or any(run.needle for run in runs), f"--needle: sweep {args.sweep} fine-tunes no run")
        slurm = slurm_parameters(args.slurm, args.executor)
        for option in ("jobs", "gpus_per_run"):
            value = getattr(args, option)
            require(value is None or value >= 1, f"--{option.replace('_', '-')} must be at least 1, got {value}")
        require(args.retries >= 0, f"--retries must not be negative, got {args.retries}")
        plans = make_plans(runs, args)
        if args.dry_run:
            return show(plans)
        args.runs_dir.mkdir(parents=True, exist_ok=True)
        jobs = [plan.job(args) for plan in plans if plan.starts]
        if any(job.needle and job.needle.haystack == "c4" for job in jobs):  # now, and not by each of the jobs
            for split in ("train", "val"):
                fetch_c4(C4, split)
        if args.executor == "local":
            train(jobs, args.jobs, args.gpus_per_run, args.retries)
        else:
            submit(jobs, args.executor, slurm, args)

    unfinished = [plan for plan in make_plans(runs, args) if plan.state != "finished" and not plan.queued]
    print(f"{len(runs) - len(unfinished)} of {len(runs)} runs are {'queued or ' * (args.executor == 'slurm')}finished")
    for plan in unfinished:
        log = beside(plan.path, ".log")
        print(f"{plan.path.name}: {plan.state}, {plan.words}" + f"; see {log}" * log.exists(), file=sys.stderr)
    sys.exit(1 if unfinished else 0)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the rest, which are fields of train_gpt.py."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sweep",
        description=f"{__doc__}\nSweeps: all, {', '.join(SWEEPS)}.\nScales: {', '.join(SCALES)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("sweep", metavar="SWEEP")
    parser.add_argument("--scale", default="paper", choices=SCALES, help="which presets stand for the paper's models")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of the scale's")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help="only these")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where the run folders go (default: runs)")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one a GPU; without GPUs, one a core)")
    parser.add_argument("--gpus-per-run", type=int, default=1, help="more than 1: by torchrun")
    parser.add_argument("--retries", type=int, default=2, help="how often a failed run is tried again (default: 2)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--executor", default="local", choices=["local", "slurm", "submitit-local"])
    parser.add_argument("--needle", nargs="+", default=[], metavar="KEY=VALUE", help="instead of the scale's settings")
    parser.add_argument("--slurm", nargs="+", default=[], metavar="KEY=VALUE", help="of sbatch; time is in minutes")
    return parser.parse_known_args()


def field_changes(preset: str, arguments: list[str]) -> dict:
    """The fields of train_gpt.py that the arguments name, with their values; scripts.reproduce takes the same ones.

    ValueError for what train_gpt.py refuses, and for the fields that a sweep sets itself.
    """
    config, fields = read_config([preset, *arguments]), named_fields(arguments)
    if own := [field for field in fields if field in SET_BY_SWEEPS]:
        raise ValueError(f"--{own[0]} is set by the sweep, which names and resumes its runs; their place is --runs-dir")
    return {field: getattr(config, field) for field in fields}


def check_run(run: Run):
    """ValueError for what train_gpt.py would refuse on any machine."""
    try:
        c = run.config
        check_schedule(c.schedule, steps=c.steps, warmup_steps=c.warmup_steps, cooldown_steps=c.cooldown_steps)
        check_options(c.method, c.method_options)
        shape = dict(num_heads=c.num_heads, head_dim=c.model_dim // c.num_heads)
        shape |= dict(train_length=c.train_length, length_scale=c.length_scale)
        make_method(c.method, **shape, **c.method_options)
        for other in c.validate_as:
            make_alternative(c.method, other, **shape, **c.method_options)
    except ValueError as error:
        raise ValueError(f"{run.preset} with {run.changes.get('method', 'its own method')}: {error}") from error


def needle_changes(words: list[str]) -> dict:
    """The settings of the needle task that --needle names; scripts.reproduce takes the same ones."""
    return {key: int(v) if v.isdigit() and key != "haystack" else v for key, v in key_values("--needle", words).items()}


def key_values(option: str, words: list[str]) -> dict[str, str]:
    for word in words:
        require("=" in word, f"{option} takes KEY=VALUE, got {word}")
    return dict(word.split("=", 1) for word in words)


# ---- what is to be done ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run, the state it is in, and what the sweep does about it."""

    run: Run
    path: Path  # its folder, which may have another name than the run
    state: str
    words: str  # about the state
    action: str
    starts: bool
    queued: bool = False

    def job(self, args: argparse.Namespace) -> Job:
        own = dict(name=self.path.name, runs_dir=str(args.runs_dir), resume="auto")
        run = dataclasses.replace(self.run, changes={"group": args.sweep, **self.run.changes, **own})
        return Job(self.path, run.config, run.arguments, self.run.needle)


def make_plans(runs: list[Run], args: argparse.Namespace) -> list[Plan]:
    folders = read_folders(args.runs_dir)
    return [make_plan(run, folders, args) for run in runs]


def make_plan(run: Run, folders: list[Folder], args: argparse.Namespace) -> Plan:
    data = data_fingerprint(run.config)
    now, words = state(run, folders, args.runs_dir, data)
    folder = find(run, folders, data)
    path = folder.path if folder else args.runs_dir / run.name
    if now == "finished" and run.needle:
        now, words = needle_state(folder, run.needle)
    action = dict(
        finished="nothing",
        pretrained="fine-tune",
        running="left alone: another process trains it",
        interrupted="resume",
        failed="try again",
        other="left alone",
        missing="train, then fine-tune" if run.needle else "train",
    )[now]
    if now == "failed" and not may_retry(path, args.retries):
        return Plan(run, path, now, words, f"given up: delete {beside(path, '.failures.txt')} to try again", False)
    starts = now in ("pretrained", "interrupted", "failed", "missing")
    if starts and args.executor == "slurm" and (number := queued_job(path)):
        return Plan(run, path, now, words, f"left alone: queued as job {number}", False, queued=True)
    return Plan(run, path, now, words, action, starts)


def show(plans: list[Plan]):
    width = max(len(plan.path.name) for plan in plans)
    for plan in plans:
        words = f"  ({plan.words})" * (plan.words not in ("", str(plan.path)))
        print(f"{plan.path.name:{width}}  {plan.state:11}  {plan.action}{words}")
    counts = collections.Counter(plan.state for plan in plans)
    print(f"{len(plans)} runs: " + ", ".join(f"{n} {name}" for name, n in counts.items()))


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to be trained: its folder, and what follows train_gpt.py on the command line; and to be fine-tuned then, if
    there is a needle task."""

    path: Path
    config: Config
    arguments: list[str]
    needle: Needle | None = None

    def train(self, processes: int) -> list[str]:
        """The command that trains it."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return [sys.executable, *(launcher if processes > 1 else []), str(ROOT / "train_gpt.py"), *self.arguments]

    def fine_tune(self) -> list[str]:
        """The command that fine-tunes it, which is one process always."""
        how = [*self.needle.arguments, "--device", self.config.device, "--compile", self.config.compile]
        return [sys.executable, "-m", "scripts.needle", str(self.path), *how]


class Attempt:
    """One attempt at a run: train_gpt.py or, when the run is trained, scripts/needle.py, in a process group of its own,
    its output at the end of NAME.log.

    environment: what differs from ours. processes: more than 1 are started by torchrun.
    """

    def __init__(self, job: Job, environment: dict[str, str], processes: int):
        self.path, self.log = job.path, beside(job.path, ".log")
        fine_tunes = job.needle is not None and (job.path / "summary.json").exists()
        self.folder = job.path / "needle" if fine_tunes else job.path  # which the process locks
        self.last = fine_tunes or job.needle is None
        command = job.fine_tune() if fine_tunes else job.train(processes)
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
        """Asks the run to end, and ends it and all that it started when it does not."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the compiler's workers too
        self.process.wait()

    def outcome(self) -> str | None:
        """How it ended (see settle), None while it runs. To be asked once after the end."""
        code = self.process.poll()
        if code is None:
            return None
        with open(self.log, "rb") as log:
            log.seek(self.log_start)
            return settle(self.path, code, log.read().decode(errors="replace"), self.folder, self.last)


def settle(path: Path, code: int, output: str, folder: Path | None = None, last: bool = True) -> str:
    """How an attempt at a run ended, from its exit code and output; keeps the files beside the folder up to date.

    finished; pretrained, if it was not the last part of the job; interrupted, to be resumed; running, as another
    process has the folder; failed; refused, which is a user's error, so that trying again does not help. folder: which
    the process locked, if not that of the run.
    """
    if code == 1 and (codes := re.findall(r"exitcode\s*: (-?\d+)", output)):
        code = int(codes[-1])  # torchrun's own is 1 whatever that of its processes is
    folder = folder or path
    told_to_stop = (folder / "interrupted").exists()  # all that tells under torchrun
    if code == INTERRUPTED or told_to_stop and code != USER_ERROR:
        return "interrupted"
    if code == 0:
        for suffix in (".log", ".failures.txt", *([".job"] if last else [])):
            beside(path, suffix).unlink(missing_ok=True)
        return "finished" if last else "pretrained"
    if code == USER_ERROR and is_running(folder):
        return "running"
    when = datetime.datetime.now().isoformat(timespec="seconds")
    append(beside(path, ".failures.txt"), f"{when} exit code {code}: {last_words(output)}\n")
    return "refused" if code == USER_ERROR else "failed"


def last_words(output: str) -> str:
    """The last line that names an error, which torchrun follows with a table of its own, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"[eE]rror: ", line)]
    return (errors or lines or ["no output"])[-1]


def may_retry(path: Path, retries: int) -> bool:
    """Whether the run has failed at most `retries` times, errors of the user not counted: they may be mended by now."""
    return sum(not re.match(rf"\S+ exit code {USER_ERROR}:", line) for line in failures(path)) <= retries


# ---- on this machine -------------------------------------------------------------------------------------------------


def train(jobs: list[Job], at_once: int | None = None, gpus_per_run: int = 1, retries: int = 2):
    """Trains the jobs, each on GPUs of its own or, without any, on its share of the cores. A run that fails is tried
    again and the others go on: see the folders for what became of them. Exits with 130 when told to stop."""
    if not jobs:
        return
    free = places(jobs, at_once, gpus_per_run)
    title = f"{len(jobs)} run{'s' * (len(jobs) > 1)}, {min(len(free), len(jobs))} at a time"
    waiting, running = collections.deque(jobs), {}
    with (
        stop_requests() as requests,
        tqdm(
            total=sum(job.config.steps + (job.needle.steps if job.needle else 0) for job in jobs),
            initial=steps_done(jobs),
            unit="step",
            desc=title,
            mininterval=POLL if sys.stderr.isatty() else 60,  # else a log file fills with bars
        ) as bar,
    ):
        try:
            while (waiting or running) and not requests:
                while waiting and free:
                    job, environment = waiting.popleft(), free.pop(0)
                    running[Attempt(job, environment, gpus_per_run)] = job, environment
                time.sleep(POLL)
                for attempt, (job, environment) in list(running.items()):
                    outcome = attempt.outcome()
                    if outcome is None:
                        continue
                    del running[attempt]
                    free.append(environment)
                    again = outcome == "failed" and may_retry(job.path, retries)
                    if outcome == "pretrained":
                        waiting.appendleft(job)  # its place is free
                    if again:
                        waiting.append(job)
                    bar.write(report(job, outcome) + "; trying again" * again)
                bar.update(steps_done(jobs) - bar.n)
        finally:
            for attempt in running:
                attempt.process.terminate()  # all at once
            for attempt in running:
                attempt.stop()
    if requests:
        print("stopped; the same command resumes what is not finished", file=sys.stderr)
        sys.exit(130)


def places(jobs: list[Job], at_once: int | None, gpus_per_run: int) -> list[dict[str, str]]:
    """The environment of each of the runs that train at the same time: its GPUs, or its number of threads.

    Without GPUs it is one run a core: models so small gain little from a second core, and a thread that waits for
    another, on a machine that has other work too, costs a lot.
    """
    on_cpu = all(job.config.device == "cpu" for job in jobs)
    gpus = [] if on_cpu else visible_gpus()
    if not on_cpu and gpus_per_run > max(1, len(gpus)):
        raise ValueError(f"--gpus-per-run {gpus_per_run}, but torch sees {len(gpus)} GPUs here")
    if gpus:
        groups = [gpus[i : i + gpus_per_run] for i in range(0, len(gpus) - gpus_per_run + 1, gpus_per_run)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(groups[i % len(groups)])} for i in range(at_once or len(groups))]
    cores = len(os.sched_getaffinity(0))
    at_once = at_once or max(1, min(cores // gpus_per_run, len(jobs)))
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // at_once // gpus_per_run)))
    return [{"OMP_NUM_THREADS": threads}] * at_once


def visible_gpus() -> list[str]:
    """The GPUs by the names that CUDA_VISIBLE_DEVICES takes."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(i) for i in range(count)]


@contextmanager
def stop_requests():
    """A list of the signals so far that ask the sweep to stop (Ctrl-C, SIGTERM, a closed terminal), so that it stops
    between two of its actions and knows every process that it has started."""
    requests = []
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in stops if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {s: signal.signal(s, lambda number, frame: requests.append(number)) for s in heard}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report(job: Job, outcome: str) -> str:
    """One line about a run that has ended."""
    name, log = job.path.name, beside(job.path, ".log")
    if outcome == "finished" and job.needle:
        found = json.loads((job.path / "needle" / "summary.json").read_text())["greedy"]
        return f"{name}: needles found " + ", ".join(f"{value:.3f} at {length}" for length, value in found.items())
    if outcome in ("finished", "pretrained"):
        loss = json.loads((job.path / "summary.json").read_text())["val_loss"]
        return f"{name}: validation loss " + ", ".join(f"{value:.3f} at {length}" for length, value in loss.items())
    if outcome == "interrupted":
        return f"{name}: interrupted; the same command resumes it"
    if outcome == "running":
        return f"{name}: left alone, another process trains it"
    return f"{name}: {failures(job.path)[-1]} (see {log})"


def steps_done(jobs: list[Job]) -> int:
    trained = sum(min(last_step(job.path), job.config.steps) for job in jobs)
    return trained + sum(min(last_step(job.path / "needle"), job.needle.steps) for job in jobs if job.needle)


def last_step(folder: Path) -> int:
    """The last step in metrics.jsonl, from its end, as it is asked for twice a second."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65_536))
            steps = re.findall(rb'^{"step": (\d+),', file.read(), re.MULTILINE)
    except FileNotFoundError:
        return 0
    return int(steps[-1]) if steps else 0


# ---- on a cluster ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ClusterJob:
    """What submitit calls on a machine of the cluster."""

    job: Job
    processes: int
    retries: int

    def __call__(self) -> str:
        """Trains and fine-tunes, tries again what fails, and returns how it ended (see settle)."""
        while True:
            attempt = Attempt(self.job, {}, self.processes)
            try:
                attempt.process.wait()
            finally:
                attempt.stop()
            outcome = attempt.outcome()
            again = outcome == "failed" and may_retry(self.job.path, self.retries)
            if outcome != "pretrained" and not again:
                return outcome

    def checkpoint(self):
        """Called when the machine is about to be taken away: the job is queued again, and resumes."""
        from submitit.helpers import DelayedSubmission

        # submitit then leaves __call__ by SystemExit, which stops the run. To wait for that here, in a signal handler
        # inside Popen.wait, would be to wait for a lock that we hold.
        return DelayedSubmission(self)


def slurm_parameters(words: list[str], executor: str) -> dict:
    """The parameters of --slurm. ValueError for what is not KEY=VALUE, and for a time that is not in minutes."""
    require(not words or executor != "local", "--slurm needs --executor slurm")
    values = {key: int(v) if v.isdigit() else v for key, v in key_values("--slurm", words).items()}
    require(type(values.get("time", 0)) is int, f"--slurm time is in minutes, got {values.get('time')}")
    return values


def submit(jobs: list[Job], name: str, parameters: dict, args: argparse.Namespace):
    """Submits each job through submitit; by slurm it returns then, "submitit-local" waits for them."""
    import submitit

    on_slurm = name == "slurm"
    gpus = args.gpus_per_run if on_slurm or torch.cuda.is_available() else 0
    try:
        executor = submitit.AutoExecutor(
            args.runs_dir / "submitit" / "%j", cluster="slurm" if on_slurm else "local", slurm_max_num_timeout=20
        )
        executor.update_parameters(
            timeout_min=24 * 60, gpus_per_node=gpus, **{f"slurm_{key}": value for key, value in parameters.items()}
        )
    except (RuntimeError, NameError) as error:
        raise ValueError(str(error).splitlines()[0]) from error
    submitted = []
    with stop_requests() as requests:
        for job in jobs:
            submitted.append(executor.submit(ClusterJob(job, args.gpus_per_run, args.retries)))
            if on_slurm:
                number = submitted[-1].job_id
                replace_file(beside(job.path, ".job"), lambda file: file.write(number.encode()))
            print(f"{job.path.name}: job {submitted[-1].job_id}")
        while not on_slurm and not requests and not all(job.done() for job in submitted):
            time.sleep(POLL)
        if requests and not on_slurm:
            for job in submitted:
                job.cancel()
            print("stopped; the same command resumes what is not finished", file=sys.stderr)
            sys.exit(130)


def queued_job(path: Path) -> str | None:
    """The number of the Slurm job that trains this run or will, None when there is none or it has ended."""
    import submitit

    file = beside(path, ".job")
    if not file.exists():
        return None
    number = file.read_text()
    return None if submitit.SlurmJob(path.parent / "submitit" / "%j", number).done(force_check=True) else number


if __name__ == "__main__":
    main()

"""What a sweep does about each of its runs, and why."""

import argparse
import collections
import dataclasses
from pathlib import Path

from configs.sweeps import Run
from optim.schedule import check_schedule
from runtime.build import layer_methods
from runtime.validation import build_alternatives
from scripts.shared.runs import StoredRun, data_fingerprint, find_stored, needle_state, read_runs, sidecar, train_state
from scripts.sweep.cluster import queued_job
from scripts.sweep.local import may_retry


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run, the state that it is in, and what the sweep does about it."""

    run: Run  # named after its folder, which may have another name than the sweep gives, and resumed
    state: str  # one of scripts.shared.runs.STATES
    reason: str  # for the state
    action: str
    starts: bool
    queued: bool  # on the cluster

    @property
    def path(self) -> Path:
        return self.run.path


def check_run(run: Run):
    """Raise ValueError for what train_gpt.py would refuse on any machine."""
    try:
        c = run.config
        check_schedule(c.schedule, steps=c.steps, warmup_steps=c.warmup_steps, cooldown_steps=c.cooldown_steps)
        first, *later = (layer_methods(c, start) for start in c.method_starts)
        for methods in later:
            for method, before in zip(methods, first, strict=True):
                method.take_over(before)
        build_alternatives(c)
    except ValueError as error:
        raise ValueError(f"{run.preset} with {run.changes.get('method', 'its own method')}: {error}") from error


def plan_runs(runs: list[Run], args: argparse.Namespace) -> list[PlannedRun]:
    """Return what is to be done about each run, from what is on disk now. args: those of the command."""
    stored = read_runs(args.runs_dir)
    return [plan_run(run, stored, args) for run in runs]


def plan_run(run: Run, stored_runs: list[StoredRun], args: argparse.Namespace) -> PlannedRun:
    """Return what is to be done about one run: what is finished, queued or another's is left alone."""
    data = data_fingerprint(run.config)
    state, reason = train_state(run, stored_runs, args.runs_dir, data)
    stored = find_stored(run, stored_runs, data)
    if state == "finished" and run.needle:
        state, reason = needle_state(stored, run.needle)
    own = dict(name=stored.path.name if stored else run.name, runs_dir=str(args.runs_dir), resume="auto")
    run = dataclasses.replace(run, changes={"group": args.sweep, **run.changes, **own})
    action, starts = dict(
        finished=("nothing", False),
        pretrained=("fine-tune", True),
        running=("left alone: another process trains it", False),
        interrupted=("resume", True),
        failed=("try again", True),
        other=("left alone", False),
        missing=("train, then fine-tune" if run.needle else "train", True),
    )[state]
    if state == "failed" and not may_retry(run.path, args.retries):
        action, starts = f"given up: delete {sidecar(run.path, '.failures.txt')} to try again", False
    job = queued_job(run.path) if starts and args.executor == "slurm" else None
    if job:
        action, starts = f"left alone: queued as job {job}", False
    return PlannedRun(run, state, reason, action, starts, queued=job is not None)


def print_plan(plan: list[PlannedRun]):
    """Print one line a run, and how many are in which state."""
    width = max(len(planned.path.name) for planned in plan)
    for planned in plan:
        reason = f"  ({planned.reason})" if planned.reason not in ("", str(planned.path)) else ""
        print(f"{planned.path.name:{width}}  {planned.state:11}  {planned.action}{reason}")
    counts = collections.Counter(planned.state for planned in plan)
    print(f"{len(plan)} runs: " + ", ".join(f"{n} {name}" for name, n in counts.items()))

"""The state of each run of a sweep, and what the sweep does about it."""

import argparse
import collections
import dataclasses
from pathlib import Path

from configs.runs import Run
from runtime.build import layer_methods
from runtime.validation import build_alternatives
from scripts.shared.runs import StoredRun, data_fingerprint, find_stored, needle_state, read_runs, sidecar, train_state
from scripts.sweep.cluster import queued_job
from scripts.sweep.local import may_retry

STARTING = dict(missing="train", interrupted="resume", failed="try again", pretrained="fine-tune")  # the other states
RESTING = dict(finished="nothing", running="left alone", other="left alone")  # start no process


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run, its state (one of scripts.shared.runs.STATES) with the reason, and the action of the sweep."""

    run: Run  # with the name of its folder, which a user may have renamed
    state: str
    reason: str
    action: str
    queued: bool  # on the cluster

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def starts(self) -> bool:
        return self.action in STARTING.values()


def check_run(run: Run):
    """Raise ValueError for what train_gpt.py would refuse on any machine."""
    c = run.config
    try:
        layer_methods(c)
        build_alternatives(c)
    except ValueError as error:
        raise ValueError(f"{run.preset} with {c.method}: {error}") from error


def plan_runs(runs: list[Run], args: argparse.Namespace) -> list[PlannedRun]:
    """Return the plan for each run from what is on the disk now. args: of the command."""
    stored = read_runs(args.runs_dir)
    return [plan_run(run, stored, args) for run in runs]


def plan_run(run: Run, stored_runs: list[StoredRun], args: argparse.Namespace) -> PlannedRun:
    """Return the plan for one run."""
    data = data_fingerprint(run.config)
    state, reason = train_state(run, stored_runs, args.runs_dir, data)
    stored = find_stored(run, stored_runs, data)
    if state == "finished" and run.needle:
        state, reason = needle_state(stored, run.needle)
    place = dict(name=stored.path.name if stored else run.name, runs_dir=str(args.runs_dir), resume="auto")
    run = dataclasses.replace(run, changes={"group": args.sweep, **run.changes, **place})
    action, queued = (STARTING | RESTING)[state], False
    if state == "failed" and not may_retry(run.path, args.retries):
        action = f"given up: delete {sidecar(run.path, '.failures.txt')} to try again"
    elif state in STARTING and args.executor == "slurm" and (job := queued_job(run.path)):
        action, queued = f"left alone: queued as job {job}", True
    return PlannedRun(run, state, reason, action, queued)


def print_plan(plan: list[PlannedRun]):
    """Print one line a run, and the number of runs in each state."""
    width = max(len(planned.path.name) for planned in plan)
    for planned in plan:
        reason = f"  ({planned.reason})" if planned.reason not in ("", str(planned.path)) else ""
        print(f"{planned.path.name:{width}}  {planned.state:11}  {planned.action}{reason}")
    counts = collections.Counter(planned.state for planned in plan)
    print(f"{len(plan)} runs: " + ", ".join(f"{n} {state}" for state, n in counts.items()))

"""Trains the runs of a sweep, and fine-tunes the runs of the needle task. Interrupted runs are resumed.

    python -m scripts.sweep SWEEP [--scale small] [--seeds 0 1] [--methods rope alibi] [fields of train_gpt.py]
    python -m scripts.sweep all --scale mini --dry-run                    prints the state of each run
    python -m scripts.sweep table_needle --needle haystack=shards examples=100

The paper's sweeps are in configs/sweeps.py, and ours in results/*/study.py. `all` is every run of the paper's sweeps,
once. Fields of train_gpt.py apply to every run. Beside the run folder NAME/, a sweep writes the output of an unfinished
run (NAME.log) and a line for each failure (NAME.failures.txt).
"""

import argparse
import collections
import dataclasses
import sys

from configs.runs import Run
from configs.sweeps import SCALES
from data.needle import C4, fetch_c4
from errors import exit_on_user_error, require
from model.methods.names import canonical_name
from runtime.build import resolve
from runtime.processes import read_launch
from scripts.shared.arguments import Parser, add_run_options, field_changes, needle_changes
from scripts.shared.runs import data_fingerprint, read_runs
from scripts.shared.states import run_state
from scripts.shared.sweeps import all_sweeps, home_of, sweep
from scripts.sweep.local import train

STARTING = ("missing", "interrupted", "failed", "pretrained")  # the sweep starts the runs in these states


@exit_on_user_error()
def main():
    args, fields = parse_arguments()
    alone = read_launch().world_size == 1
    require(alone, "torchrun started the sweep several times. Start it without torchrun: it starts its runs itself.")
    runs = choose_runs(args, fields)
    plan = find_states(runs, args)
    if args.dry_run:
        return print_plan(plan)
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    starting = [run for run, state, _ in plan if state in STARTING]
    if any(run.needle and run.needle.haystack == "c4" for run in starting):  # once, before several runs download it
        for split in ("train", "val"):
            fetch_c4(C4, split)
    train(starting, args.jobs, args.gpus_per_run, args.retries)
    plan = find_states(runs, args)
    print_plan(plan)
    sys.exit(int(any(state != "finished" for _, state, _ in plan)))


def parse_arguments() -> tuple:
    """Return the options of this command, and the other arguments, which are fields of train_gpt.py."""
    about = f"{__doc__}\nSweeps: all, {', '.join(all_sweeps())}.\nScales: {', '.join(SCALES)}."
    parser = Parser("python -m scripts.sweep", about)
    add = parser.add_argument
    add("sweep", metavar="SWEEP")
    add_run_options(parser)
    add("--jobs", type=int, help="runs at a time (default: one a GPU; without GPUs, one a core)")
    add("--gpus-per-run", type=int, default=1, help="GPUs of one run, used by torchrun (default: 1)")
    add("--retries", type=int, default=2, help="most restarts of a failed run (default: 2)")
    add("--dry-run", action="store_true", help="print the state of each run, and start none")
    return parser.parse_known_args()


def choose_runs(args: argparse.Namespace, fields: list[str]) -> list[Run]:
    """Return the runs that the command line chooses. Raise ValueError for runs that could not train anywhere."""
    args.scale = args.scale or home_of(args.sweep)[0] or "paper"
    changes, needle = field_changes(fields), needle_changes(args.needle)
    methods = args.methods and [*map(canonical_name, args.methods)]
    runs = sweep(args.sweep, args.scale, args.seeds, methods, changes, needle)
    for run in runs:
        resolve(run.config)
    require(not needle or any(run.needle for run in runs), f"sweep {args.sweep} has no needle task. Omit --needle.")
    return runs


def find_states(runs: list[Run], args: argparse.Namespace) -> list[tuple]:
    """Return each run under the name of its folder, its state on the disk, and the reason.

    States: see run_state. args: the options of the command.
    """
    stored_runs, plan = read_runs(args.runs_dir), []
    for run in runs:
        state, reason, stored = run_state(run, stored_runs, args.runs_dir, data_fingerprint(run.config))
        name = stored.path.name if stored else run.name  # a user may have renamed the folder
        changes = {"group": args.sweep, **run.changes, "name": name, "runs_dir": str(args.runs_dir), "resume": "auto"}
        run = dataclasses.replace(run, changes=changes)
        plan.append((run, state, reason))
    return plan


def print_plan(plan: list[tuple]):
    """Print one line a run, and the number of runs in each state."""
    width = max(len(run.path.name) for run, *_ in plan)
    for run, state, reason in plan:
        print(f"{run.path.name:{width}}  {state:11}  {reason}")
    counts = collections.Counter(state for _, state, _ in plan)
    print(f"{len(plan)} runs: " + ", ".join(f"{count} {state}" for state, count in counts.items()))


if __name__ == "__main__":
    main()

"""Trains the runs of a sweep, and fine-tunes those of the needle task. Finished runs are not repeated, interrupted ones
are resumed.

    python -m scripts.sweep SWEEP [--scale small] [--seeds 0 1] [--methods rope alibi] [fields of train_gpt.py]
    python -m scripts.sweep table_losses --dry-run               the state of each run, and what would be done
    python -m scripts.sweep all --scale mini --steps 60
    python -m scripts.sweep table_losses --executor slurm --slurm partition=gpu time=1440
    python -m scripts.sweep table_needle --needle haystack=shards examples=100

The sweeps are functions in configs/sweeps.py; `all` is every run of theirs, once. Fields of train_gpt.py are set in
every run. Beside the run folder NAME/ there can be
    NAME.log             output of a run that is not finished
    NAME.failures.txt    one line a failure: time, exit code, last line; delete it to try again
    NAME.job             its job on the cluster
"""

import argparse
import sys

from configs.runs import Run
from configs.sweeps import SCALE_OF_SWEEP, SCALES, SWEEPS, sweep
from data.needle import C4, fetch_c4
from errors import exit_on_user_error, require
from scripts.shared.arguments import add_run_options, field_changes, needle_changes
from scripts.shared.runs import sidecar
from scripts.sweep.cluster import slurm_parameters, submit
from scripts.sweep.local import train
from scripts.sweep.plan import check_run, plan_runs, print_plan


def main():
    args, fields = parse_arguments()
    with exit_on_user_error():
        runs = choose_runs(args, fields)
        slurm = slurm_parameters(args.slurm, args.executor)
        for option, least in (("jobs", 1), ("gpus_per_run", 1), ("retries", 0)):
            value = getattr(args, option)
            require(value is None or value >= least, f"--{option.replace('_', '-')} must be at least {least}")
        plan = plan_runs(runs, args)
        if args.dry_run:
            return print_plan(plan)
        args.runs_dir.mkdir(parents=True, exist_ok=True)
        starting = [planned.run for planned in plan if planned.starts]
        if any(run.needle and run.needle.haystack == "c4" for run in starting):  # once, before the runs need it
            for split in ("train", "val"):
                fetch_c4(C4, split)
        if args.executor == "local":
            train(starting, args.jobs, args.gpus_per_run, args.retries)
        else:
            submit(starting, args, slurm)

    unfinished = [planned for planned in plan_runs(runs, args) if planned.state != "finished" and not planned.queued]
    print(f"{len(runs) - len(unfinished)} of {len(runs)} runs are finished or queued")
    for planned in unfinished:
        see = f"; see {log}" if (log := sidecar(planned.path, ".log")).exists() else ""
        print(f"{planned.path.name}: {planned.state}, {planned.reason}{see}", file=sys.stderr)
    sys.exit(1 if unfinished else 0)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this command, and the rest, which are fields of train_gpt.py."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sweep",
        description=f"{__doc__}\nSweeps: all, {', '.join(SWEEPS)}.\nScales: {', '.join(SCALES)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("sweep", metavar="SWEEP")
    add_run_options(parser)
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one a GPU; without GPUs, one a core)")
    parser.add_argument("--gpus-per-run", type=int, default=1, help="more than 1: by torchrun")
    parser.add_argument("--retries", type=int, default=2, help="how often a failed run is tried again (default: 2)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and do nothing")
    parser.add_argument("--executor", default="local", choices=["local", "slurm"])
    parser.add_argument("--slurm", nargs="+", default=[], metavar="KEY=VALUE", help="of sbatch; time is in minutes")
    return parser.parse_known_args()


def choose_runs(args: argparse.Namespace, fields: list[str]) -> list[Run]:
    """Return the runs that the command line asks for. Raise ValueError for runs that could not train anywhere."""
    args.scale = args.scale or SCALE_OF_SWEEP.get(args.sweep, "paper")
    changes, needle = field_changes(SCALES[args.scale].base, fields), needle_changes(args.needle)
    runs = sweep(args.sweep, args.scale, args.seeds, args.methods, changes, needle)
    for run in runs:
        check_run(run)
    require(not needle or any(run.needle for run in runs), f"--needle: sweep {args.sweep} fine-tunes no run")
    return runs


if __name__ == "__main__":
    main()

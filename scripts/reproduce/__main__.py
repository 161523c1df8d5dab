"""Make the paper's tables and figures from the runs that there are.

    python -m scripts.reproduce table_losses --scale mini
    python -m scripts.reproduce all --scale paper
    python -m scripts.reproduce figure_tau --steps 6          the study with this field of train_gpt.py in every run
    python -m scripts.reproduce table_needle --needle examples=100      with another setting of the needle task

configs/sweeps.py says which runs an item needs, and `python -m scripts.sweep ITEM` trains them. Runs come from the run
folders in runs/ and from the lines in OUT/runs.jsonl (scripts.keep); --runs-dir names one of both instead. An item is a
section of OUT/tables.md and its figures. It names the runs that are missing. Exit status: 0 if nothing is missing that
can be made here, 1 otherwise, 2 for wrong usage.
"""

import argparse
import sys
from pathlib import Path

from configs.sweeps import SCALE_OF_SWEEP, SCALES, SWEEPS, sweep
from errors import exit_on_user_error, require
from runtime.processes import start_processes
from scripts.reproduce.pages import DRAWS, ITEMS, sweep_command, write_item
from scripts.reproduce.study import Study
from scripts.shared.arguments import add_run_options, field_changes, needle_changes
from scripts.shared.runs import read_runs


def main():
    args, fields = parse_arguments()
    with exit_on_user_error():
        args.scale = args.scale or SCALE_OF_SWEEP.get(args.item, "paper")
        args.out = args.out or Path("results") / args.scale
        changes, needle = field_changes(SCALES[args.scale].base, fields), needle_changes(args.needle)
        device = start_processes(changes.get("device", "auto")).device
        places = [args.runs_dir] if args.runs_dir else [Path("runs"), args.out / "runs.jsonl"]
        stored_runs = [stored for place in places for stored in read_runs(place)]
        outcomes = {}
        for item in ITEMS if args.item == "all" else [args.item]:
            try:
                study = make_study(item, args, fields, changes, needle, stored_runs, device)
                text = write_item(study, args.force, args.csv)
                outcomes[item] = describe_outcome(study)
            except ValueError as error:
                if args.item != "all":
                    raise
                outcomes[item] = f"failed: {error}"  # the other items are made
            print(f"{item}: {outcomes[item]}" if args.item == "all" else f"{text}\n{outcomes[item]}", flush=True)
    sys.exit(0 if all(outcome.startswith(("complete", "needs models")) for outcome in outcomes.values()) else 1)


def make_study(
    item: str, args: argparse.Namespace, fields: list[str], changes: dict, needle: dict, stored_runs: list, device
) -> Study:
    """Return the study of an item. changes, needle: what `fields` and --needle set in every run."""
    runs = sweep(item, args.scale, args.seeds, args.methods, changes, needle) if item in SWEEPS else []
    fine_tuned = any(run.needle for run in runs)
    require(args.item == "all" or fine_tuned or not needle, f"--needle: {item} fine-tunes no run. Leave it out.")
    return Study(
        item=item,
        scale=args.scale,
        runs=runs,
        stored_runs=stored_runs,
        runs_dir=Path("runs") if args.runs_dir is None or args.runs_dir.suffix == ".jsonl" else args.runs_dir,
        out=args.out,
        options=[*sweep_options(args, fine_tuned), *fields],
        device=device,
        draws=args.draws,
        methods=args.methods,
        seeds_given=bool(args.seeds),
    )


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this command, and the others, which are fields of train_gpt.py."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce",
        description=f"{__doc__}\nItems: all, {', '.join(ITEMS)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("item", metavar="ITEM", choices=["all", *ITEMS])
    add_run_options(parser, runs_dir=None)
    parser.add_argument("--out", type=Path, help="folder of the page and the figures (default: results/SCALE)")
    parser.add_argument("--force", action="store_true", help="replace sections that were made from more runs too")
    parser.add_argument("--csv", action="store_true", help="write the numbers too, to OUT/csv")
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"of iid Gaussian scores (default: {DRAWS})")
    return parser.parse_known_args()


def sweep_options(args: argparse.Namespace, fine_tuned: bool) -> list[str]:
    """Return the options of this command that scripts.sweep takes too, without the fields of train_gpt.py."""
    options = ["--scale", args.scale]
    for name in ("seeds", "methods"):
        options += [f"--{name}", *map(str, getattr(args, name))] if getattr(args, name) else []
    options += ["--runs-dir", str(args.runs_dir)] if args.runs_dir else []
    return options + (["--needle", *args.needle] if args.needle and fine_tuned else [])


def describe_outcome(study: Study) -> str:
    """Return one line about an item that was made."""
    used = f"{len(study.finished)} of {len(study.runs)} runs" if study.runs else "no runs needed"
    if study.unwritten:
        return f"not written, {used}: {study.unwritten}"
    if study.missing and not study.runs:
        return f"{'incomplete' if study.models else 'needs models'}: {study.missing[0][0]}: {study.missing[0][1]}"
    if study.missing:
        return f"incomplete, {used}; see {study.page}, or run `{sweep_command(study)}`"
    return f"complete, {used}: {study.page}"


if __name__ == "__main__":
    main()

"""The paper's tables and figures, from the runs that there are.

    python -m scripts.reproduce table_losses --scale mini
    python -m scripts.reproduce all --scale paper --out results/paper
    python -m scripts.reproduce figure_tau --steps 6          the study with this field of train_gpt.py in every run
    python -m scripts.reproduce table_needle --needle examples=100      with another setting of the needle task

Which runs an item needs is in configs/sweeps.py; `python -m scripts.sweep ITEM` trains them. What is missing is named,
with the command that makes it, and the item is made from the rest. Everything goes to OUT/ITEM.md with its .csv, .png
and .pdf; but nothing from no runs, and over a page that was made from more runs only with --force. Exit status: 0 if
all is there that can be made here, 1 if something is missing or not written, 2 for wrong usage.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from configs.sweeps import SCALES, SWEEPS, sweep
from errors import exit_on_user_error, require
from runtime.processes import start_processes
from scripts.reproduce.pages import DRAWS, ITEMS, sweep_command, write_item
from scripts.reproduce.study import Study
from scripts.shared.arguments import add_run_options, field_changes, needle_changes
from scripts.shared.runs import StoredRun, read_runs


def main():
    args, fields = parse_arguments()
    with exit_on_user_error():
        args.scale = args.scale or "paper"
        changes, needle = field_changes(SCALES[args.scale].base, fields), needle_changes(args.needle)
        device = start_processes(changes.get("device", "auto")).device
        stored_runs = read_runs(args.runs_dir)

        def make_study(item: str) -> Study:
            runs = sweep(item, args.scale, args.seeds, args.methods, changes, needle) if item in SWEEPS else []
            options = [*sweep_options(args, any(run.needle for run in runs)), *fields]
            chosen = dict(methods=args.methods, seeds_given=bool(args.seeds))
            out = args.out or Path("results") / args.scale
            return Study(item, args.scale, runs, args.runs_dir, out, options, device, args.draws, **chosen)

        if args.item != "all":
            study = make_study(args.item)
            require(not needle or any(run.needle for run in study.runs), f"--needle: {args.item} fine-tunes no run")
            print(write_item(study, stored_runs, args.force))
            if study.unwritten:
                print(f"not written: {study.unwritten}", file=sys.stderr)
            sys.exit(1 if study.missing or study.unwritten else 0)
    sys.exit(0 if write_all(make_study, stored_runs, args.force) else 1)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return our own options, and the rest, which are fields of train_gpt.py."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce",
        description=f"{__doc__}\nItems: all, {', '.join(ITEMS)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("item", metavar="ITEM", choices=["all", *ITEMS])
    add_run_options(parser)
    parser.add_argument("--out", type=Path, help="where it goes (default: results/SCALE)")
    parser.add_argument("--force", action="store_true", help="write over pages that were made from more runs too")
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"of iid Gaussian scores (default: {DRAWS})")
    return parser.parse_known_args()


def sweep_options(args: argparse.Namespace, fine_tunes: bool) -> list[str]:
    """Return the options of this command that scripts.sweep takes too, but for the fields of train_gpt.py."""
    options = ["--scale", args.scale]
    for name in ("seeds", "methods"):
        options += [f"--{name}", *map(str, getattr(args, name))] if getattr(args, name) else []
    options += ["--runs-dir", str(args.runs_dir)] if args.runs_dir != Path("runs") else []
    return options + (["--needle", *args.needle] if args.needle and fine_tunes else [])


def write_all(make_study: Callable[[str], Study], stored_runs: list[StoredRun], force: bool) -> bool:
    """Make every item and print what became of each. Return whether all is there that can be made on this machine."""
    outcomes = {}
    for item in ITEMS:
        try:
            study = make_study(item)
            write_item(study, stored_runs, force)
            outcomes[item] = describe_outcome(study)
        except Exception as error:  # whatever is wrong with one item, the others are made
            outcomes[item] = f"failed: {type(error).__name__}: {error}"
        print(f"{item}: {outcomes[item]}", flush=True)
    print()
    for kind in ("complete", "incomplete", "not written", "needs models", "failed"):
        if of_kind := [item for item, text in outcomes.items() if text.startswith(kind)]:
            print(f"{len(of_kind)} of {len(ITEMS)} {kind}: {', '.join(of_kind)}")
    there = all(text.startswith(("complete", "needs models")) for text in outcomes.values())
    print("all that can be made on this machine is there" if there else "what is missing, and why, is said above")
    return there


def describe_outcome(study: Study) -> str:
    """Return one line about an item that was made."""
    used = f"{len(study.finished)} of {len(study.runs)} runs" if study.runs else "no runs needed"
    if study.missing and not study.runs:
        return f"{'incomplete' if study.models else 'needs models'}: {study.missing[0]}"
    if study.missing:
        see = f"not written: {study.unwritten}" if study.unwritten else f"or see {study.page}"
        return f"incomplete, {used}; {len(study.missing)} missing: `{sweep_command(study)}`, {see}"
    return f"not written, {used}: {study.unwritten}" if study.unwritten else f"complete, {used}: {study.page}"


if __name__ == "__main__":
    main()

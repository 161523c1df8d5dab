"""Make the paper's tables and figures from finished runs.

    python -m scripts.reproduce table_losses --scale mini
    python -m scripts.reproduce all --scale paper
    python -m scripts.reproduce figure_tau --steps 6          the runs with this field of train_gpt.py changed
    python -m scripts.reproduce table_needle --needle examples=100      the runs with this needle setting changed

An item is a section of OUT/tables.md and its figures. `python -m scripts.sweep ITEM` trains its runs. Runs are read
from the folders in runs/, and from OUT/runs.jsonl or else from runs.jsonl of the study or scale in results/.
--runs-dir reads one folder or one file instead. Exit code: 0 if no run is missing, 1 otherwise, 2 for wrong usage.
"""

import collections
import datetime
import platform
import re
import shlex
import sys
from pathlib import Path

import torch

from errors import exit_on_user_error
from files import replace_text
from model.methods.names import canonical_name
from runtime.device import device_name
from runtime.processes import start_processes
from runtime.run_folder import git_commit
from scripts.reproduce import figures, logits, needles, tables
from scripts.reproduce.study import Study
from scripts.shared.arguments import Parser, add_run_options, field_changes, needle_changes
from scripts.shared.runs import read_runs
from scripts.shared.sweeps import home_of, with_studies

PAPER_ITEMS = dict(
    table_losses=tables.table_losses,
    table_needle=needles.table_needle,
    table_infini=tables.table_infini,
    table_llama=tables.table_llama,
    figure_entropy=figures.figure_entropy,
    figure_sublog=figures.figure_sublog,
    figure_sublog_unscaled=figures.figure_sublog,
    **dict.fromkeys(figures.CURVES, figures.curve_figure),
    figure_qq=logits.figure_qq,
)


def all_items() -> dict:  # functions from a Study to Markdown
    return with_studies(PAPER_ITEMS, "ITEMS")


@exit_on_user_error()
def main():
    # 1. The arguments.
    argv = sys.argv[1:]
    items = all_items()
    parser = Parser("python -m scripts.reproduce", f"{__doc__}\nItems: all, {', '.join(items)}.")
    parser.add_argument("item", metavar="ITEM", choices=["all", *items])
    out_help = "folder of the page and the figures (default: of the study, or results/SCALE)"
    parser.add_argument("--out", type=Path, help=out_help)
    add_run_options(parser, runs_dir=None)
    args, fields = parser.parse_known_args()
    scale, study_name = home_of(args.item)
    args.scale = args.scale or scale or "paper"
    home = Path("results") / (study_name if scale == args.scale else args.scale)
    args.out = args.out or home
    changes = field_changes(fields)
    needle = needle_changes(args.needle)

    # 2. The runs.
    kept = [folder / "runs.jsonl" for folder in (args.out, home) if (folder / "runs.jsonl").exists()]
    sources, runs_dir = [Path("runs"), *kept[:1]], Path("runs")
    if args.runs_dir:
        sources = [args.runs_dir]
        runs_dir = runs_dir if args.runs_dir.suffix == ".jsonl" else args.runs_dir
    stored_runs = [stored for source in sources for stored in read_runs(source)]
    device = start_processes(changes.get("device", "auto")).device

    # 3. The items.
    outcomes, chosen = [], [args.item]
    options = [argument for i, argument in enumerate(argv) if i != argv.index(args.item)]
    if args.item == "all":
        chosen = [item for item in items if home_of(item) in (("", ""), (args.scale, args.scale))]
    for item in chosen:
        command = shlex.join(["python", "-m", "scripts.reproduce", item, *options])
        try:
            study = Study(
                item,
                args.scale,
                args.out,
                stored_runs,
                methods=args.methods and [*map(canonical_name, args.methods)],
                seeds=args.seeds,
                changes=changes,
                needle=needle,
                runs_dir=runs_dir,
                device=device,
            )
            text, outcome = make_item(study, command)
        except ValueError as error:
            if args.item != "all":
                raise
            outcome = f"failed: {error}"  # go on with the other items
        print(f"{item}: {outcome}" if args.item == "all" else f"{text}\n{outcome}", flush=True)
        outcomes.append(outcome)
    sys.exit(int(not all(outcome.startswith("complete") for outcome in outcomes)))


# ---- the page --------------------------------------------------------------------------------------------------------


def make_item(study: Study, command: str) -> tuple:
    """Make an item: its section of OUT/tables.md and its figures. Return the section and a line about the outcome.

    If no run is finished, nothing is written. command: makes the item.
    """
    page, remedy = study.out / "tables.md", ""
    used = f"{len(study.finished)} of {len(study.runs)} runs" if study.runs else "no runs needed"
    if study.missing and not study.runs:
        used = f"{len(study.missing)} models are missing"
    if study.runs and not study.finished and study.item != "figure_entropy":  # its top row needs no runs
        return provenance(study, command), f"not written, {used}. Train them: `{sweep_command(command)}`"
    body = all_items()[study.item](study)
    ends = [*dict.fromkeys(study.notes), *study.sections, provenance(study, command)]
    section = "\n\n".join([f"## {study.item}", body, *ends]) + "\n"
    study.out.mkdir(parents=True, exist_ok=True)
    replace_text(page, make_page(read_sections(page) | {study.item: section}))
    if study.missing and study.runs:
        remedy = f". Train the others: `{sweep_command(command)}`"
    return section, f"{'incomplete' if study.missing else 'complete'}, {used}: {page}{remedy}"


def sweep_command(command: str) -> str:
    """Return the command that trains the runs of an item."""
    command = re.sub(r" --out[= ]\S+| --runs-dir[= ]\S+\.jsonl", "", command)
    return command.replace("scripts.reproduce", "scripts.sweep", 1)


def read_sections(page: Path) -> dict:
    """Return the sections of a page by item."""
    text = page.read_text() if page.exists() else ""
    parts = re.split(r"^## (\w+)\n", text, flags=re.MULTILINE)[1:]
    return {item: f"## {item}\n{section.rstrip()}\n" for item, section in zip(parts[::2], parts[1::2])}


def make_page(sections: dict) -> str:
    """Return the page of these sections, in the order of all_items. Sections of removed items come last."""
    present = [item for item in dict.fromkeys([*all_items(), *sections]) if item in sections]
    links = ", ".join(f"[{item}](#{item})" for item in present)
    head = f"# Tables and figures\n\nMade by `python -m scripts.reproduce` from the stored runs: {links}.\n\n"
    head += "Standard errors and p-values are over seeds. They do not cover the choice of the validation text.\n"
    return "\n".join([head, *(sections[item] for item in present)])


def provenance(study: Study, command: str) -> str:
    """Return lines with the item's command, the origin of its runs, and the missing runs."""
    # 1. The item.
    lines = [f"- command: `{command}`"]
    if study.computed:
        machine = f"{device_name(study.device)}, {platform.system()}, torch {torch.__version__}"
        commit = git_commit(Path(__file__).parent) or "unknown"
        lines.append(f"- made: {datetime.date.today()} on {machine}, code at commit {commit[:12]}")
    if study.runs:
        lines.append(f"- runs used: {len(study.finished)} of {len(study.runs)}")
    lines += {f"- fine-tuned and scored with: {run.needle}": None for run, _ in study.finished if run.needle}

    # 2. The runs: counts of their commits, devices and texts.
    counts = collections.defaultdict(collections.Counter)
    for _, stored in study.finished:
        counts["commit of the runs"].update(commit[:12] for commit in stored.logged("commit"))
        counts["device of the runs"].update(stored.logged("device"))
        tokens = stored.summary.get("distinct_tokens") or 0
        counts["training text"][f"`{stored.text}`, {tokens:,} distinct tokens"] += 1
    for name, values in counts.items():
        lines.append(f"- {name}: " + ", ".join(f"{value} ({n})" for value, n in values.items()))

    # 3. The missing runs.
    reasons = collections.defaultdict(list)
    for name, reason in study.missing:
        reasons[reason].append(f"`{name}`")
    for reason, names in reasons.items():
        lines.append(f"- missing, {reason} ({len(names)}): {', '.join(names[:3])}" + ", ..." * (len(names) > 3))
    if study.missing and study.runs:
        lines.append(f"- train the missing runs: `{sweep_command(command)}`")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

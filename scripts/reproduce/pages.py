"""The items by name, and the page OUT/tables.md, on which each has a section that says how it was made."""

import collections
import datetime
import platform
import re
import shlex
import shutil
import tempfile
from pathlib import Path

import torch

from errors import require
from files import replace_text
from runtime.device import device_name
from runtime.run_folder import git_commit
from scripts.reproduce import beyond, far_tokens, figures, llama, needles, qq, tables, taught
from scripts.reproduce.study import Study

DRAWS = 400
ITEMS = dict(
    table_losses=tables.table_losses,
    table_needle=needles.table_needle,
    table_infini=tables.table_losses,
    table_llama=llama.table_llama,
    figure_entropy=figures.figure_entropy,
    figure_sublog=figures.figure_sublog,
    figure_sublog_unscaled=figures.figure_sublog_unscaled,
    figure_train_lengths=figures.figure_train_lengths,
    figure_train_4k=figures.figure_train_4k,
    figure_train_16k=figures.figure_train_16k,
    figure_304m=figures.figure_304m,
    figure_tau=figures.figure_tau,
    figure_scale_invariant_variants=figures.figure_scale_invariant_variants,
    figure_qq=qq.figure_qq,
    figure_qq_ours=qq.figure_qq_ours,
    open_choices=tables.open_choices,
    tau_by_length=beyond.tau_by_length,
    far_tokens=far_tokens.far_tokens,
    scale_invariant_by_head=beyond.scale_invariant_by_head,
    needle_by_head=needles.table_needle,
    taught=taught.taught,
    table_rivals=beyond.table_rivals,
    needle_rivals=needles.table_needle,
    needle_nope=needles.table_needle,
    needle_tau=needles.needle_tau,
)
PARTLY_THEORY = ["figure_entropy"]  # has something to show without runs
# Items that are computed or measured on this machine. The others are functions of the stored runs.
COMPUTED = ["figure_entropy", "figure_sublog", "figure_sublog_unscaled", "figure_qq_ours", "far_tokens"]


def write_item(study: Study, force: bool = False, csv: bool = False) -> str:
    """Make an item: its section of study.page and its figures. Return the text of the section.

    Nothing is written from no runs, nor (unless forced) over a section that was made from more. study.unwritten then
    says why. csv: also write the numbers, as is always done for items in COMPUTED.
    """
    study.collect()
    with tempfile.TemporaryDirectory() as folder:
        study.draft = Path(folder)
        body = ITEMS[study.item](study)
        parts = [f"## {study.item}", body, *dict.fromkeys(study.notes), *study.sections, provenance(study)]
        section = "\n\n".join(parts) + "\n"
        sections = read_sections(study.page)
        try:
            needed = study.runs and study.item not in PARTLY_THEORY
            require(study.finished or not needed, f"no run of {study.item} is there")
            if not force:
                require_as_many(sections.get(study.item, ""), len(study.finished or study.models))
        except ValueError as error:
            study.unwritten = str(error)
            return section
        kinds = ("figures", "csv") if csv or study.item in COMPUTED else ("figures",)
        for kind in kinds:
            if (study.draft / kind).exists():
                shutil.copytree(study.draft / kind, study.out / kind, dirs_exist_ok=True)
        study.out.mkdir(parents=True, exist_ok=True)
        replace_text(study.page, make_page(sections | {study.item: section}))
    return section


def read_sections(page: Path) -> dict[str, str]:
    """Return the sections of a page by item."""
    text = page.read_text() if page.exists() else ""
    parts = re.split(r"^## (\w+)\n", text, flags=re.MULTILINE)[1:]
    return {item: f"## {item}\n{section.rstrip()}\n" for item, section in zip(parts[::2], parts[1::2])}


def make_page(sections: dict[str, str]) -> str:
    """Return the page with these sections, in the order of ITEMS."""
    present = [item for item in ITEMS if item in sections]
    links = ", ".join(f"[{item}](#{item})" for item in present)
    head = f"# Tables and figures\n\nMade by `python -m scripts.reproduce` from the stored runs: {links}.\n"
    return "\n".join([head, *(sections[item] for item in present)])


def require_as_many(section: str, used: int):
    """Raise ValueError if this section of a page was made from more runs or models than are used now."""
    found = re.search(r"^- (runs|models) used: (\d+) of", section, re.MULTILINE)
    before = int(found[2]) if found else 0
    require(before <= used, f"the page was made from {before} {found and found[1]}, now {used} are there. Use --force.")


def provenance(study: Study) -> str:
    """Return the lines that say how the item was made, from which runs, and what is missing."""
    lines, stored_runs = [f"- command: `{command_of(study)}`"], [stored for _, stored in study.finished]
    if study.item in COMPUTED:
        machine = f"{device_name(study.device)}, {platform.system()}, torch {torch.__version__}"
        commit = git_commit(Path(__file__).parent) or "unknown"
        lines.append(f"- made: {datetime.date.today()} on {machine}, code at commit {commit[:12]}")
    lines += [f"- runs used: {len(study.finished)} of {len(study.runs)}"] if study.runs else []
    lines += [f"- models used: {len(study.models)} of {study.models_needed}"] if study.models else []
    lines += [f"- fine-tuned and scored with: {needle}" for needle in {r.needle for r, _ in study.finished if r.needle}]
    lines += counted("commit of the runs", [commit[:12] for s in stored_runs for commit in s.logged("commit")])
    lines += counted("device of the runs", [device for s in stored_runs for device in s.logged("device")])
    texts = [f"`{s.text}`, {s.summary.get('distinct_tokens') or 0:,} distinct tokens" for s in stored_runs]
    lines += counted("training text", texts)
    reasons = collections.defaultdict(list)
    for name, reason in study.missing:
        reasons[reason].append(f"`{name}`")
    lines += [f"- missing, {reason} ({len(names)}): {', '.join(names)}" for reason, names in reasons.items()]
    lines += [f"- command for what is missing: `{sweep_command(study)}`"] if study.missing and study.runs else []
    return "\n".join(lines)


def counted(what: str, values: list[str]) -> list[str]:
    """Return a line with each value and how often it occurs; none without values."""
    counts = collections.Counter(values)
    return [f"- {what}: " + ", ".join(f"{value} ({n})" for value, n in counts.items())] if counts else []


def command_of(study: Study) -> str:
    default_out = study.out == Path("results") / study.scale
    own = [] if default_out else ["--out", str(study.out)]
    own += [] if study.draws == DRAWS else ["--draws", str(study.draws)]
    return shlex.join(["python", "-m", "scripts.reproduce", study.item, *study.options, *own])


def sweep_command(study: Study) -> str:
    """Return the command that trains all runs of the item."""
    return shlex.join(["python", "-m", "scripts.sweep", study.item, *study.options])

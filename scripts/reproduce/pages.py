"""The tables and figures by name, and the page of each, which says how it was made."""

import collections
import datetime
import platform
import shlex
import tempfile
from pathlib import Path

import torch

from configs.sweeps import SWEEPS
from errors import require
from files import replace_file
from runtime.device import device_name
from runtime.run_folder import git_commit
from scripts.reproduce import far_tokens, figures, lengthscales, llama, needles, qq, rivals, tables
from scripts.reproduce.study import Study
from scripts.shared.runs import StoredRun, log_values, require_as_many_runs

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
    tau_by_length=lengthscales.tau_by_length,
    far_tokens=far_tokens.far_tokens,
    scale_invariant_by_head=lengthscales.scale_invariant_by_head,
    needle_by_head=needles.table_needle,
    table_rivals=rivals.table_rivals,
    needle_rivals=needles.table_needle,
    needle_nope=needles.table_needle,
    needle_tau=needles.needle_tau,
)
PARTLY_THEORY = ["figure_entropy"]  # which has something to show without runs
# What is computed or measured here; the others are functions of what the runs left, the same wherever they are made.
COMPUTED = ["figure_entropy", "figure_sublog", "figure_sublog_unscaled", "figure_qq_ours", "far_tokens"]


def write_item(study: Study, stored_runs: list[StoredRun], force: bool = False) -> str:
    """Make the item: its files in study.out, and its page, which says what it was made from. Return the page's text.

    When they are made from no runs, or (unless forced) from fewer than the page that is there, all that is in study.out
    stays as it is and study.unwritten says why.
    """
    study.collect(stored_runs)
    with tempfile.TemporaryDirectory() as folder:
        study.draft = Path(folder)
        body = ITEMS[study.item](study)
        notes = "".join(f"\n\n{text}" for text in (*dict.fromkeys(study.notes), *study.sections))
        page = f"# {study.item}\n\n{body}{notes}\n\n## How this was made\n\n{provenance(study)}\n"
        try:
            if not force:
                what, used = ("runs", study.finished) if study.runs else ("models", study.models)
                require_as_many_runs(study.page, rf"^- {what} used: (\d+) of", len(used), what)
            needs = bool(study.runs) and study.item not in PARTLY_THEORY
            require(study.finished or not needs, f"no run of {study.item} is there")
        except ValueError as error:
            study.unwritten = str(error)
            return page
        study.out.mkdir(parents=True, exist_ok=True)
        for made in study.draft.iterdir():
            replace_file(study.out / made.name, lambda file: file.write(made.read_bytes()))
        replace_file(study.page, lambda file: file.write(page.encode()))
    return page


def provenance(study: Study) -> str:
    """Return the lines that say how the item was made, from which runs, and what is missing."""
    own = ["--out", str(study.out)] if study.out != Path("results") / study.scale else []
    own += ["--draws", str(study.draws)] if study.draws != DRAWS else []
    lines = [f"- command: `{shlex.join(['python', '-m', 'scripts.reproduce', study.item, *study.options, *own])}`"]
    if study.item in COMPUTED:
        machine = f"{device_name(study.device)}, {platform.system()}, torch {torch.__version__}"
        commit = git_commit(Path(__file__).parent) or "unknown"
        lines.append(f"- made: {datetime.date.today()} on {machine}, code at commit {commit}")
    if study.runs:
        lines.append(f"- runs used: {len(study.finished)} of {len(study.runs)}")
        needles = {run.needle for run, _ in study.finished if run.needle}
        lines += [f"- all fine-tuned and scored with: {needle}" for needle in needles]
    lines += [f"- models used: {len(study.models)} of {study.models_needed}"] if study.models else []
    stored_runs = [stored for _, stored in study.finished]
    for what in ("commit", "device"):
        if values := collections.Counter(value for stored in stored_runs for value in log_values(stored.path, what)):
            lines.append(f"- {what} of the runs: " + ", ".join(f"{v} ({n})" for v, n in values.items()))
    if stored_runs:
        texts = collections.Counter(map(training_text, stored_runs))
        lines.append("- training text of the runs: " + "; ".join(f"{text} ({n})" for text, n in texts.items()))
        lines.append("- folders: " + ", ".join(f"`{stored.path.name}`" for stored in stored_runs))
    if study.missing:
        lines += ["", f"### Missing ({len(study.missing)})", ""]
        if study.item in SWEEPS:
            does = "trains and fine-tunes" if any(run.needle for run in study.runs) else "trains"
            lines += [f"`{sweep_command(study)}` {does} all", ""]
        lines += [f"- {line}" for line in study.missing]
    return "\n".join(lines)


def sweep_command(study: Study) -> str:
    """Return the command that trains all runs of the item."""
    return shlex.join(["python", "-m", "scripts.sweep", study.item, *study.options])


def training_text(stored: StoredRun) -> str:
    """Return the fingerprint of a finished run's training text, and how much of it there was."""
    tokens, distinct = stored.summary.get("tokens"), stored.summary.get("distinct_tokens")
    counted = bool(tokens and distinct)
    read = f"{distinct:,} distinct training tokens, read {tokens / distinct:.2f} times" if counted else "not counted"
    return f"`{stored.summary['data']}`, {read}"

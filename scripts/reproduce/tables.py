"""The tables of losses, with the paper's numbers beside ours: each is returned as Markdown and written as CSV."""

import collections
import csv
import itertools
from collections.abc import Iterable
from pathlib import Path

from configs.presets import preset
from configs.sweeps import SCALES, TAU
from scripts.reproduce.comparisons import compare
from scripts.reproduce.study import Study, abbreviate_length
from scripts.shared.looks import plain_number, series_name
from scripts.shared.runs import final_losses
from scripts.shared.tables import embolden_best, format_mean, markdown_table, mean_and_stderr

PAPER_TRAIN_LENGTH = 4096  # of all its tables
OURS = "scale_invariant_p_rope"  # what the others are compared with
COMPARED = ("table_losses", "scale_invariant_by_head", "open_choices")


def table_losses(study: Study) -> str:
    losses, lengths = read_losses(study)
    if study.item in COMPARED:
        paper = {of: target["mean"] for of, target in paper_targets(study.item).items()}
        study.sections = compare(study, losses, reference_of(study), lengths, paper, weights_of(study))
    return losses_page(study, losses, lengths)


def reference_of(study: Study) -> str:
    """Return the series that the others are compared with: scale-invariant p-RoPE with the item's own tau.

    The studies beyond the paper vary the method around the tau that scales with the training length.
    """
    tau = plain_number(TAU * preset(SCALES[study.scale].base).position_scale)
    scaled = f"{OURS} tau={tau}"
    return scaled if study.item != "table_losses" and scaled in study.all_series else OURS


def losses_page(study: Study, losses: dict, lengths: list[int]) -> str:
    text = "Validation loss in nats a token at the end of training, by validation length in tokens (and in training "
    text += "lengths): mean \u00b1 standard error over seeds."
    return f"{text}\n\n{make_table(study, {'': losses}, lengths, best=min)}"


def read_losses(study: Study) -> tuple[dict, list[int]]:
    """Return the final losses of the runs, {(series, length): one a seed}, and the lengths. Note what a run lacks."""
    lengths = sorted({length for run in study.runs for length in run.config.val_lengths})
    losses = collections.defaultdict(list)
    for run, stored in list(study.finished):
        with study.dropping_unreadable(run):
            final = {series: final_losses(stored.summary, method) for series, method in study.series(run).items()}
            for series, by_length in final.items():
                for length in by_length.keys() & set(lengths):
                    losses[series, length].append(by_length[length])
            if lacking := {length for by_length in final.values() for length in set(lengths) - by_length.keys()}:
                words = [f"python -m scripts.evaluate {stored.path} --lengths", *map(str, sorted(lacking))]
                words += ["--as", *run.config.validate_as] if run.config.validate_as else []
                study.missing.append((run.name, f"losses, which `{' '.join(words)}` measures"))
    return losses, lengths


def open_choices(study: Study) -> str:
    text = "What the paper leaves open, the other choice beside ours: YaRN that never scales (which is RoPE), p-RoPE "
    text += "in Barbero's form, LogN by the length of the context instead of the row, ALiBi's slopes in "
    text += "FlexAttention's form, shorter and longer segments; and scale-invariant attention with a_t or m_t alone."
    return text + "\n\n" + table_losses(study)


# ---- what the tables have in common ----------------------------------------------------------------------------------


def weights_of(study: Study) -> dict[str, str]:
    """Return the method that was trained, by each other method that its weights were validated as."""
    return {other: run.config.method for run in study.runs for other in run.config.validate_as}


def make_table(study: Study, metrics: dict[str, dict], lengths: list[int], best, oracle: dict = {}) -> str:
    """Return the table as Markdown, and write it as CSV: ours, the mean over seeds, beside the paper's.

    metrics: by label, {(method, length): a value a seed}; the paper's numbers compare with the first. best: min or max.
    oracle: values by length of a last row.
    """
    paper, methods, lenders = paper_targets(study.item), study.all_series, weights_of(study)
    columns, oracle_cells, records = {}, {}, []
    for length, (label, values) in itertools.product(lengths, metrics.items()):
        ratio = length / study.base_length
        paper_length = round(ratio * PAPER_TRAIN_LENGTH)
        ours = {method: mean_and_stderr(values[method, length]) for method in methods}
        compared = methods if label == next(iter(metrics)) else ()
        targets = {method: paper[method, paper_length] for method in compared if (method, paper_length) in paper}
        head = f"{length} ({ratio:g}x) {label}".rstrip()
        cells = {method: format_mean(*numbers) for method, numbers in ours.items()}
        columns[head] = embolden_best(cells, {method: mean for method, (mean, _) in ours.items()}, best)
        oracle_cells[head] = f"{oracle[length]:.3f}" if length in oracle else ""
        if targets:
            columns[paper_head(paper_length, ratio)] = {m: format_target(target) for m, target in targets.items()}
        for method, (mean, stderr) in ours.items():
            paper_mean = targets[method]["mean"] if method in targets else None
            record = dict(method=method, weights_of=lenders.get(method), metric=label or "val_loss", length=length)
            seeds = len(values[method, length])
            records.append(record | dict(ratio=ratio, mean=mean, stderr=stderr, seeds=seeds, paper_mean=paper_mean))
    study.write_csv(records)
    study.notes += table_notes(study, lenders, one_seed=any(record["seeds"] == 1 for record in records))

    rows = [["method", "seeds", *columns]]
    for method in methods:
        if method.startswith("infini") and len(rows) > 1 and not any("Infini" in row[0] for row in rows):
            rows.append([""] * len(rows[0]))  # the rule in the paper's table
        seeds = [record["seeds"] for record in records if record["method"] == method and record["seeds"]] or [0]
        seeds = "-".join(map(str, sorted({min(seeds), max(seeds)})))  # 3, or 1-3 where they differ
        mark = "\u2020" if method in lenders else ""
        rows.append([series_name(method) + mark, seeds, *(cells.get(method, "") for cells in columns.values())])
    if oracle:
        rows.append(["oracle", "", *(oracle_cells.get(head, "") for head in columns)])
    return markdown_table(rows)


def table_notes(study: Study, lenders: dict[str, str], one_seed: bool) -> list[str]:
    """Return what a reader of the table must know. lenders: see weights_of; one_seed: there are numbers of one seed."""
    notes, borrowers = [], collections.defaultdict(list)
    for method in study.all_series:
        if method in lenders:
            borrowers[lenders[method]].append(series_name(method))
    if borrowers:
        same = "; ".join(f"{' and '.join(names)}: the weights of {series_name(m)}" for m, names in borrowers.items())
        notes.append(
            f"\u2020 {same}. They train identically and differ beyond the training length only, so each seed was "
            "trained once and validated as all of them."
        )
    notes += paper_remarks(paper_targets(study.item), study.all_series)
    if preset(SCALES[study.scale].base).position_scale != 1:
        notes.append(
            "Rotary bases and 1/slope of ALiBi are scaled with the training length, except in rows that say otherwise. "
            "\u03c4 is 10 tokens, except in rows that say otherwise."
        )
    if study.scale != "paper":
        beside = "The paper's columns stand beside the lengths of the same ratio to the training length; compare"
        notes.append(
            f"Scale `{study.scale}` is not the paper's: another model or training length, fewer tokens, another text. "
            + f"{beside if paper_targets(study.item) else 'Compare'} the order of the methods and what happens beyond "
            "1x, not the numbers."
        )
    if one_seed:
        notes.append("\u00b1 n/a: one seed, which has no standard error.")
    return notes


# ---- the paper's own numbers, beside ours ----------------------------------------------------------------------------


def paper_targets(table: str) -> dict[tuple[str, int], dict]:
    """Return the paper's numbers of one table by method and validation length.

    Each has mean, stderr and seeds (None where the paper gives none), note, and remark: what is odd about the number.
    """
    with open(Path(__file__).with_name("paper_targets.csv"), newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["table"] == table]
    numbers = dict(mean=float, stderr=float, seeds=int)
    return {
        (row["method"], int(row["val_length"])): {
            key: kind(row[key]) if row[key] else None for key, kind in numbers.items()
        }
        | {key: row[key] for key in ("note", "remark")}
        for row in rows
    }


def paper_remarks(paper: dict, methods: Iterable[str]) -> list[str]:
    """Return a note for each thing that is odd about the paper's numbers of these methods."""
    names = collections.defaultdict(dict)
    for (method, _), target in paper.items():
        if target["remark"] and method in methods:
            names[target["remark"]][series_name(method)] = None
    return [f"The paper's numbers of {' and '.join(those)}: {remark}." for remark, those in names.items()]


def paper_head(length: int, ratio: float) -> str:
    return f"paper {abbreviate_length(length)} ({ratio:g}x)"


def format_target(target: dict) -> str:
    cell = f"{target['mean']:.3f}" + (f" \u00b1 {target['stderr']:.3f}" if target["stderr"] is not None else "")
    return f"**{cell}**" if "bold" in target["note"] else cell

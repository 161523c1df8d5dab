"""The tables of losses, with the paper's numbers beside ours, as Markdown."""

import collections
import csv
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from configs.presets import preset
from configs.sweeps import OURS, SCALES, TAU
from scripts.continue_pretraining import NOT_TRAINED, PAPER, PAPER_MODEL
from scripts.reproduce.comparisons import compare
from scripts.reproduce.study import Study, abbreviate_length
from scripts.shared.looks import plain_number, series_name
from scripts.shared.runs import final_losses
from scripts.shared.tables import mean_and_stderr, mean_cells, pivot_table

PAPER_TRAIN_LENGTH = 4096  # of all its tables
COMPARED = ("table_losses", "scale_invariant_by_head", "open_choices")
LLAMA_FOLDER = "continued"  # in the folder of the runs, where scripts.continue_pretraining writes
LLAMA_COMPARED = ("model", "train_length", "validation", "val_tokens")  # all runs of the table must share these


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
    scaled = f"{OURS} tau={plain_number(TAU * preset(SCALES[study.scale].base).position_scale)}"
    return scaled if study.item != "table_losses" and scaled in study.all_series else OURS


def losses_page(study: Study, losses: dict, lengths: list[int]) -> str:
    text = "Validation loss in nats a token at the end of training, by validation length in tokens (and in training "
    text += "lengths): mean \u00b1 standard error over seeds."
    return f"{text}\n\n{make_table(study, {'': losses}, lengths, best=min)}"


def read_losses(study: Study) -> tuple[dict, list[int]]:
    """Return the final losses of the runs, {(series, length): one a seed}, and the lengths. Note what a run lacks."""
    lengths = sorted({length for run in study.runs for length in run.config.val_lengths})
    losses = collections.defaultdict(list)
    for run, stored in study.finished:
        final = {series: final_losses(stored.summary, method) for series, method in study.series(run).items()}
        for series, by_length in final.items():
            for length in by_length.keys() & set(lengths):
                losses[series, length].append(by_length[length])
        if lacking := {length for by_length in final.values() for length in set(lengths) - by_length.keys()}:
            words = ["python -m scripts.evaluate", stored.path, "--lengths", *sorted(lacking)]
            words += ["--as", *run.config.validate_as] if run.config.validate_as else []
            study.missing.append((run.name, f"losses, which `{' '.join(map(str, words))}` measures"))
    return losses, lengths


def open_choices(study: Study) -> str:
    text = "What the paper leaves open, the other choice beside ours: YaRN that never scales (which is RoPE), p-RoPE "
    text += "in Barbero's form, LogN by the length of the context instead of the row, ALiBi's slopes in "
    text += "FlexAttention's form, shorter and longer segments; and scale-invariant attention with a_t or m_t alone."
    return text + "\n\n" + table_losses(study)


def table_llama(study: Study) -> str:
    """Return the paper's table of Llama 2 7B beside our runs of scripts.continue_pretraining."""
    paths = sorted((study.runs_dir / LLAMA_FOLDER).glob("*/summary.json"))
    rows = {path.parent.name: json.loads(path.read_text()) for path in paths}
    compared = {name: tuple(row[field] for field in LLAMA_COMPARED) for name, row in rows.items()}
    most, _ = collections.Counter(compared.values()).most_common(1)[0] if rows else ((PAPER_MODEL, 4096), 0)
    losses, methods, texts = collections.defaultdict(list), [], set()
    for name, row in rows.items():
        if compared[name] != most:
            study.missing.append((name, f"left out: it is of {compared[name]}, most are of {most}"))
            continue
        options = dict(row["method_options"])
        if not row["steps"] and row["method"] not in NOT_TRAINED:
            options["steps"] = 0
        series = " ".join([row["method"], *(f"{key}={value}" for key, value in options.items())])
        methods.append(series)
        texts |= {f"{row['tokens']:,}"} if row["steps"] else set()
        for length, loss in row["val_loss"].items():
            losses[series, int(length)].append(loss)
    model, train_length, *_ = most
    command = f"python -m scripts.continue_pretraining {PAPER_MODEL} --method METHOD --resume auto"
    study.missing += [(series_name(m), f"which `{command}` makes") for m in PAPER if m not in methods]
    rows_shown = [*dict.fromkeys([*PAPER, *methods])]
    lengths = sorted({length for _, length in losses} | {factor * train_length for factor in (1, 4, 16)})
    text = "Validation loss in nats a token of Llama 2 7B, trained on at 4k on about 50 M tokens with each method ("
    text += (
        f"{', '.join(map(series_name, NOT_TRAINED))}: not trained), by validation length in tokens (and in training "
    )
    text += f"lengths). Ours: {model} at {train_length} on {', '.join(sorted(texts)) or 'no'} tokens."
    table = make_table(study, {"": losses}, lengths, best=min, methods=rows_shown, base_length=train_length)
    return f"{text}\n\n{table}"


# ---- what the tables have in common ----------------------------------------------------------------------------------


def weights_of(study: Study) -> dict[str, str]:
    """Return the method that was trained, by each other method that its weights were validated as."""
    return {other: run.config.method for run in study.runs for other in run.config.validate_as}


def make_table(
    study: Study,
    metrics: dict[str, dict],
    lengths: list[int],
    *,
    best: Callable,
    methods: list[str] | None = None,
    base_length: int | None = None,
    oracle: dict = {},
) -> str:
    """Return a table of ours, the mean over seeds, beside the paper's, as Markdown.

    metrics: by label, {(method, length): a value a seed}; the paper's numbers compare with the first. best: min or max.
    methods, base_length: the rows and the training length, instead of the study's. oracle: values by length of a last
    row.
    """
    paper, lenders = paper_targets(study.item), weights_of(study)
    methods, base_length = methods or study.all_series, base_length or study.base_length
    columns, counts = {}, collections.defaultdict(set)  # seeds by method
    for length, (label, values) in itertools.product(lengths, metrics.items()):
        ratio = length / base_length
        found = {method: values.get((method, length), []) for method in methods}
        numbers = {method: mean_and_stderr(of_seeds) for method, of_seeds in found.items()}
        head = f"{length} ({ratio:g}x) {label}".rstrip()
        columns[head] = mean_cells(numbers, best) | ({"oracle": f"{oracle[length]:.3f}"} if length in oracle else {})
        paper_length = round(ratio * PAPER_TRAIN_LENGTH)
        targets = {method: paper[method, paper_length] for method in methods if (method, paper_length) in paper}
        if targets and label == next(iter(metrics)):
            head = f"paper {abbreviate_length(paper_length)} ({ratio:g}x)"
            columns[head] = {method: format_target(target) for method, target in targets.items()}
        for method, of_seeds in found.items():
            counts[method] |= {len(of_seeds)} - {0}
    study.notes += table_notes(study, methods, lenders, one_seed=any(1 in seeds for seeds in counts.values()))

    rows = {}
    for method in methods:
        if method.startswith("infini") and rows and not any(other.startswith("infini") for other in rows):
            rows[""] = ["", ""]  # the rule in the paper's table
        seeds = counts[method] or {0}
        seeds = "-".join(map(str, sorted({min(seeds), max(seeds)})))  # 3, or 1-3 where they differ
        rows[method] = [series_name(method) + ("\u2020" if method in lenders else ""), seeds]
    if oracle:
        rows["oracle"] = ["oracle", ""]
    lines = [(first, {head: cells.get(key, "") for head, cells in columns.items()}) for key, first in rows.items()]
    return pivot_table(["method", "seeds"], lines, {head: head for head in columns})


def table_notes(study: Study, methods: list[str], lenders: dict[str, str], one_seed: bool) -> list[str]:
    """Return what a reader of the table must know. lenders: see weights_of; one_seed: there are numbers of one seed."""
    notes, borrowers = [], collections.defaultdict(list)
    for method in methods:
        if method in lenders:
            borrowers[lenders[method]].append(series_name(method))
    if borrowers:
        same = "; ".join(f"{' and '.join(names)}: the weights of {series_name(m)}" for m, names in borrowers.items())
        notes.append(
            f"\u2020 {same}. They train identically and differ beyond the training length only, so each seed was "
            "trained once and validated as all of them."
        )
    notes += paper_remarks(paper_targets(study.item), methods)
    if preset(SCALES[study.scale].base).position_scale != 1:
        notes.append(
            "Rotary bases and 1/slope of ALiBi are scaled with the training length, except in rows that say otherwise. "
            "\u03c4 is 10 tokens, except in rows that say otherwise."
        )
    if study.scale != "paper":
        beside = "The paper's columns stand beside the lengths of the same ratio to the training length; compare"
        notes.append(
            f"Scale `{study.scale}` is not the paper's: another model or training length, fewer tokens, another text. "
            f"{beside if paper_targets(study.item) else 'Compare'} the order of the methods and what happens beyond "
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
    kinds, targets = dict(mean=float, stderr=float, seeds=int, note=str, remark=str), {}
    with open(Path(__file__).with_name("paper_targets.csv"), newline="") as file:
        for row in csv.DictReader(file):
            if row["table"] == table:
                target = {key: kind(row[key]) if row[key] or kind is str else None for key, kind in kinds.items()}
                targets[row["method"], int(row["val_length"])] = target
    return targets


def paper_remarks(paper: dict, methods: Iterable[str]) -> list[str]:
    """Return a note for each thing that is odd about the paper's numbers of these methods."""
    names = collections.defaultdict(dict)
    for (method, _), target in paper.items():
        if target["remark"] and method in methods:
            names[target["remark"]][series_name(method)] = None
    return [f"The paper's numbers of {' and '.join(those)}: {remark}." for remark, those in names.items()]


def format_target(target: dict) -> str:
    cell = f"{target['mean']:.3f}" + (f" \u00b1 {target['stderr']:.3f}" if target["stderr"] is not None else "")
    return f"**{cell}**" if "bold" in target["note"] else cell

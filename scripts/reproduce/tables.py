"""Make the tables of losses as Markdown, with the paper's numbers beside ours."""

import collections
import csv
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

from configs.presets import preset
from configs.sweeps import SCALES, SI, TAU
from runtime.metrics import read_record
from scripts.continue_pretraining import DEFAULTS, NOT_TRAINED, PAPER, PAPER_MODEL
from scripts.reproduce.comparisons import compare
from scripts.reproduce.study import Study, abbreviate_length, samples
from scripts.shared.looks import plain_number, series_label, series_name
from scripts.shared.runs import final_losses, single_val_tokens
from scripts.shared.tables import mean_and_stderr, mean_cells, pivot_table

PAPER_TRAIN_LENGTH = 4096  # of all tables in the paper
LLAMA_FOLDER = "continued"  # in the folder of the runs; scripts.continue_pretraining writes it
LLAMA_FIELDS = "model validation method method_options train_length steps tokens val_loss val_tokens"
LLAMA_COMPARED = ("model", "train_length", "validation")  # all runs of the table must share these


def table_losses(study: Study, compared: bool = True) -> str:
    """Return the table of losses as Markdown. compared: add a section with the differences to our method."""
    losses, lengths = read_losses(study)
    if compared:
        study.sections = compare(study, losses, reference_of(study), lengths)
    text = (
        "Validation loss at the end of training, in nats per token: mean \u00b1 standard error over seeds. Columns: "
        "validation length in tokens (and as a multiple of the training length)."
    )
    return f"{text}\n\n{make_table(study, {'': losses}, lengths, best=min)}"


def table_infini(study: Study) -> str:
    study.trained_method_only = True
    return table_losses(study, compared=False)


def reference_of(study: Study) -> str:
    """Return the series with which the others are compared: scale-invariant p-RoPE.

    Studies beyond the paper change one option at a time from a tau that scales with the training length.
    """
    scaled = f"{SI} tau={plain_number(TAU * preset(SCALES[study.scale].base).position_scale)}"
    return scaled if study.item != "table_losses" and scaled in study.all_series else SI


def read_losses(study: Study) -> tuple:
    """Return final losses, {(series, length): [one per seed]}, and lengths. Add missing losses to study.missing."""
    lengths = sorted({length for run in study.runs for length in run.config.val_lengths})
    for run, stored in study.finished:
        found = [final_losses(stored.summary, method) for method in study.series(run).values()]
        if absent := {length for length in lengths if any(length not in by_length for by_length in found)}:
            command = ["python -m scripts.evaluate", stored.path, "--lengths", *sorted(absent)]
            if run.config.validate_as:
                command += ["--as", *run.config.validate_as]
            study.missing.append((run.name, f"not validated: run `{' '.join(map(str, command))}`"))
    return samples(study.by_seed(final_losses)), lengths


def table_llama(study: Study) -> str:
    """Return the table of Llama 2 7B: the paper's numbers beside our runs of scripts.continue_pretraining."""
    # 1. The runs that share model, training length and validation text with most runs.
    paths = sorted((study.runs_dir / LLAMA_FOLDER).glob("*/summary.json"))
    rows = {path.parent.name: read_record(path, LLAMA_FIELDS) for path in paths}
    compared = {name: (*(row[key] for key in LLAMA_COMPARED), single_val_tokens(row)) for name, row in rows.items()}
    common = collections.Counter(compared.values()).most_common(1)[0][0] if rows else (PAPER_MODEL, 4096)
    model, study.base_length, *_ = common
    losses, token_counts = collections.defaultdict(list), set()
    most = max((row["steps"] for name, row in rows.items() if compared[name] == common), default=0)
    for name, row in rows.items():
        if compared[name] != common:
            study.missing.append((name, f"left out: it has {compared[name]}, most runs have {common}"))
            continue
        options = dict(row["method_options"])
        if row["steps"]:
            token_counts.add(f"{row['tokens']:,}")
        if row["steps"] != (0 if row["method"] in NOT_TRAINED else most):
            options["steps"] = row["steps"]
        if row.get("peak_lr", DEFAULTS.lr) != DEFAULTS.lr:
            options["lr"] = row["peak_lr"]
        series = " ".join([row["method"], *(f"{key}={value}" for key, value in options.items())])
        for length, loss in row["val_loss"].items():
            losses[series, int(length)].append(loss)

    # 2. The table.
    command = f"python -m scripts.continue_pretraining {PAPER_MODEL} --method METHOD --resume auto"
    found = dict.fromkeys(series for series, _ in losses)
    study.missing += [(series_name(method), f"not trained: run `{command}`") for method in PAPER if method not in found]
    lengths = sorted({length for _, length in losses} | {factor * study.base_length for factor in (1, 4, 16)})
    text = (
        "Validation loss of Llama 2 7B in nats per token, after continued pretraining at 4k on about 50 M tokens ("
        f"{', '.join(map(series_name, NOT_TRAINED))}: not trained). Columns: validation length in tokens (and as a "
        f"multiple of 4k). Ours: {model} at {study.base_length} on {', '.join(sorted(token_counts)) or 'no'} tokens."
    )
    methods = [*dict.fromkeys([*PAPER, *found])]
    return f"{text}\n\n{make_table(study, {'': losses}, lengths, best=min, methods=methods)}"


# ---- parts of all tables ---------------------------------------------------------------------------------------------


def trained_methods(study: Study) -> dict:
    """Return {method that was only validated: method that was trained}. Both use the same weights."""
    pairs = [(run.config, other) for run in study.runs for other in run.config.validate_as]
    return {series_label(config, other): series_label(config) for config, other in pairs}


def make_table(
    study: Study,
    metrics: dict,
    lengths: list[int],
    *,
    best: Callable,
    methods: list | None = None,
) -> str:
    """Return a table as Markdown: our means over seeds, and the paper's numbers beside the first metric.

    metrics: {label: {(method, length): [one value per seed]}}. best: min or max. methods: rows, if not the study's.
    """
    paper, trained, columns = paper_targets(study.item), trained_methods(study), {}
    methods = methods or study.all_series

    # 1. A column for each length and metric, beside the first metric the paper's.
    counts = {method: set() for method in methods}  # numbers of seeds
    for length, (label, values) in itertools.product(lengths, metrics.items()):
        found = {method: values.get((method, length), []) for method in methods}
        columns[f"{study.length_label(length)} {label}".rstrip()] = mean_cells(
            {method: mean_and_stderr(seed_values) for method, seed_values in found.items()}, best
        )
        for method, seed_values in found.items():
            counts[method] |= {len(seed_values)} - {0}
        ratio = length / study.base_length
        paper_length = round(ratio * PAPER_TRAIN_LENGTH)
        targets = {m: format_target(paper[m, paper_length]) for m in methods if (m, paper_length) in paper}
        if targets and label == next(iter(metrics)):
            columns[f"paper {abbreviate_length(paper_length)} ({ratio:g}x)"] = targets
    study.notes += table_notes(study, methods, trained, one_seed=any(1 in seeds for seeds in counts.values()))

    # 2. A line for each method.
    lines = []
    for method in methods:
        name = series_name(method) + ("\u2020" if method in trained else "")
        extremes = {min(counts[method], default=0), max(counts[method], default=0)}  # lengths differ
        seeds = "-".join(map(str, sorted(extremes)))
        lines.append(([name, seeds], {head: cells.get(method, "") for head, cells in columns.items()}))
    return pivot_table(["method", "seeds"], lines, {head: head for head in columns})


def table_notes(study: Study, methods: list[str], trained: dict, one_seed: bool) -> list[str]:
    """Return notes for the reader of a table. trained: see trained_methods. one_seed: a number is from one seed."""
    # 1. The notes on some methods.
    same_weights, paper = collections.defaultdict(list), paper_targets(study.item)
    for method in methods:
        if method in trained:
            same_weights[trained[method]].append(series_name(method))
    same = "; ".join(f"{' and '.join(names)}: weights of {series_name(m)}" for m, names in same_weights.items())
    first = (
        f"\u2020 {same}. These methods are equal up to the training length. So each seed is trained once, and "
        "validated with each of them."
    )

    # 2. The notes on the whole table.
    scaled = (
        "Unless a row says otherwise, \u03c4 is 10 tokens, and rotary bases and ALiBi's 1/slope scale with the "
        "training length."
    )
    matched = "Paper columns match ours by multiple of the training length. " if paper else ""
    other_scale = (
        f"Scale `{study.scale}` is not the paper's: another model or training length, fewer tokens, another text. "
        f"{matched}Compare the order of the methods and the change beyond 1x, not the numbers."
    )
    notes = {scaled: preset(SCALES[study.scale].base).position_scale != 1, other_scale: study.scale != "paper"}
    notes["\u00b1 n/a: one seed has no standard error."] = one_seed
    general = [note for note, holds in notes.items() if holds]
    return [first] * bool(same) + paper_remarks(paper, methods) + general


# ---- the paper's own numbers, beside ours ----------------------------------------------------------------------------


def paper_targets(table: str) -> dict:
    """Return the paper's numbers of one table: {(method, validation length): target}.

    A target has mean, stderr, seeds, note, and a remark if the number is odd. Values absent in the paper are None.
    """
    kinds, targets = {"mean": float, "stderr": float, "seeds": int}, {}
    with open(Path(__file__).with_name("paper_targets.csv"), newline="") as file:
        for row in csv.DictReader(file):
            numbers = {key: kind(row[key]) if row[key] else None for key, kind in kinds.items()}
            if row["table"] == table:
                others = {key: row[key] for key in ("note", "remark")}
                targets[row["method"], int(row["val_length"])] = numbers | others
    return targets


def paper_remarks(paper: dict, methods: Iterable[str]) -> list[str]:
    """Return a note for each remark on the paper's numbers of these methods."""
    names = collections.defaultdict(dict)
    for (method, _), target in paper.items():
        if target["remark"] and method in methods:
            names[target["remark"]][series_name(method)] = None
    return [f"The paper's numbers of {' and '.join(methods)} are {remark}." for remark, methods in names.items()]


def format_target(target: dict) -> str:
    cell = f"{target['mean']:.3f}" + (f" \u00b1 {target['stderr']:.3f}" if target["stderr"] is not None else "")
    return f"**{cell}**" if "bold" in target["note"] else cell

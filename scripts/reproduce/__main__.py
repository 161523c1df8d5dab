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
import collections
import dataclasses
import datetime
import math
import platform
import re
import shlex
import statistics
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch

from configs.command_line import user_errors
from configs.config import Config, config_hash, require
from configs.presets import preset
from configs.sweeps import SCALES, SWEEPS, Run, sweep
from model.methods import METHODS, method_options, scaled_options
from runtime.device import device_name
from runtime.files import replace_file
from runtime.processes import start_processes
from runtime.run_folder import git_commit
from scripts.evaluate import EVALUATION, load_run, own_text
from scripts.reproduce import drawing as figures
from scripts.reproduce import logits, theory
from scripts.reproduce.drawing import draw_curves, line, method_name, series_name, write_csv
from scripts.shared.runs import Folder, check_page, find, needle_state, on_own_text, read_folders, state, val_tokens
from scripts.shared.tables import bold, markdown_table, mean_and_stderr, paper_targets, pm
from scripts.sweep.__main__ import field_changes, needle_changes

PAPER_TRAIN_LENGTH = 4096  # of all its tables
DRAWS = 400
NO_FIGURE = "**No figure: there is no finished run to draw.**"


# ---- the runs --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Study:
    """What an item is made from, and what is missing of it."""

    item: str
    scale: str
    runs: list[Run]
    runs_dir: Path
    out: Path
    options: list[str]  # of this command, which scripts.sweep takes too
    device: torch.device
    draws: int  # of independent Gaussian scores
    methods: list[str] | None = None  # only these; None: all
    seeds_given: bool = False  # on the command line; otherwise an item is made from all seeds that there are
    finished: list[tuple[Run, Folder]] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)  # a line each, with the command that mends it
    notes: list[str] = dataclasses.field(default_factory=list)
    draft: Path | None = None  # the folder in which the files are made
    unwritten: str = ""  # why they were not put into `out`

    @property
    def path(self) -> Path:  # of the files that are made, without suffix
        return self.draft / self.item

    @property
    def page(self) -> Path:
        return self.out / f"{self.item}.md"

    @property
    def lengths(self) -> list[int]:
        """The validation lengths that stand for the paper's 4k, 16k and 64k."""
        return [preset(name).train_length for name in SCALES[self.scale].lengths]

    @property
    def base_length(self) -> int:
        return self.lengths[0]

    def series(self, run: Run) -> dict[str, str]:
        """What a run is shown as: the method that it trained, with its options, and those that its weights are
        validated as; each series with its method."""
        trained = {figures.series(run.config.method, run.config.method_options): run.config.method}
        others = {method: method for method in run.config.validate_as if self.item != "table_infini"}
        return {s: m for s, m in (trained | others).items() if self.methods is None or m in self.methods}

    @property
    def all_series(self) -> list[str]:
        """In the order of figures.NAMES, each before its forms with options."""
        present = dict.fromkeys(s for run in self.runs for s in self.series(run))
        order = [*figures.NAMES, *(s.split(" ")[0] for s in present)]
        return sorted(present, key=lambda s: (order.index(s.split(" ")[0]), " " in s))

    def at(self, length: int) -> str:
        """The length as titles show it: 4k as in the paper, 256 where the scale's lengths are no multiples of 4k."""
        return short(length) if self.base_length % 4096 == 0 else str(length)

    def miss(self, run: Run, what: str, command: list[str] | None = None):
        self.missing.append(f"`{run.name}`: {what}" + (f": `{shlex.join(command)}`" if command else ""))

    def drop(self, run: Run, why: str, command: list[str] | None = None):
        """Leave a finished run out of the item, and say so."""
        self.finished = [(r, f) for r, f in self.finished if r is not run]
        self.miss(run, why, command)

    @contextmanager
    def checkpoint_errors(self, run: Run):
        """Drop the run if its model or its validation text is not there or damaged."""
        try:
            yield
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            self.drop(run, str(error).splitlines()[0])

    def collect(self, folders: list[Folder]):
        """Fill `finished` with the runs that are there, all on the same tokens; name the others in `missing`."""
        for run in self.runs:
            status, detail = state(run, folders, self.runs_dir)
            folder = find(run, folders)
            if folder is not None and folder.problems:
                self.miss(run, "; ".join(folder.problems))
            elif status != "finished":
                command = self.train_command(run, folder) if status != "running" else None
                self.miss(run, f"{status} {f'({detail})' * bool(detail)}".rstrip(), command)
            else:
                try:
                    final_losses(folder)
                    self.finished.append((run, folder))
                except ValueError as error:
                    self.miss(run, str(error))
        if not self.seeds_given:
            self.add_seeds(folders)
        for what, of in SAME_DATA.items():
            values = {run.name: value for run, f in self.finished if (value := of(f)) is not None}
            most = collections.Counter(values.values()).most_common(1)
            for run, folder in list(self.finished):
                if (theirs := values.get(run.name)) not in (None, *dict(most)):
                    self.drop(run, f"left out, {folder.path} has {what} {theirs}; most runs: {most[0][0]}")

    def add_seeds(self, folders: list[Folder]):
        """Add the finished runs that differ from ours in the seed alone."""
        with_seed = lambda run, seed: dataclasses.replace(run, changes=run.changes | {"seed": seed})
        known = {config_hash(run.config) for run in self.runs}
        seeds = {folder.config.seed for folder in folders if folder.config and folder.summary}
        for run in [with_seed(run, seed) for run in self.runs for seed in sorted(seeds)]:
            folder = find(run, folders)
            if config_hash(run.config) in known or not folder or not folder.summary or folder.problems:
                continue
            known.add(config_hash(run.config))
            self.runs.append(run)
            try:
                final_losses(folder)
                self.finished.append((run, folder))
            except ValueError as error:
                self.miss(run, str(error))

    def train_command(self, run: Run, folder: Folder | None) -> list[str]:
        """Trains this one run, or goes on with it under the name that it has."""
        named = dataclasses.replace(run, changes=run.changes | ({"name": folder.path.name} if folder else {}))
        runs_dir = [] if self.runs_dir == Path("runs") else ["--runs_dir", str(self.runs_dir)]
        return ["python", "train_gpt.py", *named.arguments, *runs_dir, *["--resume", "auto"] * (folder is not None)]


def full_pass(record: dict) -> int:
    """Of a summary or an evaluation, whose lengths all have the same tokens: how many."""
    (tokens,) = {*val_tokens(record).values()}
    return tokens


# What all runs of an item must share (they read equally many tokens, so fingerprints compare); None: not known, as of
# the validation text of runs from before data.json.
SAME_DATA = {
    "validation tokens": lambda folder: full_pass(folder.summary),
    "training text": lambda folder: folder.summary["data"],
    "validation text": lambda folder: folder.data.get("validation"),
}


def data_in_words(folder: Folder) -> str:
    tokens, distinct = folder.summary.get("tokens"), folder.summary.get("distinct_tokens")
    counted = bool(tokens and distinct)
    read = f"{distinct:,} distinct training tokens, read {tokens / distinct:.2f} times" if counted else "not counted"
    return f"`{folder.summary['data']}`, {read}"


def final_losses(folder: Folder, method: str | None = None) -> dict[int, float]:
    """Nats a token by validation length, at the end of a finished run, its weights run as `method` (default: the one
    that it trained). ValueError if it has none."""
    path, summary = folder.path / "summary.json", folder.summary
    as_other = method is not None and method != folder.config.method
    losses = lambda of: of.get("val_loss_as", {}).get(method, {}) if as_other else of["val_loss"]
    by_length = lambda of: {int(length): value for length, value in losses(of).items()}
    try:
        loss, tokens, _ = by_length(summary), full_pass(summary), summary["data"]
    except (KeyError, ValueError):
        raise ValueError(f"{path} is damaged: delete it and run the sweep again") from None
    try:  # lengths that were not validated during training
        evaluation = on_own_text(folder.json(EVALUATION) or {})
        if evaluation and (evaluation["step"], full_pass(evaluation)) == (f"step_{summary['steps']:06d}", tokens):
            loss = by_length(evaluation) | loss
    except ValueError as error:
        raise ValueError(f"{folder.path / EVALUATION} is damaged ({error}): delete it and evaluate again") from None
    if None in loss.values():
        raise ValueError(f"{path} has a loss that is not a number: the run diverged")
    return loss


# ---- tables ----------------------------------------------------------------------------------------------------------


def table_losses(study: Study):
    lengths = sorted({length for run in study.runs for length in run.config.val_lengths})
    losses = collections.defaultdict(list)
    for run, folder in list(study.finished):
        try:
            final = {series: final_losses(folder, method) for series, method in study.series(run).items()}
        except ValueError as error:
            study.drop(run, str(error))
            continue
        for series, of in final.items():
            for length in of.keys() & set(lengths):
                losses[series, length].append(of[length])
        if missing := {length for of in final.values() for length in set(lengths) - of.keys()}:
            lacking = [str(length) for length in sorted(missing)]
            command = ["python", "-m", "scripts.evaluate", str(folder.path), "--lengths", *lacking]
            command += ["--as", *run.config.validate_as] * bool(run.config.validate_as)
            study.miss(run, f"no loss at {', '.join(lacking)}", command)
    text = "Validation loss in nats a token at the end of training, by validation length in tokens (and in training "
    text += "lengths): mean \u00b1 standard error over seeds."
    return text + "\n\n" + table(study, {"": losses}, lengths, best=min)


def table_needle(study: Study):
    accuracy = {"greedy": collections.defaultdict(list), "teacher forcing": collections.defaultdict(list)}
    ceiling = collections.defaultdict(list)
    for run, folder in list(study.finished):
        command = ["python", "-m", "scripts.needle", str(folder.path), *run.needle.arguments]
        status, words = needle_state(folder, run.needle)
        if status in ("other", "running"):
            study.drop(run, f"left out, {words}" if status == "other" else f"is being fine-tuned ({words})")
            continue
        try:
            needle = folder.json("needle/summary.json")
            if needle is None:
                study.drop(run, f"{status} ({words})", command)
                continue
            shown = {
                series: needle if method == run.config.method else needle["as"][method]
                for series, method in study.series(run).items()
            }
            shares = {
                (series, label): {int(n): float(share) for n, share in of[label.replace(" ", "_")].items()}
                for series, of in shown.items()
                for label in accuracy
            }
            oracle = {int(n): float(share) for n, share in needle["oracle"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            study.drop(run, f"{folder.path}/needle/summary.json is damaged ({error!r}): delete it and repeat", command)
            continue
        for length, share in oracle.items():
            ceiling[length].append(share)
        for (series, label), of in shares.items():
            for length, share in of.items():
                accuracy[label][series, length].append(share)
        if lacking := [str(n) for n in study.lengths if any(n not in of for of in shares.values())]:
            study.miss(run, f"no needle accuracy at {', '.join(lacking)}", [*command, "--lengths", *lacking])
    text = "Share of needles whose city and number are both right, by length in tokens (and in training lengths), by "
    text += "greedy decoding and by teacher forcing: mean \u00b1 standard error over seeds. The paper's numbers stand "
    text += "beside greedy decoding."
    if ceiling:
        text += f" Fine-tuned and scored with {study.runs[0].needle}, three needles in each (the paper: C4, 300 steps "
        text += "of 64). Oracle: what a perfect copier of the prompts gets."
    oracle = {length: statistics.fmean(values) for length, values in ceiling.items()}
    return text + "\n\n" + table(study, accuracy, study.lengths, best=max, ceiling=oracle)


def open_choices(study: Study):
    text = "What the paper leaves open, the other choice beside ours: YaRN that never scales (which is RoPE), p-RoPE "
    text += "in Barbero's form, LogN by the length of the context instead of the row, ALiBi's slopes in "
    text += "FlexAttention's form, shorter and longer segments; and scale-invariant attention with a_t or m_t alone."
    return text + "\n\n" + table_losses(study)


def table_llama(study: Study):
    study.missing.append("the continual pretraining of Llama 2 7B is not built yet: only the paper's numbers are shown")
    text = "Validation loss in nats a token of Llama 2 7B, fine-tuned at 4k on about 50 M tokens with each method "
    text += "(*: not fine-tuned). **Not built yet: these are the paper's numbers, none of ours.**"
    return text + "\n\n" + table(study, {}, [4096, 16_384, 65_536], best=min)


def table(study: Study, metrics: dict[str, dict], lengths: list[int], best, ceiling: dict | None = None) -> str:
    """The table as Markdown, and as study.path.csv: ours, the mean over seeds, beside the paper's.

    metrics: by label, {(method, length): a value a seed}; the paper's numbers compare with the first. ceiling: values
    by length of a last row.
    """
    paper = paper_targets(study.item)
    methods = study.all_series or list(dict.fromkeys(method for method, _ in paper))
    borrowed = {other: run.config.method for run in study.runs for other in run.config.validate_as}
    base = study.base_length if metrics else PAPER_TRAIN_LENGTH
    compare = study.scale == "paper" and bool(metrics)  # only there are the numbers meant to be the same
    columns, records = {}, []
    for length in lengths:
        ratio = length / base
        paper_length = round(ratio * PAPER_TRAIN_LENGTH)
        targets = {m: paper[m, paper_length] for m in methods if (m, paper_length) in paper}
        for number, (label, values) in enumerate(metrics.items()):
            ours = {method: mean_and_stderr(values[method, length]) for method in methods}
            head = f"{length} ({ratio:g}x) {label}".rstrip()
            columns[head] = bold({m: pm(*o) for m, o in ours.items()}, {m: o[0] for m, o in ours.items()}, best)
            distance = {m: in_stderrs(ours[m], targets[m]) for m in targets} if number == 0 else {}
            for method in methods:
                target = targets.get(method, {}) if number == 0 else {}
                records.append(
                    dict(
                        method=method,
                        weights_of=borrowed.get(method),
                        metric=label or "val_loss",
                        length=length,
                        ratio=ratio,
                        mean=ours[method][0],
                        stderr=ours[method][1],
                        seeds=len(values[method, length]),
                        paper_length=paper_length if target else None,
                        paper_mean=target.get("mean"),
                        paper_stderr=target.get("stderr"),
                        paper_seeds=target.get("seeds"),
                        difference_in_stderrs=distance.get(method) if compare else None,
                    )
                )
            if targets and number == 0:
                columns |= paper_columns(paper_length, ratio, targets)
            if targets and number == 0 and compare:
                cell = lambda m: f"{ours[m][0] - targets[m]['mean']:+.3f} ({signed(distance[m])})"
                columns[f"difference at {short(paper_length)} (s.e.)"] = {
                    m: cell(m) if m in targets and ours[m][0] is not None else "" for m in methods
                }
        if not metrics:
            columns |= paper_columns(paper_length, ratio, targets)
            records += [dict(method=m, length=paper_length, paper_mean=t["mean"]) for m, t in targets.items()]
    write_csv(study.path.with_suffix(".csv"), records)

    seeds = {m: sorted({r["seeds"] for r in records if r["method"] == m}) for m in methods} if metrics else {}
    head = ["method", *(["seeds"] if metrics else []), *columns]
    rows = [head]
    for method in methods:
        if method.startswith("infini") and len(rows) > 1 and not any("Infini" in row[0] for row in rows):
            rows.append([""] * len(head))  # the rule in the paper's table
        starred = "*" * any("not fine-tuned" in t["note"] for (m, _), t in paper.items() if m == method)
        ours = ["-".join(map(str, dict.fromkeys((seeds[method][0], seeds[method][-1]))))] if metrics else []
        starred += "\u2020" * bool(metrics and method in borrowed)
        rows.append([series_name(method) + starred, *ours, *(cells.get(method, "") for cells in columns.values())])
    if ceiling:
        by_head = {f"{n} ({n / base:g}x) {label}": f"{value:.3f}" for n, value in ceiling.items() for label in metrics}
        rows.append(["oracle", "", *(by_head.get(column, "") for column in columns)])
    study.notes += table_notes(study, methods, borrowed, records)
    return markdown_table(rows)


def table_notes(study: Study, methods: list[str], borrowed: dict[str, str], records: list[dict]) -> list[str]:
    """What a reader of the table must know. borrowed: by method, the one whose weights it was validated with."""
    notes = []
    weights = collections.defaultdict(list)
    for method in methods:
        if method in borrowed:
            weights[borrowed[method]].append(series_name(method))
    if weights:
        same = "; ".join(
            f"{' and '.join(of)}: the weights of {series_name(of_method)}" for of_method, of in weights.items()
        )
        notes.append(
            f"\u2020 {same}. They train identically and differ beyond the training length only, so each seed was "
            "trained once and validated as all of them."
        )
    for remark, of in remarks(paper_targets(study.item), methods).items():
        notes.append(f"The paper's numbers of {' and '.join(of)}: {remark}.")
    ours = any("metric" in record for record in records)  # and not the paper's numbers alone
    if ours and preset(SCALES[study.scale].base).length_scale != 1:
        notes.append(
            "What is a length in tokens (\u03c4, rotary bases, one over ALiBi's slopes) is scaled with the training "
            "length; where a row says otherwise it is as in the paper."
        )
    if ours and study.scale != "paper":
        notes.append(
            f"Scale `{study.scale}` is not the paper's: another model or training length, fewer tokens, another text. "
            "The paper's columns stand beside the lengths of the same ratio to the training length; compare the order "
            "of the methods and what happens beyond 1x, not the numbers."
        )
    if any(r.get("seeds") == 1 for r in records):
        notes.append("\u00b1 n/a: one seed, which has no standard error.")
    if ours and study.scale == "paper":
        notes.append(
            "Difference: ours minus the paper's mean, in brackets in units of the combined standard error "
            "sqrt(ours^2 + paper's^2) (n/a where a side has none; the paper's are rounded to 0.001)."
        )
    return notes


def paper_columns(length: int, ratio: float, targets: dict[str, dict]) -> dict[str, dict]:
    show = lambda t: f"{t['mean']:.3f}" + (f" \u00b1 {t['stderr']:.3f}" if t["stderr"] is not None else "")
    cells = {m: f"**{show(t)}**" if "bold" in t["note"] else show(t) for m, t in targets.items()}
    return {f"paper {short(length)} ({ratio:g}x)": cells}


def remarks(paper: dict, methods: list[str]) -> dict[str, list[str]]:
    """What is odd about the paper's numbers, with the methods that it is odd of."""
    found = collections.defaultdict(dict)
    for (method, _), target in paper.items():
        if target["remark"] and method in methods:
            found[target["remark"]][series_name(method)] = None
    return {remark: list(of) for remark, of in found.items()}


def in_stderrs(ours: tuple, target: dict) -> float | None:
    """The difference to the paper's mean in units of the combined standard error; None where there is none."""
    mean, stderr = ours
    if stderr is None or target["stderr"] is None or not (combined := math.hypot(stderr, target["stderr"])):
        return None
    return (mean - target["mean"]) / combined


def signed(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.1f}"


def short(length: int) -> str:
    return f"{length // 1024}k" if length % 4096 == 0 else str(length)


# ---- curves ----------------------------------------------------------------------------------------------------------


def figure_train_lengths(study: Study):
    rows = curves(study, study.lengths)
    panels = []
    for length in study.lengths:
        shown = [r for r in rows if r["train_length"] == r["val_length"] == length]
        panels.append((f"train and val @{study.at(length)}", without_nope(shown) if panels else shown))
    study.notes.append("NoPE is shown in the left panel only, as in the paper.")
    text = "Validation loss at the training length, for three training lengths."
    return text + "\n\n" + curve_figure(study, rows, panels)


def figure_train_4k(study: Study):
    rows = curves(study, study.lengths)
    first, *others = by_length(study, rows)
    panels = [first, *((title, without_nope(shown)) for title, shown in others)]
    study.notes.append("Below: the last fifth of the training, and the half of the methods that is best at its end.")
    study.notes.append("NoPE is shown in the left panel only, as in the paper.")
    text = f"Validation loss of the models trained at {study.at(study.base_length)}, at three validation lengths."
    return text + "\n\n" + curve_figure(study, rows, panels, zoom=True)


def figure_train_16k(study: Study):
    rows = curves(study, study.lengths)
    panels = by_length(study, rows)
    panels[-1] = panels[-1][0], without_nope(panels[-1][1])
    study.notes.append("NoPE is left out of the right panel, as in the paper.")
    text = f"Validation loss of the models trained at {study.at(study.lengths[1])}, at three validation lengths."
    return text + "\n\n" + curve_figure(study, rows, panels)


def figure_304m(study: Study):
    rows = curves(study, study.lengths)
    text = "Validation loss of the large model, at three validation lengths."
    return text + "\n\n" + curve_figure(study, rows, by_length(study, rows), baseline=False)


def figure_tau(study: Study):
    rows = curves(study, study.lengths, lambda run: {tau_of(run.config): run.config.method})
    looks = figures.tau_lines({row["series"] for row in rows})
    text = "Validation loss of scale-invariant p-RoPE with different lengthscales \u03c4 (tokens)."
    return text + "\n\n" + curve_figure(study, rows, by_length(study, rows), looks, baseline=False)


def figure_scale_invariant_variants(study: Study):
    rows = curves(study, study.lengths)
    text = "Validation loss of scale-invariant attention with three positional encodings."
    return text + "\n\n" + curve_figure(study, rows, by_length(study, rows), baseline=False)


def tau_of(config: Config) -> float:
    default = method_options(config.method)["tau"].default
    return float((dict(tau=default) | scaled_options(config.method, config.length_scale, config.method_options))["tau"])


def curves(study: Study, lengths: list[int], series_of=None) -> list[dict]:
    """The validation curves of the study's series (or those of series_of(run)), one row a series, training length,
    validation length and step: mean, standard error, number of seeds, validation tokens. A step counts when all seeds
    were validated at it, on the same tokens."""
    seeds = collections.defaultdict(list)
    for run, folder in list(study.finished):
        shown = (series_of or study.series)(run)
        try:
            records = [r for r in folder.metrics() if "val_loss" in r]
            own = {series: validation_curve(records, method, run.config.method) for series, method in shown.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            study.drop(run, f"{folder.path}/metrics.jsonl is damaged ({error}): repair it, or delete the run")
            continue
        config = run.config
        wanted = [n for n in lengths if n in config.val_lengths]
        lacking = [str(n) for n in wanted if any(n not in curve for curve in own.values())]
        if lacking:
            what = f"was not validated at {', '.join(lacking)} during training; move {folder.path} away and train again"
            study.miss(run, what, study.train_command(run, None))
        for series, curve in own.items():
            seeds[series, config.train_length].append(curve)
    rows = []
    for (name, train_length), group in seeds.items():
        for length in lengths:
            known = [curve[length] for curve in group if length in curve]
            for step, tokens in sorted(set.intersection(*map(set, known)) if known else ()):
                # null in the metrics is a loss that was not finite
                losses = [math.nan if curve[step, tokens] is None else curve[step, tokens] for curve in known]
                mean, stderr = mean_and_stderr(losses)
                row = dict(series=name, train_length=train_length, val_length=length, step=step)
                rows.append(row | dict(mean=mean, stderr=stderr, seeds=len(known), val_tokens=tokens))
    return rows


def validation_curve(records: list[dict], method: str, trained: str) -> dict[int, dict]:
    """By validation length: the losses of a run's weights run as `method`, by step and tokens."""
    curve = {}
    for record in records:
        losses = record["val_loss"] if method == trained else record.get("val_loss_as", {}).get(method, {})
        for n, tokens in val_tokens(record).items():
            if n in losses:
                curve.setdefault(int(n), {})[record["step"], tokens] = losses[n]
    return curve


def without_nope(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["series"] != "nope"]


def by_length(study: Study, rows: list[dict]) -> list[tuple[str, list[dict]]]:
    return [(f"val @{study.at(n)}", [r for r in rows if r["val_length"] == n]) for n in study.lengths]


def curve_figure(study: Study, rows, panels, looks: dict | None = None, *, baseline=True, zoom=False) -> str:
    """Draw the panels, and write the rows beside them. Returns the Markdown that shows the figure."""
    if not rows:
        return NO_FIGURE
    present = {row["series"] for row in rows}
    looks = looks or {series: line(series, present) for series in study.all_series if series in present}
    at_scale = study.scale == "paper"
    if baseline and not at_scale:
        study.notes.append("The paper's dashed line at 3.28 is left out: it means nothing at this scale.")
    draw_curves(study.path, panels, looks, baseline=3.28 if baseline and at_scale else None, zoom=zoom)
    write_csv(study.path.with_suffix(".csv"), rows)
    if any(row["seeds"] > 1 for row in rows):
        study.notes.append("Bands: \u00b1 1 standard error over seeds.")
    else:
        study.notes.append("One seed: no bands.")
    if len({row["val_tokens"] for row in rows}) > 1:
        study.notes.append("Open circles: validations on a part of the tokens (`--val_profile fast`).")
    return picture(study.item)


# ---- theory and trained models ---------------------------------------------------------------------------------------

WINDOWS = 4  # of validation text, for the trained models' attention


def figure_entropy(study: Study):
    lengths = [2**k for k in range(7, 17)]  # 128 .. 65,536
    rows = [dict(source="iid", **row) for row in theory.iid_entropy(lengths, study.draws, seed=0)]
    schemes = dict(p_rope="none", logn_p_rope="logn", scale_invariant_p_rope="scale_invariant")
    for run, folder in list(study.finished):
        longest = study.lengths[-1]
        with study.checkpoint_errors(run):
            config, model = load_run(folder.path, study.device)
            text = own_text(folder)
            tokens = logits.validation_windows(text, WINDOWS, longest, study.device)
            profile = logits.attention_profile(model, tokens, [n for n in lengths if n <= longest])
            scheme = dict(source="trained", scheme=schemes[config.method])
            rows += [scheme | dict(length=r["length"], quantity=r["quantity"]) | r for r in profile]
    sources = {"iid scores": "iid", "trained models": "trained"}
    panels = {title: [r for r in rows if r["source"] == source] for title, source in sources.items()}
    panels = {title: mine for title, mine in panels.items() if mine}
    figures.draw_entropy(study.path, panels, theory.RANGES, theory.LOCAL)
    keys = ("source", "scheme", "length", "quantity", "mean", "stderr")
    write_csv(study.path.with_suffix(".csv"), [{key: row[key] for key in keys} for row in rows])
    text = "Top: independent Gaussian scores, none scaled, LogN (s = 0.4) and scale-invariant (\u03c4 = 10), mean over "
    text += f"{study.draws} draws. Bottom: p-RoPE models trained with each, the last query of each context, mean over "
    text += f"layers, heads and {WINDOWS} windows of validation text. Bands: \u00b1 1 standard error."
    if len(panels) == 1:
        study.notes.append("The bottom row is left out: there is no trained model.")
    return text + "\n\n" + picture(study.item)


def figure_sublog(study: Study, scale_invariant: bool = True):
    starts = [10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000]
    rows = theory.iid_range_entropy(starts, [2, 5, 10], study.draws, 0, scale_invariant)
    fits = theory.range_fits(rows)
    figures.draw_sublog(study.path, rows, fits)
    squares = {(f["factor"], f["against"]): f["r_squared"] for f in fits}
    names = {"log t": "r_squared_log_t", "sqrt(log t)": "r_squared_sqrt_log_t"}
    data = [row | {name: squares[row["factor"], against] for against, name in names.items()} for row in rows]
    write_csv(study.path.with_suffix(".csv"), data)
    keys = ["slope", "intercept", "r_squared"]
    cells = [[f"\u0394 = {f['factor']}, against {f['against']}", *(f"{f[key]:.4f}" for key in keys)] for f in fits]
    head = ["linear fit", "slope", "intercept", "R^2"]
    text = "Expected entropy (nats) of independent Gaussian scores in the range of distances [t, t\u0394), "
    text += "scale-invariant with \u03c4 = 10" if scale_invariant else "not scaled"
    text += f": mean over {study.draws} draws (bars: \u00b1 1 standard error), against log t and sqrt(log t), with the "
    text += "best linear fits (dashed)."
    return text + f"\n\n{picture(study.item)}\n\n{markdown_table([head, *cells])}"


def figure_sublog_unscaled(study: Study):
    return figure_sublog(study, scale_invariant=False)


def figure_qq(study: Study):
    study.missing.append("the paper's figures are of Llama and Gemma models, which cannot be loaded here yet")
    text = "Quantiles of the attention scores of other people's models (Llama 3 1B and 8B, Gemma 2 27B). **Not built "
    return text + "yet: see [figure_qq_ours](figure_qq_ours.md) for those of the models trained here.**"


def figure_qq_ours(study: Study):
    titles = {False: "without rotation", True: "with rotation"}
    points, statistics_of_heads, shown = [], [], []
    for run, folder in list(study.finished):
        with study.checkpoint_errors(run):
            config, model = load_run(folder.path, study.device)
            text = own_text(folder)
            tokens = logits.validation_windows(text, WINDOWS, config.train_length, study.device)
            blocks = collections.defaultdict(list)
            for layer, rotated, scores in logits.layer_scores(model, tokens):
                of = dict(method=config.method, layer=layer, rotated=rotated)
                quantiles = logits.qq_points(scores.flatten())
                points += [of | point for point in quantiles]
                for head, mine in [*enumerate(scores), ("all", scores.flatten())]:
                    statistics_of_heads.append(of | dict(head=head) | logits.moments(mine))
                blocks[titles[rotated]].append([[p[of] for p in quantiles] for of in ("gaussian", "sample")])
            name = f"{study.item}_{config.method}"
            figures.draw_qq(study.draft / name, blocks)
            shown.append(f"{method_name(config.method)}:\n\n{picture(name)}")
    text = f"Quantiles of the scores q.k / sqrt(d) of trained models, on {WINDOWS} windows of validation text of the "
    text += "training length, all heads of a layer, against those of the Gaussian with their mean and standard "
    text += "deviation (red: equal). Only pairs with t > 0, and without key 0, which attention sinks into."
    if not shown:
        return f"{text}\n\n{NO_FIGURE}"
    write_csv(study.path.with_suffix(".csv"), points)
    write_csv(study.draft / f"{study.item}_heads.csv", statistics_of_heads)
    keys = ["mean", "std", "skewness", "excess_kurtosis", "ks"]
    cells = [
        [method_name(s["method"]), str(s["layer"] + 1), titles[s["rotated"]], *(f"{s[key]:.3f}" for key in keys)]
        for s in statistics_of_heads
        if s["head"] == "all"
    ]
    head = ["method", "layer", "form", "mean", "std", "skewness", "excess kurtosis", "KS distance"]
    text += f" The table pools the heads of a layer; each head is in {study.item}_heads.csv (layers there from 0)."
    return "\n\n".join([text, *shown, markdown_table([head, *cells])])


def picture(name: str) -> str:
    return f"![{name}]({name}.png)"


# ---- the page and the command ----------------------------------------------------------------------------------------

ITEMS = dict(
    table_losses=table_losses,
    table_needle=table_needle,
    table_infini=table_losses,
    table_llama=table_llama,
    figure_entropy=figure_entropy,
    figure_sublog=figure_sublog,
    figure_sublog_unscaled=figure_sublog_unscaled,
    figure_train_lengths=figure_train_lengths,
    figure_train_4k=figure_train_4k,
    figure_train_16k=figure_train_16k,
    figure_304m=figure_304m,
    figure_tau=figure_tau,
    figure_scale_invariant_variants=figure_scale_invariant_variants,
    figure_qq=figure_qq,
    figure_qq_ours=figure_qq_ours,
    open_choices=open_choices,
)
PARTLY_THEORY = ["figure_entropy"]  # which has something to show without runs


def reproduce(study: Study, folders: list[Folder], force: bool = False) -> str:
    """Make the item: its files in study.out, and the text of its page, which says what it was made from.

    When they are made from no runs, or (unless forced) from fewer than the page that is there, all that is in study.out
    stays as it is and study.unwritten says why.
    """
    study.collect(folders)
    with tempfile.TemporaryDirectory() as folder:
        study.draft = Path(folder)
        body = ITEMS[study.item](study)
        notes = "".join(f"\n\n{note}" for note in dict.fromkeys(study.notes))
        page = f"# {study.item}\n\n{body}{notes}\n\n## How this was made\n\n{provenance(study)}\n"
        try:
            if study.runs and not force:
                check_page(study.page, r"^- runs used: (\d+) of", len(study.finished))
            needs = bool(study.runs) and study.item not in PARTLY_THEORY
            require(study.finished or not needs, f"none of the {len(study.runs)} runs of {study.item} is there")
        except ValueError as error:
            study.unwritten = str(error)
            return page
        study.out.mkdir(parents=True, exist_ok=True)
        for made in study.draft.iterdir():
            replace_file(study.out / made.name, lambda file: file.write(made.read_bytes()))
        replace_file(study.page, lambda file: file.write(page.encode()))
    return page


def provenance(study: Study) -> str:
    made_at = f"{datetime.date.today()} on {device_name(study.device)}, {platform.system()}, torch {torch.__version__}"
    own = ["--out", str(study.out)] * (study.out != Path("results") / study.scale)
    own += ["--draws", str(study.draws)] * (study.draws != DRAWS)
    lines = [
        f"- command: `{shlex.join(['python', '-m', 'scripts.reproduce', study.item, *study.options, *own])}`",
        f"- made: {made_at}, code at commit {git_commit(Path(__file__).parent) or 'unknown'}",
    ]
    if study.runs:
        lines.append(f"- runs used: {len(study.finished)} of {len(study.runs)}")
        needles = {run.needle for run, _ in study.finished if run.needle}
        lines += [f"- all fine-tuned and scored with: {needle}" for needle in needles]
    for what in ("commit", "device"):
        values = collections.Counter(value for _, folder in study.finished for value in log_values(folder.path, what))
        if values:
            lines.append(f"- {what} of the runs: " + ", ".join(f"{v} ({n})" for v, n in values.items()))
    if study.finished:
        texts = collections.Counter(data_in_words(folder) for _, folder in study.finished)
        lines.append("- training text of the runs: " + "; ".join(f"{text} ({n})" for text, n in texts.items()))
        lines.append("- folders: " + ", ".join(f"`{folder.path.name}`" for _, folder in study.finished))
    if study.missing:
        lines += ["", f"### Missing ({len(study.missing)})", ""]
        if study.item in SWEEPS:
            does = "trains and fine-tunes" if any(run.needle for run in study.runs) else "trains"
            lines += [f"`{shlex.join(['python', '-m', 'scripts.sweep', study.item, *study.options])}` {does} all", ""]
        lines += [f"- {line}" for line in study.missing]
    return "\n".join(lines)


def log_values(folder: Path, key: str) -> list[str]:
    """What log.txt says after "commit: " or "device: ", once each; a resumed run says it again."""
    path = folder / "log.txt"
    text = path.read_text(errors="replace") if path.exists() else ""
    return list(dict.fromkeys(re.findall(rf"^{key}: (.+)$", text, re.MULTILINE))) or ["unknown"]


def main():
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce",
        description=f"{__doc__}\nItems: all, {', '.join(ITEMS)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("item", metavar="ITEM", choices=["all", *ITEMS])
    parser.add_argument("--scale", default="paper", choices=SCALES)
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of the scale's")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help="only these")
    parser.add_argument("--needle", nargs="+", default=[], metavar="KEY=VALUE", help="instead of the scale's settings")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, help="where it goes (default: results/SCALE)")
    parser.add_argument("--force", action="store_true", help="write over pages that were made from more runs too")
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"of iid Gaussian scores (default: {DRAWS})")
    args, fields = parser.parse_known_args()
    with user_errors():
        changes, needle = field_changes(SCALES[args.scale].base, fields), needle_changes(args.needle)
        device = start_processes(changes.get("device", "auto")).device
        folders = read_folders(args.runs_dir)
        options = ["--scale", args.scale]
        for name in ("seeds", "methods"):
            options += [f"--{name}", *map(str, getattr(args, name))] if getattr(args, name) else []
        options += ["--runs-dir", str(args.runs_dir)] * (args.runs_dir != Path("runs"))
        tuning = ["--needle", *args.needle] if needle else []

        def study(item: str) -> Study:
            runs = sweep(item, args.scale, args.seeds, args.methods, changes, needle) if item in SWEEPS else []
            out = args.out or Path("results") / args.scale
            words = [*options, *(tuning if any(run.needle for run in runs) else []), *fields]
            where = item, args.scale, runs, args.runs_dir, out, words, device, args.draws
            return Study(*where, methods=args.methods, seeds_given=bool(args.seeds))

        if args.item != "all":
            one = study(args.item)
            require(not needle or any(run.needle for run in one.runs), f"--needle: {args.item} fine-tunes no run")
            print(reproduce(one, folders, args.force))
            if one.unwritten:
                print(f"not written: {one.unwritten}", file=sys.stderr)
            sys.exit(1 if one.missing or one.unwritten else 0)

    outcomes = {}
    for item in ITEMS:
        try:
            one = study(item)
            reproduce(one, folders, args.force)
            of = f"{len(one.finished)} of {len(one.runs)} runs" if one.runs else "no runs needed"
            if one.missing and not one.runs:
                outcomes[item] = f"not built: {one.missing[0]}"
            elif one.missing:
                command = shlex.join(["python", "-m", "scripts.sweep", item, *one.options])
                see = f"not written: {one.unwritten}" if one.unwritten else f"or see {one.page}"
                outcomes[item] = f"incomplete, {of}; {len(one.missing)} missing: `{command}`, {see}"
            elif one.unwritten:
                outcomes[item] = f"not written, {of}: {one.unwritten}"
            else:
                outcomes[item] = f"complete, {of}: {one.page}"
        except Exception as error:  # whatever is wrong with one item, the others are made
            outcomes[item] = f"failed: {type(error).__name__}: {error}"
        print(f"{item}: {outcomes[item]}", flush=True)
    print()
    for kind in ("complete", "incomplete", "not written", "not built", "failed"):
        of_kind = [item for item, outcome in outcomes.items() if outcome.split(",")[0].split(":")[0] == kind]
        if of_kind:
            print(f"{len(of_kind)} of {len(ITEMS)} {kind}: {', '.join(of_kind)}")
    there = all(outcome.startswith(("complete", "not built")) for outcome in outcomes.values())
    print("all that can be made on this machine is there" if there else "what is missing, and why, is said above")
    sys.exit(0 if there else 1)


if __name__ == "__main__":
    main()

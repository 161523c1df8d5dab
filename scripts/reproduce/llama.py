"""The paper's table of Llama 2 7B: its numbers, beside those of the runs of `scripts.continue_pretraining`."""

import collections
import dataclasses
import json
import shlex
from pathlib import Path

from scripts.hf.settings import NOT_TRAINED, PAPER, PAPER_MODEL
from scripts.reproduce.study import Study
from scripts.reproduce.tables import PAPER_TRAIN_LENGTH, format_target, paper_head, paper_remarks, paper_targets
from scripts.shared.looks import series_name
from scripts.shared.run_files import COUNT, LOSSES, SUMMARY, TEXT, read_json
from scripts.shared.runs import log_values
from scripts.shared.tables import embolden_best, markdown_table, write_csv

FOLDER = "continued"  # in the folder of the runs
KIND = SUMMARY | dict(model=TEXT, method=TEXT, rescale=TEXT, train_length=COUNT, validation=TEXT)
KIND |= dict(method_options={}, val_loss_before=LOSSES)


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A finished run. summary: of its folder."""

    path: Path
    summary: dict

    @property
    def method(self) -> str:
        return self.summary["method"]

    @property
    def as_in_paper(self) -> bool:
        trained = self.method in NOT_TRAINED or self.summary["steps"] > 0
        return not self.summary["method_options"] and self.summary["rescale"] == "no" and trained

    @property
    def label(self) -> str:
        words = [f"{key} {value}" for key, value in self.summary["method_options"].items()]
        words += [f"scores rescaled by {self.summary['rescale']}"] if self.summary["rescale"] != "no" else []
        mark = "" if self.summary["steps"] else "*"
        return ", ".join([series_name(self.method), *words]) + mark

    @property
    def compared(self) -> tuple:
        """Return what all rows must share."""
        own = self.summary
        return own["model"], own["train_length"], own["validation"], json.dumps(own["val_tokens"])


def table_llama(study: Study) -> str:
    rows, paper = find_rows(study), paper_targets(study.item)
    train_length = rows[0].summary["train_length"] if rows else PAPER_TRAIN_LENGTH
    ratios = sorted({int(length) / train_length for row in rows for length in row.summary["val_loss"]} | {1, 4, 16})
    shown = dict(rows=rows, train_length=train_length, ratios=ratios, paper=paper)
    text = (
        "Validation loss in nats a token of Llama 2 7B, trained on at 4k on about 50 M tokens with each method (*: not "
    )
    text += "trained), by validation length in tokens (and in training lengths)."
    if rows:
        own = rows[0].summary
        tokens = ", ".join(f"{n:,}" for n in sorted({row.summary["tokens"] for row in rows if row.summary["steps"]}))
        text += f" Ours: {own['model']} at {train_length} on {tokens or 'no'} tokens; right after the conversion, "
        text += "and at the end."
        if Path(own["model"]).name != Path(PAPER_MODEL).name or train_length != PAPER_TRAIN_LENGTH:
            study.notes.append("Not the paper's model and training length: compare the order of the methods alone.")
    else:
        text += " **None of these runs is there: these are the paper's numbers.**"
    study.notes += paper_remarks(paper, [method for method, _ in paper])
    add_missing(study, rows)
    write_csv(study.path.with_suffix(".csv"), records(**shown))
    return f"{text}\n\n{as_table(**shown)}"


def find_rows(study: Study) -> list[Row]:
    """Return the finished runs in the paper's order, all of the model, lengths and text of most; name the others."""
    rows = []
    for path in sorted((study.runs_dir / FOLDER).glob("*/summary.json")):
        try:
            rows.append(Row(path.parent, read_json(path, KIND)))
        except ValueError as error:
            study.missing.append(f"{path} is damaged ({error}): delete it and run the command again")
    rows = [row for row in rows if study.methods is None or row.method in study.methods]
    if rows:
        most = collections.Counter(row.compared for row in rows).most_common(1)[0][0]
        for row in rows:
            if row.compared != most:
                study.missing.append(f"{row.path} is left out: it is of {row.compared}, most are of {most}")
        rows = [row for row in rows if row.compared == most]
    study.models, study.models_needed = [row.path.name for row in rows if row.as_in_paper], len(PAPER)
    for what in ("commit", "device"):
        values = dict.fromkeys(value for row in rows for value in log_values(row.path, what))
        study.notes += [f"{what.capitalize()} of the runs: {', '.join(values)}."] if values else []
    order = [*PAPER, *(row.method for row in rows)]
    return sorted(rows, key=lambda row: (order.index(row.method), row.label))


def add_missing(study: Study, rows: list[Row]):
    """Name the runs of the paper's table that are not there, with the command that makes each."""
    model = rows[0].summary["model"] if rows else PAPER_MODEL
    place = [] if study.runs_dir == Path("runs") else ["--runs_dir", str(study.runs_dir / FOLDER)]
    there = {row.method for row in rows if row.as_in_paper}
    for method in PAPER:
        if method not in there and (study.methods is None or method in study.methods):
            words = ["python", "-m", "scripts.continue_pretraining", model, "--method", method, "--resume", "auto"]
            study.missing.append(f"{series_name(method)}: `{shlex.join([*words, *place])}`")


def as_table(rows: list[Row], train_length: int, ratios: list[float], paper: dict) -> str:
    """Return ours and the paper's as Markdown: a row a run, and one a method of the paper's that has none."""
    missing = [method for method in PAPER if method not in {row.method for row in rows if row.as_in_paper}]
    order = [*rows, *missing]
    columns = {}
    for ratio in ratios:
        length, paper_length = str(round(ratio * train_length)), round(ratio * PAPER_TRAIN_LENGTH)
        head = f"{length} ({ratio:g}x)"
        if rows:
            before = {row: number for row in rows if (number := row.summary["val_loss_before"].get(length)) is not None}
            after = {row: number for row in rows if (number := row.summary["val_loss"].get(length)) is not None}
            columns[f"{head} before"] = {row: f"{x:.3f}" for row, x in before.items() if row.summary["steps"]}
            columns[head] = embolden_best({row: f"{x:.3f}" for row, x in after.items()}, after)
        targets = {key: target_of(key, paper, paper_length) for key in order}
        if any(targets.values()):
            columns[paper_head(paper_length, ratio)] = {k: format_target(t) for k, t in targets.items() if t}
    table = [["method", *columns]]
    for key in order:
        name = key.label if isinstance(key, Row) else series_name(key) + ("*" if key in NOT_TRAINED else "")
        table.append([name, *(cells.get(key, "") for cells in columns.values())])
    return markdown_table(table)


def target_of(key: Row | str, paper: dict, length: int) -> dict | None:
    """Return the paper's number of a row, or of a method without one; None for rows that the paper has not."""
    if isinstance(key, Row) and not key.as_in_paper:
        return None
    return paper.get((key.method if isinstance(key, Row) else key, length))


def records(rows: list[Row], train_length: int, ratios: list[float], paper: dict) -> list[dict]:
    """Return the rows of the .csv: ours, and the paper's numbers of methods that we have not."""
    missing = [method for method in PAPER if method not in {row.method for row in rows if row.as_in_paper}]
    found = []
    for ratio in ratios:
        length, paper_length = str(round(ratio * train_length)), round(ratio * PAPER_TRAIN_LENGTH)
        for key in (*rows, *missing):
            own = key.summary if isinstance(key, Row) else {}
            record = dict(method=own.get("method", key), options=json.dumps(own.get("method_options", {})))
            record |= dict(rescale=own.get("rescale"), steps=own.get("steps"), tokens=own.get("tokens"))
            record |= dict(length=length, ratio=ratio, before=own.get("val_loss_before", {}).get(length))
            record |= dict(mean=own.get("val_loss", {}).get(length), paper_length=paper_length)
            found.append(record | dict(paper_mean=(target_of(key, paper, paper_length) or {}).get("mean")))
    return found

"""The paper's table of Llama 2 7B: its numbers, beside those of the runs of `scripts.continue_pretraining`."""

import collections
import json
from pathlib import Path

from scripts.continue_pretraining import NOT_TRAINED, PAPER, PAPER_MODEL
from scripts.reproduce.study import Study
from scripts.reproduce.tables import PAPER_TRAIN_LENGTH, format_target, paper_head, paper_remarks, paper_targets
from scripts.shared.looks import series_name
from scripts.shared.tables import embolden_best, markdown_table

FOLDER = "continued"  # in the folder of the runs
COMPARED = ("model", "train_length", "validation", "val_tokens")  # what all rows must share


def table_llama(study: Study) -> str:
    rows, paper = find_rows(study), paper_targets(study.item)
    train_length = rows[0]["train_length"] if rows else PAPER_TRAIN_LENGTH
    ratios = sorted({int(length) / train_length for row in rows for length in row["val_loss"]} | {1, 4, 16})
    text = "Validation loss in nats a token of Llama 2 7B, trained on at 4k on about 50 M tokens with each method (*: "
    text += "not trained), by validation length in tokens (and in training lengths)."
    if rows:
        tokens = ", ".join(f"{n:,}" for n in sorted({row["tokens"] for row in rows if row["steps"]}))
        text += f" Ours: {rows[0]['model']} at {train_length} on {tokens or 'no'} tokens; right after the conversion, "
        text += "and at the end."
        if Path(rows[0]["model"]).name != Path(PAPER_MODEL).name or train_length != PAPER_TRAIN_LENGTH:
            study.notes.append("Not the paper's model and training length: compare the order of the methods alone.")
    else:
        text += " **None of these runs is there: these are the paper's numbers.**"
    study.notes += paper_remarks(paper, [method for method, _ in paper])
    absent = [method for method in PAPER if method not in study.models and method in (study.methods or PAPER)]
    command = f"python -m scripts.continue_pretraining {PAPER_MODEL} --method METHOD --resume auto"
    study.missing += [(series_name(method), f"which `{command}` makes") for method in absent]
    names = [label(row) for row in rows] + [series_name(m) + ("*" if m in NOT_TRAINED else "") for m in absent]
    columns = {}
    for ratio in ratios:
        length, paper_length = str(round(ratio * train_length)), round(ratio * PAPER_TRAIN_LENGTH)
        head = f"{length} ({ratio:g}x)"
        if rows:
            before = [row["val_loss_before"].get(length) if row["steps"] else None for row in rows]
            columns[f"{head} before"] = {n: f"{x:.3f}" for n, x in zip(names, before) if x is not None}
            after = {name: row["val_loss"][length] for name, row in zip(names, rows) if length in row["val_loss"]}
            columns[head] = embolden_best({name: f"{x:.3f}" for name, x in after.items()}, after)
        keys = [row["method"] if as_in_paper(row) else None for row in rows] + absent
        targets = {name: paper[key, paper_length] for name, key in zip(names, keys) if (key, paper_length) in paper}
        if targets:
            columns[paper_head(paper_length, ratio)] = {name: format_target(t) for name, t in targets.items()}
    study.write_csv(
        [{"method": name} | {head: cells.get(name, "") for head, cells in columns.items()} for name in names]
    )
    table = [["method", *columns], *([name, *(cells.get(name, "") for cells in columns.values())] for name in names)]
    return f"{text}\n\n{markdown_table(table)}"


def find_rows(study: Study) -> list[dict]:
    """Return the summaries of the finished runs in the paper's order, all of the model, lengths and text of most."""
    paths = sorted((study.runs_dir / FOLDER).glob("*/summary.json"))
    rows = {path.parent.name: json.loads(path.read_text()) for path in paths}
    rows = {name: row for name, row in rows.items() if study.methods is None or row["method"] in study.methods}
    compared = {name: json.dumps([row[field] for field in COMPARED]) for name, row in rows.items()}
    most = next((value for value, _ in collections.Counter(compared.values()).most_common(1)), None)
    for name in [name for name in rows if compared[name] != most]:
        study.missing.append((name, f"left out: it is of {compared[name]}, most are of {most}"))
        del rows[name]
    order = [*PAPER, *(row["method"] for row in rows.values())]
    study.models = [row["method"] for row in rows.values() if as_in_paper(row)]
    study.models_needed = len(PAPER)
    return sorted(rows.values(), key=lambda row: (order.index(row["method"]), label(row)))


def as_in_paper(row: dict) -> bool:
    trained = row["method"] in NOT_TRAINED or row["steps"] > 0
    return not row["method_options"] and not row["rescale"] and trained


def label(row: dict) -> str:
    parts = [f"{key} {value}" for key, value in row["method_options"].items()]
    parts += ["scores rescaled"] if row["rescale"] else []
    return ", ".join([series_name(row["method"]), *parts]) + ("" if row["steps"] else "*")

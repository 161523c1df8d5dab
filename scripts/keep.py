"""Copy the results of finished runs into one small file for git: a line of JSON per run, about 2 kB.

    python -m scripts.keep runs/NAME... --to results/mini/runs.jsonl
    python -m scripts.reproduce table_losses --scale mini

A line replaces the line of the same name. Checkpoints, training records and the log stay in the run folder.
"""

from collections.abc import Iterable
from pathlib import Path

from configs.config import NOT_HASHED, Config
from configs.presets import PRESETS, preset
from errors import exit_on_user_error, require
from files import replace_text, to_json
from scripts.shared.arguments import Parser
from scripts.shared.runs import StoredRun, read_run, read_runs, single_val_tokens, val_tokens

TOP_LEVEL = ("method", "method_options", "seed")  # fields that are keys of the line, not of "changes"
# Fields that the tables need, although config_hash ignores them:
TABLED = "data_dir dtype validate_as val_lengths val_tokens val_every val_profile val_copy_gaps val_far_windows".split()
SUMMARY = """
steps tokens distinct_tokens parameters tokens_per_second seconds val_loss val_loss_as copy_loss copy_gain copy_gain_as
copy_gain_error copy_accuracy copy_accuracy_as copy_loss_as far_loss far_gain far_gain_error far_gain_as far_tokens
val_loss_by_block val_loss_own val_tokens_own riffle_gain riffle_gain_error riffle_gain_as riffle_documents
copy_gain_error_as far_gain_error_as riffle_gain_error_as
""".split()
LOGGED = ("commit", "device", "torch", "started")  # lists, because a resumed run logs them again
DATA = ("train", "validation", "tokenizer")
NEEDLE = "haystack steps sequences curriculum examples pretrained greedy teacher_forcing by_distance as".split()
CURVE = ("step", "val_loss", "val_loss_as", "copy_gain")


@exit_on_user_error()
def main():
    parser = Parser("python -m scripts.keep", __doc__)
    parser.add_runs()
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="runs.jsonl of a scale")
    args = parser.parse_args()
    lines = {path.name: make_line(read_run(path)) for path in args.runs}
    require(len(lines) == len(args.runs), "Two runs have the same name. Name a run once, or rename a folder.")
    kept = {stored.path.name: stored.line for stored in read_runs(args.to)} | lines
    args.to.parent.mkdir(parents=True, exist_ok=True)
    write_lines(args.to, kept.values())
    print(f"{args.to} holds {len(kept)} runs")


def write_lines(file: Path, lines: Iterable[dict]):
    """Write a runs.jsonl."""
    replace_text(file, "".join(to_json(line, ensure_ascii=False) + "\n" for line in lines))


def make_line(stored: StoredRun) -> dict:
    """Return the line of a finished run. Raise ValueError if the run is not finished or is damaged."""
    require(not stored.problems, "; ".join(stored.problems))
    require(stored.summary, f"{stored.path} is not finished. Train it to its end first.")

    # 1. The configuration, as changes of the nearest preset.
    config, summary = stored.config, stored.summary
    fields = [field for field in vars(config) if field in TABLED or field not in {*TOP_LEVEL, *NOT_HASHED}]
    by_preset = {name: changed_fields(config, preset(name), fields) for name in PRESETS}
    nearest = min(by_preset, key=lambda name: len(by_preset[name]))
    line = {"name": stored.path.name, "preset": nearest, "changes": by_preset[nearest]}
    line |= {field: getattr(config, field) for field in TOP_LEVEL}

    # 2. Where and on which text the run was made.
    line |= {key: values for key in LOGGED if (values := stored.logged(key)) != ["unknown"]}
    line["data"] = select(stored.data, DATA) or {"train": summary["data"]}

    # 3. The results, at the end and during training.
    line["val_tokens"] = single_val_tokens(summary)
    line |= select(summary, SUMMARY)
    last = {field: stored.last(field) for field in ("val_loss_by_position", "method_parameters")}
    line |= select(last, last)
    line["curve"] = curve = []
    for record in stored.validations():
        point = select(record, CURVE)
        if {*val_tokens(record).values()} != {line["val_tokens"]}:  # a number as at the end is not repeated
            point["val_tokens"] = val_tokens(record)
        curve.append(point)
    require(
        config.steps in [point["step"] for point in curve],
        f"{stored.path}/metrics.jsonl lacks the validation after the last step. Restore it.",
    )
    if stored.needle:
        line["needle"] = select(stored.needle, NEEDLE)
    return line


def changed_fields(config: Config, base: Config, fields: list[str]) -> dict:
    """Return the fields of config that differ from base."""
    return {field: getattr(config, field) for field in fields if getattr(config, field) != getattr(base, field)}


def select(record: dict, keys: Iterable[str]) -> dict:
    """Return these keys of a record. Missing and empty values are left out."""
    return {key: record[key] for key in keys if record.get(key) not in (None, {})}


if __name__ == "__main__":
    main()

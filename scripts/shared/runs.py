"""Reads stored runs: their settings, losses, models and texts. states.py finds the runs of a sweep among them.

A run is stored as a run folder, or as one line of a runs.jsonl that scripts.keep wrote. `read_runs` reads both.
"""

import dataclasses
import functools
import re
from pathlib import Path

import torch

from configs.config import Config, config_hash, file_hash
from configs.presets import preset
from data.shards import TOKENIZER_FILE, TokenStream, open_split, read_manifest, sha256_of, tokenizer_of
from data.tokenizer import Tokenizer, load_tokenizer
from errors import UserError, require
from files import parse_object, read_bytes
from model.gpt import GPT
from runtime.build import config_of
from runtime.checkpoint import latest_checkpoint, load_checkpoint, load_weights
from runtime.device import compute_dtype
from runtime.metrics import check_record, read_metrics, read_record

REQUIRED = {  # fields of the files of a run
    "summary.json": "steps tokens seconds parameters val_loss val_tokens",
    "data.json": "",
    "evaluation.json": "step val_loss val_tokens",
}
IN_LINE = f"name preset changes method method_options seed {REQUIRED['summary.json']}"


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """The files of a run, read. A damaged file raises no exception, but adds a line to `problems`."""

    path: Path  # run folder; for a kept run FILE.jsonl/NAME
    config: Config | None
    summary: dict | None  # of a finished run, with the results of scripts.evaluate
    data: dict = dataclasses.field(default_factory=dict)  # data.json
    problems: tuple[str, ...] = ()
    line: dict | None = None  # of a kept run in its runs.jsonl

    @functools.cached_property
    def identity(self) -> str | None:
        """Return the hash of the fields that change the losses."""
        return self.config and config_hash(self.config)

    @property
    def text(self) -> str | None:  # the fingerprint of the training text
        return (self.summary or {}).get("data") or self.data.get("train")

    @property
    def needle(self) -> dict | None:
        """Return the scores on the needle task, or None without scores."""
        return self.line.get("needle") if self.line else read_record(self.path / "needle/summary.json")

    def validations(self) -> list[dict]:  # raises ValueError for a damaged line
        if self.line:
            return [{"val_tokens": self.line["val_tokens"]} | record for record in self.line["curve"]]
        path = self.path / "metrics.jsonl"
        return [record for record in read_metrics(path) if "val_loss" in record] if path.exists() else []

    def last(self, field: str):
        """Return this field of the last validation that has it, or None."""
        if self.line:
            return self.line.get(field)
        return next((record[field] for record in reversed(self.validations()) if record.get(field)), None)

    def logged(self, key: str) -> list[str]:
        """Return the distinct values of "commit", "device", "torch" or "started" in the log.

        A resumed run logs them again.
        """
        if self.line:
            return self.line.get(key) or ["unknown"]
        path = self.path / "log.txt"
        text = path.read_text(errors="replace") if path.exists() else ""
        pattern = r"^python [^,\n]+, torch ([^,\n]+), numpy " if key == "torch" else rf"^{key}: (.+)$"
        return list(dict.fromkeys(re.findall(pattern, text, re.MULTILINE))) or ["unknown"]


def read_runs(place: Path) -> list[StoredRun]:
    """Return the runs in a runs.jsonl, or in a folder of run folders, sorted by name.

    Raise ValueError naming a damaged line of a runs.jsonl, and for a file with another ending.
    """
    if place.suffix == ".jsonl":
        lines = read_bytes(place).splitlines() if place.exists() else []
        return [read_line(place, number, line) for number, line in enumerate(lines, start=1)]
    require(not place.is_file(), f"{place}: the name of a file of runs ends in .jsonl. Rename it.")
    return [read_run(path.parent) for path in sorted(place.glob("*/config.json"))]


def read_line(file: Path, number: int, content: bytes) -> StoredRun:
    """Return the run in one line of a runs.jsonl."""
    place = f"{file}, line {number}"
    line = check_record(parse_object(content, place), place, IN_LINE, data=dict, curve=list)
    for record in line["curve"]:
        check_record(record, f"{place}, a record of its curve", "val_loss", step=int)
    check_record(line["data"], f"{place}, data")
    check_record(line.get("needle", {}), f"{place}, needle")
    path, data = file / line["name"], line["data"]
    changes = {field: tuple(value) if isinstance(value, list) else value for field, value in line["changes"].items()}
    changes |= {field: line[field] for field in ("name", "method", "method_options", "seed")}
    try:
        config, problems = dataclasses.replace(preset(line["preset"]), **changes), ()
    except (ValueError, TypeError) as error:
        config, problems = None, (f"{path} was kept by an older version of the code ({error}). Keep the run again.",)
    return StoredRun(path, config, line | {"data": data.get("train")}, data, problems, line)


def read_run(path: Path) -> StoredRun:
    """Return the run in a run folder."""
    config, problems, summary, data = None, [], None, {}
    try:
        config = stored_config(path)
    except ValueError as error:
        problems.append(str(error))
    for name, fields in REQUIRED.items():
        try:
            value = read_record(path / name, fields)
            if name == "summary.json" and value:
                final_losses(value), single_val_tokens(value)
                summary = value
            elif name == "data.json":
                data = value or {}
            elif summary and value:
                summary = with_evaluation(summary, value)
        except (ValueError, OSError) as error:
            problems.append(f"{path / name}: {error}")
    return StoredRun(path, config, summary, data, tuple(problems))


def stored_config(path: Path) -> Config:
    """Return the configuration in a run folder. Raise ValueError if config.json is missing or damaged."""
    require((path / "config.json").exists(), f"{path} has no config.json. Name a run folder.")
    try:
        stored = parse_object(read_bytes(path / "config.json"), "it")
        config = config_of(stored)
        found = stored.pop("hash", None)
        require(found in (None, file_hash(config, stored)), "its fields do not fit its hash")
        return config
    except UserError as error:
        raise UserError(f"{path}/config.json is damaged ({error}). Restore it, or delete the folder.") from error


def with_evaluation(summary: dict, evaluation: dict) -> dict:
    """Return the summary with the results of scripts.evaluate: gains, and losses on as many tokens."""
    if evaluation.get("step") != f"step_{summary['steps']:06d}":
        return summary
    return join(comparable(evaluation, summary), summary)


def comparable(found: dict, other: dict) -> dict:
    """Return the gains in `found`. Its losses are added if both records have the same number of validation tokens."""
    found = found | {"val_tokens": val_tokens(found)}  # earlier versions kept one number for all lengths
    same = single_val_tokens(found) == single_val_tokens(other)
    prefixes = ("copy_", "far_", "riffle_", *["val_"] * same)
    return {name: value for name, value in found.items() if name.startswith(prefixes)}


def join(old: dict, new: dict) -> dict:
    """Return the union of two nested dictionaries. The values of `new` replace the values of `old`."""
    joined = old | new
    for key in old.keys() & new.keys():
        if isinstance(new[key], dict):
            joined[key] = join(old[key], new[key])
    return joined


def val_tokens(record: dict) -> dict[str, int]:
    """Return the validation tokens by length of a metrics record, a summary or an evaluation."""
    tokens = record["val_tokens"]
    return tokens if isinstance(tokens, dict) else dict.fromkeys(record["val_loss"], tokens)


def single_val_tokens(record: dict) -> int:
    """Return the validation tokens of a record. Raise ValueError if they differ by length."""
    tokens = {*val_tokens(record).values()}
    require(len(tokens) == 1, f"val_tokens {sorted(tokens)} differ by length. Validate all lengths on the same tokens.")
    return tokens.pop()


def measured(record: dict, field: str, method: str | None = None) -> dict:
    """Return a field, such as far_gain, of a summary or metrics record.

    method: the method of validation, one of validate_as. None: the trained method.
    """
    return record.get(field, {}) if method is None else record.get(f"{field}_as", {}).get(method, {})


def copy_gains(record: dict, method: str | None = None) -> dict[int, float]:
    """Return the copy gain in nats by gap. Its spans are random, so only copying can predict them."""
    return {int(gap): nats for gap, nats in measured(record, "copy_gain", method).get("random", {}).items()}


def final_losses(summary: dict, method: str | None = None) -> dict[int, float]:
    """Return the final loss in nats a token by validation length. Raise ValueError if one is not finite."""
    losses = measured(summary, "val_loss", method)
    require(None not in losses.values(), "the run diverged, as a loss is not finite")
    return {int(length): float(value) for length, value in losses.items()}


def data_fingerprint(config: Config) -> str | None:
    """Return the fingerprint of the run's training text, or None if it is unknown: no text, or one that continues."""
    if config.init_from:
        return None
    try:
        return open_split(config.data_dir, "train", config.vocab_size).fingerprint(config.steps * config.batch_tokens)
    except (OSError, ValueError):
        return None


# ---- their models and texts ------------------------------------------------------------------------------------------


def load_run(folder: Path, device: torch.device) -> tuple[Config, torch.nn.Module]:
    """Return the configuration of a run of train_gpt.py, and its model with the weights of the latest checkpoint.

    The backend of attention becomes `auto`, because the machine may be another one.
    """
    config = stored_config(folder)
    continued = "model" in parse_object(read_bytes(folder / "config.json"), folder.name)
    require(not continued, f"{folder} has a Hugging Face model. Load {folder}/model as in docs/huggingface.md.")
    checkpoint = latest_checkpoint(folder / "checkpoints")
    require(checkpoint, f"{folder} has no checkpoint. Train the run first.")
    model = GPT(config, compute_dtype(config, device)).to(device)
    load_weights(model, load_checkpoint(checkpoint)["model"], checkpoint)
    return dataclasses.replace(config, attention_backend="auto"), model


def open_validation_text(run: StoredRun) -> TokenStream:
    """Return the validation text of a run. Raise ValueError if its data folder holds another text now."""
    config = run.config
    stream = open_split(config.data_dir, "val", config.vocab_size)
    same = run.data.get("validation") in (None, stream.fingerprint(config.val_tokens))
    problem = f"{config.data_dir} does not hold the validation text of {run.path}"
    require(same, f"{problem}. Restore the text, or evaluate on the present text with --data {config.data_dir}.")
    entries = read_manifest(config.data_dir)["files"]
    for path in stream.paths:
        same = sha256_of(path) == entries[path.name]["sha256"]
        require(same, f"{path} differs from its checksum. Prepare it again.")
    return stream


def check_tokenizer(run: StoredRun, data: Path):
    """Raise ValueError unless the text in this folder was made with the tokenizer of the run."""
    trained, found = run.data.get("tokenizer"), tokenizer_of(data)
    problem = f"{data} has tokenizer {found}, but {run.path} was trained with {trained}"
    require(trained and trained == found, f"{problem}. Make the text with --tokenizer {run.config.data_dir}.")


def tokenizer_file(run: StoredRun) -> str | Path:
    """Return "gpt2", or the tokenizer.json of the run's own folder or of its data folder.

    Raise ValueError if neither has the tokenizer of the run.
    """
    trained = run.data.get("tokenizer")
    if trained == "gpt2":
        return trained
    files = [folder / TOKENIZER_FILE for folder in (run.path, Path(run.config.data_dir))]
    for file in files:
        if trained and sha256_of(file) == trained:
            return file
    raise UserError(f"neither {files[0]} nor {files[1]} is the tokenizer that the run's data.json names. Restore one.")


def tokenizer_of_run(run: StoredRun) -> Tokenizer:
    """Return the tokenizer of a run. Raise ValueError as tokenizer_file does."""
    return load_tokenizer(tokenizer_file(run))

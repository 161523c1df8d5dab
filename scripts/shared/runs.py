"""Run folders as the scripts see them: what each holds, its state, and which one is the run that a sweep asks for."""

import dataclasses
import fcntl
import json
import re
from collections.abc import Iterable
from pathlib import Path

from configs.config import NOT_MATHEMATICS, Config, config_hash, require, shortened
from configs.sweeps import Needle, Run
from data.shards import open_split
from model.methods import scaled_options
from runtime.checkpoint import latest_checkpoint
from runtime.metrics import read_metrics

STATES = ("finished", "pretrained", "running", "interrupted", "failed", "other", "missing")
OTHER_TEXTS = "other_texts"  # in evaluation.json, beside the losses on the run's own text: by fingerprint


@dataclasses.dataclass(frozen=True)
class Folder:
    """A run folder. What is wrong with it is in `problems`, one line each, never an exception."""

    path: Path
    config: Config | None
    summary: dict | None  # of a finished run
    data: dict = dataclasses.field(default_factory=dict)  # data.json; empty for runs of before it
    problems: tuple[str, ...] = ()

    @property
    def hash(self) -> str | None:
        return config_hash(self.config) if self.config else None

    @property
    def text(self) -> str | None:
        """The fingerprint of its training data, None where it is not known."""
        return (self.summary or {}).get("data") or self.data.get("train")

    def metrics(self) -> list[dict]:
        """The records of metrics.jsonl; ValueError naming the line if one is damaged."""
        path = self.path / "metrics.jsonl"
        try:
            records = read_metrics(path) if path.exists() else []
        except RecursionError as error:
            raise ValueError(f"{path}: {error}") from error
        for number, record in enumerate(records, start=1):
            check_record(record, f"{path}, line {number}")
        return records

    def json(self, name: str) -> dict | None:
        """What is in a file of the folder (one of FILES), None where there is none. ValueError, which does not name
        the file, if it is damaged."""
        return read_json(self.path / name, FILES[name])


# ---- what the files hold ---------------------------------------------------------------------------------------------

# A folder may be damaged, or come from anywhere: what is read from it is checked here, once, and nowhere else. A kind
# is a type of the values below, [kind] for a list, {int: kind} by length, {str: kind} by name, or a dict of fields, of
# which those with ? may lack; fields that are not listed are not looked at.
NUMBER, COUNT, TEXT = "a number", "a whole number", "a text"
STEP = "the name of a checkpoint"
TOKENS = "a number of tokens, or one by length"  # of a validation; see val_tokens
LOSSES = {int: NUMBER}
POSITIONS = {"val_loss_by_position?": {int: [NUMBER]}}
VALIDATED = {"val_loss": LOSSES, "val_tokens": TOKENS, "val_loss_as?": {str: LOSSES}}
SHARES = {kind: {int: NUMBER} for kind in ("greedy", "teacher_forcing?", "oracle?")}
TRAINING_RECORD = {"step": COUNT, "tokens": COUNT, "train_loss?": NUMBER, "grad_norm?": NUMBER}
TRAINING_RECORD |= {"tokens_per_second?": NUMBER}
VALIDATION_RECORD = {"step": COUNT, "tokens": COUNT, "scores_mean?": [NUMBER], "scores_std?": [NUMBER]}
VALIDATION_RECORD |= VALIDATED | POSITIONS
SUMMARY = {"steps": COUNT, "tokens?": COUNT, "distinct_tokens?": COUNT, "parameters?": COUNT, "data?": TEXT}
SUMMARY |= {"tokens_per_second?": NUMBER} | VALIDATED
EVALUATED = {"step": STEP} | VALIDATED | POSITIONS
FILES = {
    "summary.json": SUMMARY,
    "data.json": {"train?": TEXT, "validation?": TEXT, "tokenizer?": TEXT},
    "evaluation.json": {f"{OTHER_TEXTS}?": {str: EVALUATED | {"data": TEXT}}},
    "needle/settings.json": {},
    "needle/summary.json": SHARES | {"as?": {str: SHARES}},
}
LARGEST = 3.5e38  # of float32, which all numbers of a run come from


def read_json(path: Path, kind: dict) -> dict | None:
    """What a file of this kind holds, None where there is none. ValueError, without its name, if it is damaged."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from error
    check(found, kind, "it")
    if path.name == "evaluation.json" and on_own_text(found):  # it may hold losses on other text alone
        check(found, EVALUATED, "it")
    return found


def check_record(record, where: str):
    """ValueError, which names where, unless this is what a run writes into metrics.jsonl."""
    try:
        check(record, VALIDATION_RECORD if type(record) is dict and "val_loss" in record else TRAINING_RECORD, "it")
    except ValueError as error:
        raise ValueError(f"{where} is not what a run writes: {error}") from None


def check(value, kind, name: str):
    """ValueError, which names it, at the first part of the value that is not of this kind."""
    if isinstance(kind, dict) and (by := next(iter(kind), None)) in (int, str):
        right = type(value) is dict and (by is str or all(re.fullmatch("[1-9][0-9]{0,17}", key) for key in value))
        require(right, f"{name} is no object by {'length' if by is int else 'name'}: {shortened(value)}")
        for key, item in value.items():
            check(item, kind[by], f"{name}.{key}")
    elif isinstance(kind, dict):
        require(type(value) is dict, f"{name} is no object: {shortened(value)}")
        for field, of in kind.items():
            key = field.removesuffix("?")
            require(key in value or field != key, f"{name} has no {key}")
            if key in value:
                check(value[key], of, key if name == "it" else f"{name}.{key}")
    elif isinstance(kind, list):
        require(type(value) is list, f"{name} is no list: {shortened(value)}")
        for item in value:
            check(item, kind[0], name)
    elif kind is TOKENS:
        check(value, {int: COUNT} if type(value) is dict else COUNT, name)
    else:
        fits = {
            NUMBER: value is None or type(value) in (int, float) and abs(value) <= LARGEST,  # null: was not finite
            COUNT: type(value) is int and 0 <= value < 2**63,
            TEXT: value is None or type(value) is str,
            STEP: type(value) is str and re.fullmatch("step_[0-9]{1,18}", value),
        }
        require(fits[kind], f"{name} is {shortened(value)}, not {kind}")


def val_tokens(record: dict) -> dict[str, int]:
    """Validation tokens by length, of a validation's record, a summary or an evaluation. (Those of before the profiles
    have one number.)"""
    tokens = record["val_tokens"]
    return tokens if isinstance(tokens, dict) else dict.fromkeys(record["val_loss"], tokens)


def data_fingerprint(config: Config) -> str | None:
    """Of the training data that the run reads, None where it is not on this machine."""
    try:
        stream = open_split(config.data_dir, "train", config.vocab_size)
        return stream.fingerprint(config.steps * config.batch_tokens)
    except (OSError, ValueError):
        return None


def on_own_text(evaluation: dict) -> dict:
    """Of what is in an evaluation.json, the losses on the run's own text; {} if there are none."""
    return {key: value for key, value in evaluation.items() if key != OTHER_TEXTS}


def stored_config(path: Path) -> Config:
    """The configuration in a run folder. ValueError if there is none or it is damaged."""
    if not (path / "config.json").exists():
        raise ValueError(f"{path} is not a run folder: it has no config.json")
    known = {field.name for field in dataclasses.fields(Config)}
    try:
        stored = json.loads((path / "config.json").read_text())
        if length := stored.get("rotary_base_length"):  # of before length_scale: it scaled the rotary base alone
            options, ratio = stored.setdefault("method_options", {}), stored["train_length"] / length
            if "base" in options:
                options["base"] *= ratio
            elif base := scaled_options(stored["method"], ratio, options).get("base"):
                options["base"] = base
        return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known})
    except (ValueError, TypeError, AttributeError, RecursionError, KeyError, ArithmeticError) as error:
        raise ValueError(f"{path}/config.json is damaged ({error})") from error


def read_folder(path: Path) -> Folder:
    config, problems = None, []
    try:
        config = stored_config(path)
    except ValueError as error:
        problems.append(str(error))
    found, mends = {}, {"summary.json": "delete it and run the sweep again", "data.json": "delete it"}
    for name, mend in mends.items():
        try:
            found[name] = read_json(path / name, FILES[name])
        except ValueError as error:
            problems.append(f"{path}/{name} is damaged ({error}): {mend}")
    return Folder(path, config, found.get("summary.json"), found.get("data.json") or {}, tuple(problems))


def read_folders(runs_dir: Path) -> list[Folder]:
    """Every run folder below runs_dir, by name."""
    if not runs_dir.is_dir():
        return []
    return [read_folder(path) for path in sorted(runs_dir.iterdir()) if (path / "config.json").exists()]


def find(run: Run, folders: list[Folder], data: str | None = None) -> Folder | None:
    """The folder that holds this run, whatever its name: a finished one if there is one, else the one of that name.

    data: the fingerprint of the training data that the run reads here; what was trained on other data is another run.
    None: not known, or any will do.
    """
    same = [f for f in folders if f.hash == config_hash(run.config) and is_told(f, run, data)]
    return max(same, key=lambda f: (f.summary is not None, f.path.name == run.name), default=None)


def is_told(folder: Folder, run: Run, data: str | None) -> bool:
    """Whether the folder, of the same mathematics, has the run's data and the other fields that tell the run."""
    known = None not in (data, folder.text)  # then the folder's name, which may have moved, says nothing
    told = [field for field in run.told if not (known and field == "data_dir")]
    same = all(getattr(folder.config, field) == getattr(run.config, field) for field in told)
    return same and (not known or folder.text == data)


def state(run: Run, folders: list[Folder], runs_dir: Path, data: str | None = None) -> tuple[str, str]:
    """One of STATES but pretrained, and in words what it means for the training of this run (see needle_state too).

    other: the folder of that name holds something else, which is left alone. data: as in find.
    """
    folder = find(run, folders, data)
    path = folder.path if folder else runs_dir / run.name
    if folder is None and (named := next((f for f in folders if f.path.name == run.name), None)):
        if named.config is None:
            return "other", named.problems[0]
        if differ := differences(run.config, named.config, run.told):
            return "other", f"{named.path} is of another config ({differ}): rename it"
        return "other", f"trained on other data than {run.config.data_dir}: use another --runs-dir"
    if folder and folder.problems:
        return "other", folder.problems[0]
    now = folder_state(folder) if folder else "failed" if failures(path) else "missing"
    if now == "failed":
        return now, failures_in_words(path)
    if now == "interrupted":
        return now, how_far(path)
    return now, "" if now == "missing" else str(path)


def needle_state(folder: Folder, needle: Needle) -> tuple[str, str]:
    """What `state` is to the training of a run, of its fine-tuning on the needle task once it is trained; "pretrained"
    when that has not begun.

    other: it was fine-tuned or scored with other settings, or its files are damaged, and it is left alone.
    """
    path = folder.path / "needle"
    if is_running(path):
        return "running", str(path)
    found, mends = {}, {"settings.json": path, "summary.json": path / "summary.json"}
    for name, mend in mends.items():
        try:
            found[name] = folder.json(f"needle/{name}") or {}
        except ValueError as error:
            return "other", f"{path / name} is damaged ({error}): delete {mend}"
    settings, summary = found.values()
    wanted = {key: getattr(needle, key) for key in ("haystack", "steps", "sequences")}
    wanted["pretrained"] = f"step_{folder.config.steps:06d}"
    have = summary or settings
    if have and (changed := [f"{k} {have.get(k)} there, {v} here" for k, v in wanted.items() if have.get(k) != v]):
        return "other", f"{path} is of another fine-tuning ({', '.join(changed)}): delete it to start again"
    if summary and (examples := summary.get("examples")) != needle.examples:
        scored = f"{path} is scored on other examples ({examples} a length there, {needle.examples} here)"
        return "other", f"{scored}: delete {mends['summary.json']} to score again"
    lengths = {str(length) for length in needle.lengths(folder.config.train_length)}
    scored = [summary, *(summary.get("as", {}).get(method, {}) for method in folder.config.validate_as)]
    if all(lengths <= {*of.get("greedy", ())} for of in scored):
        return "finished", str(folder.path)
    if failures(folder.path):
        return "failed", failures_in_words(folder.path)
    return ("interrupted", how_far(path)) if have else ("pretrained", "not fine-tuned yet")


def failures_in_words(path: Path) -> str:
    failed = failures(path)
    return f"{path} failed {len(failed)} time{'s' * (len(failed) > 1)}: {failed[-1]}"


def how_far(path: Path) -> str:
    checkpoint = latest_checkpoint(path / "checkpoints") if (path / "checkpoints").exists() else None
    return f"{path}, {f'after {checkpoint.stem}' if checkpoint else 'without a checkpoint'}"


def folder_state(folder: Folder) -> str:
    """finished, running, failed or interrupted."""
    if folder.summary is not None:
        return "finished"
    if is_running(folder.path):
        return "running"
    return "failed" if failures(folder.path) else "interrupted"


def differences(ours: Config, theirs: Config, also: Iterable[str] = ()) -> str:
    """In words, the fields that differ: of those that change the mathematics, and of `also`."""
    a, b = ours.to_dict(), theirs.to_dict()
    told = [field for field in a if field not in NOT_MATHEMATICS or field in also]
    return ", ".join(f"{field} {b[field]} there, {a[field]} here" for field in told if a[field] != b[field])


def failures(path: Path) -> list[str]:
    """One line for each time that the run failed."""
    file = beside(path, ".failures.txt")
    return file.read_text(errors="replace").splitlines() if file.exists() else []


def beside(path: Path, suffix: str) -> Path:
    """A file of the sweep about a run: beside its folder, which a refused run does not even have."""
    return path.with_name(path.name + suffix)


def is_running(path: Path) -> bool:
    """Whether a process holds the folder's lock."""
    try:
        with open(path / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or what is called so is no file
        return False
    return False


def check_page(page: Path, words: str, runs: int):
    """ValueError if the page at this path says that it was made from more runs than these. words: how it says it, a
    regular expression around the number."""
    said = re.search(words, page.read_text(errors="replace"), re.MULTILINE) if page.exists() else None
    there = int(said[1]) if said else 0
    mend = ": --force writes over it" if runs else ""  # with none there is nothing to write
    require(there <= runs, f"{page} was made from {there} runs, and now there are {runs}{mend}")

"""What the files of a run folder hold, and the check of what is read from them."""

import json
import re
from pathlib import Path

from configs.config import shortened
from errors import require
from scripts.shared.runs import OTHER_TEXTS, on_own_text, val_tokens  # noqa: F401

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
    """Return what a file of this kind holds, None where there is none. Raises ValueError, without its name, if it is
    damaged."""
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
    """Raise ValueError, which names where, unless this is what a run writes into metrics.jsonl."""
    try:
        check(record, VALIDATION_RECORD if type(record) is dict and "val_loss" in record else TRAINING_RECORD, "it")
    except ValueError as error:
        raise ValueError(f"{where} is not what a run writes: {error}") from None


def check(value, kind, name: str):
    """Raise ValueError, which names it, at the first part of the value that is not of this kind."""
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
        is_of_kind = {
            NUMBER: value is None or type(value) in (int, float) and abs(value) <= LARGEST,  # null: was not finite
            COUNT: type(value) is int and 0 <= value < 2**63,
            TEXT: value is None or type(value) is str,
            STEP: type(value) is str and re.fullmatch("step_[0-9]{1,18}", value),
        }
        require(is_of_kind[kind], f"{name} is {shortened(value)}, not {kind}")

"""The runs of a sweep: each is a preset with changes, and perhaps fine-tuning on the needle task."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import Literal

from configs.config import NOT_HASHED, Config, check_fields, config_hash, setting, with_changes
from configs.presets import preset

SET_BY_SWEEPS = ("name", "runs_dir", "resume")  # scripts/sweep names and resumes the runs


@dataclasses.dataclass(frozen=True)
class Needle:
    """Fine-tuning and scoring on the needle task (scripts/needle.py). The paper does not state how many examples it
    scores, and it has no curriculum."""

    haystack: Literal["c4", "shards"] = "c4"
    """c4, downloaded once, or shards: the training data of the run."""
    steps: int = setting(300, at_least=1)
    """Fine-tuning steps."""
    sequences: int = setting(64, at_least=1)
    """Sequences per step."""
    examples: int = setting(500, at_least=1)
    """Scored prompts per length."""
    curriculum: int = setting(0, at_least=0)
    """Tokens of prompt and response in the first half of the steps. 0: as in the second half."""

    def __post_init__(self):
        check_fields(self)

    def __str__(self) -> str:
        return " ".join(self.arguments)

    @property
    def arguments(self) -> list[str]:
        """Return the arguments after `scripts.needle RUN` on the command line."""
        arguments = []
        for name, value in vars(self).items():
            arguments += [f"--{name}", str(value)]
        return arguments

    @staticmethod
    def lengths(train_length: int) -> list[int]:
        """Return the scored lengths in tokens, response included. A training length of 4k gives 4k, 16k and 64k."""
        return [factor * train_length for factor in (1, 4, 16)]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run to train: a preset, the fields that differ from it, and perhaps fine-tuning on the needle task."""

    preset: str
    changes: dict
    needle: Needle | None = None

    @functools.cached_property
    def config(self) -> Config:
        return with_changes(preset(self.preset), {"name": self.name, **self.changes})

    @property
    def name(self) -> str:
        """Return the run folder's name: preset, method, other changes (a hash instead if they are long), seed."""
        config = with_changes(preset(self.preset), self.changes)
        parts = [self.preset, config.method.replace(",", ".")]
        for field, value in sorted(self.changes.items()):
            if field == "method_options":
                parts += [f"{option}{as_folder_part(value[option])}" for option in sorted(value)]
            elif field not in {"method", "seed", *NOT_HASHED}:
                parts.append(f"{field}{as_folder_part(value)}")
        if len("-".join(parts)) > 120:
            parts[2:] = [config_hash(config)]
        return "-".join([*parts, f"s{config.seed}"])

    @property
    def path(self) -> Path:
        """Return the run folder."""
        return Path(self.config.runs_dir) / self.config.name

    @property
    def arguments(self) -> list[str]:
        """Return the arguments after `train_gpt.py` on the command line."""
        arguments = [self.preset]
        for field, value in {**self.changes, "name": self.config.name}.items():
            arguments.append(f"--{field}")
            if isinstance(value, dict):
                arguments += itertools.chain(*value.items())
            elif isinstance(value, tuple):
                arguments += value
            else:
                arguments.append(value)
        return list(map(str, arguments))


def as_folder_part(value) -> str:
    """Return the value as text, with characters that a folder's name may contain."""
    text = "_".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return re.sub(r"[^A-Za-z0-9._+=-]", "_", text)

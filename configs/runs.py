"""What a sweep trains: runs, each a preset with changes, and their fine-tuning on the needle task."""

import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from configs.config import NOT_MATHEMATICS, Config, config_hash, with_changes
from configs.presets import preset
from errors import did_you_mean, require

SET_BY_SWEEPS = ("name", "runs_dir", "resume")  # the sweep runner names and resumes the runs


@dataclasses.dataclass(frozen=True)
class Needle:
    """Fine-tuning and scoring on the needle task (scripts/needle.py). The paper gives no number of examples and has no
    curriculum."""

    haystack: str = "c4"  # or "shards", the run's own data, or a file or folder of text
    steps: int = 300
    sequences: int = 64  # in a step
    examples: int = 500  # scored at each length
    curriculum: int = 0  # tokens a prompt in the first half of the steps; 0: no such half

    def __post_init__(self):
        for name, least in dict(steps=1, sequences=1, examples=1, curriculum=0).items():
            value = getattr(self, name)
            require(
                type(value) is int and value >= least, f"{name} of the needle task is {value}. Use {least} or more."
            )

    def __str__(self) -> str:
        begin = f", the first half with prompts of {self.curriculum} tokens and more of them" if self.curriculum else ""
        return (
            f"haystack {self.haystack}, {self.steps} steps of {self.sequences} sequences{begin}, {self.examples} "
            "examples scored at each length"
        )

    @property
    def arguments(self) -> list[str]:
        """Return what follows `scripts.needle RUN` on the command line."""
        return [word for name, value in dataclasses.asdict(self).items() for word in (f"--{name}", str(value))]

    @staticmethod
    def lengths(train_length: int) -> list[int]:
        """Return the lengths of scored prompts in tokens: the paper's 4k, 16k and 64k of models trained at 4k."""
        return [factor * train_length for factor in (1, 4, 16)]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run to be trained: a preset, the fields that differ from it, and the fine-tuning that follows, if any.

    distinguishing: fields outside the mathematics (NOT_MATHEMATICS) in which runs of its sweep differ.
    """

    preset: str
    changes: dict
    needle: Needle | None = None
    distinguishing: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """Return a hash that only the same run has."""
        config = with_changes(preset(self.preset), self.changes)
        parts = [config_hash(config), *((field, getattr(config, field)) for field in self.distinguishing)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12] if self.distinguishing else parts[0]

    @property
    def name(self) -> str:
        """Return the run folder's name: preset, method, other changes (their hash if they are long), and the seed."""
        parts = [self.preset, self.changes.get("method", preset(self.preset).method).replace(",", ".")]
        for field, value in sorted(self.changes.items()):
            if field == "method_options":
                parts += [f"{option}{as_folder_part(value[option])}" for option in sorted(value)]
            elif field in self.distinguishing or field not in {"method", "seed", *NOT_MATHEMATICS}:
                parts.append(f"{field}{as_folder_part(value)}")
        if len("-".join(parts)) > 120:
            parts[2:] = [self.identity]
        return "-".join([*parts, f"s{self.changes.get('seed', 0)}"])

    @property
    def path(self) -> Path:
        """Return the run folder."""
        return Path(self.changes.get("runs_dir", preset(self.preset).runs_dir)) / self.changes.get("name", self.name)

    @functools.cached_property
    def config(self) -> Config:
        return with_changes(preset(self.preset), {"name": self.name, **self.changes})

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the method that is trained, and those that its weights are validated as."""
        return self.config.method, *self.config.validate_as

    @property
    def arguments(self) -> list[str]:
        """Return the command line after `train_gpt.py`."""
        words = [self.preset]
        for field, value in {**self.changes, "name": self.config.name}.items():
            if isinstance(value, bool):
                words.append(f"--{field}" if value else f"--no_{field}")
                continue
            values = itertools.chain(*value.items()) if isinstance(value, dict) else value
            words += [f"--{field}", *(values if isinstance(value, (list, tuple, dict)) else [value])]
        return [str(word) for word in words]


def as_folder_part(value) -> str:
    """Return the value as a part of a folder's name."""
    text = "_".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return re.sub(r"[^A-Za-z0-9._+=-]", "_", text)


def grid(presets: str | list[str], **axes: list) -> list[Run]:
    """Return every combination of the values of the axes (fields of the config), for each preset."""
    presets = [presets] if isinstance(presets, str) else presets
    fields = {field.name for field in dataclasses.fields(Config)} - {*SET_BY_SWEEPS}
    for field, values in axes.items():
        require(field in fields, f"a sweep cannot set {field!r}; {did_you_mean(field, fields, 'it is no field')}")
        is_list = isinstance(values, Iterable) and not isinstance(values, str)
        require(is_list, f"a sweep's axis {field} must be a list of values, got {values!r}")
    return [Run(name, dict(zip(axes, values))) for name in presets for values in itertools.product(*axes.values())]

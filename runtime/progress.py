"""How far a run has come: what its checkpoints hold besides weights and optimizer state."""

import dataclasses
import math
import re
from pathlib import Path
from types import NoneType
from typing import Any, Self


@dataclasses.dataclass
class Progress:
    step: int = 0
    """Optimizer steps made."""
    seconds: float = 0.0
    """Spent in them."""
    skipped: int = 0
    """Of them, steps that were not finite."""
    validation: dict | None = None
    """The record of the last validation."""
    wandb_id: str | None = None
    """Of the mirror, which a resumed run goes on with."""
    rng: list[dict] = dataclasses.field(default_factory=list)
    """The random number generators of each process."""

    @property
    def validated(self) -> int:
        """The step of the last validation, -1 before the first."""
        return self.validation["step"] if self.validation else -1

    @classmethod
    def load(cls, path: Path, state: dict[str, Any], steps: int) -> Self:
        """Return that of the checkpoint at `path`, whose content is `state`, for a run of so many steps.

        Raise ValueError naming the file when it holds what cannot be, or is further than the run goes. (Checkpoints of
        older versions lack some of the fields.)
        """
        progress = cls(**{field.name: state[field.name] for field in dataclasses.fields(cls) if field.name in state})
        for name in ("step", "seconds", "skipped", "validation", "wandb_id", "rng"):
            if not progress._is_possible(name, path, steps):
                found = " ".join(f"{name} {getattr(progress, name)!r}".split())[:100]
                raise ValueError(f"{path} is damaged ({found}): delete it to continue from the one before it")
        if progress.step > steps:
            advice = "give more, or choose another --name"
            raise ValueError(f"{path} is of step {progress.step}, beyond --steps {steps}: {advice}")
        return progress

    def _is_possible(self, name: str, path: Path, steps: int) -> bool:
        value = getattr(self, name)
        if name == "step":
            return type(value) is int and int(re.fullmatch(r"step_(\d+)\.pt", path.name)[1]) == value
        if name == "seconds":
            return type(value) is float and 0 <= value < math.inf
        if name == "skipped":
            return type(value) is int and 0 <= value <= self.step
        if name == "validation" and value is not None:
            losses_are_numbers = all(type(loss) is float for loss in value["val_loss"].values())
            # The last one is not made again. (Those of before there were profiles have no val_tokens.)
            complete = value["step"] < steps or value["val_loss"] and "val_tokens" in value
            return type(value["step"]) is int and value["step"] <= self.step and losses_are_numbers and complete
        return type(value) in dict(validation=(NoneType,), wandb_id=(str, NoneType), rng=(list,))[name]

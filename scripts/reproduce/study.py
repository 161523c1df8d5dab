"""What a table or figure is made from: the runs that it needs, those that there are, and what is missing."""

import collections
import dataclasses
import shlex
from contextlib import contextmanager
from pathlib import Path

import torch

from configs.config import config_hash
from configs.presets import preset
from configs.sweeps import SCALES, Run
from scripts.evaluate import EVALUATION
from scripts.shared.looks import NAMES, series_label
from scripts.shared.run_files import on_own_text, val_tokens
from scripts.shared.runs import StoredRun, find_stored, train_state

# Items that do not show what runs are also validated as:
ONE_METHOD_A_RUN = ("table_infini", "table_rivals", "needle_rivals")


@dataclasses.dataclass
class Study:
    """What an item, a table or figure, is made from, and what is missing of it."""

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
    finished: list[tuple[Run, StoredRun]] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)  # a line each, with the command that mends it
    notes: list[str] = dataclasses.field(default_factory=list)
    models: list[str] = dataclasses.field(default_factory=list)  # of other people's that were used
    models_needed: int = 0
    sections: list[str] = dataclasses.field(default_factory=list)  # of the page, after the notes
    draft: Path | None = None  # the folder in which the files are made
    unwritten: str = ""  # why they were not put into `out`

    @property
    def path(self) -> Path:
        """Return the path of the files that are made, without suffix."""
        return self.draft / self.item

    @property
    def page(self) -> Path:
        return self.out / f"{self.item}.md"

    @property
    def lengths(self) -> list[int]:
        """Return the validation lengths that stand for the paper's 4k, 16k and 64k."""
        return [preset(name).train_length for name in SCALES[self.scale].lengths]

    @property
    def base_length(self) -> int:
        return self.lengths[0]

    def series(self, run: Run) -> dict[str, str]:
        """Return what a run is shown as: the method that it trained, with its options, and those that its weights are
        validated as; each series with its method."""
        trained = {series_label(run.config): run.config.method}
        others = {method: method for method in run.config.validate_as if self.item not in ONE_METHOD_A_RUN}
        return {s: m for s, m in (trained | others).items() if self.methods is None or m in self.methods}

    @property
    def all_series(self) -> list[str]:
        """Return the series in the order of NAMES, each before its forms with options."""
        present = dict.fromkeys(s for run in self.runs for s in self.series(run))
        order = [*NAMES, *(s.split(" ")[0] for s in present)]
        return sorted(present, key=lambda s: (order.index(s.split(" ")[0]), " " in s))

    def title(self, length: int) -> str:
        """Return the length as titles show it: 4k as in the paper, 256 where the lengths are no multiples of 4k."""
        return abbreviate_length(length) if self.base_length % 4096 == 0 else str(length)

    def miss(self, run: Run, what: str, command: list[str] | None = None):
        """Note what is missing of a run, and the command that makes it."""
        self.missing.append(f"`{run.name}`: {what}" + (f": `{shlex.join(command)}`" if command else ""))

    def drop(self, run: Run, why: str, command: list[str] | None = None):
        """Leave a finished run out of the item, and say so."""
        self.finished = [(r, stored) for r, stored in self.finished if r is not run]
        self.miss(run, why, command)

    @contextmanager
    def dropping_unreadable(self, run: Run):
        """Drop the run if its model or its validation text is not there or damaged."""
        try:
            yield
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            self.drop(run, str(error).splitlines()[0])

    def collect(self, stored_runs: list[StoredRun]):
        """Fill `finished` with the runs that are there, all on the same tokens; name the others in `missing`."""
        for run in self.runs:
            state, reason = train_state(run, stored_runs, self.runs_dir)
            stored = find_stored(run, stored_runs)
            if stored is not None and stored.problems:
                self.miss(run, "; ".join(stored.problems))
            elif state != "finished":
                command = self.train_command(run, stored) if state != "running" else None
                self.miss(run, f"{state} ({reason})" if reason else state, command)
            else:
                self.add_finished(run, stored)
        if not self.seeds_given:
            self.add_seeds(stored_runs)
        self.drop_other_data()

    def add_finished(self, run: Run, stored: StoredRun):
        try:
            final_losses(stored)
            self.finished.append((run, stored))
        except ValueError as error:
            self.miss(run, str(error))

    def add_seeds(self, stored_runs: list[StoredRun]):
        """Add the finished runs that differ from ours in the seed alone."""
        known = {config_hash(run.config) for run in self.runs}
        seeds = sorted({stored.config.seed for stored in stored_runs if stored.config and stored.summary})
        for ours, seed in [(run, seed) for run in self.runs for seed in seeds]:
            run = dataclasses.replace(ours, changes=ours.changes | {"seed": seed})
            stored = find_stored(run, stored_runs)
            if config_hash(run.config) in known or not stored or not stored.summary or stored.problems:
                continue
            known.add(config_hash(run.config))
            self.runs.append(run)
            self.add_finished(run, stored)

    def drop_other_data(self):
        """Drop the runs on other data than most. (They read equally many tokens, so fingerprints compare.)"""
        for what, value_of in COMPARED_DATA.items():
            values = {run.name: value for run, stored in self.finished if (value := value_of(stored)) is not None}
            most = collections.Counter(values.values()).most_common(1)
            for run, stored in list(self.finished):
                if (theirs := values.get(run.name)) not in (None, *dict(most)):
                    self.drop(run, f"left out, {stored.path} has {what} {theirs}; most runs: {most[0][0]}")

    def train_command(self, run: Run, stored: StoredRun | None) -> list[str]:
        """Return the command that trains this one run, or goes on with it under the name that it has."""
        named = dataclasses.replace(run, changes=run.changes | ({"name": stored.path.name} if stored else {}))
        runs_dir = [] if self.runs_dir == Path("runs") else ["--runs_dir", str(self.runs_dir)]
        resume = ["--resume", "auto"] if stored else []
        return ["python", "train_gpt.py", *named.arguments, *runs_dir, *resume]


def single_val_tokens(record: dict) -> int:
    """Return the validation tokens of a summary or an evaluation, which are the same at all lengths. Raises ValueError
    if they are not."""
    (tokens,) = {*val_tokens(record).values()}
    return tokens


# What all runs of an item must share; None: not known, as of the validation text of runs from before data.json.
COMPARED_DATA = {
    "validation tokens": lambda stored: single_val_tokens(stored.summary),
    "training text": lambda stored: stored.summary["data"],
    "validation text": lambda stored: stored.data.get("validation"),
}


def final_losses(stored: StoredRun, method: str | None = None) -> dict[int, float]:
    """Return nats a token by validation length, at the end of a finished run, its weights run as `method` (default: the
    one that it trained). Raises ValueError if it has none."""
    path, summary = stored.path / "summary.json", stored.summary

    def by_length(record: dict) -> dict[int, float]:
        as_other = method is not None and method != stored.config.method
        losses = record.get("val_loss_as", {}).get(method, {}) if as_other else record["val_loss"]
        return {int(length): value for length, value in losses.items()}

    try:
        loss, tokens, _ = by_length(summary), single_val_tokens(summary), summary["data"]
    except (KeyError, ValueError):
        raise ValueError(f"{path} is damaged: delete it and run the sweep again") from None
    try:  # lengths that were not validated during training
        evaluation = on_own_text(stored.json(EVALUATION) or {})
        last = f"step_{summary['steps']:06d}"
        if evaluation and (evaluation["step"], single_val_tokens(evaluation)) == (last, tokens):
            loss = by_length(evaluation) | loss
    except ValueError as error:
        raise ValueError(f"{stored.path / EVALUATION} is damaged ({error}): delete it and evaluate again") from None
    if None in loss.values():
        raise ValueError(f"{path} has a loss that is not a number: the run diverged")
    return loss


def abbreviate_length(length: int) -> str:
    """Return the length as the paper writes it: 4k for 4096."""
    return f"{length // 1024}k" if length % 4096 == 0 else str(length)

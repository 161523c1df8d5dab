"""What a table or figure is made from: the runs that it needs, those that there are, and what is missing."""

import collections
import dataclasses
from contextlib import contextmanager
from pathlib import Path

import torch

from configs.config import config_hash
from configs.presets import preset
from configs.runs import Run
from configs.sweeps import SCALES
from scripts.shared.looks import NAMES, series_label
from scripts.shared.runs import StoredRun, find_stored, single_val_tokens, train_state
from scripts.shared.tables import write_csv

# Items that show each run as the method that it trained, not as those that its weights are also validated as:
ONE_METHOD_A_RUN = ("table_infini", "table_rivals", "needle_rivals")
# What all runs of an item must share. None: not known.
COMPARED_DATA = {
    "validation tokens": lambda stored: single_val_tokens(stored.summary),
    "training text": lambda stored: stored.text,
    "validation text": lambda stored: stored.data.get("validation"),
}


@dataclasses.dataclass
class Study:
    """What an item, a table or figure, is made from, and what is missing of it."""

    item: str
    scale: str
    runs: list[Run]
    stored_runs: list[StoredRun]
    runs_dir: Path  # folder of the run folders
    out: Path
    options: list[str]  # of this command, which scripts.sweep takes too
    device: torch.device
    draws: int  # of independent Gaussian scores
    methods: list[str] | None = None  # only these; None: all
    seeds_given: bool = False  # False: the item shows all seeds that there are
    finished: list[tuple[Run, StoredRun]] = dataclasses.field(default_factory=list)
    missing: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # a run or model, and why it is missing
    models: list[str] = dataclasses.field(default_factory=list)  # of other people, which were used
    models_needed: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)
    sections: list[str] = dataclasses.field(default_factory=list)  # of the page, after the notes
    draft: Path | None = None  # the folder in which the files are made
    unwritten: str = ""  # why they were not put into `out`

    @property
    def page(self) -> Path:
        return self.out / "tables.md"

    def figure(self, name: str = "") -> Path:
        """Return the path of a figure that is made, without its suffix."""
        return self.draft / "figures" / (name or self.item)

    def picture(self, name: str = "") -> str:
        """Return the Markdown that shows a figure on the page."""
        return f"![{name or self.item}](figures/{name or self.item}.png)"

    def write_csv(self, rows: list[dict], suffix: str = ""):
        write_csv(self.draft / "csv" / f"{self.item}{suffix}.csv", rows)

    @property
    def lengths(self) -> list[int]:
        """Return the validation lengths that stand for the paper's 4k, 16k and 64k."""
        return [preset(name).train_length for name in SCALES[self.scale].lengths]

    @property
    def base_length(self) -> int:
        return self.lengths[0]

    def series(self, run: Run) -> dict[str, str | None]:
        """Return the series that a run is shown as, each with the method as which its weights are validated.

        None: the method that it trained.
        """
        others = {method: method for method in run.config.validate_as if self.item not in ONE_METHOD_A_RUN}
        shown = {series_label(run.config): None} | others
        return {s: m for s, m in shown.items() if self.methods is None or (m or run.config.method) in self.methods}

    @property
    def all_series(self) -> list[str]:
        """Return the series in the order of NAMES, each method before its forms with options."""
        present = dict.fromkeys(series for run in self.runs for series in self.series(run))
        order = [*NAMES, *(series.split(" ")[0] for series in present)]
        return sorted(present, key=lambda series: (order.index(series.split(" ")[0]), " " in series))

    def title(self, length: int) -> str:
        """Return the length as titles show it: 4k as in the paper, 256 where the lengths are no multiples of 4k."""
        return abbreviate_length(length) if self.base_length % 4096 == 0 else str(length)

    def drop(self, run: Run, why: str):
        """Leave a finished run out of the item, and say so."""
        self.finished = [(other, stored) for other, stored in self.finished if other is not run]
        self.missing.append((run.name, why))

    @contextmanager
    def dropping_unreadable(self, run: Run):
        """Drop the run if its model, its records or its validation text is not there or damaged."""
        try:
            yield
        except (ValueError, OSError, KeyError, TypeError, RuntimeError) as error:
            self.drop(run, str(error).splitlines()[0])

    def collect(self):
        """Fill `finished` with the runs that are there, all on the same text, and `missing` with the others."""
        for run in self.runs:
            state, reason = train_state(run, self.stored_runs, self.runs_dir)
            if state == "finished":
                self.finished.append((run, find_stored(run, self.stored_runs)))
            else:
                self.missing.append((run.name, f"{state}: {reason}" if reason else "not trained"))
        if not self.seeds_given:
            self.add_seeds()
        for what, value_of in COMPARED_DATA.items():
            values = {run.name: value for run, stored in self.finished if (value := value_of(stored)) is not None}
            most = collections.Counter(values.values()).most_common(1)
            for run, stored in self.finished:
                if (value := values.get(run.name)) not in (None, *dict(most)):
                    self.drop(run, f"left out, {stored.path} has {what} {value}; most runs: {most[0][0]}")

    def add_seeds(self):
        """Add the finished runs that differ from the item's in the seed alone."""
        known = {config_hash(run.config) for run in self.runs}
        seeds = sorted({stored.config.seed for stored in self.stored_runs if stored.config})
        for planned, seed in [(run, seed) for run in self.runs for seed in seeds]:
            run = dataclasses.replace(planned, changes=planned.changes | {"seed": seed})
            stored = find_stored(run, self.stored_runs)
            if config_hash(run.config) not in known and stored and stored.summary and not stored.problems:
                known.add(config_hash(run.config))
                self.runs.append(run)
                self.finished.append((run, stored))


def abbreviate_length(length: int) -> str:
    """Return the length as the paper writes it: 4k for 4096."""
    return f"{length // 1024}k" if length % 4096 == 0 else str(length)

"""Find the runs of a table or figure: the finished ones, and the missing ones with the reason."""

import collections
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from configs.config import config_hash
from configs.presets import preset
from configs.runs import Run
from configs.sweeps import SCALES
from errors import require
from scripts.shared.looks import named, series_label
from scripts.shared.runs import StoredRun, single_val_tokens
from scripts.shared.states import find_stored, run_state
from scripts.shared.sweeps import all_sweeps, sweep

BySeed = dict[int, float]  # seed -> number


class Study:
    """The runs of an item (a table or figure), and the text that the item adds to the page."""

    def __init__(
        self,
        item: str,
        scale: str,
        out: Path,
        stored_runs: list[StoredRun],
        *,
        methods: list | None = None,
        seeds: list | None = None,
        changes: dict = {},
        needle: dict = {},
        runs_dir: Path = Path("runs"),
        device: str = "cpu",
    ):
        """Find the runs of an item. changes, needle: fields and needle settings that all runs share."""
        self.item, self.scale, self.methods, self.out = item, scale, methods, out
        self.runs_dir, self.device = runs_dir, torch.device(device)
        self.base_length = self.lengths[0]  # the training length, in tokens
        self.runs = sweep(item, scale, seeds, methods, changes, needle) if item in all_sweeps() else []
        planned = {config_hash(run.config) for run in self.runs}
        texts = collections.Counter(stored.text for stored in stored_runs if stored.identity in planned)
        self.stored_runs = sorted(stored_runs, key=lambda stored: -texts[stored.text])  # the commonest text comes first
        self.finished = []  # (Run, StoredRun)
        self.missing = []  # (name of a run or model, reason)
        self.notes = []
        self.sections = []  # further parts of the page, after the notes
        self.trained_method_only = False  # leave out the other methods with which the weights of a run are validated
        self.computed = False  # the item is computed or measured on this machine, not a function of the stored runs
        if not seeds:
            self.add_seeds()
        self.collect()

    def figure_path(self, name: str = "") -> Path:
        """Return the path of a figure without its suffix."""
        return self.out / "figures" / (name or self.item)

    def figure_markdown(self, name: str = "") -> str:
        """Return the Markdown that shows a figure on the page."""
        return f"![{name or self.item}](figures/{name or self.item}.png)"

    @property
    def lengths(self) -> list[int]:
        """Return the lengths of this scale that correspond to the paper's 4k, 16k and 64k."""
        return [preset(name).train_length for name in SCALES[self.scale].lengths]

    def length_label(self, length: int) -> str:
        """Return a length with its multiple of the training length, such as "1024 (4x)"."""
        return f"{length} ({length / self.base_length:g}x)"

    def series(self, run: Run) -> dict:
        """Return the series of a run: {label: method with which the weights are validated}.

        None stands for the trained method.
        """
        others = () if self.trained_method_only else run.config.validate_as
        shown = {method or run.config.method: method for method in (None, *others)}
        chosen = shown.keys() & self.methods if self.methods else shown
        return {series_label(run.config, name): method for name, method in shown.items() if name in chosen}

    def by_seed(self, read: Callable) -> dict:
        """Return numbers of the finished runs: {(series, key): BySeed}.

        read: a function from a summary and a method (see `series`) to {key: number}. Raise ValueError for two runs
        with the same series and seed.
        """
        found = collections.defaultdict(dict)
        for run, stored in self.finished:
            seed = run.config.seed
            for series, method in self.series(run).items():
                for key, number in read(stored.summary, method).items():
                    problem = f"two runs are {series}, seed {seed}. Write a table of your own for them."
                    require(seed not in found[series, key], problem)
                    found[series, key][seed] = number
        return found

    @property
    def all_series(self) -> list[str]:
        """Return the series in the order of looks.csv. A method comes before its forms with options."""
        present = dict.fromkeys(series for run in self.runs for series in self.series(run))
        methods = [series.split(" ")[0] for series in present]
        order = [*named(), *methods].index
        return sorted(present, key=lambda series: (order(series.split(" ")[0]), " " in series))

    def drop(self, run: Run, reason: str):
        """Leave a finished run out of the item, and list it as missing."""
        self.finished = [(other, stored) for other, stored in self.finished if other is not run]
        self.missing.append((run.name, reason))

    def collect(self):
        """Sort the runs into `finished` and `missing`. Finished runs on another text than most are missing, too."""
        descriptions = {"missing": "not trained", "pretrained": "not fine-tuned"}
        for run in self.runs:
            state, reason, stored = run_state(run, self.stored_runs, self.runs_dir)
            if state == "finished":
                self.finished.append((run, stored))
            else:
                self.missing.append((run.name, descriptions.get(state, f"{state}: {reason}")))
        self.missing.sort(key=lambda missing: missing[1] == "not fine-tuned")  # training comes before fine-tuning
        texts = [text_identity(stored) for _, stored in self.finished]
        common_text = collections.Counter(texts).most_common(1)[0][0] if texts else ()
        for run, stored in self.finished:
            if (text := text_identity(stored)) != common_text:
                self.drop(run, f"left out: texts and validation tokens are {text}, of most runs {common_text}")

    def add_seeds(self):
        """Add finished runs with other seeds to `runs`, if all else is equal."""
        runs = {config_hash(run.config): run for run in self.runs}
        seeds = sorted({stored.config.seed for stored in self.stored_runs if stored.config})
        for planned, seed in itertools.product(self.runs, seeds):
            run = dataclasses.replace(planned, changes=planned.changes | {"seed": seed})
            stored = find_stored(run, self.stored_runs)
            if stored and stored.summary and not stored.problems and (stored.needle or not run.needle):
                runs.setdefault(config_hash(run.config), run)
        self.runs = [*runs.values()]


def text_identity(stored: StoredRun) -> tuple:
    """Return what all runs of an item must share: fingerprints of both texts, and the number of validation tokens."""
    return stored.text, stored.data.get("validation"), single_val_tokens(stored.summary)


def samples(values: dict) -> dict:
    """Return the numbers of each key in the order of the runs, without their seeds."""
    return {key: [*by_seed.values()] for key, by_seed in values.items()}


def abbreviate_length(length: int) -> str:
    """Return the length as the paper writes it: 4k for 4096."""
    return f"{length // 1024}k" if length % 4096 == 0 else str(length)

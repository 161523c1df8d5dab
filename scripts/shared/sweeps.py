"""Finds the sweeps and the studies, and chooses the runs of a sweep.

A study of ours is a folder results/NAME. Its file study.py has

    SCALE     the default of --scale for its sweeps and items. "": they are for every scale.
    SWEEPS    {name: function from a Scale to a list of Runs}
    ITEMS     {name: function from a scripts.reproduce.study.Study to Markdown}: tables and figures
    TESTS     {name of an item: function from a Study to PairedTests (results/paired.py)}, fixed before their runs
    NUMBERS   {kind: function from a stored run and a method to {key: number}}: further numbers for pages

The paper's sweeps are in configs/sweeps.py.
"""

import dataclasses
import functools
import importlib
from pathlib import Path
from types import ModuleType

from configs.config import config_hash, with_changes
from configs.presets import preset
from configs.runs import Run
from configs.sweeps import PAPER_SWEEPS, SCALES
from errors import did_you_mean, require
from model.methods.names import canonical_name

RESULTS = Path(__file__).parents[2] / "results"


@functools.cache
def studies() -> list[ModuleType]:
    """Return the modules results/NAME/study.py."""
    names = sorted(path.parent.name for path in RESULTS.glob("*/study.py"))
    return [importlib.import_module(f"results.{name}.study") for name in names]


def with_studies(papers: dict, kind: str) -> dict:
    """Return the paper's sweeps or items and the ones of all studies, by name. kind: "SWEEPS" or "ITEMS"."""
    found = dict(papers)
    for study in studies():
        found |= getattr(study, kind)
    return found


def all_sweeps() -> dict:  # functions from a Scale to a list of Runs
    return with_studies(PAPER_SWEEPS, "SWEEPS")


def home_of(name: str) -> tuple:
    """Return the scale of a study's sweep or item, and the study's name. Both are "" if it is for every scale."""
    for study in studies():
        if study.SCALE and name in study.SWEEPS | study.ITEMS:
            return study.SCALE, study.__name__.split(".")[1]
    return "", ""


def sweep(
    name: str,
    scale: str,
    seeds: list | None = None,
    methods: list | None = None,
    changes: dict | None = None,
    needle: dict | None = None,
) -> list[Run]:
    """Return the runs of a sweep. The name "all" stands for every run of the paper's sweeps.

    seeds: replace the seeds of the scale. methods: leave out runs that are validated as none of these. changes: fields
    to set in every run. needle: settings that replace the scale's settings of the needle task.
    Raise ValueError for an unknown name, for a changed field that the sweep sets, and if there are no runs.
    """
    functions = all_sweeps()
    require(name in ("all", *functions), f"unknown sweep {name!r}. {did_you_mean(name, ['all', *functions])}")
    chosen = SCALES[scale]
    chosen = dataclasses.replace(chosen, needle=dataclasses.replace(chosen.needle, **(needle or {})))
    if seeds:
        chosen = dataclasses.replace(chosen, seeds=tuple(seeds), once=tuple(seeds))
    planned = []
    for each in PAPER_SWEEPS if name == "all" else [name]:
        planned += functions[each](chosen)

    runs = {}  # by hash, because sweeps can share runs
    for run in planned:
        if methods and {canonical_name(run.config.method), *run.config.validate_as}.isdisjoint(methods):
            continue
        run = add_changes(name, run, changes or {})
        identity = config_hash(run.config)
        first = runs.setdefault(identity, run)
        if run.needle:  # one sweep that fine-tunes a run is enough
            runs[identity] = dataclasses.replace(first, needle=run.needle)
    require(runs, f"sweep {name} has no runs of {', '.join(methods or ())}. Choose other methods.")
    return [*runs.values()]


def add_changes(name: str, run: Run, changes: dict) -> Run:
    """Return the run with the changes that differ from its preset, and with the canonical name of its method.

    Raise ValueError for a field that the sweep sets, and for an unknown method.
    """
    for field in changes.keys() & run.changes.keys():
        instruction = {"seed": "Use --seeds.", "method": "Use --methods."}.get(field, "Leave it out.")
        same = changes[field] == run.changes[field]
        require(same, f"--{field}: sweep {name} sets it to {run.changes[field]!r} in a run. {instruction}")
    base = preset(run.preset)
    steps = (changes | run.changes).get("steps", base.steps)
    scaled = with_changes(base, {"steps": steps})  # other fields scale with steps
    defaults = vars(scaled) | {"steps": base.steps}
    added = {field: value for field, value in changes.items() if value != defaults[field]}
    changed = added | run.changes
    if "method" in changed:
        changed["method"] = canonical_name(changed["method"])
    return dataclasses.replace(run, changes=changed)

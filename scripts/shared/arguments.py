"""Command lines: the parser of all commands, and the options that choose runs, for sweep and reproduce."""

import argparse
from pathlib import Path

from configs import command_line
from configs.command_line import read_fields
from configs.runs import SET_BY_SWEEPS, Needle
from configs.sweeps import SCALES
from errors import require


class Parser(command_line.Parser):
    """Reads the arguments of a command. about: what --help prints, the command's docstring."""

    def __init__(self, prog: str, about: str):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=about, formatter_class=layout, allow_abbrev=False)

    def add_device(self):
        self.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])

    def add_runs(self):
        self.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")


def add_run_options(parser: Parser, runs_dir: Path | None = Path("runs")):
    """Add the options that choose runs of a sweep. runs_dir: the default of --runs-dir."""
    add = parser.add_argument
    add("--scale", choices=SCALES, help="size of models and texts (default: paper)")
    add("--seeds", nargs="+", type=int, help="seeds (default: the seeds of the scale)")
    add("--methods", nargs="+", metavar="METHOD", help="only these methods")
    add("--needle", nargs="+", default=[], metavar="KEY=VALUE", help="changed needle-task settings")
    add("--runs-dir", type=Path, default=runs_dir, help="folder of the run folders (default: runs)")


def field_changes(arguments: list[str]) -> dict:
    """Return the fields of train_gpt.py that the arguments set, with their values.

    Raise ValueError for arguments that train_gpt.py refuses, and for fields that a sweep sets itself.
    """
    fields = read_fields(arguments)
    for field in SET_BY_SWEEPS:
        require(field not in fields, f"--{field} is set by the sweep. Leave it out. --runs-dir names the folder.")
    return fields


def needle_changes(pairs: list[str]) -> dict:
    """Return the needle settings in KEY=VALUE pairs. Raise ValueError for another pair."""
    names = [*vars(Needle())]
    for pair in pairs:
        key, separator, _ = pair.partition("=")
        known = key in names and separator
        require(known, f"--needle {pair} is no needle setting. Write KEY=VALUE, with a key of {', '.join(names)}.")
    return read_fields([f"--{pair}" for pair in pairs], Needle())

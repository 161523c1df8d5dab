"""The words on the command line by which sweep and reproduce choose runs."""

import argparse
from pathlib import Path

from configs.command_line import read_config, read_fields
from configs.runs import SET_BY_SWEEPS
from configs.sweeps import SCALES
from errors import require
from model.methods import canonical_name


def add_run_options(parser: argparse.ArgumentParser, runs_dir: Path | None = Path("runs")):
    """Add the options that say which runs of a sweep are meant, and where they are. runs_dir: the default."""
    parser.add_argument("--scale", choices=SCALES, help="which presets stand for the paper's models (default: paper)")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of the scale's")
    parser.add_argument("--methods", nargs="+", type=canonical_name, metavar="METHOD", help="only these")
    parser.add_argument("--needle", nargs="+", default=[], metavar="KEY=VALUE", help="instead of the scale's settings")
    parser.add_argument("--runs-dir", type=Path, default=runs_dir, help="where the runs are (default: runs)")


def field_changes(preset: str, arguments: list[str]) -> dict:
    """Return the fields of train_gpt.py that the arguments name, with their values.

    Raises ValueError for what train_gpt.py refuses, and for the fields that a sweep sets itself.
    """
    read_config([preset, *arguments])  # which refuses them together
    fields = read_fields(arguments)
    if own := [field for field in fields if field in SET_BY_SWEEPS]:
        raise ValueError(f"--{own[0]} is set by the sweep, which names and resumes its runs; their place is --runs-dir")
    return fields


def needle_changes(pairs: list[str]) -> dict:
    """Return the settings of the needle task that --needle names, with their values."""
    return {key: int(v) if v.isdigit() and key != "haystack" else v for key, v in key_values("--needle", pairs).items()}


def key_values(option: str, pairs: list[str]) -> dict[str, str]:
    """Return KEY=VALUE pairs as a dict. Raises ValueError for what is no such pair."""
    for pair in pairs:
        require("=" in pair, f"{option} takes KEY=VALUE, got {pair}")
    return dict(pair.split("=", 1) for pair in pairs)

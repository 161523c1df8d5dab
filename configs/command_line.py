"""Parses the command line of train_gpt.py: a preset and the fields that differ. Other commands use read_fields."""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import os
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from configs.config import Config, OptionValue, with_changes
from configs.presets import PRESETS, preset
from errors import UserError, did_you_mean

SEE_HELP = "Use --help to list all options."


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print the usage and exit. --runs-dir and --runs_dir are the same option."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        if options.get("type") is Path:
            options["type"] = lambda text: Path(text).expanduser()  # as in value_options
        action = super().add_argument(*names, **options)
        for name in action.option_strings:
            alias = name[:2] + name[2:].translate(str.maketrans("-_", "_-"))
            self._option_string_actions.setdefault(alias, action)  # --help shows only the name
        return action

    def error(self, message: str):
        raise UserError(f"{message}. {SEE_HELP}")


def read_fields(
    arguments: list[str], defaults: Config = Config(), fields: Collection[str] = (), description: str = ""
) -> dict:
    """Return the fields that the arguments set with `--field value`, by name.

    defaults: an instance of the dataclass that has the fields. --help shows its values and ends the process. fields:
    names of the fields that can be set (default: all). description: the first lines of --help.
    Raise ValueError for an unknown field and for a value of the wrong type.
    """
    # 1. Add an argument for each field.
    parser = Parser(
        description=description,
        usage="--field value ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    docstrings = field_docstrings(type(defaults))
    types = {field.name: field.type for field in dataclasses.fields(defaults) if not fields or field.name in fields}
    for name, kind in types.items():
        default = getattr(defaults, name)
        if isinstance(default, tuple):
            default = " ".join(map(str, default))
        text = f"{docstrings[name]} (default: {'none' if default in ('', {}) else default})"
        text = text.replace("%", "%%")
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text, **value_options(kind))

    # 2. Parse them.
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0]
        suggestion = did_you_mean(name, [f"--{field}" for field in types], SEE_HELP)
        raise UserError(f"unknown argument {unknown[0]!r}. {suggestion}")

    # 3. Turn lists into dictionaries and tuples.
    values = vars(namespace)
    for name, value in values.items():
        origin = get_origin(types[name])
        if origin is tuple:
            values[name] = tuple(value)
        if origin is dict:
            if len(value) % 2:
                raise UserError(f"--{name} has a name without a value. Give pairs of a name and a value.")
            values[name] = dict(zip(value[::2], map(option_value, value[1::2])))
    return values


def value_options(kind: type) -> dict:
    """Return the arguments of add_argument that make it read a value of this type."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return dict(choices=parts)
    if get_origin(kind) is tuple:
        count = "*" if parts[-1] is ... else len(parts)
        return dict(nargs=count, type=parts[0], metavar=parts[0].__name__.upper())
    if get_origin(kind) is dict:
        return dict(nargs="*", metavar="NAME VALUE")
    if kind is str:  # no shell expands the ~ of --runs_dir=~/runs, or of an argument from a file
        return dict(type=os.path.expanduser, metavar="STR")
    return dict(type=kind, metavar=kind.__name__.upper())


def option_value(text: str) -> OptionValue:
    """Return a number, True or False if the text is one, else the text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


@functools.cache
def field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of its base classes."""
    docstrings = {}
    for base in reversed(kind.__mro__[:-1]):  # without object
        (definition,) = ast.parse(inspect.getsource(base)).body
        for field, docstring in itertools.pairwise(definition.body):
            if isinstance(field, ast.AnnAssign):
                docstrings[field.target.id] = " ".join(docstring.value.value.split())
    return docstrings


def read_config(arguments: list[str], usage: str = "") -> Config:
    """Return the configuration that the arguments describe: a preset's name, then `--field value` pairs.

    usage: the text that --help prints before it ends the process. Raise ValueError for arguments that describe no run.
    The attention method is not checked (runtime/build.py).
    """
    docs = {name: inspect.getdoc(getattr(make, "func", make)) for name, make in PRESETS.items()}  # func: of a partial
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage, "Presets:", *(f"    {name:14}{text.splitlines()[0]}" for name, text in docs.items()), sep="\n")
        sys.exit(0 if arguments else 2)
    name, *fields = arguments
    base = preset(name)
    return with_changes(base, read_fields(fields, base, description=f"{name}: {docs[name]}\n\n{usage}"))

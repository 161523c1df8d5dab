"""The command line of train_gpt.py: a preset, and the fields that differ from it. Other commands have fields too."""

import ast
import dataclasses
import inspect
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Literal, get_args, get_origin

from configs.config import Config, OptionValue, is_of_type, shortened, with_changes
from configs.presets import PRESETS, preset
from errors import did_you_mean, require

SEE_HELP = "--help lists all fields"


def read_config(arguments: list[str], usage: str = "", methods: ModuleType | None = None) -> Config:
    """Return the run that a preset's name and --field value, as in sys.argv[1:], describe.

    usage: the text of --help, which ends the process. methods: the module model.methods, whose methods --help lists; it
    gives each method its one name. Raise ValueError, in one line, for arguments that describe no run.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage + "\nPresets: " + ", ".join(PRESETS))
        sys.exit(0 if arguments else 2)
    name, *rest = arguments
    base = preset(name)
    if "-h" in rest or "--help" in rest:
        print(help_text(name, methods.METHODS if methods else ()))
        sys.exit(0)
    config = with_changes(base, read_fields(rest))
    if methods:
        others = tuple(map(methods.canonical_name, config.validate_as))
        config = dataclasses.replace(config, method=methods.canonical_name(config.method), validate_as=others)
    own_name = f"{name}-{config.method.replace(',', '.')}-s{config.seed}"
    return config if config.name else dataclasses.replace(config, name=own_name)


def read_fields(arguments: list[str], of: type = Config) -> dict:
    """Return the values of the fields that --field value, --field=value or --no_field among the arguments set.

    of: the dataclass that has the fields.

    A dash in a field's name is an underscore; of a field that is set twice, the last counts. Raise ValueError, in one
    line, for an unknown field, or what is no value of a field's type.
    """
    types = {field.name: field.type for field in dataclasses.fields(of)}
    flags = {f"--{name}": name for name in types} | {f"--no_{name}": name for name in types if types[name] is bool}
    given = {}
    for argument in arguments:
        if argument.startswith("-") and isinstance(option_value(argument), str):  # not a negative number
            flag, *words = argument.split("=", maxsplit=1)
            flag = flag[:2] + flag[2:].replace("-", "_")
            require(flag in flags, f"unknown field {flag}; {did_you_mean(flag, flags, SEE_HELP)}")
            given[flags[flag]] = flag, words
        else:
            require(given, f"{shortened(argument)} is the value of no field; {SEE_HELP}")
            words.append(argument)
    return {name: field_value(types[name], flag, words) for name, (flag, words) in given.items()}


def field_value(kind: type, flag: str, words: list[str]) -> object:
    """Return the value of this type that the flag and the words after it say. Raise ValueError when they say none."""
    value = words  # a list, which is of none of the types
    with suppress(ValueError):
        if kind is bool:
            value = words or not flag.startswith("--no_")
        elif get_origin(kind) is dict:
            value = dict(zip(words[::2], map(option_value, words[1::2]), strict=True))
        elif get_origin(kind) is tuple:
            value = tuple(map(get_args(kind)[0], words))
        elif len(words) == 1:
            value = words[0] if get_origin(kind) is Literal else kind(words[0])
    takes = placeholder(kind) or "no value"
    require(is_of_type(value, kind), f"{flag} takes {takes}, got {shortened(' '.join(words))}; {SEE_HELP}")
    return value


def option_value(word: str) -> OptionValue:
    """Return the number, the truth value or else the text that a word says."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return {"True": True, "False": False}.get(word, word)


def placeholder(kind: type) -> str:
    """Return what stands for a value of this type in messages and in --help."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return "|".join(parts)
    if get_origin(kind) is tuple:
        return " ".join("..." if part is ... else placeholder(part) for part in parts)
    return {bool: "", int: "INT", float: "FLOAT", str: "TEXT"}.get(kind, "NAME VALUE ...")


def help_text(name: str, methods: Iterable[str]) -> str:
    """Return the help of a preset: its docstring, and each field with its docstring and its value in this preset."""
    lines = [f"usage: train_gpt.py {name} [--field value ...]", "", inspect.getdoc(PRESETS[name]) or "", ""]
    return "\n".join([*lines, methods_help(methods), "", *fields_help(Config, vars(preset(name)))])


def methods_help(methods: Iterable[str]) -> str:
    return textwrap.fill(f"Methods: {', '.join(methods)}.", shutil.get_terminal_size().columns)


def fields_help(of: type, values: dict[str, object]) -> list[str]:
    """Return the lines about the fields of a dataclass: each with its docstring and its value, where it has one."""
    width, types, lines = shutil.get_terminal_size().columns, {f.name: f.type for f in dataclasses.fields(of)}, []
    for field, below in itertools.pairwise(ast.parse(inspect.getsource(of)).body[0].body):
        if isinstance(field, ast.AnnAssign) and field.target.id in values:  # below it is its docstring
            field, text = field.target.id, " ".join(below.value.value.split())
            value = values[field]
            value = " ".join(map(str, value)) if isinstance(value, tuple) else value
            lines.append(f"  --{field} {placeholder(types[field]) or f'or --no_{field}'}")
            text = f"{text} (default: {'none' if value in ('', {}) else value})"
            lines.append(textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return lines

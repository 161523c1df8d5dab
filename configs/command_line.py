"""The command line of train_gpt.py: a preset, and fields that differ from it; and how all commands refuse."""

import dataclasses
import difflib
import inspect
import io
import itertools
import sys
from collections.abc import Iterable
from contextlib import contextmanager, redirect_stderr

import tyro

from configs.config import Config, Fields, with_changes
from configs.presets import PRESETS, preset

FIELDS = [field.name for field in dataclasses.fields(Config)]


@contextmanager
def user_errors(*kinds: type[Exception]):
    """One line and exit code 2 for what the user can put right: ValueError and OSError, unless others are named."""
    try:
        yield
    except kinds or (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def read_config(arguments: list[str], usage: str = "", methods: Iterable[str] = ()) -> Config:
    """From a preset's name and --field value, as in sys.argv[1:]; ValueError, in one line, for what is none.

    --help ends the process; `usage` (of the program) and `methods` (the names of the attention methods) are its text.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage + "\nPresets: " + ", ".join(PRESETS))
        sys.exit(0 if arguments else 2)
    name, *rest = arguments
    base = preset(name)
    for field in named_fields(rest):
        if field not in (*FIELDS, "help"):
            close = difflib.get_close_matches(field, FIELDS, n=3)
            hint = f"did you mean {' or '.join('--' + c for c in close)}?" if close else "--help lists all fields"
            raise ValueError(f"unknown field --{field}; {hint}")
    # Parsed unchecked, so that what Config refuses is one line from us and not a box from tyro.
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            parsed = tyro.cli(
                Fields,
                default=Fields(**base.to_dict()),
                args=rest,
                prog=f"train_gpt.py {name}",
                description=f"{inspect.getdoc(PRESETS[name]) or ''}\n\nMethods: {', '.join(methods)}.",
                use_underscores=True,
            )
    except SystemExit as leaving:
        if not leaving.code:  # --help
            raise
        title, *lines = [line.strip(" │╭╮╰╯─-") for line in box.getvalue().splitlines()]  # a rule is then empty
        said = itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, lines))
        raise ValueError(f"{' '.join(said)}; --help lists all fields") from None
    config = with_changes(base, {field: getattr(parsed, field) for field in named_fields(rest)})
    return config if config.name else dataclasses.replace(config, name=f"{name}-{config.method}-s{config.seed}")


def named_fields(arguments: list[str]) -> list[str]:
    """The fields that --field value, --field=value, --no_field among the arguments set, each once."""
    words = [word.removeprefix("--").split("=")[0].replace("-", "_") for word in arguments if word.startswith("--")]
    return list(dict.fromkeys(word if word in FIELDS else word.removeprefix("no_") for word in words))

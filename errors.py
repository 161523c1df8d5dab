"""Users' mistakes: each ends the program with one line that names it, and exit code 2."""

import difflib
import os
import sys
import time
from collections.abc import Collection
from contextlib import contextmanager


class UserError(ValueError):
    """Something that the user can put right. The message says what is wrong and what to do."""


def require(condition: object, message: str):
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)


def did_you_mean(name: str, valid: Collection[str], otherwise: str = "") -> str:
    """Return a question that names similar valid names. Without similar names, return `otherwise` or list all names."""
    if close := difflib.get_close_matches(name, valid):
        return f"Did you mean {' or '.join(close)}?"
    return otherwise or f"There are: {', '.join(valid) or 'none'}"


@contextmanager
def exit_on_user_error():
    """End the program with one line: exit code 2 for ValueError and OSError, 130 for Ctrl-C."""
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(5)  # torchrun ends this rank meanwhile if rank 0 found the same mistake
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)

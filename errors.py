"""How a mistake of the user is answered: one line that names it, and exit code 2. Every room may import this."""

import difflib
import sys
from collections.abc import Collection
from contextlib import contextmanager


def require(condition: object, message: str):
    """Raise ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def did_you_mean(name: str, valid: Collection[str], otherwise: str = "") -> str:
    """Return a question that names the nearest of the valid names; where none is near, `otherwise` or all of them."""
    if close := difflib.get_close_matches(name, valid):
        return f"did you mean {' or '.join(close)}?"
    return otherwise or f"there are: {', '.join(valid) or 'none'}"


@contextmanager
def exit_on_user_error():
    """Make of ValueError and OSError, which the user can put right, one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

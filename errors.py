"""How a mistake of the user is named, in one line. Every room may import this."""

import difflib
from collections.abc import Collection


def require(condition: object, message: str):
    """Raise ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def did_you_mean(name: str, valid: Collection[str], otherwise: str = "") -> str:
    """Return a question that names the nearest of the valid names; where none is near, `otherwise` or all of them."""
    if close := difflib.get_close_matches(name, valid):
        return f"did you mean {' or '.join(close)}?"
    return otherwise or f"there are: {', '.join(valid) or 'none'}"

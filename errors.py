"""Reports a user's mistake in one line, and ends the program with exit code 2."""

import difflib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Collection
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake that the user can correct. The message names the problem, then the remedy."""


def require(condition: object, message: str):
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)


def did_you_mean(name: str, valid: Collection[str], otherwise: str = "") -> str:
    """Return a question that names similar valid names. Without similar names, return `otherwise` or list all names."""
    if close := difflib.get_close_matches(name, valid):
        return f"Did you mean {' or '.join(close)}?"
    return otherwise or (f"Use one of {', '.join(sorted(valid))}." if valid else "There are none.")


def lacks_memory(error: BaseException) -> bool:
    """Return True if Python or PyTorch raised the error for a lack of memory. PyTorch's is a RuntimeError."""
    return isinstance(error, MemoryError) or bool(re.search("out of memory|can't allocate memory", str(error)))


@contextmanager
def exit_on_user_error():
    """End the program with one line: exit code 2 for ValueError, OSError and a lack of memory, 130 for Ctrl-C."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed our output, as in `command | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again when it exits
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError) as error:
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0":
            time.sleep(5)  # rank 0 reports the same mistake first, and torchrun then ends this rank
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if isinstance(error, (UserError, OSError)) else f" ({last.filename}, line {last.lineno})"
        print(f"error: {' '.join(str(error).splitlines())}{place}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        print(f"error: out of memory ({' '.join(str(error).split())[:300]}). Use fewer tokens.", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)

"""Files that are whole at every instant, and JSON that any reader accepts."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO


def replace_file(path: Path, write: Callable[[BinaryIO], object]):
    """Write a file so that a kill or a power cut at any instant leaves the old content or the new one, never a part.

    `write` fills a temporary file, `<name>.partial`, which then takes the place of `path`. A symbolic link at `path` is
    replaced, not followed. When `write` raises, `path` is unchanged; an OSError
    (disk full) names it. One process at a time may write to a folder.
    """
    partial = path.with_name(path.name + ".partial")
    if os.path.lexists(partial):  # a process that was killed may have left it
        partial.unlink()
    try:
        with open(partial, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # the data must be on the disk before the name is
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(f"cannot write {path}: {error.strerror or error}") from error
        raise
    sync(path.parent)  # a caller may delete the older file only when the new name is on the disk


def sync(path: Path) -> None:
    """Write a file's bytes, or a folder's names, to the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str):
    """Write a text as replace_file does."""
    replace_file(path, lambda file: file.write(text.encode()))


def open_own(path: Path, mode: str, **options: Any) -> IO:
    """Open a file for appending, with the options of `open`. A symbolic link is not followed: it raises OSError."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666), **options)


def append(path: Path, text: str):
    """Add text to the end of a file. Raise OSError naming the file (disk full, read-only)."""
    try:
        with open_own(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error


def to_json(record: Any, **options: Any) -> str:
    """Return the record as json.dumps does, with NaN and infinities as null: many readers refuse Python's words."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(record), allow_nan=False, **options)

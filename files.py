"""Writes files that no kill can leave half-written, and JSON that any reader accepts."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO


def replace_file(path: Path, write: Callable[[BinaryIO], object]):
    """Replace a file as a whole. A kill or a power cut leaves either the old content or the new content.

    `write` fills a temporary file, `<name>.partial`, which then takes the place of `path`. A symbolic link at `path` is
    replaced, not followed. When `write` raises, `path` is unchanged. Raise OSError naming the file (disk full). One
    process at a time may write to a folder.
    """
    partial = path.with_name(path.name + ".partial")
    if os.path.lexists(partial):  # a killed process may have left one
        partial.unlink()
    try:
        with open(partial, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # the content must reach the disk before the name does
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(f"cannot write {path} ({error.strerror or error}). Check disk and permissions.") from error
        raise
    sync(path.parent)  # callers may delete an older file next, so the new name must be on the disk


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's file names, to the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str):
    """Replace a file with this text, as replace_file does."""
    replace_file(path, lambda file: file.write(text.encode()))


def open_no_symlink(path: Path, mode: str, **options: Any) -> IO:
    """Return the opened file, with the options of `open`. Raise OSError if the path is a symbolic link."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666), **options)


def append(path: Path, text: str):
    """Add text to the end of a file. Raise OSError naming the file (disk full, read-only)."""
    try:
        with open_no_symlink(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror or error}). Check disk and permissions.") from error


def to_json(record: Any, **options: Any) -> str:
    """Return the record as JSON, with null for NaN and infinities, because JSON has no such numbers."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(record), allow_nan=False, **options)

"""Files that are whole at every instant, and JSON that any reader accepts."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO, Callable


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that a kill or a power cut at any instant leaves the old content or the new one, never a part.

    `write` fills a temporary file beside `path`, `<name>.partial`; when it raises, that file is removed and `path` is
    as it was. One process at a time may write to a folder (RunFolder's lock sees to it).
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # the data must be on the disk before the name is
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too, before a caller deletes what it replaces
    finally:
        os.close(folder)


def append(path: Path, text: str) -> None:
    """Add text to the end of a file, all of it or nothing. Raises OSError naming the file (disk full, read-only)."""
    data = text.encode()
    try:
        with open(path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]  # a disk that is nearly full takes a part
            except OSError:
                file.truncate(size)
                raise
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from error


def to_json(record: Any, **options: Any) -> str:
    """`json.dumps`, with NaN and infinities as null: JSON has no word for them, and many readers refuse Python's."""
    return json.dumps(_finite(record), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

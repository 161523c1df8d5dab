"""Files that are whole at every instant, JSON that any reader accepts, and links that lead nobody astray.

A run folder may come from a stranger, with a symbolic link where we write: to a file of ours anywhere else. So nothing
in it is opened for writing but through `replace_file`, `append` and `open_own`, which follow none. Every room may
import this.
"""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO


def refuse_link(path: Path):
    """Raise OSError for a symbolic link where a file or folder of ours should be. (What it is in may be reached by
    links.)"""
    if path.is_symlink():
        raise OSError(f"{path} is a symbolic link to {os.readlink(path)}, where writing may do harm: remove it")


def open_own(path: Path, mode: str, **options: Any) -> IO:
    """Open a file for writing, with the options of `open`. Raise OSError for a symbolic link."""
    try:
        return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666), **options)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise


def replace_file(path: Path, write: Callable[[BinaryIO], object]):
    """Write a file so that a kill or a power cut at any instant leaves the old content or the new one, never a part.

    `write` fills a temporary file beside `path`, `<name>.partial`, made afresh; when it raises, that file is removed
    and `path` is as it was. One process at a time may write to a folder (RunFolder's lock sees to it).
    """
    partial = path.with_name(path.name + ".partial")
    if os.path.lexists(partial):  # of a process that was killed; or a link, to a file that is not ours
        partial.unlink()
    try:
        with open(partial, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # the data must be on the disk before the name is
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)  # the new name too, before a caller deletes what it replaces


def sync(path: Path) -> None:
    """Write to the disk a file's bytes, or a folder's names, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str):
    """Write a text as replace_file does."""
    replace_file(path, lambda file: file.write(text.encode()))


def append(path: Path, text: str):
    """Add text to the end of a file, all of it or nothing. Raise OSError naming the file (disk full, read-only)."""
    data = text.encode()
    try:
        with open_own(path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]  # a disk that is nearly full takes a part
            except OSError:
                file.truncate(size)
                raise
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error


def to_json(record: Any, **options: Any) -> str:
    """Return the record as json.dumps would, with these options of it, but NaN and infinities as null: JSON has no word
    for them, and many readers refuse Python's."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(record), allow_nan=False, **options)

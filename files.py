"""Writes files that no kill can leave half-written, and reads and writes JSON. Errors name the file."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import IO, Any, BinaryIO, Literal, get_args, get_origin

from errors import UserError


@contextmanager
def naming(action: str, path: Path) -> Iterator[None]:
    """Let an OSError say which file was concerned and what was being done, "read" or "write".

    Python names the file in errors of opening, but not in errors of reading and writing, such as a full disk.
    Libraries in Rust (safetensors, tokenizers) raise other exceptions with "os error" in their text.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot {action} {path} ({reason}). Check disk and permissions.") from error


def replace_file(path: Path, write: Callable[[BinaryIO], object]):
    """Replace a file as a whole. A kill or a power cut leaves either the old content or the new content.

    `write` fills a temporary file, `<name>.partial`, which then takes the place of `path`. A symbolic link at `path` is
    replaced, not followed. When `write` raises, `path` is unchanged. Raise OSError naming the file (disk full). One
    process at a time may write to a folder.
    """
    partial = path.with_name(path.name + ".partial")
    with naming("write", path):
        if os.path.lexists(partial):  # a killed process may have left one
            partial.unlink()
        try:
            with open(partial, "xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())  # the content must reach the disk before the name does
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    sync(path.parent)  # callers may delete an older file next, so the new name must be on the disk


def sync(path: Path):
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
    with naming("write", path), open_no_symlink(path, "a", encoding="utf-8") as file:
        file.write(text)


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raise OSError naming the file."""
    with naming("read", path):
        return path.read_bytes()


def parse_object(content: bytes | str, place: str, remedy: str = "Restore it.", **fields: type) -> dict[str, Any]:
    """Return the JSON object in `content`. fields: the type of each field that it must have.

    place: a name for messages. Raise UserError naming the place and the field, if the content is anything else.
    """
    try:
        value = json.loads(content, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error}). {remedy}") from None
    return check_object(value, place, remedy, **fields)


def refuse_constant(name: str):
    """Raise ValueError for NaN and infinities, which Python's json reads, although JSON has no such numbers."""
    raise ValueError(f"it has {name}")


def check_object(value: Any, place: str, remedy: str = "Restore it.", **fields: type) -> dict[str, Any]:
    """Return the value if it is a JSON object with these fields of these types. Otherwise raise UserError."""
    if type(value) is not dict:
        raise UserError(f"{place} is not a JSON object. {remedy}")
    for name, kind in fields.items():
        if name not in value:
            raise UserError(f"{place} has no {name}. {remedy}")
        if not fits(value[name], kind):
            shown = kind.__name__ if type(kind) is type else kind
            raise UserError(f"{place}: {name} is {str(value[name])[:40]!r}, not of type {shown}. {remedy}")
    return value


def fits(value: Any, kind: Any) -> bool:
    """Return True if a value, perhaps of JSON, has this type.

    An int is a float too. The keys of dict[int, ...] are digits, because JSON's keys are texts.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in parts
    if origin is UnionType:
        return any(fits(value, part) for part in parts)
    if origin is dict:
        key_kind, item_kind = parts
        keys_fit = isinstance(value, dict) and (key_kind is str or all(map(str.isdecimal, value)))
        return keys_fit and all(fits(item, item_kind) for item in value.values())
    if origin is tuple and ... not in parts:  # of this number of values; JSON has lists in its place
        fits_in_number = isinstance(value, (list, tuple)) and len(value) == len(parts)
        return fits_in_number and all(map(fits, value, parts))
    if origin in (list, tuple):
        return isinstance(value, origin) and all(fits(item, parts[0]) for item in value)
    if kind is float:
        return isinstance(value, (int, float)) and type(value) is not bool
    return type(value) is kind


def to_json(record: Any, **options: Any) -> str:
    """Return the record as JSON, with null for NaN and infinities, because JSON has no such numbers."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(record), allow_nan=False, **options)

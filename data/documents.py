"""Reads the documents of text files, and counts what was read, left out and changed.

A file with one JSON object a line (.jsonl, .ndjson or .json) and a .parquet file have one document in the field `text`
of each row. Any other file is one document, or several documents separated by lines `<|endoftext|>`. Files may be
compressed as .gz or .zst. The library pyarrow, in requirements-extras.txt, reads .parquet and .zst.
"""

import codecs
import gzip
import itertools
import json
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType

from data.tokenizer import END_OF_TEXT
from errors import UserError, require

SEPARATOR = re.compile(rf"^[^\S\n]*{re.escape(END_OF_TEXT)}[^\S\n]*$", re.MULTILINE)
KIND = re.compile(r"(\.[^.]*)?(\.gz|\.zst)?$")
IN_FOLDERS = re.compile(r"\.(txt|jsonl|ndjson|parquet|json(?=\.))(\.gz|\.zst)?")  # a bare .json is rarely text
REPLACED = "not UTF-8, replaced"  # bytes, and lone surrogates in JSON
LISTED = 8  # of the largest counts of one kind
CHARACTERS = 1000  # of a file for each replaced character, at least; with fewer, the file has another encoding


def kind_of(path: Path) -> str:
    """Return the end of a file's name in lower case, such as ".txt" or ".json.gz"."""
    return KIND.search(path.name.lower())[0]


class DocumentReader:
    """Iterates over the documents of files and folders, stripped and not empty. The files are sorted.

    field: of a row, with its text. skip_bad: leave out rows without a text, instead of refusing them.
    Raise ValueError for a folder without text, and while reading for a damaged file or a row without a text.
    """

    def __init__(self, inputs: Iterable[Path], field: str = "text", skip_bad: bool = False):
        self.field, self.skip_bad = field, skip_bad
        # "documents" and files "left out" by kind of file, "bad rows" and REPLACED by file.
        self.counts = defaultdict(Counter)
        self.not_utf8: list[Path] = []
        files = set()
        for path in inputs:
            files.update(self._find(path) if path.is_dir() else [path])
        self.files = sorted(files)

    def _find(self, folder: Path) -> Sequence[Path]:
        """Return the files of text anywhere in a folder. Count the others."""
        found = []
        for path in folder.rglob("*"):
            if path.is_dir():
                if path.is_symlink() or not os.access(path, os.R_OK | os.X_OK):  # rglob does not look into it
                    self.counts["left out"]["linked or locked folders"] += 1
            elif IN_FOLDERS.fullmatch(kind_of(path)):
                found.append(path)
            else:
                self.counts["left out"][kind_of(path)] += 1
        require(found, f"{folder}: has no .txt, .jsonl or .parquet files. Name another folder, or files.")
        return found

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            characters, kind = 0, kind_of(path)

            def replace(error: UnicodeError, path: Path = path):
                self.counts[REPLACED][path] += error.end - error.start
                return codecs.replace_errors(error)

            codecs.register_error("counted", replace)
            for text in filter(None, self._texts(path, kind)):
                characters += len(text)
                self.counts["documents"][kind] += 1
                yield text
            if self.counts[REPLACED][path] * CHARACTERS > characters:
                self.not_utf8.append(path)

    def _texts(self, path: Path, kind: str) -> Iterator[str]:
        """Yield the texts of a file, stripped. Some may be empty."""
        try:
            if kind.startswith(".parquet"):
                table = _pyarrow(path).parquet.ParquetFile(path, page_checksum_verification=True)
                batches = table.iter_batches(columns=[self.field])
                rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
                yield from self._texts_of_rows(rows, path)
                return
            with _open(path, kind) as file:
                if kind.startswith((".json", ".ndjson")):
                    yield from self._texts_of_rows(file, path)
                    return
                whole = file.read()
        except UserError:
            raise
        except (EOFError, zlib.error, OSError, ValueError) as error:  # pyarrow raises the last two
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot read {path} ({reason}). Get the file again, or check the disk.") from error
        problem = f"{path}: not a text in UTF-8. Convert it to .txt or .jsonl, perhaps .gz."
        require("\0" not in whole, problem)  # a compressed or binary file, or one in UTF-16
        if re.match(rf'{{.*"{re.escape(self.field)}":', whole):
            raise UserError(f"{path}: begins with a JSON object. Give the file a name with .jsonl at the end.")
        yield from map(str.strip, SEPARATOR.split(whole))

    def _texts_of_rows(self, rows: Iterable[str | dict], path: Path) -> Iterator[str]:
        """Yield the text of each row: a line of JSON, which may be empty, or a dictionary."""
        for number, row in enumerate(rows, 1):
            try:
                if isinstance(row, str):
                    row = json.loads(row) if row.strip() else {self.field: ""}
                yield row[self.field].encode(errors="counted").decode().strip()  # JSON can have lone surrogates
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                if not self.skip_bad:
                    problem = f"{path}: line {number}: not an object with a text in field {self.field!r}"
                    raise UserError(f"{problem}. Choose a --field, or leave such lines out with --skip-bad.") from error
                self.counts["bad rows"][path] += 1

    def report(self):
        """Print what was read, left out and changed. Raise ValueError for files in another encoding than UTF-8."""
        for name, counter in self.counts.items():
            parts = [f"{count:,} {key or 'without suffix'}" for key, count in counter.most_common()]
            if len(parts) > LISTED:
                parts[LISTED:] = [f"and {len(parts) - LISTED} more"]
            if parts:
                print(f"{name}: {', '.join(parts)}", flush=True)
        if self.not_utf8:
            names = ", ".join(map(str, self.not_utf8))
            raise UserError(f"{names}: not UTF-8. Convert with `iconv -f ENCODING -t UTF-8`, or leave out.")


def _open(path: Path, kind: str) -> TextIOWrapper:
    if kind.endswith(".zst"):
        raw = _pyarrow(path).input_stream(path, compression="zstd")
    else:
        raw = gzip.open(path) if kind.endswith(".gz") else open(path, "rb")
    return TextIOWrapper(raw, encoding="utf-8-sig", errors="counted", newline="\n")


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: needs pyarrow. Run `pip install pyarrow`.") from None
    return pyarrow

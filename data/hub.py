"""Fetches files of a data set on the Hugging Face hub as text for `python -m data.text`.

    python -m data.hub codeparrot/codeparrot-clean-valid file-000000000054.json.gz --field content --out data/code-text

A file is .jsonl or .json (an object a line), .parquet (needs pyarrow) or .txt, the first two and .txt also as .gz; what
the page of the data set calls a column is its --field. --min-characters leaves out short documents: losses by position
tell about long ones alone. Each file becomes OUT/NAME.jsonl, whole or not at all; one that is there is not fetched
again. Of data sets that are code, the hub has a parquet form: --revision refs/convert/parquet.
"""

import argparse
import gzip
import itertools
import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

from data.fineweb import fetch_file
from errors import exit_on_user_error, require
from files import replace_file

KINDS = (".jsonl", ".json", ".parquet", ".txt")


def kind_of(name: str) -> str:
    """Return which of KINDS a file is. ValueError if it is none of them."""
    kind = Path(name.removesuffix(".gz")).suffix
    readable = kind in KINDS and not name.endswith(".parquet.gz")
    require(readable, f"{name} cannot be read: {', '.join(KINDS)} can, all but .parquet also as .gz")
    return kind


def documents(path: Path, name: str, field: str) -> Iterator[str]:
    """Yield the texts in a file; name: what it is called on the hub. ValueError where they are not in the field."""
    kind = kind_of(name)
    if kind == ".parquet":
        yield from parquet_documents(path, name, field)
        return
    with (gzip.open if name.endswith(".gz") else open)(path, "rt", encoding="utf-8", errors="replace") as file:
        try:
            for number, line in enumerate(file if kind != ".txt" else [file.read()], start=1):
                yield line if kind == ".txt" else line_text(line, f"{name}, line {number}", field)
        except (EOFError, zlib.error) as error:
            raise ValueError(f"{name} is damaged: {error}") from error


def line_text(line: str, where: str, field: str) -> str:
    try:
        text = json.loads(line)[field]
    except (ValueError, TypeError, LookupError, RecursionError):
        text = None
    require(isinstance(text, str), f"{where}: not a JSON object with a text in field {field!r}")
    return text


def parquet_documents(path: Path, name: str, field: str) -> Iterator[str]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{name} needs pyarrow: pip install -r requirements-extras.txt") from error
    file = parquet.ParquetFile(path)
    there = file.schema_arrow.names
    require(field in there, f"{name} has no column {field!r}, but {', '.join(there)}: give one with --field")
    for batch in file.iter_batches(batch_size=64, columns=[field]):
        texts = batch.column(0).to_pylist()
        require(all(isinstance(text, str) for text in texts), f"{name}: column {field!r} holds other than text")
        yield from texts


def fetch(repo: str, name: str, out: Path, field: str, min_characters: int, most: int | None, revision: str) -> str:
    """Write at most so many of a file's documents to OUT/NAME.jsonl, and return what is there in words.

    OSError when the hub cannot give the file; ValueError when it has no such text, or none as long as that.
    """
    path = out / f"{name.removesuffix('.gz').removesuffix(kind_of(name)).replace('/', '-')}.jsonl"
    if path.exists():
        return f"{path}: already there"
    incoming = out / ".incoming"
    try:
        fetched, _ = fetch_file(f"{name} of {repo}", repo, name, incoming, revision=revision)
        long = (text for text in documents(fetched, name, field) if len(text) >= min_characters)
        count = characters = 0

        def write(file):
            nonlocal count, characters
            for text in itertools.islice(long, most):
                file.write(json.dumps({"text": text}).encode() + b"\n")
                count, characters = count + 1, characters + len(text)
            require(count, f"{name} of {repo} has no document of {min_characters} characters")

        replace_file(path, write)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return f"{path}: {count:,} documents, {characters:,} characters"


@exit_on_user_error()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.hub", description="Fetch text of a data set on the hub.")
    parser.add_argument("repo", metavar="DATASET", help="its name on the hub, OWNER/NAME")
    parser.add_argument("files", nargs="+", metavar="FILE", help="files of it")
    parser.add_argument("--out", required=True, type=Path, help="folder for the text")
    parser.add_argument("--field", default="text", help="field or column of the text (default: text)")
    parser.add_argument("--min-characters", type=int, default=1, help="leave out shorter documents")
    parser.add_argument("--documents", type=int, help="the first so many of each file (default: all)")
    parser.add_argument("--revision", default="main", help="branch or commit of the data set (default: main)")
    args = parser.parse_args(argv)
    require(args.documents is None or args.documents >= 1, f"--documents must be at least 1, got {args.documents}")
    for name in args.files:
        kind_of(name)
    for name in args.files:
        limits = args.field, args.min_characters, args.documents, args.revision
        print(fetch(args.repo, name, args.out, *limits))


if __name__ == "__main__":
    main()

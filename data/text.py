"""Tokenises text files and .jsonl files to a folder of shards with a manifest.

    python -m data.text books/ --tokenizer gpt2 --out data/books
    python -m data.text crawl.jsonl.gz notes/*.md --tokenizer bpe:4096 --out data/crawl

A .jsonl or .json file has one JSON object per line. A document is the field `text` (--field) of an object. Any other
file is one document, or several documents separated by lines `<|endoftext|>`. Files may be compressed as .gz. In a
folder, all .txt and .jsonl files are read. Bytes that are not UTF-8 become U+FFFD. Empty documents, and white space
around documents, are dropped. `--tokenizer` takes gpt2, a file, a data folder, or a Hugging Face model. `bpe:SIZE`
trains a tokenizer on the train split.

The sha256 of a document assigns it to train or val, so no document is in both. If a split has no document, val is the
last --val-fraction of each document instead. Both splits are shuffled with a fixed seed. Every document begins with
the end-of-text token, as in the FineWeb shards. The whole text is in memory.

`--copy-rows 0.5 --row-tokens 256` makes half of the rows of the train split copy rows (see data.copy_rows).
"""

import argparse
import gzip
import hashlib
import itertools
import json
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.copy_rows import SEED, RowLengths, check_rows, rows
from data.shard_writer import ShardWriter
from data.shards import TOKEN, TOKENIZER_FILE
from data.tokenizer import END_OF_TEXT, TOKENIZER_CONFIG, Tokenizer, load_tokenizer, pieces, train_bpe
from errors import UserError, exit_on_user_error

SEPARATOR = re.compile(rf"^[^\S\n]*{re.escape(END_OF_TEXT)}[^\S\n]*$", re.MULTILINE)
SHUFFLE_SEED = 0
PIECES = 32  # encoded in one call: enough to keep all cores busy


# ---- documents ----


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """Return all files among the inputs, and the .txt and .jsonl files (or .gz) anywhere in their folders, sorted."""
    found = set()
    for path in inputs:
        if not path.is_dir():
            found.add(path)
            continue
        files = [file for file in path.rglob("*") if has_suffix(file, ".txt", ".jsonl")]
        if not files:
            raise UserError(f"{path} has no .txt and no .jsonl files. Name another folder, or files.")
        found.update(files)
    return sorted(found)


def has_suffix(path: Path, *suffixes: str) -> bool:
    """Return True if the file has one of these suffixes, perhaps followed by .gz."""
    return path.name.removesuffix(".gz").endswith(suffixes)


def read_documents(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the documents of a file, stripped. Raise ValueError for a JSON line without a text in its field."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="\n") as file:
            if has_suffix(path, ".json", ".jsonl"):
                texts = (_text_of_line(line, field, f"{path}: line {i}") for i, line in enumerate(file, 1))
            else:
                whole = file.read()
                if "\0" in whole:  # a compressed or binary file, or one in UTF-16
                    raise UserError(f"{path}: not a text in UTF-8. Convert it to .txt or .jsonl, perhaps .gz.")
                texts = map(str.strip, SEPARATOR.split(whole))
            yield from filter(None, texts)
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: cut off or damaged ({error}). Get the file again.") from error


def _text_of_line(line: str, field: str, place: str) -> str:
    """Return the text in a line of a .jsonl file, stripped; "" for an empty line. place: file and line, for errors."""
    try:
        text = json.loads(line)[field] if line.strip() else ""
        return text.encode(errors="replace").decode().strip()  # JSON can have lone surrogates
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{place}: not a JSON object with a text in field {field!r}. Choose a --field.") from error


def split_documents(documents: Iterable[str], val_fraction: float) -> dict[str, list[str]]:
    """Return the documents of "train" and "val", shuffled. Raise ValueError for too little text."""
    if not 0 < val_fraction < 1:
        raise UserError(f"--val-fraction {val_fraction}: out of range. Use more than 0 and less than 1.")

    # 1. The hash of a document decides its split.
    splits = {"train": [], "val": []}
    for text in documents:
        draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
        splits["val" if draw < val_fraction else "train"].append(text)
    if not all(splits.values()):
        print(f"too few documents to divide: val is the last {100 * val_fraction:g} % of each", flush=True)
        splits = _cut_documents(splits["train"] or splits["val"], val_fraction)
    if not all(splits.values()):
        raise UserError(f"--val-fraction {val_fraction}: too few documents for two splits. Use more text.")

    # 2. Shuffle.
    for split, texts in splits.items():
        order = np.random.default_rng(SHUFFLE_SEED).permutation(len(texts))
        splits[split] = [texts[i] for i in order]
    return splits


def _cut_documents(texts: list[str], val_fraction: float) -> dict[str, list[str]]:
    """Return two splits. val has the last `val_fraction` of each document, and starts at the end of a line or word."""
    parts = {"train": [], "val": []}
    for text in texts:
        place = len(text) - round(val_fraction * len(text))
        cut = text.find("\n" if "\n" in text[place:] else " ", place)
        if cut < 0:
            parts["train"].append(text)
        else:
            parts["train"].append(text[:cut].strip())
            parts["val"].append(text[cut:].strip())
    return parts


# ---- shards ----


def prepare(
    inputs: Sequence[Path],
    out: Path,
    tokenizer: str,
    *,
    field: str = "text",
    val_fraction: float = 0.05,
    shard_tokens: int = 100_000_000,
    name: str = "text",
    copy_rows: float | None = None,
    row_lengths: RowLengths = (),
) -> dict:
    """Write the shards of the inputs, as the command does, and return the manifest.

    copy_rows: share of copy rows in the train split. None: the split is natural text alone.
    row_lengths: pairs (tokens in a row, position in the stream where such rows end). The last position is None. A
    position is a multiple of the lengths of the rows before it and after it.
    """
    # 1. Check the arguments, before all text is read.
    if copy_rows is not None:
        check_rows(copy_rows, row_lengths)
    if any(out.glob("*.bin")):
        raise UserError(f"{out}: already has shards. Choose another --out, or remove them.")
    files = find_files(inputs)
    bpe = re.fullmatch(r"bpe:(\d+)", tokenizer)
    loaded = None if bpe else load_tokenizer(tokenizer)
    size = int(bpe[1]) if bpe else loaded.vocab_size
    if size > 2**16:
        raise UserError(f"--tokenizer {tokenizer}: {size} tokens do not fit shards of uint16. Use at most {2**16}.")

    # 2. Read the documents, and put the tokenizer into the folder.
    documents = itertools.chain.from_iterable(read_documents(file, field) for file in files)
    splits = split_documents(tqdm(documents, "reading", unit="doc", disable=None), val_fraction)
    out.mkdir(parents=True, exist_ok=True)
    if bpe:
        (out / TOKENIZER_CONFIG).unlink(missing_ok=True)  # of a tokenizer that was here before
        train_bpe(splits["train"], size, out / TOKENIZER_FILE)
        loaded = load_tokenizer(out / TOKENIZER_FILE)
    elif loaded.name == TOKENIZER_FILE:
        _copy_tokenizer(loaded.file, out)

    # 3. Write the tokens of each split.
    with ShardWriter(
        out,
        name,
        tokenizer=loaded.name,
        vocab_size=loaded.vocab_size,
        shard_tokens=shard_tokens,
    ) as writer:
        for split, texts in splits.items():
            parts = encode(tqdm(texts, f"encoding {split}", unit="doc", disable=None), loaded)
            if split == "train" and copy_rows is not None:
                text = np.concatenate([np.array(tokens, TOKEN) for tokens in parts])
                parts = rows(text, copy_rows, row_lengths)
            num_tokens = 0
            for tokens in parts:
                writer.write(split, tokens)
                num_tokens += len(tokens)
            print(f"{split}: {len(texts):,} documents, {num_tokens:,} tokens", flush=True)
        if copy_rows is not None:
            writer.manifest["copy_rows"] = {"share": copy_rows, "row_lengths": row_lengths, "seed": SEED}
        return writer.close()


def _copy_tokenizer(file: Path, out: Path):
    """Copy a tokenizer and its configuration, if it has one, into a folder. It may be there already."""
    if file.resolve() == (out / TOKENIZER_FILE).resolve():
        return
    shutil.copyfile(file, out / TOKENIZER_FILE)
    config = file.with_name(TOKENIZER_CONFIG)
    if config.exists() and config.parent.resolve() != out.resolve():
        shutil.copyfile(config, out / TOKENIZER_CONFIG)


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of documents piece by piece. Each document begins with the end-of-text token."""
    numbered = itertools.chain.from_iterable(enumerate(pieces(text)) for text in texts)
    while batch := list(itertools.islice(numbered, PIECES)):
        tokens = tokenizer.encode_batch([piece for _, piece in batch])
        for (number, _), ids in zip(batch, tokens):
            yield ids if number else [tokenizer.eot, *ids]


@exit_on_user_error()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.text", description="Tokenise text files into shards.")
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="files, or folders of .txt and .jsonl")
    parser.add_argument("--tokenizer", required=True, help="gpt2, bpe:SIZE, a file, a data folder, or a model")
    parser.add_argument("--out", required=True, type=Path, help="output folder, without shards yet")
    parser.add_argument("--field", default="text", help="field of a .jsonl object that holds the text")
    parser.add_argument("--val-fraction", type=float, default=0.05, help="approximate share of val (default 0.05)")
    parser.add_argument("--copy-rows", type=float, metavar="SHARE", help="share of copy rows in train, such as 0.5")
    parser.add_argument("--row-tokens", type=int, default=256, help="tokens in a row, with --copy-rows (default 256)")
    args = parser.parse_args(argv)
    prepare(
        args.inputs,
        args.out,
        args.tokenizer,
        field=args.field,
        val_fraction=args.val_fraction,
        copy_rows=args.copy_rows,
        row_lengths=[(args.row_tokens, None)],
    )


if __name__ == "__main__":
    main()

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

from data.copy_rows import MIN_SEGMENT, SEED, RowLengths, rows
from data.shard_writer import ShardWriter
from data.shards import TOKEN, TOKENIZER_FILE
from data.tokenizer import END_OF_TEXT, TOKENIZER_CONFIG, Tokenizer, load_tokenizer, pieces, train_bpe
from errors import UserError, exit_on_user_error, require

SEPARATOR = re.compile(rf"^[^\S\n]*{re.escape(END_OF_TEXT)}[^\S\n]*$", re.MULTILINE)
SHUFFLE_SEED = 0
PIECES = 32  # encoded in one call: enough to keep all cores busy


# ---- documents ----


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """Return all files among the inputs, and the .txt and .jsonl files (or .gz) anywhere in their folders, sorted."""
    found = {path for path in inputs if not path.is_dir()}
    for folder in (path for path in inputs if path.is_dir()):
        files = [file for file in folder.rglob("*") if file.name.removesuffix(".gz").endswith((".txt", ".jsonl"))]
        require(files, f"{folder} has no .txt and no .jsonl files. Name another folder, or files.")
        found.update(files)
    return sorted(found)


def read_documents(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the documents of a file, stripped. Raise ValueError for a JSON line without a text in its field."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="\n") as file:
            if not path.name.removesuffix(".gz").endswith((".json", ".jsonl")):
                whole = file.read()  # a compressed or binary file, or one in UTF-16, has the character NUL
                require("\0" not in whole, f"{path}: not a text in UTF-8. Convert it to .txt or .jsonl, perhaps .gz.")
                yield from (text for part in SEPARATOR.split(whole) if (text := part.strip()))
                return
            for number, line in enumerate(file, 1):
                try:
                    text = json.loads(line)[field] if line.strip() else ""
                    text = text.encode(errors="replace").decode().strip()  # JSON can have lone surrogates
                except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                    problem = f"{path}: line {number}: not a JSON object with a text in field {field!r}"
                    raise UserError(f"{problem}. Choose a --field.") from error
                if text:
                    yield text
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: cut off or damaged ({error}). Get the file again.") from error


def split_documents(documents: Iterable[str], val_fraction: float) -> dict[str, list[str]]:
    """Return the documents of "train" and "val", shuffled. Raise ValueError for too little text."""
    require(0 < val_fraction < 1, f"--val-fraction {val_fraction}: out of range. Use more than 0 and less than 1.")
    splits = {"train": [], "val": []}
    for text in documents:
        draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
        splits["val" if draw < val_fraction else "train"].append(text)
    if not all(splits.values()):
        print(f"too few documents to divide: val is the last {100 * val_fraction:g} % of each", flush=True)
        splits = _cut_documents(splits["train"] or splits["val"], val_fraction)
    require(all(splits.values()), f"--val-fraction {val_fraction}: too few documents for two splits. Use more text.")
    return {
        split: [texts[i] for i in np.random.default_rng(SHUFFLE_SEED).permutation(len(texts))]
        for split, texts in splits.items()
    }


def _cut_documents(texts: list[str], val_fraction: float) -> dict[str, list[str]]:
    """Return two splits. val has the last `val_fraction` of each document, and starts at the end of a line or word."""
    parts = {"train": [], "val": []}
    for text in texts:
        place = len(text) - round(val_fraction * len(text))
        cut = text.find("\n" if "\n" in text[place:] else " ", place)
        parts["train"].append(text[:cut].strip() if cut >= 0 else text)
        parts["val"] += [text[cut:].strip()] if cut >= 0 else []
    return parts


# ---- shards ----


def prepare(
    inputs: Sequence[Path], out: Path, tokenizer: str, *,
    field: str = "text", val_fraction: float = 0.05, shard_tokens: int = 100_000_000,
    name: str = "text", copy_rows: float | None = None, row_lengths: RowLengths = (),
) -> dict:  # fmt: skip
    """Write the shards of the inputs, as the command does, and return the manifest.

    copy_rows: share of copy rows in the train split. None: the split is natural text alone.
    row_lengths: pairs (tokens in a row, position in the stream where such rows end). The last position is None. A
    position is a multiple of the lengths of the rows before it and after it.
    """
    out = Path(out)
    if copy_rows is not None:
        least, shortest = 2 * MIN_SEGMENT, min(length for length, _ in row_lengths)
        require(0 <= copy_rows < 1, f"--copy-rows {copy_rows}: out of range. Use at least 0 and less than 1.")
        require(shortest >= least, f"--row-tokens {shortest}: too short. Use at least {least} tokens.")
    require(not any(out.glob("*.bin")), f"{out}: already has shards. Choose another --out, or remove them.")
    files = find_files(inputs)
    bpe = re.fullmatch(r"bpe:(\d+)", tokenizer)
    tok = None if bpe else load_tokenizer(tokenizer)  # raises errors before all text is read
    size = int(bpe[1]) if bpe else tok.vocab_size
    require(size <= 2**16, f"--tokenizer {tokenizer}: {size} tokens do not fit shards of uint16. Use at most {2**16}.")
    documents = itertools.chain.from_iterable(read_documents(file, field) for file in files)
    splits = split_documents(tqdm(documents, "reading", unit="doc", disable=None), val_fraction)

    out.mkdir(parents=True, exist_ok=True)
    if bpe:
        (out / TOKENIZER_CONFIG).unlink(missing_ok=True)  # of a tokenizer that was here before
        train_bpe(splits["train"], int(bpe[1]), out / TOKENIZER_FILE)
        tok = load_tokenizer(out / TOKENIZER_FILE)
    elif tok.name == TOKENIZER_FILE and tok.file.resolve() != (out / TOKENIZER_FILE).resolve():
        shutil.copyfile(tok.file, out / TOKENIZER_FILE)
        config = tok.file.with_name(TOKENIZER_CONFIG)
        if config.exists() and config.parent.resolve() != out.resolve():
            shutil.copyfile(config, out / TOKENIZER_CONFIG)
    with ShardWriter(out, name, tokenizer=tok.name, vocab_size=tok.vocab_size, shard_tokens=shard_tokens) as writer:
        for split, texts in splits.items():
            parts = encode(tqdm(texts, f"encoding {split}", unit="doc", disable=None), tok)
            if split == "train" and copy_rows is not None:
                parts = rows(np.concatenate([np.array(tokens, TOKEN) for tokens in parts]), copy_rows, row_lengths)
            num_tokens = 0
            for tokens in parts:
                writer.write(split, tokens)
                num_tokens += len(tokens)
            print(f"{split}: {len(texts):,} documents, {num_tokens:,} tokens", flush=True)
        if copy_rows is not None:
            writer.manifest["copy_rows"] = {"share": copy_rows, "row_lengths": row_lengths, "seed": SEED}
        return writer.close()


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of documents piece by piece. Each document begins with the end-of-text token."""
    numbered = ((number, piece) for text in texts for number, piece in enumerate(pieces(text)))
    while batch := list(itertools.islice(numbered, PIECES)):
        tokens = tokenizer.encode_batch([piece for _, piece in batch])
        yield from ([tokenizer.eot, *ids] if number == 0 else ids for (number, _), ids in zip(batch, tokens))


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
    options = vars(parser.parse_args(argv))
    row_lengths = [(options.pop("row_tokens"), None)]
    prepare(**options, row_lengths=row_lengths)


if __name__ == "__main__":
    main()

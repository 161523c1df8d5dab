"""Tokenises text files and .jsonl files to a folder of shards with a manifest.

    python -m data.text books/ --tokenizer gpt2 --out data/books
    python -m data.text crawl.jsonl notes/ --suffixes .md .txt --tokenizer bpe:4096 --out data/crawl

A .jsonl file has one JSON object a line, with its text in the field `text` (--field). Any other file is one document,
or several that are separated by lines `<|endoftext|>`. Bytes that are not UTF-8 become U+FFFD, with a warning. White
space around documents is dropped, and so are empty documents. `--tokenizer` takes gpt2, a file, a data folder, or a
Hugging Face model; `bpe:SIZE` trains a tokenizer on the train split.

The sha256 of its text puts a document into train or val, so a document is never in both. If a split is empty then, the
last --val-fraction of each document is val. Both splits are shuffled with a fixed seed. Every document begins with
the end-of-text token, as in the FineWeb shards. Memory holds the places of all documents, and the text of one batch.

`--copy-rows 0.5 --row-tokens 64:1146880 256` makes half of the rows of the train split copy rows (see data.copy_rows).
Rows have 64 tokens up to token 1,146,880 of the stream, and 256 tokens after it.
"""

import argparse
import hashlib
import re
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.copy_rows import SEED, RowLengths, check_copy_rows, row_length, rows
from data.download import read_field
from data.shard_writer import ShardWriter
from data.shards import TOKEN, TOKENIZER_FILE
from data.tokenizer import END_OF_TEXT, TOKENIZER_CONFIG, Tokenizer, load_tokenizer, pieces, train_bpe
from errors import exit_on_user_error, require

SHUFFLE_SEED = 0
ENCODE_CHARACTERS = 1 << 20  # in one call: enough to keep all cores busy


# ---- documents ----


def find_files(inputs: Sequence[Path], suffixes: Sequence[str], exclude: Sequence[str]) -> list[Path]:
    """Return all named files, and the files with a suffix anywhere in named folders, sorted.

    exclude: names of files and folders to skip. ValueError if there is no file.
    """
    files = set()
    for path in map(Path, inputs):
        require(path.exists(), f"{path}: no such file or folder. Name another.")
        root, found = (path, path.rglob("*")) if path.is_dir() else (path.parent, [path])
        for file in found:
            wanted = file.is_file() and (file == path or file.suffix in suffixes)
            if wanted and not set(file.relative_to(root).parts) & set(exclude):
                files.add(file)
    require(files, f"{', '.join(map(str, inputs))}: no files of {', '.join(suffixes)}. Use other --suffixes.")
    return sorted(files)


def document_spans(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a file's documents: lines of a .jsonl, else the text between lines `<|endoftext|>`."""
    start = position = 0
    with open(path, "rb") as file:
        for line in file:
            end = position + len(line)
            if path.suffix == ".jsonl":
                yield position, end
            elif line.strip() == END_OF_TEXT.encode():
                yield start, position
                start = end
            position = end
    if path.suffix != ".jsonl":
        yield start, position


def read_document(path: Path, start: int, end: int, field: str) -> tuple[str, int]:
    """Return the text of a document, stripped, and the number of U+FFFD in it for bytes that are not UTF-8."""
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(end - start)
    text = data.decode(errors="replace")
    replaced = text.count("\ufffd") - data.count("\ufffd".encode())
    text = text.strip()
    if path.suffix == ".jsonl" and text:
        text = read_field(text, field, f"{path}: byte {start}")
        text = text.encode(errors="replace").decode().strip()  # JSON can spell halves of surrogate pairs
    return text, replaced


@dataclass
class Corpus:
    """Holds the places of the documents of both splits, in the order of the stream."""

    files: list[Path]
    field: str
    spans: dict[str, np.ndarray]  # split -> (documents, 3) int64: file, start, end
    is_cut: bool = False  # both splits have a part of each document

    def text(self, split: str, index: int) -> str:
        file, start, end = map(int, self.spans[split][index])
        return read_document(self.files[file], start, end, self.field)[0]

    def texts(self, split: str, description: str) -> Iterator[str]:
        """Yield the documents of a split, with a progress bar."""
        for index in tqdm(range(len(self.spans[split])), f"{description} {split}", unit="doc", disable=None):
            yield self.text(split, index)


def index_documents(files: list[Path], field: str, val_fraction: float) -> Corpus:
    """Find, split and shuffle the documents. ValueError for too little text, or a line of .jsonl without a text."""
    require(0 < val_fraction < 1, f"--val-fraction {val_fraction}: out of range. Use more than 0 and less than 1.")
    spans, replaced = {"train": array("q"), "val": array("q")}, 0
    for index, path in enumerate(tqdm(files, "finding documents", unit="file", disable=None)):
        for start, end in document_spans(path):
            text, replaced_here = read_document(path, start, end, field)
            replaced += replaced_here
            if text:
                draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
                spans["val" if draw < val_fraction else "train"].extend((index, start, end))
    if replaced:
        print(f"warning: {replaced:,} characters are not UTF-8 and became U+FFFD", file=sys.stderr)
    is_cut = not all(spans.values())
    if is_cut:
        spans = _cut_documents(files, spans["train"] or spans["val"], val_fraction)
    require(all(spans.values()), f"--val-fraction {val_fraction}: too few documents for two splits. Use more text.")
    rows = {split: np.array(flat, np.int64).reshape(-1, 3) for split, flat in spans.items()}
    shuffled = {split: np.random.default_rng(SHUFFLE_SEED).permutation(part) for split, part in rows.items()}
    return Corpus(files, field, shuffled, is_cut)


def _cut_documents(files: list[Path], spans: array, val_fraction: float) -> dict[str, list[int]]:
    """Return the spans of two splits: val has the last `val_fraction` of each document, from white space on.

    Lines of .jsonl, and documents without such white space, stay in train.
    """
    parts = {"train": [], "val": []}
    for index, start, end in np.array(spans, np.int64).reshape(-1, 3).tolist():
        cut = end - round(val_fraction * (end - start))
        with open(files[index], "rb") as file:
            file.seek(cut)
            space = re.search(rb"\n", tail := file.read(end - cut)) or re.search(rb"\s", tail)
        if space and files[index].suffix != ".jsonl" and tail[space.start() :].strip():
            cut += space.start()
            parts["val"] += [index, cut, end]
        else:
            cut = end
        parts["train"] += [index, start, cut]
    return parts


# ---- shards ----


def prepare(
    inputs: Sequence[Path], out: Path, tokenizer: str, *,
    suffixes: Sequence[str] = (".txt", ".jsonl"), field: str = "text", val_fraction: float = 0.05,
    shard_tokens: int = 100_000_000, name: str = "text", exclude: Sequence[str] = (),
    copy_rows: float | None = None, row_lengths: RowLengths = (),
) -> dict:  # fmt: skip
    """Do what the command does (see the module) and return the manifest.

    copy_rows: share of copy rows among the rows of the train split; None: the split is natural text alone.
    row_lengths: pairs (tokens in a row, position in the stream where such rows end), with None as the last position.
    """
    out = Path(out)
    if copy_rows is not None:
        check_copy_rows(copy_rows, row_lengths)
    require(copy_rows is not None or not row_lengths, "--row-tokens: copy rows alone have a length. Add --copy-rows.")
    require(not any(out.glob("*.bin")), f"{out}: has shards. Choose another --out, or remove them.")
    files = find_files(inputs, suffixes, exclude)
    bpe = re.fullmatch(r"bpe:(\d+)", tokenizer)
    tok = None if bpe else load_tokenizer(tokenizer)  # may raise, before all text is read
    corpus = index_documents(files, field, val_fraction)
    if corpus.is_cut:
        print(f"too few documents: the last {100 * val_fraction:g} % of each are val", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    if bpe:
        train_bpe(corpus.texts("train", "training bpe on"), int(bpe[1]), out / TOKENIZER_FILE)
        tok = load_tokenizer(out / TOKENIZER_FILE)
    elif tok.file:
        shutil.copyfile(tok.file, out / TOKENIZER_FILE)
        config = tok.file.with_name(TOKENIZER_CONFIG)
        if config.exists():
            shutil.copyfile(config, out / TOKENIZER_CONFIG)
    with ShardWriter(out, name, tokenizer=tok.name, vocab_size=tok.vocab_size, shard_tokens=shard_tokens) as writer:
        for split, spans in corpus.spans.items():
            parts = encode(corpus.texts(split, "encoding"), tok)
            if split == "train" and copy_rows is not None:
                parts = _add_copy_rows(parts, out, copy_rows, row_lengths)
            num_tokens = 0
            for tokens in parts:
                writer.write(split, tokens)
                num_tokens += len(tokens)
            print(f"{split}: {len(spans):,} documents, {num_tokens:,} tokens", flush=True)
        if copy_rows is not None:
            lengths = [list(pair) for pair in row_lengths]
            writer.manifest["copy_rows"] = {"share": copy_rows, "row_lengths": lengths, "seed": SEED}
        return writer.close()


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of documents piece by piece; each document begins with the end-of-text token."""
    batch, characters = [], 0  # (is the first piece of a document, piece)
    for text in texts:
        for number, piece in enumerate(pieces(text)):
            batch.append((number == 0, piece))
            characters += len(piece)
            if characters >= ENCODE_CHARACTERS:
                yield from _encode_batch(batch, tokenizer)
                batch, characters = [], 0
    yield from _encode_batch(batch, tokenizer)


def _encode_batch(batch: list[tuple[bool, str]], tokenizer: Tokenizer) -> Iterator[list[int]]:
    for (is_first, _), ids in zip(batch, tokenizer.encode_batch([piece for _, piece in batch])):
        yield [tokenizer.eot, *ids] if is_first else ids


def _add_copy_rows(
    parts: Iterable[list[int]], folder: Path, share: float, row_lengths: RowLengths
) -> Iterator[np.ndarray]:
    """Yield rows of the train split. The natural text stands in an unnamed file on the disk of the folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        for tokens in parts:
            file.write(np.array(tokens, TOKEN))
        file.flush()
        yield from rows(np.memmap(file, TOKEN, "r"), share, row_lengths)


@exit_on_user_error()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.text", description="Tokenise text files into shards.")
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="files, or folders with all they hold")
    parser.add_argument("--tokenizer", required=True, help="gpt2, FILE.json, bpe:SIZE, or a model")
    parser.add_argument("--out", required=True, type=Path, help="folder for the shards; must not have any yet")
    parser.add_argument("--suffixes", nargs="+", default=[".txt", ".jsonl"], help="suffixes of files in folders")
    parser.add_argument("--field", default="text", help="field of a .jsonl object that holds the text")
    parser.add_argument("--val-fraction", type=float, default=0.05, help="share of the text, about (default 0.05)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens in a shard")
    parser.add_argument("--name", default="text", help="shards are called NAME_train_000001.bin, ...")
    parser.add_argument("--exclude", nargs="+", default=[], metavar="NAME", help="names of files and folders to skip")
    parser.add_argument("--copy-rows", type=float, metavar="SHARE", help="share of copy rows in train, as 0.5")
    rows_help = "tokens in a row, each but the last with the position in the stream where such rows end"
    options = {"nargs": "+", "default": [], "metavar": "LENGTH[:END]", "dest": "row_lengths", "help": rows_help}
    parser.add_argument("--row-tokens", type=row_length, **options)
    prepare(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    main()

"""Tokenises text files and .jsonl files to a folder of shards with a manifest.

    python -m data.text books/ --tokenizer gpt2 --out data/books
    python -m data.text crawl.jsonl notes/ --suffixes .md .txt --tokenizer bpe:4096 --out data/crawl

A .jsonl file holds one JSON object a line, its text in the field `text` (--field). Any other file is one document, or
several, separated by lines `<|endoftext|>`. Bytes that are not UTF-8 become U+FFFD, with a warning; white space around
documents is dropped, and so are empty documents. `--tokenizer meta-llama/Llama-2-7b-hf`, a model of Hugging Face's or
its folder, takes the model's own; then its token for the beginning of a text stands before each document.

The sha256 of its text puts a document into train or val, so the same document is never in both, whatever the files.
Where that leaves a split empty, as it may with few documents, every document is cut instead: its last --val-fraction is
val, from the end of a line on if there is one near. Both splits are shuffled with a fixed seed, so the order of the
files is not the order of the stream. Every document is preceded by the end-of-text token, as in the FineWeb shards.

`--copy-rows 0.5 --row-tokens 64:1146880 256` makes half of the rows of the train split copy rows (see data.copy_rows).
Rows have 64 tokens up to token 1,146,880 of the stream, and 256 tokens after it.

Memory holds the places of all documents (24 bytes each) and one document at a time: the text is read once to find the
documents, and once in shuffled order to encode them; in between `bpe:SIZE` trains a tokenizer on the train split.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.copy_rows import SEED, RowLengths, check_copy_rows, parse_row_lengths, rows
from data.fineweb import time_limit
from data.model_files import END_OF_TEXT, TOKENIZER_CONFIG, first_token, model_file
from data.shards import TOKEN, TOKENIZER_FILE, ShardWriter, read_manifest, refuse_file
from errors import exit_on_user_error, require

SHUFFLE_SEED = 0
GPT2_VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"  # as OpenAI published them
GPT2_ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
ENCODE_CHARACTERS = 1 << 20  # in one call: enough to keep all cores busy
PIECE_CHARACTERS = 1 << 18  # of a document at once: the tokenizers library takes some 160 bytes of memory for each
# Tests and tables of characters in Python's standard library, and packages that other people installed.
NOT_TEXT = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "entities.py")
WARNINGS = 3  # files that are named for bytes that are not UTF-8


# ---- tokenizers ----


@dataclass(frozen=True)
class Tokenizer:
    """Holds what the project needs of a tokenizer, whichever library runs it."""

    name: str  # in the manifest: "gpt2", or the name of the tokenizer's file in the data folder
    vocab_size: int
    eot: int  # id of the end-of-text token
    encode_batch: Callable[[list[str]], list[list[int]]]  # special tokens in the text are plain text
    decode: Callable[[Sequence[int]], str]
    file: Path | None = None

    def encode(self, text: str) -> list[int]:
        return [token for piece in pieces(text) for token in self.encode_batch([piece])[0]]


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load "gpt2", "gpt2:DIR" (its two files are in DIR), a `tokenizers` FILE.json, that of a prepared data folder, or
    that of a model of Hugging Face's: its folder, or its name on the hub, which a Path is never taken for.

    OSError if files cannot be had; ValueError if there is no such tokenizer.
    """
    name, _, folder = str(spec).partition(":")
    path = Path(spec)
    if name == "gpt2":
        return _load_gpt2(Path(folder) if folder else None)
    require(isinstance(spec, str) or path.exists(), f"{path} is not here: run this where the data of the run is")
    if (path / TOKENIZER_CONFIG).exists() or re.fullmatch(r"[\w.-]+/[\w.-]+", str(spec)) and not path.exists():
        model_file(spec, TOKENIZER_CONFIG)
        return _load_file(model_file(spec, TOKENIZER_FILE))
    if path.is_dir():
        manifest = read_manifest(path)
        require(manifest, f"{path}: no manifest.json in this folder that would name its tokenizer")
        return load_tokenizer("gpt2" if manifest["tokenizer"] == "gpt2" else path / manifest["tokenizer"])
    names = "gpt2, gpt2:DIR, a tokenizers FILE.json, a data folder, or a model's folder or name on the hub"
    require(path.suffix == ".json", f"unknown tokenizer {str(spec)!r}: use {names}")
    return _load_file(path)


def _load_gpt2(folder: Path | None) -> Tokenizer:
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    if folder is None:
        try:
            with time_limit(5, "no answer"):  # the library sets none; it compares what comes with a sha256 of its own
                encoding = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:
            raise OSError(
                f"cannot fetch the files of the gpt2 tokenizer ({type(error).__name__}): set TIKTOKEN_CACHE_DIR to a"
                " cache that has them, or use gpt2:DIR, where DIR holds encoder.json and vocab.bpe"
            ) from error
    else:
        vocab, encoder = folder / "vocab.bpe", folder / "encoder.json"
        ranks = data_gym_to_mergeable_bpe_ranks(str(vocab), str(encoder), GPT2_VOCAB_SHA256, GPT2_ENCODER_SHA256)
        special = {END_OF_TEXT: len(ranks)}
        encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    return Tokenizer("gpt2", encoding.n_vocab, encoding.eot_token, encoding.encode_ordinary_batch, encoding.decode)


def _load_file(path: Path) -> Tokenizer:
    import tokenizers

    require(path.is_file(), f"{path}: no such tokenizer file")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: not a file of the tokenizers library ({error})") from error
    separator = first_token(path)
    eot = tokenizer.token_to_id(separator)
    require(eot is not None, f"{path}: this tokenizer has no token {separator}")
    tokenizer.no_truncation()  # a file may carry its model's maximum length, which would cut documents
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True

    def encode_batch(texts: list[str]) -> list[list[int]]:
        try:
            return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library, which is no Exception and has printed its own lines
            raise ValueError(f"{path}: this tokenizer cannot encode the text ({error})") from error

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    return Tokenizer(TOKENIZER_FILE, max(tokenizer.get_vocab().values()) + 1, eot, encode_batch, decode, file=path)


def pieces(text: str) -> Iterator[str]:
    """Yield pieces of a text, of at most PIECE_CHARACTERS, to be encoded one by one.

    A cut is between a word and the white space after it. GPT-2's pattern of words, which our own tokenizers have too,
    cuts there as well, so the tokens are those of the whole text. They may differ around the cuts for a tokenizer that
    puts something before a text or knows no words, and in a piece without white space, which is cut anywhere.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        last = start + PIECE_CHARACTERS
        ends = (i for i in range(last, start, -1) if text[i] in " \n" and not text[i - 1].isspace())
        end = next(ends, last)
        yield text[start:end]
        start = end
    yield text[start:]


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE with end of text as token 0, of `vocab_size` if the text allows that, and save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes, so that nothing is unknown
    smallest = len(alphabet) + 1
    require(smallest <= vocab_size <= 2**16, f"bpe:{vocab_size}: the size must be from {smallest} to {2**16}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    tokenizer.save(str(path))


# ---- documents ----


def find_files(inputs: Sequence[Path], suffixes: Sequence[str], exclude: Sequence[str]) -> list[Path]:
    """Return the files named and those in folders named (recursively, by suffix), but for those excluded, sorted."""
    files = set()
    for path in map(Path, inputs):
        require(path.exists(), f"{path}: no such file or folder")
        root, found = (path, path.rglob("*")) if path.is_dir() else (path.parent, [path])
        for file in found:
            wanted = file.is_file() and (file == path or file.suffix in suffixes)
            if wanted and not set(file.relative_to(root).parts) & set(exclude):
                files.add(file)
    searched = f"({', '.join(suffixes)}) in {', '.join(map(str, inputs))}"
    require(files, f"no files {searched} that are not excluded")
    return sorted(files)


def write_folders(roots: Sequence[Path], out: Path, exclude: Sequence[str] = NOT_TEXT) -> int:
    """Write each folder of Python source as one document to a .txt file in `out`; return the number of documents.

    A folder's document is its own .py files in sorted order, without those of its subfolders. The order of the names in
    `out` is the order of the roots, and of the folders in a root. exclude: names of files and folders to skip.
    """
    folders = {}  # folder -> texts of its files
    for root in roots:
        for path in find_files([root], [".py"], exclude):
            if text := path.read_text(encoding="utf-8", errors="replace").strip():
                folders.setdefault(path.parent, []).append(text)
    Path(out).mkdir(parents=True, exist_ok=True)
    for number, (folder, texts) in enumerate(folders.items()):
        text = "\n\n\n".join(texts) + "\n"
        (Path(out) / f"{number:05d}-{folder.name}.txt").write_text(text, encoding="utf-8")
    return len(folders)


def document_spans(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a file's documents: its lines if .jsonl, else what is between lines `<|endoftext|>`."""
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
    """Return the text of a document, stripped, and how many of its U+FFFD stand for what is not UTF-8."""
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(end - start)
    text = data.decode(errors="replace")
    replaced = text.count("\ufffd") - data.count("\ufffd".encode())
    text = text.strip()
    if path.suffix == ".jsonl" and text:
        text = _read_field(text, field)
    return text, replaced


def _read_field(line: str, field: str) -> str:
    try:
        text = json.loads(line)[field]
    except (ValueError, RecursionError, TypeError, LookupError):
        text = None
    require(isinstance(text, str), f"not a JSON object with a text in field {field!r}")
    return text.encode(errors="replace").decode().strip()  # JSON can spell halves of surrogate pairs: no encoder can


def cut_document(text: str, val_fraction: float) -> dict[str, str]:
    """Return the parts of a document for train and val.

    val gets the last `val_fraction`, or down to half of that, so that the cut is at the end of a line, or else a word.
    """
    cut = len(text) - round(val_fraction * len(text))
    near = (cut + len(text)) // 2
    ends = [text.find(mark, cut, near) for mark in "\n "]
    cut = next((end for end in ends if end >= 0), cut)
    return {"train": text[:cut].rstrip(), "val": text[cut:].lstrip()}


@dataclass
class Corpus:
    """Holds where the documents of both splits are, in the order of the stream."""

    files: list[Path]
    field: str
    spans: dict[str, np.ndarray]  # split -> (documents, 3) int64: file, start, end
    cut: float | None = None  # the share of val in each document, where both splits have a part of each

    def text(self, split: str, index: int) -> str:
        file, start, end = map(int, self.spans[split][index])
        text, _ = read_document(self.files[file], start, end, self.field)
        return text if self.cut is None else cut_document(text, self.cut)[split]

    def texts(self, split: str) -> Iterator[str]:
        return (self.text(split, index) for index in range(len(self.spans[split])))


def index_documents(files: list[Path], field: str, val_fraction: float) -> Corpus:
    """Find, split and shuffle the documents, cut where they are too few; warn of bytes that are not UTF-8.

    ValueError for a fraction that leaves a split nothing, too little text, or a line of .jsonl that holds none.
    """
    require(0 < val_fraction < 1, f"--val-fraction {val_fraction}: it must be more than 0 and less than 1")
    spans, replaced = {"train": array("q"), "val": array("q")}, Counter()
    total = sum(os.path.getsize(path) for path in files)
    with tqdm(total=total, desc="finding documents", unit="B", unit_scale=True, disable=None) as bar:
        for index, path in enumerate(files):
            for number, (start, end) in enumerate(document_spans(path), 1):
                try:
                    text, wrong = read_document(path, start, end, field)
                except ValueError as error:
                    raise ValueError(f"{path}: line {number}: {error}") from error
                bar.update(end - start)
                replaced[path] += wrong
                if text:
                    draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
                    spans["val" if draw < val_fraction else "train"].extend((index, start, end))
    _warn_of_bytes(+replaced)

    corpus = Corpus(files, field, {split: np.array(flat, np.int64).reshape(-1, 3) for split, flat in spans.items()})
    if not all(spans.values()):
        corpus = _cut_all(corpus, val_fraction)
    for split, places in corpus.spans.items():
        corpus.spans[split] = np.random.default_rng(SHUFFLE_SEED).permutation(places)
    return corpus


def _cut_all(corpus: Corpus, val_fraction: float) -> Corpus:
    """Return the corpus with a part of each document in both splits; ValueError if one split has no text then."""
    everything = np.concatenate(list(corpus.spans.values()))  # (documents, 3)
    cut = Corpus(corpus.files, corpus.field, dict.fromkeys(corpus.spans, everything), val_fraction)
    cut.spans = {split: everything[[bool(text) for text in cut.texts(split)]] for split in cut.spans}
    empty = " and a ".join(split for split, places in cut.spans.items() if not len(places))
    little = f"{len(everything)} documents are too little text to cut a {empty} split from"
    require(not empty, f"{little} at --val-fraction {val_fraction}: use more text, or another fraction")
    return cut


def _warn_of_bytes(replaced: dict[Path, int]) -> None:
    """Print a line for each file (path -> characters) that is not UTF-8; one for all beyond the first WARNINGS."""
    advice = "not UTF-8, they became U+FFFD: convert the text first, if it is of use (iconv -f latin1 -t utf-8)"
    for path, count in list(replaced.items())[:WARNINGS]:
        print(f"warning: {path}: {count:,} characters are {advice}", file=sys.stderr)
    if rest := list(replaced.values())[WARNINGS:]:
        print(f"warning: {len(rest):,} more files: {sum(rest):,} characters are {advice}", file=sys.stderr)


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
    refuse_file(out)
    if copy_rows is None:
        require(not row_lengths, "--row-tokens is for copy rows. Add --copy-rows, or leave it out.")
    else:
        check_copy_rows(copy_rows, row_lengths)
    require(not any(out.glob("*.bin")), f"{out}: already has shards: choose another folder or remove them")
    files = find_files(inputs, suffixes, exclude)
    kind, _, size = tokenizer.partition(":")
    if kind == "bpe":
        require(size.isdecimal(), f"{tokenizer}: the size of the vocabulary must be a number, as in bpe:4096")
    else:
        tok = load_tokenizer(tokenizer)
        words = f"{tokenizer}: a vocabulary of {tok.vocab_size} tokens does not fit shards of uint16"
        require(tok.vocab_size <= 2**16, f"{words}: use a tokenizer of at most {2**16}")
    corpus = index_documents(files, field, val_fraction)
    if corpus.cut is not None:
        share = f"the last {100 * val_fraction:g} % of it are val"
        print(f"too few documents for a draw to give both splits some: each is cut, {share}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    if kind == "bpe":
        texts = tqdm(corpus.texts("train"), "training bpe", len(corpus.spans["train"]), unit="doc", disable=None)
        train_bpe(texts, int(size), out / TOKENIZER_FILE)
        tok = load_tokenizer(out / TOKENIZER_FILE)
    elif tok.file is not None:
        shutil.copyfile(tok.file, out / TOKENIZER_FILE)
        if (beside := tok.file.with_name(TOKENIZER_CONFIG)).exists():
            shutil.copyfile(beside, out / TOKENIZER_CONFIG)

    with ShardWriter(out, name, tokenizer=tok.name, vocab_size=tok.vocab_size, shard_tokens=shard_tokens) as writer:
        for split, spans in corpus.spans.items():
            num_tokens = num_bytes = 0
            texts = tqdm(corpus.texts(split), f"encoding {split}", len(spans), unit="doc", disable=None)
            with tempfile.TemporaryFile(dir=out) as natural:  # its disk has room for as many tokens
                for batch in _batches(texts):
                    starts, parts = zip(*batch)
                    for is_start, ids in zip(starts, tok.encode_batch(list(parts))):
                        tokens = [tok.eot, *ids] if is_start else ids
                        if split == "train" and copy_rows is not None:
                            natural.write(np.array(tokens, TOKEN))
                        else:
                            writer.write(split, tokens)
                        num_tokens += len(tokens)
                    num_bytes += sum(len(part.encode()) for part in parts)
                kind, ratio = "documents" if corpus.cut is None else "cut documents", num_bytes / num_tokens
                print(f"{split}: {len(spans):,} {kind}, {num_tokens:,} tokens, {ratio:.2f} bytes per token", flush=True)
                if split == "train" and copy_rows is not None:
                    natural.flush()
                    for row in rows(np.memmap(natural, TOKEN, "r"), copy_rows, row_lengths):
                        writer.write(split, row)
        if copy_rows is not None:
            lengths = [list(pair) for pair in row_lengths]
            writer.manifest["copy_rows"] = {"share": copy_rows, "row_lengths": lengths, "seed": SEED}
        return writer.close()


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[bool, str]]]:
    """Yield lists of pieces of documents, each with whether it is the first of its document."""
    batch, characters = [], 0
    for text in texts:
        for number, piece in enumerate(pieces(text)):
            batch.append((number == 0, piece))
            characters += len(piece)
            if characters >= ENCODE_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


@exit_on_user_error()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.text", description="Tokenise text files into shards.")
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="files, or folders with all they hold")
    parser.add_argument("--tokenizer", required=True, help="gpt2, gpt2:DIR, FILE.json, bpe:SIZE, or a model")
    parser.add_argument("--out", required=True, type=Path, help="folder for the shards; must not have any yet")
    parser.add_argument("--suffixes", nargs="+", default=[".txt", ".jsonl"], help="what to take from folders")
    parser.add_argument("--field", default="text", help="field of a .jsonl object that holds the text")
    parser.add_argument("--val-fraction", type=float, default=0.05, help="share of the text, about (default 0.05)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens in a shard")
    parser.add_argument("--name", default="text", help="shards are called NAME_train_000001.bin, ...")
    parser.add_argument("--exclude", nargs="+", default=[], metavar="NAME", help="names of files and folders to skip")
    parser.add_argument("--copy-rows", type=float, metavar="SHARE", help="share of copy rows in train, as 0.5")
    rows_help = "tokens in a row, each but the last with the position in the stream where such rows end"
    parser.add_argument("--row-tokens", nargs="+", default=[], metavar="LENGTH[:END]", help=rows_help)
    arguments = vars(parser.parse_args(argv))
    prepare(row_lengths=parse_row_lengths(arguments.pop("row_tokens")), **arguments)


if __name__ == "__main__":
    main()

"""Tokenises text files, JSON lines and .parquet files to a folder of shards with a manifest.

    python -m data.text books/ --tokenizer gpt2 --out data/books
    python -m data.text crawl.jsonl.gz notes/*.md --tokenizer bpe:4096 --out data/crawl

Documents are in the field `text` (--field) of the rows of .jsonl, .ndjson, .json and .parquet files, and in any other
file (data/documents.py). In a folder, all .txt, .jsonl, .ndjson, .json.gz and .parquet files are read. The command
prints the number of documents by kind of file, and the files that were left out. Bytes that are not UTF-8 become
U+FFFD. The command counts these bytes, and refuses a file with many of them. Empty documents, and white space around
documents, are dropped.
`--skip-bad` leaves out rows without a text. `--tokenizer` takes gpt2, a file, a data folder, or a Hugging Face model.
`bpe:SIZE` trains a tokenizer on the train split.

The sha256 of a document assigns it to train or val, so no document is in both. If a split has no document, val is the
last --val-fraction of each document instead. Both splits are shuffled with a fixed seed. Every document begins with
the end-of-text token, as in the FineWeb shards. The whole text is in memory.

`--copy-rows 0.5 --row-tokens 256` makes half of the rows of the train split copy rows (see data.copy_rows).
"""

import argparse
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.copy_rows import SEED, RowLengths, check_rows, rows
from data.documents import DocumentReader
from data.shard_writer import ShardWriter
from data.shards import TOKEN, TOKENIZER_CONFIG, TOKENIZER_FILE, copy_tokenizer
from data.tokenizer import Tokenizer, load_tokenizer, pieces, train_bpe
from errors import exit_on_user_error, require

SHUFFLE_SEED = 0
PIECES = 32  # encoded in one call: enough to keep all cores busy


# ---- splits ----


def split_documents(documents: Iterable[str], val_fraction: float) -> dict[str, list[str]]:
    """Return the documents of "train" and "val", shuffled. Raise ValueError for too little text."""
    require(0 < val_fraction < 1, f"--val-fraction {val_fraction}: out of range. Use more than 0 and less than 1.")

    # 1. The hash of a document decides its split.
    splits = {"train": [], "val": []}
    for text in documents:
        draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
        splits["val" if draw < val_fraction else "train"].append(text)
    if not all(splits.values()):
        print(f"too few documents to divide: val is the last {100 * val_fraction:g} % of each", flush=True)
        splits = _cut_documents(splits["train"] or splits["val"], val_fraction)
    require(all(splits.values()), f"--val-fraction {val_fraction}: too few documents for two splits. Use more text.")

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
    skip_bad: bool = False,
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
    require(not any(out.glob("*.bin")), f"{out}: already has shards. Choose another --out, or remove them.")
    reader = DocumentReader(inputs, field, skip_bad)
    bpe = re.fullmatch(r"bpe:(\d+)", tokenizer)
    loaded = None if bpe else load_tokenizer(tokenizer)
    size = int(bpe[1]) if bpe else loaded.vocab_size
    require(size <= 2**16, f"--tokenizer {tokenizer}: {size} tokens do not fit shards of uint16. Use at most {2**16}.")

    # 2. Read the documents, and put the tokenizer into the folder.
    documents = [*tqdm(reader, "reading", unit="doc", disable=None)]
    reader.report()
    splits = split_documents(documents, val_fraction)
    out.mkdir(parents=True, exist_ok=True)
    if bpe:
        (out / TOKENIZER_CONFIG).unlink(missing_ok=True)  # of a tokenizer that was here before
        train_bpe(splits["train"], size, out / TOKENIZER_FILE)
        loaded = load_tokenizer(out / TOKENIZER_FILE)
    elif loaded.name == TOKENIZER_FILE:
        copy_tokenizer(loaded.file, out)

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


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of documents piece by piece. Each document begins with the end-of-text token."""
    numbered = itertools.chain.from_iterable(enumerate(pieces(text)) for text in texts)
    while batch := list(itertools.islice(numbered, PIECES)):
        tokens = tokenizer.encode_batch([piece for _, piece in batch])
        for (number, _), ids in zip(batch, tokens):
            yield ids if number else [tokenizer.eot, *ids]


@exit_on_user_error()
def main():
    parser = argparse.ArgumentParser(prog="python -m data.text", description="Tokenise text files into shards.")
    add = parser.add_argument
    add("inputs", nargs="+", type=Path, metavar="INPUT", help="files, or folders of files")
    add("--tokenizer", required=True, help="gpt2, bpe:SIZE, a file, a data folder, or a model")
    add("--out", required=True, type=Path, help="output folder, without shards yet")
    add("--field", default="text", help="field of a row that holds the text")
    add("--skip-bad", action="store_true", help="leave out rows without a text, and count them")
    add("--val-fraction", type=float, default=0.05, help="approximate share of val (default 0.05)")
    add("--copy-rows", type=float, metavar="SHARE", help="share of copy rows in train, such as 0.5")
    add("--row-tokens", type=int, default=256, help="tokens in a row, with --copy-rows (default 256)")
    args = parser.parse_args()
    prepare(
        args.inputs,
        args.out,
        args.tokenizer,
        field=args.field,
        skip_bad=args.skip_bad,
        val_fraction=args.val_fraction,
        copy_rows=args.copy_rows,
        row_lengths=[(args.row_tokens, None)],
    )


if __name__ == "__main__":
    main()

"""Token shards: the file format, its checks, and a stream that reads them. data.shard_writer writes shards.

A shard is a header and tokens, little-endian uint16. The header is 256 little-endian int32: 20240520, version 1, number
of tokens, zeros. modded-nanogpt's FineWeb files have this format. The first training shard has number 1, the first
validation shard number 0: `fineweb_train_000001.bin`, `fineweb_val_000000.bin`. `manifest.json` has their checksums.

    python -m data.shards verify data/fineweb10B       compares every byte with the checksums
    python -m data.shards describe data/fineweb10B     writes a manifest for shards that another program made
"""

import argparse
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from errors import UserError, exit_on_user_error, require
from files import check_object, naming, parse_object, read_bytes, replace_text

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 256 * 4
TOKEN = np.dtype("<u2")
MANIFEST, TOKENIZER_FILE = "manifest.json", "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"  # beside a model's tokenizer.json
GPT2_VOCAB = 50257
DESCRIBE = "`python -m data.shards describe {}`"


# ---- format ----


def _is_in_split(name: str, split: str) -> bool:
    return re.fullmatch(rf".+_{split}(_\d+)?\.bin", name) is not None  # llm.c also writes NAME_train.bin


def find_shards(folder: Path, split: str = "(train|val)") -> list[Path]:
    """Return the shards of a split, or of both, in a folder. Other files and folders are left alone."""
    return sorted(path for path in folder.glob("*.bin") if _is_in_split(path.name, split) and path.is_file())


def shard_bytes(num_tokens: int) -> int:
    """Return the bytes of a header and num_tokens tokens: a shard's size, or the position of its next token."""
    return HEADER_BYTES + num_tokens * TOKEN.itemsize


def read_array(path: Path, dtype: np.dtype, count: int, offset: int = 0) -> np.ndarray:
    """Return `count` numbers from this byte of a file on, or fewer at its end. Raise OSError naming the file.

    np.fromfile takes an error of the disk for the end of the file.
    """
    array = np.empty(count, dtype)
    with naming("read", path), open(path, "rb") as file:
        file.seek(offset)
        size = file.readinto(memoryview(array).cast("B"))
    return array[: size // dtype.itemsize]


def read_header(path: Path) -> int:
    """Return the number of tokens in a shard. Raise ValueError if the file is not a complete, non-empty shard."""
    header = read_array(path, np.dtype("<i4"), 3).tolist()
    require(header[:2] == [MAGIC, VERSION], f"{path}: not a token shard of version {VERSION}. Prepare it again.")
    num_tokens = header[-1]  # of a file of 8 bytes: VERSION, which the size contradicts
    require(num_tokens > 0, f"{path}: has no tokens. Prepare it again.")
    size = os.path.getsize(path)
    problem = f"{path}: has {size} bytes instead of {shard_bytes(num_tokens)}. Prepare it again."
    require(size == shard_bytes(num_tokens), problem)
    return num_tokens


def describe_shard(path: Path) -> dict:
    """Return a shard's entry in the manifest, {"tokens", "max_token", "sha256"}. Raise ValueError for a bad shard."""
    num_tokens = read_header(path)
    max_token = int(read_array(path, TOKEN, num_tokens, HEADER_BYTES).max())
    return {"tokens": num_tokens, "max_token": max_token, "sha256": sha256_of(path)}


# ---- manifest: {"tokenizer": name, "vocab_size": int, "files": {file name: describe_shard(file)}} ----
# data.download adds "source". data.text adds "tokenizer_sha256", if there is a tokenizer.json. For copy rows it adds
# "copy_rows": {"share": float, "row_lengths": [[tokens in a row, end], ...], "seed": int}, see copy_rows.RowLengths.


def read_manifest(folder: Path) -> dict | None:
    """Return the manifest of a data folder, or None without a manifest. Raise ValueError for any other content."""
    path = Path(folder) / MANIFEST
    remedy = f"Prepare the data again. If the file is not ours, move it, then run {DESCRIBE.format(folder)}."
    if not path.exists():
        return None
    manifest = parse_object(read_bytes(path), str(path), remedy, tokenizer=str, vocab_size=int, files=dict)
    check_object(manifest.get("copy_rows", {}), f"{path}: copy_rows", remedy)
    for name, entry in manifest["files"].items():
        check_object(entry, f"{path}: {name}", remedy, tokens=int, max_token=int, sha256=str)
        if entry["max_token"] >= manifest["vocab_size"]:
            problem = f"{path}: {name} has token {entry['max_token']}, outside the vocabulary of vocab_size"
            raise UserError(f"{problem} {manifest['vocab_size']}. {remedy}")
    return manifest


def tokenizer_of(data_dir: Path) -> str | None:
    """Return the name of a data folder's tokenizer, or the sha256 of its tokenizer.json. None without a manifest."""
    manifest = read_manifest(data_dir)
    return manifest and manifest.get("tokenizer_sha256", manifest["tokenizer"])


def sha256_of(path: Path) -> str | None:
    """Return the sha256 of a file, which is read at once, or None if it does not exist."""
    return hashlib.sha256(read_bytes(path)).hexdigest() if path.exists() else None


def copy_tokenizer(file: Path, out: Path):
    """Copy a tokenizer, and the configuration beside it, into a folder. Either may be missing, or there already."""
    for source, name in ((file, TOKENIZER_FILE), (file.with_name(TOKENIZER_CONFIG), TOKENIZER_CONFIG)):
        if source.exists():
            replace_text(out / name, read_bytes(source).decode())


def write_manifest(folder: Path, manifest: dict):
    replace_text(folder / MANIFEST, json.dumps(manifest, indent=1))


# ---- reading ----


class TokenStream:
    """Reads a list of shards as one endless sequence: position p is token p modulo len(stream).

    entries: the manifest's entries (file name -> entry) of these shards.
    """

    def __init__(self, paths: Sequence[Path], entries: dict[str, dict]):
        self.paths = paths
        self.shard_tokens = [read_header(path) for path in self.paths]
        self._starts = np.cumsum([0, *self.shard_tokens])  # position of each shard's first token; last, all tokens
        self._entries = entries
        self.max_token = max(entries[path.name]["max_token"] for path in self.paths)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def document_token(self) -> int:
        """Return the token before each document. It is the first token of a validation text.

        A training text with copy rows begins with another token.
        """
        return int(self.read(0, 1)[0])

    def fingerprint(self, tokens: int | None = None) -> str:
        """Return sixteen hex digits that identify the first `tokens` of the stream (None: the whole stream).

        They depend on name, size and sha256 of all shards up to token number `tokens`, the last target.
        """
        whole = tokens is None or tokens >= len(self)
        count = len(self.paths) if whole else self._locate(tokens)[0] + 1
        identity = []
        for path, num_tokens in zip(self.paths[:count], self.shard_tokens):
            identity.append((path.name, num_tokens, self._entries[path.name]["sha256"]))
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def _locate(self, position: int) -> tuple[int, int]:
        """Return the index of a position's shard, and the index of its token in that shard."""
        position %= len(self)
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        return shard, position - int(self._starts[shard])

    def file_and_index(self, position: int) -> tuple[str, int]:
        """Return the name of a position's file, and the index of its token in that file, for messages."""
        shard, offset = self._locate(position)
        return self.paths[shard].name, offset

    def read(self, start: int, count: int, vocab_size: int = 2**16) -> np.ndarray:
        """Return tokens start to start + count, uint16. The range may cross shards, and wraps around at the end.

        Raise ValueError for a token outside the vocabulary, because an index error in a CUDA kernel names no token.
        Raise ValueError for a shard that was truncated after the stream was opened.
        """
        # 1. Read shard by shard.
        tokens = np.empty(count, TOKEN)  # (count,)
        filled = 0
        while filled < count:
            shard, offset = self._locate(start + filled)
            path = self.paths[shard]
            wanted = min(count - filled, self.shard_tokens[shard] - offset)
            part = read_array(path, TOKEN, wanted, shard_bytes(offset))
            require(len(part) == wanted, f"{path}: the file was truncated during the run. Restore it.")
            tokens[filled : filled + wanted] = part
            filled += wanted

        # 2. Refuse the first token outside the vocabulary.
        outside = tokens >= vocab_size
        if outside.any():
            first = int(outside.argmax())
            name, index = self.file_and_index(start + first)
            raise UserError(f"{name}: token {index} is {tokens[first]}. Set vocab_size to more than this token.")
        return tokens


def open_split(data_dir: Path, split: str, vocab_size: int, remedy: str = "Prepare the data first.") -> TokenStream:
    """Return the stream of a folder's "train" or "val" shards, after a comparison of headers and manifest.

    remedy: a sentence for the error of a folder without shards.
    Raise ValueError for a missing manifest, for a bad, missing or unknown shard, and for tokens outside the vocabulary.
    """
    # 1. Find the shards and the manifest.
    data_dir = Path(data_dir)
    paths = find_shards(data_dir, split)
    require(paths, f"{data_dir}: no {split} shards, such as x_{split}_000001.bin. {remedy}")
    manifest = read_manifest(data_dir)
    require(manifest, f"{data_dir}: has no {MANIFEST}. Run {DESCRIBE.format(data_dir)} once.")

    # 2. Compare them: (name, number of tokens) of each shard.
    entries = manifest["files"]
    expected = {(name, entry["tokens"]) for name, entry in entries.items() if _is_in_split(name, split)}
    found = {(path.name, read_header(path)) for path in paths}
    different = {name for name, _ in expected ^ found}
    if different:
        names = ", ".join(sorted(different))
        raise UserError(f"{data_dir}: {names} differs between folder and {MANIFEST}. Prepare it again.")

    # 3. Compare the tokens with the model's vocabulary.
    stream = TokenStream(paths, entries)
    if stream.max_token >= vocab_size:
        raise UserError(
            f"{data_dir}: has token {stream.max_token}, outside the model's vocabulary of {vocab_size}. "
            f"Set vocab_size to at least {manifest['vocab_size']}."
        )
    return stream


def verify(data_dir: Path) -> dict[str, str]:
    """Return file name -> problem, for the manifest's and all other .bin files. Raise ValueError without a manifest."""
    manifest = read_manifest(data_dir)
    require(manifest, f"{data_dir}: has no {MANIFEST} to verify against. Give a folder of prepared data.")
    problems = {}
    if manifest.get("tokenizer_sha256") not in (None, sha256_of(data_dir / TOKENIZER_FILE)):
        problems[TOKENIZER_FILE] = "missing or changed"
    present = {path.name for path in find_shards(data_dir)}
    for name in sorted(manifest["files"].keys() | present):
        try:
            if describe_shard(data_dir / name) != manifest["files"].get(name):
                problems[name] = "differs from the manifest"
        except (ValueError, OSError) as error:
            problems[name] = str(error)
    return problems


def describe(folder: Path) -> dict:
    """Return a manifest of shards that another program made, with tokenizer.json if the folder has one, else gpt2.

    Raise ValueError for shards that these tokenizers cannot have made, and for a folder without both splits.
    """
    require(not read_manifest(folder), f"{folder}: has a {MANIFEST}. Verify it instead.")
    files = {}
    for split, number in {"train": 1, "val": 0}.items():
        paths = find_shards(folder, split)
        require(paths, f"{folder}: no {split} shards. Name them x_{split}_{number:06d}.bin and so on.")
        files |= {path.name: describe_shard(path) for path in paths}
    manifest = {"tokenizer": "gpt2", "vocab_size": GPT2_VOCAB, "files": files}
    largest = max(entry["max_token"] for entry in files.values())
    fits = largest == GPT2_VOCAB - 1  # GPT-2's end-of-text, which begins each document
    path = folder / TOKENIZER_FILE
    if path.exists():
        size = _vocab_size(path)
        fits = largest < size
        manifest |= {"tokenizer": TOKENIZER_FILE, "vocab_size": size, "tokenizer_sha256": sha256_of(path)}
    if not fits:
        problem = f"{folder}: the largest token is {largest}, but {manifest['tokenizer']} has {manifest['vocab_size']}"
        raise UserError(f"{problem} tokens. Copy the {TOKENIZER_FILE} of these shards into the folder.")
    return manifest


def _vocab_size(tokenizer: Path) -> int:
    from tokenizers import Tokenizer  # here, because a run reads shards without it

    try:
        return max(Tokenizer.from_file(str(tokenizer)).get_vocab().values()) + 1
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{tokenizer}: not a file of the tokenizers library ({error}). Remove it.") from error


@exit_on_user_error()
def main():
    parser = argparse.ArgumentParser(prog="python -m data.shards", description="Check or describe token shards.")
    parser.add_argument("command", choices=["verify", "describe"])
    parser.add_argument("dir", type=Path)
    args = parser.parse_args()
    folder = args.dir
    if args.command == "describe":
        write_manifest(folder, describe(folder))
    bad = [f"{name} ({problem})" for name, problem in verify(folder).items()]
    require(not bad, f"{folder}: {len(bad)} bad files, {', '.join(bad)}. Remove them and make them again.")
    print(f"{folder}: all files agree with {MANIFEST}")


if __name__ == "__main__":
    main()

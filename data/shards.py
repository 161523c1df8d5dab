"""Token shards: the file format, writing, checking, and reading them as one stream.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros), then that many
uint16 tokens: the format of modded-nanogpt's FineWeb files. Training shards count from 1, validation shards from 0:
`fineweb_train_000001.bin`, `fineweb_val_000000.bin`. A folder's `manifest.json` says what its shards must hold.

    python -m data.shards verify data/fineweb10B
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 256 * 4
TOKEN = np.dtype("<u2")
MANIFEST = "manifest.json"


# ---- files ----


def shard_paths(folder: Path, split: str) -> list[Path]:
    """The shards of a split ("train" or "val") in a folder, in the order of the stream."""
    return sorted(path for path in Path(folder).glob("*.bin") if _is_of_split(path.name, split))


def _is_of_split(name: str, split: str) -> bool:
    return re.fullmatch(rf".+_{split}_\d+\.bin", name) is not None


def read_header(path: Path) -> int:
    """Returns the number of tokens in a shard; ValueError if the file is not a whole, non-empty shard."""
    header = np.fromfile(path, "<i4", count=3)
    if len(header) < 3 or header[0] != MAGIC:
        raise ValueError(f"{path}: not a token shard, it does not begin with {MAGIC}")
    if header[1] != VERSION:
        raise ValueError(f"{path}: shard version {header[1]}, this code reads version {VERSION}")
    num_tokens = int(header[2])
    if num_tokens < 1:
        raise ValueError(f"{path}: the shard holds no tokens")
    size, expected = os.path.getsize(path), HEADER_BYTES + num_tokens * TOKEN.itemsize
    if size != expected:
        problem = "truncated" if size < expected else "overlong"
        raise ValueError(f"{path}: {problem}, {size} bytes where its {num_tokens} tokens need {expected}: get it again")
    return num_tokens


def describe_shard(path: Path) -> dict:
    """A shard's entry in the manifest, from one pass over the file: {"tokens", "max_token", "sha256"}."""
    num_tokens, max_token, digest = read_header(path), 0, hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(HEADER_BYTES))
        while chunk := file.read(1 << 24):
            digest.update(chunk)
            max_token = max(max_token, int(np.frombuffer(chunk, TOKEN).max()))
    return {"tokens": num_tokens, "max_token": max_token, "sha256": digest.hexdigest()}


# ---- manifest: {"tokenizer": name, "vocab_size": int, "files": {file name: describe_shard(file)}} ----


def read_manifest(folder: Path) -> dict | None:
    """The manifest of a data folder, None where there is none."""
    path = Path(folder) / MANIFEST
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error


def write_manifest(folder: Path, manifest: dict) -> None:
    """Replaces the manifest in one step: a reader sees the old one or the new one."""
    path = Path(folder) / MANIFEST
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


# ---- writing ----


class ShardWriter:
    """Streams tokens into the shards of both splits; documents may straddle shards.

    Shards keep a temporary name until `close`, which ends with the manifest: a run that dies leaves nothing that
    looks like data. Needs no memory beyond one document.

        writer = ShardWriter(folder, "fineweb", tokenizer="gpt2", vocab_size=50257)
        writer.write("train", tokens)  # any number of times, "train" or "val"
        manifest = writer.close()
    """

    def __init__(self, folder: Path, prefix: str, *, tokenizer: str, vocab_size: int, shard_tokens: int = 100_000_000):
        if not 0 < vocab_size <= 2**16:
            raise ValueError(f"a vocabulary of {vocab_size} tokens does not fit shards of uint16: use at most {2**16}")
        if not 0 < shard_tokens < 2**31:
            raise ValueError(f"shard_tokens is {shard_tokens}, it must be from 1 to {2**31 - 1}")
        self.folder, self.prefix, self.shard_tokens = Path(folder), prefix, shard_tokens
        self.manifest = {"tokenizer": tokenizer, "vocab_size": vocab_size, "files": {}}
        self._open = {}  # split -> the file that its next token goes to
        self._next_number = {"train": 1, "val": 0}
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, split: str, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends tokens (one document, or any piece of the stream) to a split."""
        tokens = np.asarray(tokens)
        vocab_size = self.manifest["vocab_size"]
        if tokens.max(initial=0) >= vocab_size:
            raise ValueError(f"token {tokens.max()} is outside the vocabulary of {vocab_size}")
        tokens = tokens.astype(TOKEN)
        while len(tokens):
            file = self._open.get(split) or self._begin(split)
            room = self.shard_tokens - self._tokens_in(file)
            file.write(tokens[:room])
            if len(tokens) >= room:
                self._finish(split)
            tokens = tokens[room:]

    def close(self) -> dict:
        """Gives all shards their names, writes the manifest and returns it."""
        for split in list(self._open):
            self._finish(split)
        for name in self.manifest["files"]:
            os.replace(self._temporary(name), self.folder / name)
        write_manifest(self.folder, self.manifest)
        return self.manifest

    def _temporary(self, name: str) -> Path:
        return self.folder / f"{name}.tmp"

    def _begin(self, split: str):
        name = f"{self.prefix}_{split}_{self._next_number[split]:06d}.bin"
        self._next_number[split] += 1
        self._open[split] = file = open(self._temporary(name), "wb")
        file.write(bytes(HEADER_BYTES))
        return file

    def _finish(self, split: str) -> None:
        file = self._open.pop(split)
        header = np.zeros(256, "<i4")
        header[:3] = MAGIC, VERSION, self._tokens_in(file)
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
        file.close()
        path = Path(file.name)
        self.manifest["files"][path.stem] = describe_shard(path)

    @staticmethod
    def _tokens_in(file) -> int:
        return (file.tell() - HEADER_BYTES) // TOKEN.itemsize


# ---- reading ----


class TokenStream:
    """The tokens of a list of shards as one endless sequence: position p is token p modulo len(stream).

    Holds no tokens and no open files: a read takes just what it needs from disk, so 1,030 shards of 100M tokens are
    as cheap as one. `entries` are the manifest's (file name -> entry), all of these shards or none.
    """

    def __init__(self, paths: Sequence[Path], entries: dict[str, dict] | None = None):
        self.paths = [Path(path) for path in paths]
        self.shard_tokens = [read_header(path) for path in self.paths]
        self._ends = np.cumsum(self.shard_tokens)
        hashes = [entries[path.name]["sha256"] if entries else None for path in self.paths]
        names = [path.name for path in self.paths]
        identity = json.dumps(list(zip(names, self.shard_tokens, hashes)))
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]  # not of the folder: it may move
        self.max_token = max(entries[name]["max_token"] for name in names) if entries else None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _locate(self, position: int) -> tuple[int, int]:
        """(index of the shard, token in the shard)"""
        position %= len(self)
        shard = int(np.searchsorted(self._ends, position, side="right"))
        return shard, position - int(self._ends[shard]) + self.shard_tokens[shard]

    def where(self, position: int) -> tuple[str, int]:
        """(file name, token in the file) of a position, for messages."""
        shard, offset = self._locate(position)
        return self.paths[shard].name, offset

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start to start + count, uint16; runs over the borders of shards and wraps around at the end."""
        tokens = np.empty(count, TOKEN)  # (count,)
        filled = 0
        while filled < count:
            shard, offset = self._locate(start + filled)
            wanted = min(count - filled, self.shard_tokens[shard] - offset)
            path, skip = self.paths[shard], HEADER_BYTES + offset * TOKEN.itemsize
            part = np.fromfile(path, TOKEN, count=wanted, offset=skip)
            if len(part) < wanted:
                raise ValueError(f"{path}: ends before token {offset + wanted}: it has changed since it was opened")
            tokens[filled : filled + wanted] = part
            filled += wanted
        return tokens


def open_split(data_dir: Path, split: str, vocab_size: int) -> TokenStream:
    """Opens the "train" or "val" shards of a folder after checking all of them against header and manifest.

    Reads headers only; `python -m data.shards verify` is the check of every byte. FileNotFoundError when there is
    nothing to open; ValueError for a bad shard, one that the manifest does not know (or the reverse), or tokens that a
    vocabulary of `vocab_size` does not hold.
    """
    data_dir = Path(data_dir)
    advice = (
        "prepare data with `python -m data.fineweb 10B --shards 25`"
        f" or `python -m data.text FILES... --tokenizer gpt2 --out {data_dir}`"
    )
    if not data_dir.is_dir():
        raise FileNotFoundError(f"{data_dir}: no such data folder; {advice}")
    paths = shard_paths(data_dir, split)
    if not paths:
        raise FileNotFoundError(f"{data_dir}: no {split} shards (*_{split}_*.bin) in this folder; {advice}")
    manifest = read_manifest(data_dir)
    if manifest is None:
        return TokenStream(paths)

    entries = {name: entry for name, entry in manifest["files"].items() if _is_of_split(name, split)}
    names = {path.name for path in paths}
    if missing := sorted(entries.keys() - names):
        raise ValueError(f"{data_dir}: {', '.join(missing)} missing, though in {MANIFEST}: prepare the data again")
    if extra := sorted(names - entries.keys()):
        raise ValueError(f"{data_dir}: {', '.join(extra)} not in {MANIFEST}: remove it or prepare the data again")
    stream = TokenStream(paths, entries)
    for path, num_tokens in zip(paths, stream.shard_tokens):
        if num_tokens != entries[path.name]["tokens"]:
            expected = entries[path.name]["tokens"]
            raise ValueError(f"{path}: {num_tokens} tokens where {MANIFEST} has {expected}: prepare the data again")
    if stream.max_token >= vocab_size:
        raise ValueError(
            f"{data_dir}: the {split} shards hold token {stream.max_token}, outside the model's vocabulary of"
            f" {vocab_size}: set it to at least {manifest['vocab_size']}"
        )
    return stream


# ---- python -m data.shards verify DIR ----


def verify(data_dir: Path) -> Iterator[tuple[str, str | None]]:
    """Yields (file name, what is wrong or None) for every file of the manifest and every other .bin file."""
    data_dir = Path(data_dir)
    manifest = read_manifest(data_dir)
    if manifest is None:
        raise FileNotFoundError(f"{data_dir / MANIFEST}: no such file, so there is nothing to verify against")
    for name in sorted(manifest["files"].keys() | {path.name for path in data_dir.glob("*.bin")}):
        yield name, _problem(data_dir / name, manifest["files"].get(name))


def _problem(path: Path, entry: dict | None) -> str | None:
    if entry is None:
        return "not in the manifest"
    if not path.exists():
        return "missing"
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == entry["sha256"] else "sha256 differs"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data.shards", description="Check token shards.")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("verify", help="compare the sha256 of every file with the manifest")
    command.add_argument("dir", type=Path)
    args = parser.parse_args(argv)
    try:
        bad = []
        for name, problem in verify(args.dir):
            print(f"{name}: {problem or 'ok'}", flush=True)
            if problem:
                bad.append(f"{name} ({problem})")
        if bad:
            raise ValueError(f"{args.dir}: {len(bad)} bad: {', '.join(bad)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

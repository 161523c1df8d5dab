"""Token shards: the file format, writing, checking, and reading them as one stream.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros), then that many
uint16 tokens: the format of modded-nanogpt's FineWeb files. Training shards count from 1, validation shards from 0:
`fineweb_train_000001.bin`, `fineweb_val_000000.bin`. A folder's `manifest.json` says what its shards must hold.

    python -m data.shards verify data/fineweb10B

reads every byte, also of the `tokenizer.json` that text was prepared with. What it cannot find: in a manifest from
before manifests had a checksum, a vocabulary size, tokenizer or source changed into another possible one.
"""

import argparse
import contextlib
import glob
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
MANIFEST, TOKENIZER_FILE = "manifest.json", "tokenizer.json"
SAMPLE = 4096  # tokens of a shard without a manifest that stand for its content


# ---- files ----


def refuse_file(folder: Path) -> None:
    """ValueError where a file is given for a data folder."""
    if folder.is_file():
        raise ValueError(f"{folder}: is a file, not a data folder: give the folder of the shards and {MANIFEST}")


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


def sync(path: Path) -> None:
    """Returns when a file's bytes, or a folder's names, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- manifest: {"tokenizer": name, "vocab_size": int, "files": {file name: describe_shard(file)}} ----
# fineweb adds its "source", a folder with a tokenizer.json its "tokenizer_sha256"; in the file there is also "sha256",
# of the rest (not in manifests from before it).


def read_manifest(folder: Path) -> dict | None:
    """The manifest of a data folder, None where there is none; ValueError for one that is damaged."""
    path = Path(folder) / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}): prepare the data again") from error
    if problem := _manifest_problem(manifest):
        raise ValueError(f"{path}: damaged, {problem}: prepare the data again")
    return {key: value for key, value in manifest.items() if key != "sha256"}


def _manifest_problem(manifest) -> str | None:
    types = {"tokenizer": str, "vocab_size": int, "source": str, "tokenizer_sha256": str, "files": dict, "sha256": str}
    if type(manifest) is not dict:
        return "it is not an object"
    if wrong := [key for key, value in manifest.items() if type(value) is not types.get(key)]:
        return f"{wrong[0]!r} does not belong there or has a value of the wrong type"
    if missing := {"tokenizer", "vocab_size", "files"} - manifest.keys():
        return f"it lacks {', '.join(sorted(missing))}"
    for name, entry in manifest["files"].items():
        if not _is_of_split(name, "(train|val)"):
            return f"{name!r} is no name of a shard"
        fields = {key: type(value) for key, value in entry.items()} if type(entry) is dict else None
        if fields != {"tokens": int, "max_token": int, "sha256": str}:
            return f"the entry of {name} is not tokens, max_token and sha256"
        if entry["max_token"] >= manifest["vocab_size"]:
            return f"{name} has token {entry['max_token']}, outside the vocabulary of {manifest['vocab_size']}"
    return None if manifest.get("sha256") in (None, _checksum(manifest)) else "its own sha256 differs"


def _checksum(manifest: dict) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()


def tokenizer_of(data_dir: Path) -> str | None:
    """What two data folders share when their tokenizers are the same: its name, or the sha256 of the folder's
    tokenizer.json. None where no manifest says it; ValueError for one that is damaged."""
    data_dir = Path(data_dir)
    manifest = read_manifest(data_dir)
    if manifest is None or manifest["tokenizer"] != TOKENIZER_FILE:
        return manifest and manifest["tokenizer"]
    path = data_dir / TOKENIZER_FILE  # in manifests from before they had its sha256
    return manifest.get("tokenizer_sha256") or (_sha256(path) if path.exists() else None)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(folder: Path, manifest: dict) -> None:
    """Replaces the manifest in one step: a reader sees the old one or the new one."""
    path = Path(folder) / MANIFEST
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "w") as file:
            json.dump(manifest | {"sha256": _checksum(manifest)}, file, indent=1)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


# ---- writing ----


class ShardWriter:
    """Streams tokens into the shards of both splits; documents may straddle shards.

    Shards keep a temporary name until `close`: a run that dies leaves nothing that looks like data, and the next one
    removes what it left. `close` begins with the manifest, so of a folder that lacks shards their names are known.
    Needs no memory beyond one document.

        with ShardWriter(folder, "fineweb", tokenizer="gpt2", vocab_size=50257) as writer:
            writer.write("train", tokens)  # any number of times, "train" or "val"
            manifest = writer.close()

    Leaving the `with` by an exception (a full disk) removes the temporary files.
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
        self._remove_temporary_files()

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
        if (tokenizer := self.folder / TOKENIZER_FILE).exists():
            self.manifest["tokenizer_sha256"] = _sha256(tokenizer)
        write_manifest(self.folder, self.manifest)
        for name in self.manifest["files"]:
            os.replace(self._temporary(name), self.folder / name)
        sync(self.folder)
        return self.manifest

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None:
            for file in self._open.values():
                with contextlib.suppress(OSError):  # what is still in its buffer finds the disk as full as before
                    file.close()
            self._remove_temporary_files()

    def _remove_temporary_files(self) -> None:
        for path in self.folder.glob(f"{glob.escape(self.prefix)}_*.bin.tmp"):
            path.unlink()

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
        file.close()
        path = Path(file.name)
        sync(path)
        self.manifest["files"][path.stem] = describe_shard(path)

    @staticmethod
    def _tokens_in(file) -> int:
        return (file.tell() - HEADER_BYTES) // TOKEN.itemsize


# ---- reading ----


class TokenStream:
    """The tokens of a list of shards as one endless sequence: position p is token p modulo len(stream).

    Holds no tokens and no open files: a read takes just what it needs from disk, so 1,030 shards of 100M tokens are
    as cheap as one. `entries` are the manifest's (file name -> entry), all of these shards or none.

    A read makes sure that the shard is the one that was opened, by the size, time and inode of the file: ValueError
    if one differs, unless the shard still has the manifest's sha256 (it was touched, or restored).
    """

    def __init__(self, paths: Sequence[Path], entries: dict[str, dict] | None = None):
        self.paths = [Path(path) for path in paths]
        self._opened = [_identity(path) for path in self.paths]  # before anything is read of them
        self.shard_tokens = [read_header(path) for path in self.paths]
        self._ends = np.cumsum(self.shard_tokens)
        self._entries = entries
        self.max_token = max(entries[path.name]["max_token"] for path in self.paths) if entries else None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fingerprint(self, tokens: int | None = None) -> str:
        """Sixteen hex digits for what a run of `tokens` reads, its last target too (None: for the whole stream).

        Of the names, sizes and contents of the shards that hold it, not of the folder, which may move: shards further
        on change nothing. A content is the manifest's sha256; without a manifest, the first SAMPLE tokens.
        """
        whole = tokens is None or tokens >= len(self)
        count = len(self.paths) if whole else self._locate(tokens)[0] + 1
        identity = [
            (path.name, num_tokens, self._entries[path.name]["sha256"] if self._entries else _sample(path))
            for path, num_tokens in zip(self.paths[:count], self.shard_tokens)
        ]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

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
            with open(path, "rb") as file:
                part = np.fromfile(file, TOKEN, count=wanted, offset=skip)
                identity = _identity(file.fileno())  # after reading: what was changed meanwhile counts
            if identity != self._opened[shard]:
                self._opened[shard] = self._unchanged(path)
                continue
            tokens[filled : filled + wanted] = part
            filled += wanted
        return tokens

    def _unchanged(self, path: Path) -> tuple[int, ...]:
        """The identity of a shard of which only that has changed. ValueError if its content has, or may have."""
        identity = _identity(path)
        if self._entries and _problem(path, self._entries[path.name]) is None:
            return identity
        how = f" (`python -m data.shards verify {path.parent}` checks that)" if self._entries else ""
        raise ValueError(f"{path}: it has changed since it was opened: restore it{how} and go on, or start again")


def _identity(file: Path | int) -> tuple[int, ...]:
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns, found.st_ino


def _sample(path: Path) -> str:
    return hashlib.sha256(np.fromfile(path, TOKEN, count=SAMPLE, offset=HEADER_BYTES).tobytes()).hexdigest()


def open_split(data_dir: Path, split: str, vocab_size: int, need_tokens: int = 0) -> TokenStream:
    """Opens the "train" or "val" shards of a folder after checking all of them against header and manifest.

    Reads headers only; `python -m data.shards verify` is the check of every byte. FileNotFoundError when there is
    nothing to open, with the command that gets it (`need_tokens` of training text); ValueError for a bad shard, one
    that the manifest does not know (or the reverse), or tokens that a vocabulary of `vocab_size` does not hold.
    """
    from data.fineweb import data_command  # which writes shards, so it imports this module

    data_dir = Path(data_dir)
    refuse_file(data_dir)
    advice = f"get it with `{data_command(data_dir, need_tokens)}`"
    if not data_dir.exists():
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
    """Yields (file name, what is wrong or None) for every file of the manifest and every other .bin file.

    FileNotFoundError when there is no manifest or nothing else, ValueError when the manifest is damaged.
    """
    data_dir = Path(data_dir)
    refuse_file(data_dir)
    manifest = read_manifest(data_dir)
    if manifest is None:
        if not data_dir.exists():
            raise FileNotFoundError(f"{data_dir}: no such data folder")
        raise FileNotFoundError(f"{data_dir / MANIFEST}: no such file, so there is nothing to verify against")
    if "tokenizer_sha256" in manifest:
        path = data_dir / TOKENIZER_FILE
        same = path.exists() and _sha256(path) == manifest["tokenizer_sha256"]
        yield TOKENIZER_FILE, None if same else "sha256 differs" if path.exists() else "missing"
    names = manifest["files"].keys() | {path.name for path in data_dir.glob("*.bin")}
    if not names:
        raise FileNotFoundError(f"{data_dir}: no shards, nor any in {MANIFEST}")
    for name in sorted(names):
        yield name, _problem(data_dir / name, manifest["files"].get(name))


def _problem(path: Path, entry: dict | None) -> str | None:
    if entry is None:
        return "not in the manifest"
    if not path.exists():
        return "missing"
    try:
        found = describe_shard(path)
    except (ValueError, OSError) as error:
        return str(error).removeprefix(f"{path}: ")
    return ", ".join(f"{key} differs" for key in found if found[key] != entry[key]) or None


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
            raise ValueError(f"{args.dir}: {len(bad)} bad, remove and make them again: {', '.join(bad)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

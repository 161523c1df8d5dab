"""Token shards: the file format, writing, checking, and reading them as one stream.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros), then that many
uint16 tokens: the format of modded-nanogpt's FineWeb files. Training shards count from 1, validation shards from 0:
`fineweb_train_000001.bin`, `fineweb_val_000000.bin`. A folder's `manifest.json` says what its shards must hold.

    python -m data.shards verify data/fineweb10B

reads every byte, also of the `tokenizer.json` that text was prepared with. It cannot find a vocabulary size, tokenizer
or source that was changed into another possible one in a manifest from before manifests had a checksum.
"""

import argparse
import contextlib
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from errors import exit_on_user_error, require
from files import replace_file, sync

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 256 * 4
TOKEN = np.dtype("<u2")
MANIFEST, TOKENIZER_FILE = "manifest.json", "tokenizer.json"
SAMPLE = 4096  # the first tokens of a shard, which stand for its content where there is no manifest


def refuse_file(folder: Path) -> None:
    """Raise ValueError where a file is given for a data folder."""
    advice = f"give the folder of the shards and {MANIFEST}"
    require(not folder.is_file(), f"{folder}: is a file, not a data folder: {advice}")


def shard_paths(folder: Path, split: str) -> list[Path]:
    """Return the shards of a split ("train" or "val") in a folder, in the order of the stream."""
    return sorted(path for path in Path(folder).glob("*.bin") if _is_of_split(path.name, split))


def _is_of_split(name: str, split: str) -> bool:
    return re.fullmatch(rf".+_{split}_\d+\.bin", name) is not None


def read_header(path: Path) -> int:
    """Return the number of tokens in a shard; raise ValueError if the file is not a whole, non-empty shard."""
    header = np.fromfile(path, "<i4", count=3).tolist()
    require(len(header) == 3 and header[0] == MAGIC, f"{path}: not a token shard, it does not begin with {MAGIC}")
    _, version, num_tokens = header
    require(version == VERSION, f"{path}: shard version {version}, this code reads version {VERSION}")
    require(num_tokens > 0, f"{path}: the shard holds no tokens")
    size, expected = os.path.getsize(path), shard_bytes(num_tokens)
    problem = f"{'truncated' if size < expected else 'overlong'}, {size} bytes"
    require(size == expected, f"{path}: {problem} where its {num_tokens} tokens need {expected}: get it again")
    return num_tokens


def shard_bytes(num_tokens: int) -> int:
    """Return the size of a shard's file."""
    return HEADER_BYTES + num_tokens * TOKEN.itemsize


def describe_shard(path: Path) -> dict:
    """Return a shard's entry in the manifest, from one pass over the file: {"tokens", "max_token", "sha256"}."""
    num_tokens, max_token, digest = read_header(path), 0, hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(HEADER_BYTES))
        while chunk := file.read(1 << 24):
            digest.update(chunk)
            max_token = max(max_token, int(np.frombuffer(chunk, TOKEN).max()))
    return {"tokens": num_tokens, "max_token": max_token, "sha256": digest.hexdigest()}


# ---- manifest: {"tokenizer": name, "vocab_size": int, "files": {file name: describe_shard(file)}} ----
# data.fineweb adds its "source", and data.text the "tokenizer_sha256" of a tokenizer.json. In the file there is also
# "sha256", the checksum of all the rest, which manifests once did not have. "copy_rows" describes the copy rows of the
# train split: {"share": float, "row_lengths": [[tokens in a row, end or null], ...], "seed": int}.

MANIFEST_TYPES = {"tokenizer": str, "vocab_size": int, "files": dict}
OPTIONAL_TYPES = {"source": str, "tokenizer_sha256": str, "sha256": str, "copy_rows": dict}


def read_manifest(folder: Path) -> dict | None:
    """Return the manifest of a data folder, None where there is none; raise ValueError for one that is damaged."""
    path = Path(folder) / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}): prepare the data again") from error
    problem = _find_manifest_problem(manifest)
    require(problem is None, f"{path}: damaged, {problem}: prepare the data again")
    manifest.pop("sha256", None)
    return manifest


def _find_manifest_problem(manifest) -> str | None:
    found = _types_of(manifest) or {}
    if found != MANIFEST_TYPES | {key: kind for key, kind in OPTIONAL_TYPES.items() if key in found}:
        return "it has not the fields of a manifest, or values of other types"
    for name, entry in manifest["files"].items():
        if not _is_of_split(name, "(train|val)"):
            return f"{name!r} is no name of a shard"
        if _types_of(entry) != {"tokens": int, "max_token": int, "sha256": str}:
            return f"the entry of {name} is not tokens, max_token and sha256"
        if entry["max_token"] >= manifest["vocab_size"]:
            return f"{name} has token {entry['max_token']}, outside the vocabulary of {manifest['vocab_size']}"
    return None if manifest.get("sha256") in (None, _checksum(manifest)) else "its own sha256 differs"


def _types_of(value) -> dict[str, type] | None:
    return {key: type(item) for key, item in value.items()} if type(value) is dict else None


def _checksum(manifest: dict) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()


def tokenizer_of(data_dir: Path) -> str | None:
    """Return what tells whether two data folders have the same tokenizer: its name, or the sha256 of tokenizer.json.

    None where no manifest says it; ValueError for one that is damaged.
    """
    manifest = read_manifest(data_dir)
    if manifest is None or manifest["tokenizer"] != TOKENIZER_FILE:
        return manifest and manifest["tokenizer"]
    return manifest.get("tokenizer_sha256") or _sha256(Path(data_dir) / TOKENIZER_FILE)


def copy_rows_of(folder: Path) -> dict | None:
    """Return the copy rows of a data folder's train split: {"share", "row_lengths", "seed"}. None without copy rows."""
    manifest = read_manifest(folder)
    return manifest and manifest.get("copy_rows")


def _sha256(path: Path) -> str | None:
    """Return the sha256 of a small file, None where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def write_manifest(folder: Path, manifest: dict) -> None:
    """Replace the manifest of a data folder, with its checksum: a reader sees the old one or the new one."""
    text = json.dumps(manifest | {"sha256": _checksum(manifest)}, indent=1)
    replace_file(Path(folder) / MANIFEST, lambda file: file.write(text.encode()))


# ---- writing ----


class ShardWriter:
    """Streams tokens into the shards of both splits; documents may run from one shard into the next.

        with ShardWriter(folder, "fineweb", tokenizer="gpt2", vocab_size=50257) as writer:
            writer.write("train", tokens)  # any number of times, "train" or "val"
            manifest = writer.close()

    Shards keep a temporary name until `close`, so a process that dies leaves nothing that looks like data; what it
    leaves is removed by the next one. An exception (a full disk) removes the temporary files. `close` writes the
    manifest before it gives the shards their names: if it is killed between, the manifest tells which are missing.
    """

    def __init__(self, folder: Path, prefix: str, *, tokenizer: str, vocab_size: int, shard_tokens: int = 100_000_000):
        size = f"a vocabulary of {vocab_size} tokens"
        require(0 < vocab_size <= 2**16, f"{size} does not fit shards of uint16: use at most {2**16}")
        require(0 < shard_tokens < 2**31, f"shard_tokens is {shard_tokens}, it must be from 1 to {2**31 - 1}")
        self.folder, self.prefix, self.shard_tokens = Path(folder), prefix, shard_tokens
        self.manifest = {"tokenizer": tokenizer, "vocab_size": vocab_size, "files": {}}
        self._open = {}  # split -> the file that its next token goes to
        self._next_number = {"train": 1, "val": 0}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_temporary_files()

    def write(self, split: str, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens (one document, or any piece of the stream) to a split."""
        tokens, vocab_size = np.asarray(tokens), self.manifest["vocab_size"]
        largest = tokens.max(initial=0)
        require(largest < vocab_size, f"token {largest} is outside the vocabulary of {vocab_size}")
        tokens = tokens.astype(TOKEN)
        while len(tokens):
            file = self._open.get(split) or self._begin(split)
            room = self.shard_tokens - (file.tell() - HEADER_BYTES) // TOKEN.itemsize
            file.write(tokens[:room])
            if len(tokens) >= room:
                self._finish(split)
            tokens = tokens[room:]

    def close(self) -> dict:
        """Write the manifest, give all shards their names, and return the manifest."""
        for split in list(self._open):
            self._finish(split)
        if sha256 := _sha256(self.folder / TOKENIZER_FILE):
            self.manifest["tokenizer_sha256"] = sha256
        write_manifest(self.folder, self.manifest)
        for name in self.manifest["files"]:
            os.replace(self.folder / f"{name}.tmp", self.folder / name)
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

    def _begin(self, split: str):
        name = f"{self.prefix}_{split}_{self._next_number[split]:06d}.bin"
        self._next_number[split] += 1
        self._open[split] = file = open(self.folder / f"{name}.tmp", "wb")
        file.write(bytes(HEADER_BYTES))
        return file

    def _finish(self, split: str) -> None:
        file = self._open.pop(split)
        header = np.zeros(256, "<i4")
        header[:3] = MAGIC, VERSION, (file.tell() - HEADER_BYTES) // TOKEN.itemsize
        file.seek(0)
        file.write(header)
        file.close()
        path = Path(file.name)
        sync(path)
        self.manifest["files"][path.stem] = describe_shard(path)


# ---- reading ----


class TokenStream:
    """Reads a list of shards as one endless sequence: position p is token p modulo len(stream).

    It holds no tokens and no open files, so 1,030 shards of 100M tokens are as cheap as one. `entries` are those of the
    manifest (file name -> entry) for all of these shards, or None.

    Each read compares size, time and inode of the file with those at opening, and raises ValueError where they differ,
    unless the shard still has the manifest's sha256 (it was touched, or restored).
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
        """Return sixteen hex digits that identify what a run of `tokens` (None: the whole stream) reads.

        They depend on name, size and content (the manifest's sha256; without one, the first SAMPLE tokens) of the
        shards up to the last target, not on the folder, which may move, nor on later shards.
        """
        whole = tokens is None or tokens >= len(self)
        count = len(self.paths) if whole else self._locate(tokens)[0] + 1

        def content(path: Path) -> str:
            if self._entries:
                return self._entries[path.name]["sha256"]
            return hashlib.sha256(np.fromfile(path, TOKEN, count=SAMPLE, offset=HEADER_BYTES).tobytes()).hexdigest()

        identity = [(path.name, num, content(path)) for path, num in zip(self.paths[:count], self.shard_tokens)]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def _locate(self, position: int) -> tuple[int, int]:
        """Return the index of the shard and the token in it that a position is."""
        position %= len(self)
        shard = int(np.searchsorted(self._ends, position, side="right"))
        return shard, position - int(self._ends[shard]) + self.shard_tokens[shard]

    def where(self, position: int) -> tuple[str, int]:
        """Return the file name and the token in that file of a position, for messages."""
        shard, offset = self._locate(position)
        return self.paths[shard].name, offset

    def read(self, start: int, count: int, vocab_size: int = 2**16) -> np.ndarray:
        """Return tokens start to start + count, uint16, over the borders of shards and around at the end.

        ValueError for a token outside the vocabulary: an index error inside a CUDA kernel would not name its place.
        """
        tokens, filled = np.empty(count, TOKEN), 0  # (count,)
        while filled < count:
            shard, offset = self._locate(start + filled)
            wanted = min(count - filled, self.shard_tokens[shard] - offset)
            with open(self.paths[shard], "rb") as file:
                part = np.fromfile(file, TOKEN, count=wanted, offset=shard_bytes(offset))
                identity = _identity(file.fileno())  # after reading: what was changed meanwhile counts
            if identity != self._opened[shard]:
                self._accept_if_unchanged(shard)
                continue
            tokens[filled : filled + wanted] = part
            filled += wanted
        outside = tokens >= vocab_size
        if outside.any():
            name, offset = self.where(start + int(outside.argmax()))
            raise ValueError(f"{name}: token {offset} is {tokens[outside][0]}, outside the vocabulary of {vocab_size}")
        return tokens

    def _accept_if_unchanged(self, shard: int) -> None:
        """Take the file as it is now for the one that was opened; raise ValueError if its content may have changed."""
        path = self.paths[shard]
        identity = _identity(path)
        same = self._entries and _find_shard_problem(path, self._entries[path.name]) is None
        how = f" (`python -m data.shards verify {path.parent}` checks that)" if self._entries else ""
        require(same, f"{path}: it has changed since it was opened: restore it{how} and go on, or start again")
        self._opened[shard] = identity


def _identity(file: Path | int) -> tuple[int, ...]:
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns, found.st_ino


def open_split(data_dir: Path, split: str, vocab_size: int, need_tokens: int = 0) -> TokenStream:
    """Open the "train" or "val" shards of a folder after checking all of their headers against the manifest.

    ValueError when there is nothing to open, with the command that gets it (`need_tokens` of training text), for a bad
    shard, one that the manifest does not know (or the reverse), or tokens outside a vocabulary of `vocab_size`.
    """
    from data.fineweb import data_command  # which writes shards, so it imports this module

    data_dir = Path(data_dir)
    refuse_file(data_dir)
    advice = f"get it with `{data_command(data_dir, need_tokens)}`"
    require(data_dir.exists(), f"{data_dir}: no such data folder; {advice}")
    paths = shard_paths(data_dir, split)
    require(paths, f"{data_dir}: no {split} shards (*_{split}_*.bin) in this folder; {advice}")
    manifest = read_manifest(data_dir)
    if manifest is None:
        return TokenStream(paths)

    entries = {name: entry for name, entry in manifest["files"].items() if _is_of_split(name, split)}
    names = {path.name for path in paths}
    missing, extra = (", ".join(sorted(some)) for some in (entries.keys() - names, names - entries.keys()))
    require(not missing, f"{data_dir}: {missing} missing, though in {MANIFEST}: prepare the data again")
    require(not extra, f"{data_dir}: {extra} not in {MANIFEST}: remove it or prepare the data again")
    stream = TokenStream(paths, entries)
    for path, found in zip(paths, stream.shard_tokens):
        expected = entries[path.name]["tokens"]
        require(found == expected, f"{path}: {found} tokens where {MANIFEST} has {expected}: prepare the data again")
    advice = f"outside the model's vocabulary of {vocab_size}: set it to at least {manifest['vocab_size']}"
    require(stream.max_token < vocab_size, f"{data_dir}: the {split} shards hold token {stream.max_token}, {advice}")
    return stream


def verify(data_dir: Path) -> Iterator[tuple[str, str | None]]:
    """Yield (file name, what is wrong or None) for every file of the manifest and every other .bin file.

    ValueError when there is no manifest, a damaged one, or nothing else.
    """
    refuse_file(data_dir)
    manifest = read_manifest(data_dir)
    require(manifest is not None or data_dir.exists(), f"{data_dir}: no such data folder")
    require(manifest is not None, f"{data_dir / MANIFEST}: no such file, so there is nothing to verify against")
    if "tokenizer_sha256" in manifest:
        found = _sha256(data_dir / TOKENIZER_FILE)
        same = found == manifest["tokenizer_sha256"]
        yield TOKENIZER_FILE, None if same else "sha256 differs" if found else "missing"
    names = manifest["files"].keys() | {path.name for path in data_dir.glob("*.bin")}
    require(names, f"{data_dir}: no shards, nor any in {MANIFEST}")
    for name in sorted(names):
        yield name, _find_shard_problem(data_dir / name, manifest["files"].get(name))


def _find_shard_problem(path: Path, entry: dict | None) -> str | None:
    if entry is None:
        return "not in the manifest"
    if not path.exists():
        return "missing"
    try:
        found = describe_shard(path)
    except (ValueError, OSError) as error:
        return str(error).removeprefix(f"{path}: ")
    return ", ".join(f"{key} differs" for key in found if found[key] != entry[key]) or None


@exit_on_user_error()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.shards", description="Check token shards.")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("verify", help="compare the sha256 of every file with the manifest")
    command.add_argument("dir", type=Path)
    folder, bad = parser.parse_args(argv).dir, []
    for name, problem in verify(folder):
        print(f"{name}: {problem or 'ok'}", flush=True)
        if problem:
            bad.append(f"{name} ({problem})")
    require(not bad, f"{folder}: {len(bad)} bad, remove and make them again: {', '.join(bad)}")


if __name__ == "__main__":
    main()

"""Writes token shards and their manifest. data.shards describes the format."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.shards import MAGIC, TOKEN, TOKENIZER_FILE, VERSION, describe_shard, sha256_of, write_manifest
from errors import require
from files import naming, sync


class ShardWriter:
    """Writes the tokens of two splits to shards. A document may continue in the next shard.

        with ShardWriter(folder, "fineweb", tokenizer="gpt2", vocab_size=50257) as writer:
            writer.write("train", tokens)  # any number of times, "train" or "val"
            manifest = writer.close()

    Shards stay in a temporary folder until `close`, so a killed process leaves no partial data. `close` writes the
    manifest before it moves the shards. After a kill in between, the manifest shows the missing shards.
    """

    def __init__(self, folder: Path, prefix: str, *, tokenizer: str, vocab_size: int, shard_tokens: int = 100_000_000):
        problem = f"a vocabulary of {vocab_size} tokens does not fit shards of uint16. Use at most {2**16}."
        require(0 < vocab_size <= 2**16, problem)
        self.folder = folder
        self.prefix = prefix
        self.shard_bytes = shard_tokens * TOKEN.itemsize
        self.manifest = {"tokenizer": tokenizer, "vocab_size": vocab_size, "files": {}}
        self._waiting = {"train": bytearray(), "val": bytearray()}  # tokens of the next shard
        self._next_number = {"train": 1, "val": 0}
        self._temporary = self.folder / ".incoming"
        shutil.rmtree(self._temporary, ignore_errors=True)  # left by a killed process
        self._temporary.mkdir(parents=True)

    def write(self, split: str, tokens: Sequence[int] | np.ndarray):
        """Append tokens (one document, or any piece of the stream) to a split."""
        waiting = self._waiting[split]
        waiting += np.asarray(tokens).astype(TOKEN).tobytes()
        while len(waiting) >= self.shard_bytes:
            self._write_shard(split, waiting[: self.shard_bytes])
            del waiting[: self.shard_bytes]

    def close(self) -> dict:
        """Write the manifest, move all shards into the folder, and return the manifest."""
        for split, waiting in self._waiting.items():
            if waiting:
                self._write_shard(split, waiting)
        if self.manifest["tokenizer"] == TOKENIZER_FILE:  # gpt2 has no file, or one of an earlier text
            self.manifest["tokenizer_sha256"] = sha256_of(self.folder / TOKENIZER_FILE)
        write_manifest(self.folder, self.manifest)
        for name in self.manifest["files"]:
            os.replace(self._temporary / name, self.folder / name)
        sync(self.folder)
        self._temporary.rmdir()
        return self.manifest

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exception):
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _write_shard(self, split: str, tokens: bytearray):
        header = np.zeros(256, "<i4")
        header[:3] = MAGIC, VERSION, len(tokens) // TOKEN.itemsize
        path = self._temporary / f"{self.prefix}_{split}_{self._next_number[split]:06d}.bin"
        self._next_number[split] += 1
        with naming("write", path):
            path.write_bytes(header.tobytes() + tokens)
        sync(path)
        self.manifest["files"][path.name] = describe_shard(path)

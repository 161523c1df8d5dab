"""Checkpoints that survive a kill at any instant: step_000500.pt in the run's checkpoints/ folder."""

import os
import pickle
import re
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import get_crc32_options, set_crc32_options
from torch.utils._pytree import tree_map_only

from errors import UserError, require
from files import replace_file
from runtime.processes import World, fail_together, gather

CHECKSUM_BYTES = len(b"crc32 00000000\n")


class DamagedCheckpoint(UserError):
    """A checkpoint is not the bytes that were written."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path} is damaged ({reason}). Delete it to continue from the checkpoint before it.")
        self.reason = reason


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Save `state` as the checkpoint of `step`, then delete all but the newest `keep`; return its path.

    The new file is complete and on the disk before an older one is deleted, so the disk briefly holds keep + 1. `state`
    may hold tensors, numbers, strings, lists and dicts. Raise OSError when it cannot be written (disk full); the
    earlier checkpoints are then untouched.
    """
    for leftover in folder.glob("step_*.partial"):  # a run that was killed while it saved may have left it
        leftover.unlink()
    path = folder / f"step_{step:06d}.pt"
    try:
        replace_file(path, lambda file: write_with_checksum(state, file))
    except (OSError, RuntimeError) as error:
        # torch turns a failed write into a RuntimeError about file positions; the reason is the OSError below it.
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"cannot save {path}: {reason}; earlier checkpoints are untouched") from error
    for older in list_checkpoints(folder)[keep:]:
        if older != path:
            older.unlink()
    return path


class BackgroundSaver:
    """Saves checkpoints in a thread while the run goes on, one at a time."""

    def __init__(self):
        self.thread, self.pending = ThreadPoolExecutor(1), Future()
        self.pending.set_result(None)

    def save(self, folder: Path, step: int, state: dict[str, Any], keep: int):
        """Begin to save a copy of `state`, once the checkpoint before it is saved. Raise the OSError of that one.

        The run waits only for the copy in main memory, unless it saves more often than the disk can.
        """
        self.finish()
        copy = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
        self.pending = self.thread.submit(save_checkpoint, folder, step, copy, keep)

    def check(self):
        """Raise the OSError of a checkpoint that could not be saved, if that is known by now."""
        if self.pending.done():
            self.pending.result()

    def finish(self) -> Path | None:
        """Wait until the pending checkpoint is saved; return its path. Raise OSError when it cannot be saved."""
        return self.pending.result()


def space_needed(folder: Path, checkpoint_bytes: int, keep: int) -> int:
    """Return the free bytes that `save_checkpoint` needs; some of the keep + 1 checkpoints may exist already."""
    leftovers = sum(path.stat().st_size for path in folder.glob("step_*.partial"))  # deleted before the next is written
    return max(1, keep + 1 - len(list_checkpoints(folder))) * checkpoint_bytes - leftovers


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the highest step, or None when there is none."""
    return next(iter(list_checkpoints(folder)), None)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in the folder, which need not exist, newest first."""
    steps = {path: re.fullmatch(r"step_(\d+)\.pt", path.name) for path in folder.glob("step_*.pt")}
    return sorted((path for path in steps if steps[path]), key=lambda path: int(steps[path][1]), reverse=True)


class Checksummed:
    """A file to write to that keeps the CRC-32 of what was written, computed while it is being written."""

    def __init__(self, file: BinaryIO, thread: ThreadPoolExecutor):
        self.file, self.thread, self.crc, self.flush = file, thread, 0, file.flush

    def write(self, data: bytes | memoryview) -> int:
        crc = self.thread.submit(zlib.crc32, data, self.crc)
        try:
            return self.file.write(data)
        finally:
            self.crc = crc.result()


def write_with_checksum(state: dict[str, Any], file: BinaryIO):
    """Write what torch.save writes, then a line with the CRC-32 of all of it, which torch.load passes over.

    The archive's own checksums leave out its index, where a flipped bit can change what is loaded. They take as long as
    all the writing, so torch.save is told to leave them out.
    """
    before = get_crc32_options()
    with ThreadPoolExecutor(1) as thread:
        checksummed = Checksummed(file, thread)
        set_crc32_options(False)
        try:
            torch.save(state, checksummed)
        finally:
            set_crc32_options(before)
    file.write(f"crc32 {checksummed.crc:08x}\n".encode())


def load_checkpoint(path: Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Return the state that was saved. Nothing in the file can run code.

    Raise DamagedCheckpoint, a ValueError, when the file is not the bytes that were written, and ValueError when it
    holds more than plain data.
    """
    left, crc = max(0, os.path.getsize(path) - CHECKSUM_BYTES), 0
    with open(path, "rb") as file:
        while data := file.read(min(left, 2**20)):
            crc, left = zlib.crc32(data, crc), left - len(data)
        if file.read() != f"crc32 {crc:08x}\n".encode():
            raise DamagedCheckpoint(path, "wrong checksum, or a part of the file is missing")
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} holds more than tensors and plain data, so it is not loaded") from error


def load_newest(folder: Path, world: World) -> tuple[Path | None, dict[str, Any], dict[Path, str]]:
    """Return the newest checkpoint that every rank finds whole, its state, and newer damaged ones with the reason.

    The path is None where the folder has no checkpoint. All ranks call this. Raise ValueError, or end all ranks (see
    fail_together), when there are checkpoints and none of them can be loaded.
    """
    damaged = {}
    for path in list_checkpoints(folder):
        state = reason = None
        with fail_together(world):
            try:
                state = load_checkpoint(path)
            except DamagedCheckpoint as error:
                reason = error.reason
        reasons = [other for other in gather(world, reason) if other is not None]
        if not reasons:
            return path, state, damaged
        damaged[path] = reasons[0]
    with fail_together(world):
        for path, reason in damaged.items():
            raise DamagedCheckpoint(path, reason)
    return None, {}, {}


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is no checkpoint any more; return its new path."""
    return path.rename(path.with_name(path.name + ".damaged"))


def check_same_run(path: Path, state: dict, config: dict, fingerprint: str, may_differ: Iterable[str]):
    """Raise ValueError that names the fields when a checkpoint's config or data differs from this run's.

    may_differ: fields that do not change what is computed.
    """
    stored, advice = state["config"], "Choose another --name, or --force to go on."
    different = [field for field in config if field not in may_differ and config[field] != stored.get(field)]
    changes = ", ".join(f"{field} {stored.get(field)} -> {config[field]}" for field in different)
    require(not different, f"{path} belongs to another run ({changes}). {advice}")
    same_data = state["fingerprint"] == fingerprint
    require(same_data, f"{path} was trained on other data than {config['data_dir']}. {advice}")


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Turn errors in the use of a checkpoint that does not fit this run into a ValueError that names the file."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{path} does not fit this run ({reason}). Delete it, or choose another --name.") from error

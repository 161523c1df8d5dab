"""Checkpoints that survive a kill at any instant: step_000500.pt in the run's checkpoints/ folder."""

import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import get_crc32_options, set_crc32_options
from torch.utils._pytree import tree_map_only

from errors import require
from files import replace_file
from runtime.processes import World, fail_together, gather

ARCHIVE_END = b"PK\5\6", 22  # the last record of a zip archive begins with this, and is so many bytes long
CHECKSUM_BYTES = len(b"crc32 00000000\n")


class DamagedCheckpoint(ValueError):
    """A checkpoint is not the bytes that were written."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path} is damaged ({reason}): delete it to continue from the one before it")
        self.reason = reason


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Save `state` as the checkpoint of `step`, then delete all but the newest `keep`; return its path.

    The new file is complete and on the disk before an older one goes, so that the disk holds up to keep + 1 for a
    moment. `state` may hold tensors, numbers, strings, lists and dicts: what `load_checkpoint` accepts.
    Raise OSError when it cannot be written (disk full); the earlier checkpoints are then untouched.
    """
    for leftover in folder.glob("step_*.partial"):  # of a run that was killed while it saved
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
    """Saves checkpoints in a thread, while the run goes on. There is one under way at a time, and at the end of the
    `with` block, however it ends, none."""

    def __init__(self):
        self.thread, self.pending = ThreadPoolExecutor(1), Future()
        self.pending.set_result(None)

    def __enter__(self) -> "BackgroundSaver":
        return self

    def __exit__(self, *error):
        self.thread.shutdown()  # waits

    def save(self, folder: Path, step: int, state: dict[str, Any], keep: int):
        """Begin to save a copy of `state` as save_checkpoint does, once the one before is saved: the copy, in the
        machine's memory, is all that a run waits for if it saves no more often than the disk can. Raise the OSError of
        the one before."""
        self.finish()
        copy = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
        self.pending = self.thread.submit(save_checkpoint, folder, step, copy, keep)

    def check(self):
        """Raise the OSError of a checkpoint that could not be saved, if by now it is known."""
        if self.pending.done():
            self.pending.result()

    def finish(self) -> Path | None:
        """Wait until what was begun is saved; return its path. Raise OSError when it cannot be."""
        return self.pending.result()


def space_needed(folder: Path, checkpoint_bytes: int, keep: int) -> int:
    """Return the bytes that have to be free for `save_checkpoint`, where some of the keep + 1 may be there already."""
    leftovers = sum(path.stat().st_size for path in folder.glob("step_*.partial"))  # they go before the next is written
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
    """Write what torch.save writes, and behind it a line with the CRC-32 of all of it, which torch.load passes over.

    The checksums that the archive itself has leave out its index, where a flipped bit can change what is loaded. As
    they take as long as all the writing, torch.save is told to do without (zip programs that test the file then
    complain, and so do versions of this program from before there was such a line).
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


def has_checksum(path: Path) -> bool:
    """Return whether the file does not end where its archive does: those of older versions do."""
    signature, size = ARCHIVE_END
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - size))
        return file.read(len(signature)) != signature


def check_bytes(path: Path):
    """Raise BadZipFile when a checkpoint is not what was written. One without our line, of an older version, has the
    checksums of its tensors and its pickle compared, as zip keeps them."""
    if not has_checksum(path):
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
        return
    left, crc = max(0, os.path.getsize(path) - CHECKSUM_BYTES), 0
    with open(path, "rb") as file:
        while data := file.read(min(left, 2**20)):
            crc, left = zlib.crc32(data, crc), left - len(data)
        if file.read() != f"crc32 {crc:08x}\n".encode():
            raise zipfile.BadZipFile("wrong checksum of the file, or a part of it is missing")


def load_checkpoint(path: Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Return the state that was saved. Nothing in the file can run code.

    Raise DamagedCheckpoint, a ValueError that names the file, when a bit of it is another one than was written (the
    checksums are compared, which torch.load does not do), ValueError when it holds other than plain data.
    """
    try:
        check_bytes(path)
        return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds more than tensors and plain data, so it is not loaded") from error
    except Exception as error:  # what a flipped byte in the index of an archive without our checksum comes out as
        raise DamagedCheckpoint(path, f"{type(error).__name__}: {error}") from error


def load_newest(folder: Path, world: World) -> tuple[Path | None, dict[str, Any], dict[Path, str]]:
    """Return the newest checkpoint that every rank finds whole (None where the folder has none), its state, and those
    newer that are damaged, with the reason. All ranks call this.

    Raise ValueError, or end all ranks (see fail_together), when there are checkpoints and none of them can be loaded.
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
    """Rename a damaged checkpoint, so that it does not count as one any more; return its new path."""
    return path.rename(path.with_name(path.name + ".damaged"))


def check_same_run(path: Path, state: dict, config: dict, fingerprint: str, may_differ: Iterable[str]):
    """Raise ValueError that names the fields when a checkpoint's config is another, or its data is.

    `may_differ` are fields that do not change what is computed.
    """
    theirs, mend = state["config"], "choose another --name, or --force to go on"
    different = [field for field in config if field not in may_differ and config[field] != theirs.get(field)]
    changes = ", ".join(f"{field} {theirs.get(field)} -> {config[field]}" for field in different)
    require(not different, f"{path} is of another run ({changes}): {mend}")
    same_data = state["fingerprint"] == fingerprint
    require(same_data, f"{path} was trained on other data than {config['data_dir']}: {mend}")


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Raise ValueError naming the file when what its block uses of a checkpoint is other than a run's."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{path} does not fit this run ({reason}): delete it, or choose another --name") from error

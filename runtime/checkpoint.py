"""Checkpoints that survive a kill at any instant: step_000500.pt in the run's checkpoints/ folder."""

import dataclasses
import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch

from errors import UserError
from files import replace_file
from runtime.processes import World

CHECKSUM_BYTES = len(b"crc32 00000000\n")


class DamagedCheckpoint(UserError):
    """A checkpoint is not the bytes that were written."""


@dataclasses.dataclass
class Progress:
    """What a run's checkpoint holds besides configuration, weights and optimizer state."""

    step: int = 0  # optimizer steps made
    first_token: int = 0  # where step 0 begins in the training text; more than 0 after --init_from
    seconds: float = 0.0  # spent in steps
    skipped: int = 0  # steps that were not finite
    wandb_id: str | None = None
    rng: list[dict] = dataclasses.field(default_factory=list)  # of each rank


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Save `state` as the checkpoint of `step`, then delete all but the newest `keep`; return its path.

    The new file is complete and on the disk before an older one is deleted, so the disk briefly holds keep + 1. `state`
    may hold tensors, numbers, strings, lists and dicts. Raise OSError when it cannot be written (disk full); the
    earlier checkpoints are then untouched.
    """
    for leftover in folder.glob("step_*.partial"):  # a run that was killed while it saved may have left it
        leftover.unlink()
    path = folder / f"step_{step:06d}.pt"
    replace_file(path, lambda file: write_with_checksum(state, file))
    for older in list_checkpoints(folder)[keep:]:
        older.unlink()
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the highest step, or None when there is none."""
    return next(iter(list_checkpoints(folder)), None)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in the folder, which need not exist, newest first."""
    return sorted(folder.glob("step_*.pt"), key=lambda path: int(path.stem.removeprefix("step_")), reverse=True)


def write_with_checksum(state: dict[str, Any], file: BinaryIO):
    """Write what torch.save writes, then a line with the CRC-32 of all of it, which torch.load passes over.

    The archive's own checksums leave out its index, where a flipped bit can change what is loaded.
    """
    archive = io.BytesIO()
    torch.save(state, archive)
    file.write(archive.getbuffer())
    file.write(f"crc32 {zlib.crc32(archive.getbuffer()):08x}\n".encode())


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state that was saved, on the CPU. Nothing in the file can run code.

    Raise DamagedCheckpoint, a ValueError, when the file is not the bytes that were written.
    """
    content = memoryview(path.read_bytes())
    archive, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
    if checksum != f"crc32 {zlib.crc32(archive):08x}\n".encode():
        raise DamagedCheckpoint(f"{path} is damaged. Delete it to continue from the checkpoint before it.")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def load_newest(folder: Path, world: World) -> tuple[Path | None, dict[str, Any], list[Path]]:
    """Return the newest checkpoint that every rank finds whole, its state, and the damaged ones that are newer.

    The path is None where the folder has no checkpoint. All ranks call this. Raise DamagedCheckpoint when there are
    checkpoints and none of them is whole.
    """
    damaged = []
    for path in list_checkpoints(folder):
        try:
            state = load_checkpoint(path)
        except DamagedCheckpoint:
            state = None
        if all(world.gather(state is not None)):
            return path, state, damaged
        damaged.append(path)
    if damaged:
        raise DamagedCheckpoint(f"{damaged[0]} and all others are damaged. Delete them to start anew.")
    return None, {}, []

"""Saves and loads checkpoints: step_000500.pt in the run's checkpoints/ folder. A kill cannot damage them."""

import dataclasses
import io
import re
import zlib
from pathlib import Path
from typing import BinaryIO

import torch

from errors import UserError
from files import read_bytes, replace_file
from runtime.processes import World

CHECKPOINT = re.compile(r"step_[0-9]{6,}\.pt")
CHECKSUM_BYTES = len(b"crc32 00000000\n")


class DamagedCheckpoint(UserError):
    """The checksum of a checkpoint is wrong, so its content has changed since it was saved."""


@dataclasses.dataclass
class Progress:
    """The progress of a run. A checkpoint holds it beside configuration, weights and optimizer state."""

    step: int = 0  # completed optimizer steps
    first_token: int = 0  # position of step 0 in the training text; more than 0 after --init_from
    seconds: float = 0.0  # training time, without validations, checkpoints and each process's first step of a length
    skipped: int = 0  # steps without an update, because loss or gradients were not finite
    rng: list[dict] = dataclasses.field(default_factory=list)  # state of the random generators, by rank

    @classmethod
    def stored(cls, values: dict) -> "Progress":
        """Return the progress in a checkpoint. Older checkpoints have wandb's id there, too."""
        return cls(**{name: value for name, value in values.items() if name != "wandb_id"})


def save_checkpoint(folder: Path, step: int, state: dict, keep: int = 2) -> Path:
    """Save `state` as the checkpoint of `step`, delete all but the newest `keep`, and return the new path.

    An older file is deleted only when the new one is on the disk, which needs space for keep + 1. `state` may hold
    tensors, numbers, strings, lists and dicts. Raise OSError when the disk is full. The older checkpoints then stay.
    """
    for leftover in folder.glob("step_*.partial"):  # a run that was killed while saving leaves one
        leftover.unlink()
    path = folder / f"step_{step:06d}.pt"
    replace_file(path, lambda file: write_with_checksum(state, file))
    for older in list_checkpoints(folder)[keep:]:
        older.unlink()
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the path of the newest checkpoint, or None when the folder has none."""
    return next(iter(list_checkpoints(folder)), None)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints' paths, newest first. The folder need not exist.

    Other files, such as `step_000500 (1).pt`, are left alone.
    """
    paths = [path for path in folder.glob("step_*.pt") if CHECKPOINT.fullmatch(path.name) and path.is_file()]
    return sorted(paths, key=lambda path: int(path.stem.removeprefix("step_")), reverse=True)


def write_with_checksum(state: dict, file: BinaryIO):
    """Write the archive of torch.save, then a line with its CRC-32. torch.load ignores that line.

    The checksums inside the archive do not cover its index. A flipped bit there could load wrong weights.
    """
    archive = io.BytesIO()
    torch.save(state, archive)
    file.write(archive.getbuffer())
    file.write(f"crc32 {zlib.crc32(archive.getbuffer()):08x}\n".encode())


def load_checkpoint(path: Path) -> dict:
    """Return the saved state, on the CPU. Loading never runs code from the file.

    Raise DamagedCheckpoint, a ValueError, when the checksum is wrong.
    """
    content = read_bytes(path)  # BytesIO does not copy bytes
    archive = memoryview(content)[:-CHECKSUM_BYTES]
    checksum = content[-CHECKSUM_BYTES:]
    if checksum != f"crc32 {zlib.crc32(archive):08x}\n".encode():
        raise DamagedCheckpoint(f"{path} is damaged. Delete it to use the previous checkpoint.")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def load_weights(model: torch.nn.Module, weights: dict, checkpoint: Path):
    """Load the weights of a checkpoint. Raise ValueError if the model's code has other parameters now."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split()[:30])
        problem = f"{checkpoint} does not fit the present code ({reason})"
        raise UserError(f"{problem}. Restore the code, or train again.") from None


def load_newest(folder: Path, world: World) -> tuple:
    """Return the newest checkpoint that every rank can read, its state, and the paths of newer damaged checkpoints.

    The path is None if the folder has no checkpoint. All ranks call this. Raise DamagedCheckpoint if all are damaged,
    and ValueError if ranks see different files, such as machines without a common disk.
    """
    # 1. All ranks must see the same files.
    paths = list_checkpoints(folder)
    names = [path.name for path in paths]
    if any(others != names for others in world.gather(names)):
        raise UserError(f"Ranks see different checkpoints in {folder}. Use a disk that all machines share.")

    # 2. Take the newest one that all can read.
    damaged = []
    for path in paths:
        try:
            state = load_checkpoint(path)
        except DamagedCheckpoint:
            state = None
        if all(world.gather(state is not None)):
            return path, state, damaged
        damaged.append(path)
    if damaged:
        problem = f"{damaged[0]} and all older ones are damaged"
        raise DamagedCheckpoint(f"{problem}. Restore one, or delete them to start from step 0.")
    return None, {}, []

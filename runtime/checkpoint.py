"""Checkpoints that survive a kill at any instant: step_000500.pt in the run's checkpoints/ folder."""

import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from errors import require
from files import replace_file


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
        replace_file(path, lambda file: torch.save(state, file))
    except (OSError, RuntimeError) as error:
        # torch turns a failed write into a RuntimeError about file positions; the reason is the OSError below it.
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"cannot save {path}: {reason}; earlier checkpoints are untouched") from error
    for older in list_checkpoints(folder)[keep:]:
        if older != path:
            older.unlink()
    return path


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


def load_checkpoint(path: Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Return the state that was saved. Nothing in the file can run code.

    Raise ValueError naming the file when it is damaged (the checksums of the data are compared, which torch.load does
    not do) or when it holds other than plain data.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
        return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds more than tensors and plain data, so it is not loaded") from error
    except Exception as error:  # a flipped byte in the archive's index comes out as almost any of them
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged ({reason}): delete it to continue from the one before it") from error


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

"""Checkpoints of models that several processes share.

checkpoints/step_000500/     weights and optimizer state, by torch.distributed.checkpoint, each process its part
checkpoints/step_000500.pt   the rest (runtime/checkpoint.py), written last: without it the folder does not count

Either number of processes reads what the other has written. Nothing in them can run code.
"""

import contextlib
import hashlib
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # no Exception: a BaseException

from errors import require
from runtime.checkpoint import list_checkpoints, save_checkpoint
from runtime.processes import World, fail_together

METADATA = ".metadata"  # of torch.distributed.checkpoint: a pickle, which torch reads without looking
PLAIN = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("torch", "Size")}
PLAIN |= {("torch.serialization", "_get_layout")}
PLAIN |= {("torch", "bfloat16"), ("torch", "float32"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
NAMES = "Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata ChunkStorageMetadata"
PLAIN |= {("torch.distributed.checkpoint.metadata", name) for name in (*NAMES.split(), "_MEM_FORMAT_ENCODING")}


def save(folder: Path, step: int, tensors: dict[str, Tensor], rest: dict[str, Any], keep: int, world: World):
    """Save the checkpoint of a step, and delete all but the newest `keep`. All processes call it.

    tensors: by name, DTensors where processes share them. rest: see save_checkpoint. OSError where it cannot be.
    """
    path = folder / f"step_{step:06d}"
    with fail_together(world):
        if world.is_main:
            remove_folders(folder, keep=[path.stem for path in list_checkpoints(folder)])
    with fail_together(world), no_warning():  # what fails here fails in all processes: they tell each other
        try:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path))
        except (Exception, CheckpointException) as error:
            raise OSError(f"cannot save {path}: {reason(error)}; earlier checkpoints are untouched") from error
    with fail_together(world):
        if world.is_main:
            save_checkpoint(folder, step, rest | dict(files=digests(path)), keep=keep)
            remove_folders(folder, keep=[path.stem for path in list_checkpoints(folder)])


def load(path: Path, files: dict[str, str], tensors: dict[str, Tensor], world: World):
    """Fill the tensors, in place, from the folder beside step_000500.pt, which `path` is. All processes call it.

    files: the digests in that file. ValueError (fail_together) when it is damaged or does not fit.
    """
    folder = path.with_suffix("")
    with fail_together(world):
        if world.is_main:
            found = digests(folder)
            changed = sorted(name for name in found | files if found.get(name) != files.get(name))
            mend = f"delete {path} to continue from the one before"
            require(not changed, f"{folder} is damaged ({', '.join(changed)}): {mend}")
            check_pickle(folder / METADATA)
    with fail_together(world), no_warning():
        try:
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder))
        except (Exception, CheckpointException) as error:
            mend = f"delete {path}, or choose another --name"
            raise ValueError(f"{folder} does not fit this run ({reason(error)}): {mend}") from error


def reason(error: BaseException) -> str:
    """Return in one line why torch.distributed.checkpoint failed, in all processes: they tell each other."""
    if isinstance(error, CheckpointException):  # which holds one a process, and prints their stacks
        error = next(iter(error.failures.values()))[0]
    return " ".join(f"{type(error).__name__} {error}".split())[:200]


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file of a checkpoint's folder."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with open(path, "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def remove_folders(folder: Path, keep: list[str]):
    for path in folder.glob("step_*"):
        if path.is_dir() and path.name not in keep:
            shutil.rmtree(path)


def check_pickle(path: Path):
    """Raise ValueError unless a pickle is made of what describes tensors alone, so that loading it can do no harm."""
    try:
        with open(path, "rb") as file:
            PlainUnpickler(file).load()
    except Exception as error:  # whatever a pickle may raise
        raise ValueError(f"{path} holds more than the places of tensors, so it is not loaded ({error})") from error


class PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PLAIN:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


@contextlib.contextmanager
def no_warning():
    """Leave out what torch.distributed.checkpoint says where there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield

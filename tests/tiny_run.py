"""Runs of models so small that a test can train them in its process."""

import contextlib
import random
import subprocess
from types import SimpleNamespace

import pytest
from commands import exit_code, succeeds

from data.text import prepare
from scripts import needle
from scripts.record import __main__ as record
from scripts.sweep import local
from train_gpt import main as train

FIELDS = "--vocab_size 384 --num_layers 1 --num_heads 2 --model_dim 32 --batch_tokens 480 --train_length 240 --steps 4 "
FIELDS += "--cooldown_steps 2 --val_lengths 240 --val_tokens 960 --val_every 0 --compile off --device cpu --seed 3"


def train_tiny_run(folder, fields="", letters="abcdefgh ", documents=150, tokenizer="bpe:384"):
    """Write documents of random letters, train on them with FIELDS and other fields, and return the run's folder."""
    rng = random.Random(0)
    for i in range(documents):
        (folder / f"{i}.txt").write_text(" ".join("".join(rng.choices(letters, k=300)).split()))
    prepare([folder], folder / "data", str(tokenizer), val_fraction=0.3, name="letters")
    succeeds(train, *arguments(folder, fields))
    return folder / "run"


def arguments(folder, fields=""):
    """Return the command line of the run of a folder that has the data."""
    places = f"--runs_dir {folder} --name run --data_dir {folder}/data"
    return f"quickstart {places} --length_schedule --val_copy_gaps {FIELDS} {fields}".split()


class InThisProcess:
    """Takes the place of Popen: trains or fine-tunes here, because a new process needs seconds to import torch."""

    def __init__(self, command, **options):
        _, program, *argv = command
        main = train
        if program == "-m":
            main = {"scripts.needle": needle, "scripts.record": record}[argv.pop(0)].main
        self.returncode = exit_code(main, argv)

    def poll(self):
        return self.returncode


@contextlib.contextmanager
def sweeps_in_this_process():
    """Let the runs of a sweep train in this process, with one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(local, "subprocess", SimpleNamespace(**(vars(subprocess) | dict(Popen=InThisProcess))))
        patch.setattr(local, "POLL", 0)
        yield

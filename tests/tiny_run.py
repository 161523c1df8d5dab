"""A run of a model so small that a test can train it."""

import random
import sys

import pytest

from data.text import prepare
from train_gpt import main as train


def train_tiny_run(folder, fields, letters="abcdefgh ", documents=150):
    """Trains in this process on documents of random letters, which it writes, and returns the run's folder."""
    rng = random.Random(0)
    for i in range(documents):
        (folder / f"{i}.txt").write_text(" ".join("".join(rng.choices(letters, k=300)).split()))
    prepare([folder], folder / "data", "bpe:384", val_fraction=0.3, name="letters")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", ["train_gpt.py", "quickstart", "--runs_dir", str(folder), "--name", "run",
                                          "--data_dir", str(folder / "data"), "--length_schedule", "--val_copy_gaps",
                                          *fields.split()])  # fmt: skip
        train()
    return folder / "run"

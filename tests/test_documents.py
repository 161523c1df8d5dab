"""Tokens far inside their own documents: which they are, and their loss in a run and in scripts.evaluate."""

import numpy as np
import pytest
import torch
from commands import read_json
from test_train import plain_losses
from tiny_run import train_tiny_run

from data.shards import open_split
from measure.documents import document_token, own_context
from scripts import evaluate
from scripts.shared.runs import load_run


def by_counting(inputs, token):
    """Return own_context of one sequence, token by token."""
    contexts, count = [], 0
    for present in inputs:
        count = 1 if present == token else count + 1
        contexts.append(count)
    return contexts


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_own_context_counts_from_the_document_token_or_the_first_token(share):
    generator = np.random.default_rng(3)
    inputs = generator.choice([7, 5], p=[share, 1 - share], size=(4, 50)).astype("uint16")
    assert own_context(inputs, 7).tolist() == [by_counting(row, 7) for row in inputs]


def test_the_loss_on_these_tokens_is_measured_at_the_end_and_by_evaluate(tmp_path, capsys):
    run = train_tiny_run(tmp_path, "--val_lengths 24 240 --train_length 24 --micro_batch_tokens 240")
    summary = read_json(run / "summary.json")
    config, model = load_run(run, torch.device("cpu"))
    stream = open_split(tmp_path / "data", "val", config.vocab_size)
    token = document_token(stream)
    text = stream.read(0, 961)
    assert (text == token).sum() >= 3
    inputs = text[:-1].reshape(-1, 240)
    with torch.no_grad():
        losses = plain_losses(model, np.lib.stride_tricks.sliding_window_view(text, 241)[::240])
    chosen = np.array([by_counting(row, token) for row in inputs]) > 24
    assert 0 < chosen.sum() < chosen.size
    assert summary["val_tokens_own"] == {"240": chosen.sum()}
    assert summary["val_loss_own"]["240"] == pytest.approx(losses.numpy()[chosen].mean(), abs=1e-5)
    evaluate.main([str(run), "--lengths", "24", "240"])
    assert f"{summary['val_loss_own']['240']:.3f} ({chosen.mean():.1%})" in capsys.readouterr().out

"""Riffled documents, and riffle gain against losses of single sequences."""

import numpy as np
import pytest
import torch
from commands import read_json, refuses, succeeds
from test_train import plain_losses
from tiny_run import train_tiny_run

from data.shards import open_split
from measure.riffle import CHUNKS, long_documents
from scripts import evaluate
from scripts.shared.runs import load_run


def test_riffle_gain_is_the_difference_of_the_losses_of_single_sequences(tmp_path, capsys):
    run = train_tiny_run(tmp_path, "--val_lengths 8 --train_length 8 --micro_batch_tokens 960 --steps 60")
    succeeds(evaluate.main, run, "--riffle")
    found = read_json(run / "evaluation.json")
    config, model = load_run(run, torch.device("cpu"))
    stream = open_split(tmp_path / "data", "val", config.vocab_size)
    text = stream.read(0, len(stream)).astype(int)
    length = 8 * CHUNKS + 1
    windows = np.lib.stride_tricks.sliding_window_view(text, length)
    end = stream.document_token
    documents = windows[(windows[:, 0] == end) & (windows[:, 1:] != end).all(axis=1)]
    count = found["riffle_documents"]
    assert CHUNKS <= count == len(documents)
    differences = -plain_losses(model, documents).numpy()
    for chunk in range(CHUNKS):
        here = slice(8 * chunk, 8 * chunk + 8)
        for j, document in enumerate(documents):
            pieces = [documents[(j - chunk + i) % count, 8 * i : 8 * i + 8] for i in range(chunk)]
            row = np.concatenate([*pieces, document[8 * chunk : 8 * chunk + 9]])
            differences[j, here] += plain_losses(model, row[None]).numpy()[0, -8:]
    for end in (16, 32, 64, 128):
        gains = differences[:, end // 2 : end].mean(axis=1)
        assert found["riffle_gain"][str(end)] == pytest.approx(gains.mean(), abs=1e-5)
        assert found["riffle_gain_error"][str(end)] == pytest.approx(gains.std(ddof=1) / count**0.5, rel=1e-3)
    assert f"{found['riffle_gain']['128']:.3f} ±" in capsys.readouterr().out
    with refuses("documents of more than 1000 tokens"):
        long_documents(stream, 1000, len(stream), config.vocab_size)

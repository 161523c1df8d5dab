"""Tokens far inside their own documents, riffled documents, and attention within documents: models, runs."""

import numpy as np
import torch
from attention_cases import CPU, assert_near
from commands import exit_code, parametrize, read_json, refuses, succeeds
from pytest import approx
from test_gpt import make_random_gpt, random_tokens
from test_train import plain_losses, sequences
from tiny_run import train_tiny_run

from data.shards import open_split
from measure.documents import own_context
from measure.riffle import CHUNKS, long_documents
from model.methods import METHODS
from model.scores import attention_by_layer
from scripts import evaluate
from scripts.keep import make_line
from scripts.shared.runs import load_run, read_run
from train_gpt import main as train


def by_counting(inputs, token):
    """Return own_context of one sequence, token by token."""
    contexts, count = [], 0
    for present in inputs:
        count = 1 if present == token else count + 1
        contexts.append(count)
    return contexts


@parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_own_context_counts_from_the_document_token_or_the_first_token(share):
    inputs = torch.where(torch.rand(4, 50, generator=torch.Generator().manual_seed(3)) < share, 7, 5)
    assert own_context(inputs, 7).tolist() == [by_counting(row, 7) for row in inputs]


def test_the_loss_on_these_tokens_is_measured_at_the_end_and_by_evaluate(tmp_path, capsys):
    run = train_tiny_run(tmp_path, "--val_lengths 24 240 --train_length 24 --micro_batch_tokens 240")
    summary = read_json(run / "summary.json")
    config, model = load_run(run, CPU)
    stream = open_split(tmp_path / "data", "val", config.vocab_size)
    token = stream.document_token
    text = sequences(stream.read(0, 961), 240)
    assert (text == token).sum() >= 3
    losses = plain_losses(model, text)
    chosen = np.array([by_counting(row, token) for row in text[:, :-1]]) > 24
    assert 0 < chosen.sum() < chosen.size
    assert summary["val_tokens_own"] == {"240": chosen.sum()}
    assert summary["val_loss_own"]["240"] == approx(losses.numpy()[chosen].mean(), abs=1e-5)
    succeeds(evaluate.main, run, "--lengths", 24, 240)
    assert f"{summary['val_loss_own']['240']:.3f} ({chosen.mean():.1%})" in capsys.readouterr().out


def test_riffle_gain_is_the_difference_of_the_losses_of_single_sequences(tmp_path, capsys):
    more = "--method rope --val_lengths 8 --train_length 8 --micro_batch_tokens 960 --steps 60"
    run = train_tiny_run(tmp_path, more)
    succeeds(evaluate.main, run, "--riffle", "--as", "yarn")
    found = read_json(run / "evaluation.json")
    config, model = load_run(run, CPU)
    stream = open_split(tmp_path / "data", "val", config.vocab_size)
    text = stream.read(0, len(stream)).astype(int)
    length = 8 * CHUNKS + 1
    windows = np.lib.stride_tricks.sliding_window_view(text, length)
    end = stream.document_token
    documents = windows[(windows[:, 0] == end) & (windows[:, 1:] != end).all(axis=1)]
    count = found["riffle_documents"]
    assert CHUNKS <= count == len(documents) == read_run(run).summary["riffle_documents"]
    differences = -plain_losses(model, documents).numpy()
    for chunk in range(CHUNKS):
        here = slice(8 * chunk, 8 * chunk + 8)
        for j, document in enumerate(documents):
            pieces = [documents[(j - chunk + i) % count, 8 * i : 8 * i + 8] for i in range(chunk)]
            row = np.concatenate([*pieces, document[8 * chunk : 8 * chunk + 9]])
            differences[j, here] += plain_losses(model, row[None]).numpy()[0, -8:]
    for end in (16, 32, 64, 128):
        gains = differences[:, end // 2 : end].mean(axis=1)
        assert found["riffle_gain"][str(end)] == approx(gains.mean(), abs=1e-5)
        assert found["riffle_gain_error"][str(end)] == approx(gains.std(ddof=1) / count**0.5, rel=1e-3)
    line = make_line(read_run(run))
    assert all(line[key] == found[key] for key in found if "riffle" in key)
    table = capsys.readouterr().out
    for gains in (found["riffle_gain"], found["riffle_gain_as"]["yarn"]):
        assert f"{gains['128']:.3f} ±" in table
    with refuses("documents of more than 1000 tokens"):
        long_documents(stream, 1000, len(stream), config.vocab_size)


# ---- attention within documents --------------------------------------------------------------------------------------

DEPENDENT = ("rope_ntk", "yarn", "logn_ntk")  # their angles depend on the length of the sequence
REFUSED = ("infini", "fire", "stick_breaking", "wall", "lssar", "grape_ap", "nape_entmax")
WITHIN = [name for name in METHODS if name not in DEPENDENT and not name.startswith(REFUSED)]


def several_documents(length=150):
    tokens, targets = random_tokens(length)
    tokens[:, [20, 21, length - 20]], tokens[1, 35] = 0, 0
    return tokens, targets


@parametrize("name", WITHIN)
def test_within_documents_a_model_computes_each_document_alone(name):
    model, (tokens, targets) = make_random_gpt(name), several_documents()
    losses = model(tokens, targets, plan=model.plan(150, document_token=0), per_token=True)
    alone = []
    for row in zip(tokens.split(1), targets.split(1)):
        starts = (row[0][0, 1:] == 0).nonzero().flatten() + 1  # of every document but the first
        documents = zip(*(x.tensor_split(starts, dim=1) for x in row))
        parts = [model(*document, per_token=True) for document in documents]
        alone.append(torch.cat(parts, dim=1))
    assert_near(losses, torch.cat(alone), 1e-5)
    assert (losses - model(tokens, targets, per_token=True)).abs().max() > 1e-3 or name == "identity"


def test_entropies_within_documents_are_the_means_of_the_documents_alone():
    model, tokens = make_random_gpt("scale_invariant_p_rope"), several_documents()[0][1:]
    found = attention_by_layer(model, tokens, model.plan(150, document_token=0))
    total = 0
    for part in tokens.tensor_split((tokens[0, 1:] == 0).nonzero().flatten() + 1, dim=1):
        alone = attention_by_layer(model, part, model.plan(part.shape[1]))
        total += part.shape[1] * alone["attention_entropy"]["1"]
    assert found["attention_entropy"]["1"] == approx(total / 150, abs=1e-5)


def test_a_run_trains_and_validates_within_documents(tmp_path):
    fields = "--method logn_p_rope --val_lengths 240 480 --muon_lr 0.1"
    losses = {}
    for mask in ("off", "train", "val", "both"):
        (tmp_path / mask).mkdir()
        run = train_tiny_run(tmp_path / mask, f"{fields} --document_mask {mask}")
        config, model = load_run(run, CPU)
        stream = open_split(tmp_path / mask / "data", "val", config.vocab_size)
        losses[mask] = read_json(run / "summary.json")["val_loss"]
        for length in (240, 480):
            rows = torch.from_numpy(sequences(stream.read(0, 961), length).astype("int64"))
            token = stream.document_token if mask in ("val", "both") else None
            expected = model(rows[:, :-1], rows[:, 1:], plan=model.plan(length, document_token=token))
            assert losses[mask][str(length)] == approx(expected.item(), abs=1e-5)
    assert len({by_length["480"] for by_length in losses.values()}) == 4


SKIPS_FIRST = "scale_invariant_p_rope --method_options skip_first true"


@parametrize("method", ["stick_breaking", "rope,infini_rope", SKIPS_FIRST])
def test_methods_that_cannot_stay_within_documents_are_refused(method, tmp_path):
    command = f"quickstart --runs_dir {tmp_path} --document_mask train --method {method}"
    assert exit_code(train, command.split()) == 2 and not [*tmp_path.iterdir()]

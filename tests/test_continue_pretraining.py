# ruff: noqa: E402 (imports after importorskip)
"""scripts.continue_pretraining on a tiny Llama of the real class, with grouped queries."""

import os
import shutil
import signal

import pytest
from commands import ROOT, TWO_RANKS, exit_code, one_error, python, read_json, update_json

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-extras.txt")

import numpy as np
import torch
import torch.nn.functional as F
from tiny_llama import VOCAB, save_model, save_tokenizer, texts
from torch.testing import assert_close

from data.shards import open_split
from data.text import prepare
from data.tokenizer import load_tokenizer
from measure.copy_gain import copy_sequences
from runtime.checkpoint import load_checkpoint
from runtime.metrics import read_metrics
from scripts import continue_pretraining as command
from scripts import export
from scripts.hf.convert import convert
from scripts.hf.load import load_model
from scripts.hf.training import AdamW, WithLoss

LENGTHS, STEPS = ("64", "256", "1024"), 4
FIELDS = "--dtype bfloat16 --device cpu --train_length 64 --batch_tokens 256 --micro_batch_tokens 128 --save_every 2 "
FIELDS += f"--keep 2 --val_lengths {' '.join(LENGTHS)} --val_tokens 1024 --lr 0.001"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with model/, data/ and its text/."""
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder / "model")
    (folder / "text").mkdir()
    for number, text in enumerate(texts(60)):
        (folder / "text" / f"{number}.txt").write_text(text)
    prepare([folder / "text"], folder / "data", str(folder / "model"), val_fraction=0.3)
    return folder


def arguments(place, runs, *more, model=None, steps=STEPS):
    steps = [] if steps is None else ["--steps", str(steps)]
    return [str(model or place / "model"), "--data_dir", str(place / "data"), "--runs_dir", str(runs), *FIELDS.split(),
            *steps, *map(str, more)]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(place, tmp_path_factory):
    """The folder of runs with one of LogN + p-RoPE, in bfloat16. Not to be written to."""
    runs = tmp_path_factory.mktemp("undisturbed")
    assert exit_code(command.main, arguments(place, runs, "--method", "logn_p_rope", "--name", "run")) == 0
    return runs


def reference_losses(model, inputs, targets):
    return F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten(), reduction="none").view(inputs.shape)


def validation_tokens(place, length):
    tokens = open_split(place / "data", "val", VOCAB).read(0, 1025).astype(np.int64)
    return torch.from_numpy(tokens[:-1]).view(-1, length), torch.from_numpy(tokens[1:]).view(-1, length)


def comparable(run):
    timings = ("tokens_per_second", "seconds", "val_seconds", "peak_memory_mib")
    return [{k: v for k, v in r.items() if k not in timings} for r in read_metrics(run / "metrics.jsonl")]


def test_losses_before_and_after(place, undisturbed):
    run = undisturbed / "run"
    records = read_metrics(run / "metrics.jsonl")
    before, after = (r for r in records if "val_loss" in r)
    summary = read_json(run / "summary.json")
    assert (before["step"], after["step"]) == (0, STEPS)
    assert summary["val_loss_before"] == before["val_loss"] and summary["val_loss"] == after["val_loss"]
    assert tuple(before["val_loss"]) == tuple(after["val_loss"]) == LENGTHS
    assert all(after["val_loss"][n] < before["val_loss"][n] - 0.1 for n in LENGTHS)
    assert [r["step"] for r in records if "train_loss" in r] == [1, 2, 3, 4]
    learned = [[*r["method_parameters"].values()] for r in (before, after)]
    moved = np.abs(np.subtract(*learned))  # s of LogN, (layers, heads), in float32: each step moves it by lr or less
    assert moved.shape == (2, 4) and (moved > 1e-5).all() and (moved < 1.1e-3 * STEPS).all()


def test_rope_is_not_trained(place, tmp_path):
    argv = arguments(place, tmp_path, "--method", "rope", "--val_copy_gaps", 40, "--dtype", "float32", steps=None)
    assert exit_code(command.main, argv) == 0
    summary = read_json(tmp_path / "model-rope" / "summary.json")
    assert summary["steps"] == 0 and summary["val_loss"] == summary["val_loss_before"]
    assert not [*(tmp_path / "model-rope" / "checkpoints").iterdir()] and not (tmp_path / "model-rope/model").exists()
    spans = torch.from_numpy(copy_sequences(open_split(place / "data", "val", VOCAB), 40, VOCAB)[0])  # random ones
    model = transformers.LlamaForCausalLM.from_pretrained(place / "model")
    losses = reference_losses(model, spans[:, :-1], spans[:, 1:])
    expected = losses[:, :31].mean() - losses[:, -31:].mean()
    assert summary["copy_gain"]["random"]["40"] == pytest.approx(expected.item(), abs=1e-4)


def test_steps_are_adamws_on_the_whole_logits(place, tmp_path):
    """RoPE in float32 against transformers' own model, logits and optimizer in float64."""
    argv = arguments(place, tmp_path, "--method", "rope", "--dtype", "float32", "--name", "run", steps=2)
    argv += ["--val_lengths", "64"]  # the training length alone
    assert exit_code(command.main, argv) == 0
    model = transformers.LlamaForCausalLM.from_pretrained(place / "model", dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    tokens = torch.from_numpy(open_split(place / "data", "train", VOCAB).read(0, 513).astype(np.int64))
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "train_loss" in r]
    for step, record in enumerate(records):
        here = slice(256 * step, 256 * (step + 1))
        loss = reference_losses(model, tokens[:-1][here].view(4, 64), tokens[1:][here].view(4, 64)).mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).item()
        assert record["train_loss"] == pytest.approx(loss.item(), abs=1e-6)
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    saved = load_model(tmp_path / "run" / "model")
    for name, p in model.named_parameters():
        assert_close(saved.get_parameter(name).double(), p, rtol=0, atol=2e-5)
    assert load_tokenizer(str(tmp_path / "run" / "model")).vocab_size == VOCAB


def test_recomputed_activations_give_the_same_gradients(place):
    """On a GPU the command recomputes each layer's activations in the backward pass."""
    gradients, calls = [], []
    for recompute in (False, True):
        model = convert(load_model(place / "model"), "scale_invariant_p_rope", train_length=64)
        if recompute:
            model.activation_checkpointing_enable()
        model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(recompute))
        WithLoss(model)(*validation_tokens(place, 64)).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert calls == [False, True, True]
    assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_saved_model_is_the_trained_one(place, tmp_path):
    argv = arguments(place, tmp_path, "--method", "logn_p_rope", "--dtype", "float32", steps=2)
    assert exit_code(command.main, [*argv, "--name", "run"]) == 0
    summary = read_json(tmp_path / "run" / "summary.json")
    with torch.no_grad():
        losses = reference_losses(load_model(tmp_path / "run" / "model"), *validation_tokens(place, 256))
    assert losses.mean().item() == pytest.approx(summary["val_loss"]["256"], abs=1e-5)


def test_other_commands_refuse_the_run(undisturbed, capsys):
    assert exit_code(export.main, [str(undisturbed / "run")]) == 2
    assert "docs/huggingface.md" in one_error(capsys) and not (undisturbed / "run" / "hf").exists()


def test_updates_below_the_precision_of_bfloat16_count_on_average():
    weight = torch.nn.Parameter(torch.ones(64, 1024, dtype=torch.bfloat16))
    optimizer = AdamW([weight], lr=2e-5, weight_decay=0.0)
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    # Below 1, the precision is 2^-8, so each weight moves in a share 2e-5 x 2^8 of the steps.
    assert (1 - weight.double().mean()).item() == pytest.approx(20 * 2e-5, abs=2.5e-5)
    exact = 1 - 0.999**20  # the second moment grows by a thousandth of a step, below the precision, too
    assert optimizer.state[weight]["exp_avg_sq"].double().mean().item() == pytest.approx(exact, rel=0.01)


def test_a_step_that_is_not_finite_ends_the_run(place, tmp_path, capsys):
    argv = arguments(place, tmp_path, "--name", "run", "--lr", "1e20", "--save_every", "1")
    assert exit_code(command.main, argv) == 2 and "loss" in capsys.readouterr().err
    steps = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert f"step_{STEPS:06d}.pt" not in steps and not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("after", [2, 3])
def test_a_resumed_run_equals_the_undisturbed_one_bit_for_bit(after, place, undisturbed, tmp_path, monkeypatch):
    argv = arguments(place, tmp_path, "--method", "logn_p_rope", "--name", "run", "--resume", "auto")
    run, whole = tmp_path / "run", undisturbed / "run"
    forward, passes = WithLoss.forward, []

    def stop(self, *args, **options):
        passes.append("per_token" not in options)
        if sum(passes) == 2 * after:  # a step has two micro-batches
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, *args, **options)

    with monkeypatch.context() as context:
        context.setattr(WithLoss, "forward", stop)
        assert exit_code(command.main, argv) == 75
    assert (run / "interrupted").read_text() == "SIGTERM\n" and not (run / "summary.json").exists()
    assert (run / "checkpoints" / f"step_{after:06d}.pt").exists()
    assert exit_code(command.main, argv) == 0 and comparable(run) == comparable(whole)
    ours, expected = (load_checkpoint(folder / "checkpoints" / f"step_{STEPS:06d}.pt") for folder in (run, whole))
    for part in ("model", "optimizers"):
        assert_close(ours[part], expected[part], rtol=0, atol=0)
    shutil.rmtree(run / "checkpoints")  # of a finished run, whose model must stay
    before = [(run / name).read_bytes() for name in ("metrics.jsonl", "model/model.safetensors")]
    assert exit_code(command.main, argv) == 0
    assert [(run / name).read_bytes() for name in ("metrics.jsonl", "model/model.safetensors")] == before


@pytest.mark.slow
def test_two_processes_equal_one(place, tmp_path):
    argv = arguments(place, tmp_path, "--method", "logn_p_rope", "--dtype", "float32", "--name")
    python(*TWO_RANKS, "-m", "scripts.continue_pretraining", *argv, "two", PYTHONPATH=str(ROOT))
    assert exit_code(command.main, [*argv, "one"]) == 0
    for a, b in zip(comparable(tmp_path / "two"), comparable(tmp_path / "one"), strict=True):
        key = "val_loss" if "val_loss" in a else "train_loss"
        assert a["step"] == b["step"] and a[key] == pytest.approx(b[key], abs=1e-4)


@pytest.mark.parametrize("more, field", [
    (["--method", "ropes"], "method"),
    (["--val_tokens", "1000"], "val_tokens"),
    (["--model", "x"], "model"),
    (["--muon_lr", "1"], "muon_lr"),
], ids=str)  # fmt: skip
def test_wrong_usage(more, field, place, tmp_path, capsys):
    assert exit_code(command.main, arguments(place, tmp_path / "runs", *more)) == 2
    assert field in one_error(capsys) and not (tmp_path / "runs").exists()


def test_a_vocabulary_beyond_16_bits_is_refused(place, tmp_path, capsys):
    shutil.copy(place / "model" / "config.json", tmp_path)
    update_json(tmp_path / "config.json", vocab_size=128_256)
    assert exit_code(command.main, arguments(place, tmp_path / "runs", model=tmp_path)) == 2
    assert "vocabulary" in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_the_data_must_have_the_models_tokenizer(place, tmp_path, capsys):
    shutil.copytree(place / "model", tmp_path / "other")
    save_tokenizer(tmp_path / "other", vocab_size=290)
    assert exit_code(command.main, arguments(place, tmp_path / "runs", model=tmp_path / "other")) == 2
    assert "tokenizer" in capsys.readouterr().err and not (tmp_path / "runs").exists()

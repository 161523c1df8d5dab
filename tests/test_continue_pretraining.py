# ruff: noqa: E402 (imports after importorskip)
"""scripts.continue_pretraining on a tiny Llama of the real class, with grouped queries."""

import shutil
import signal

import pytest
from commands import (
    TWO_RANKS,
    exit_code,
    fails,
    parametrize,
    python,
    read_json,
    shared,
    slow,
    succeeds,
    table,
    update_json,
    write_files,
)
from pytest import approx

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-extras.txt")

import torch
from test_train import assert_close_run, assert_same_run, numbers, steps_and_validations
from tiny_llama import VOCAB, save_model, save_tokenizer, texts
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from data.shards import open_split
from data.text import prepare
from data.tokenizer import load_tokenizer
from measure.copy_gain import copy_sequences
from scripts import continue_pretraining as command
from scripts import export
from scripts.hf.convert import convert
from scripts.hf.load import load_model
from scripts.hf.training import AdamW, WithLoss

transformers.utils.logging.disable_progress_bar()  # it writes to stderr
STEPS = 4
SIZES = dict(hidden_size=64, max_position_embeddings=64, initializer_range=0.06)
FIELDS = "--dtype bfloat16 --device cpu --train_length 64 --batch_tokens 256 --micro_batch_tokens 128 --save_every 2 \
--keep 2 --val_lengths 64 256 1024 --val_tokens 1024 --lr 0.001 --name run"


@shared
def place(shared_path):
    """A folder with model/, data/ and its text/."""
    save_model(shared_path / "model", **SIZES)
    write_files(shared_path / "text", {f"{number}.txt": text for number, text in enumerate(texts(60))})
    prepare([shared_path / "text"], shared_path / "data", str(shared_path / "model"), val_fraction=0.3)
    return shared_path


def arguments(place, runs, more="", model=None, steps=f"--steps {STEPS}"):
    return f"{model or place / 'model'} --data_dir {place}/data --runs_dir {runs} {FIELDS} {steps} {more}".split()


def train(place, runs, *more, **options):
    """Make a run with these arguments, and return its folder."""
    succeeds(command.main, *arguments(place, runs, *more, **options))
    return runs / "run"


@shared
def undisturbed(place, shared_path):
    """The folder of a run of LogN + p-RoPE, in bfloat16. Not to be written to."""
    return train(place, shared_path, "--method logn_p_rope")


def reference_losses(model, tokens):
    """Return the loss of each token after the first. tokens (B, T)."""
    return cross_entropy(model(tokens[:, :-1]).logits.mT, tokens[:, 1:], reduction="none")


def text_tokens(place, split, count):
    return torch.from_numpy(open_split(place / "data", split, VOCAB).read(0, count).astype("int64"))


def test_losses_before_and_after(undisturbed):
    steps, (before, after) = steps_and_validations(undisturbed)
    assert read_json(undisturbed / "summary.json")["val_loss"] == after["val_loss"]
    assert [*after["val_loss"]] == ["64", "256", "1024"]
    assert all(after["val_loss"][n] < loss - 0.1 for n, loss in before["val_loss"].items())
    assert [r["step"] for r in (before, *steps, after)] == [0, 1, 2, 3, 4, STEPS]
    scales = [torch.tensor([*r["method_parameters"].values()]) for r in (before, after)]  # s of LogN, (layers, heads)
    moved = (scales[1] - scales[0]).abs()  # in float32: each step moves it by lr or less
    assert moved.shape == (2, 4) and (moved > 1e-5).all() and (moved < 1.1e-3 * STEPS).all()


def test_rope_is_not_trained(place, tmp_path):
    run = train(place, tmp_path, "--method rope --val_copy_gaps 40 --dtype float32", steps="")
    summary = read_json(run / "summary.json")
    left = *(run / "checkpoints").iterdir(), *run.glob("model")
    assert [summary["steps"], *left] == [0]
    spans = torch.from_numpy(copy_sequences(open_split(place / "data", "val", VOCAB), 40, VOCAB)[0])  # random ones
    losses = reference_losses(transformers.LlamaForCausalLM.from_pretrained(place / "model"), spans)
    expected = losses[:, :31].mean() - losses[:, -31:].mean()
    assert summary["copy_gain"]["random"]["40"] == approx(expected.item(), abs=1e-4)


def test_steps_are_adamws_on_the_whole_logits(place, tmp_path):
    """RoPE in float32 against transformers' own model, logits and optimizer in float64."""
    fields = "--method rope --dtype float32 --val_lengths 64 --cooldown_steps 2 --steps 2"
    run = train(place, tmp_path, fields)
    model = transformers.LlamaForCausalLM.from_pretrained(place / "model", dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    sequences = text_tokens(place, "train", 513).unfold(0, 65, 64)
    steps, _ = steps_and_validations(run)
    for factor, record, batch in zip((1, 0.5), steps, sequences.split(4), strict=True):
        optimizer.param_groups[0]["lr"] = 1e-3 * factor
        loss = reference_losses(model, batch).mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).item()
        assert record["train_loss"] == approx(loss.item(), abs=1e-6)
        assert record["grad_norm"] == approx(norm, rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    saved = load_model(run / "model")
    for name, p in model.named_parameters():
        assert_close(saved.get_parameter(name).double(), p, rtol=0, atol=2e-5)
    assert load_tokenizer(run / "model").vocab_size == VOCAB


def test_tied_embeddings_are_one_tensor_that_is_trained_once(place, tmp_path):
    """AdamW's first step moves a weight by the learning rate."""
    save_model(tmp_path / "model", **SIZES, tie_word_embeddings=True)
    fields = "--method rope --dtype float32 --val_lengths 64 --lr 1e-4 --steps 1"
    run = train(place, tmp_path, fields, model=tmp_path / "model")
    before, after = (load_model(folder / "model") for folder in (tmp_path, run))
    assert after.lm_head.weight is after.model.embed_tokens.weight
    moved = (after.lm_head.weight - before.lm_head.weight).abs()
    assert 0 < moved.max() < 1.1e-4


def test_recomputed_activations_give_the_same_gradients(place):
    """On a GPU the command recomputes each layer's activations in the backward pass."""
    gradients, calls = [], []
    tokens = text_tokens(place, "val", 65)[None]
    for recompute in (False, True):
        model = convert(load_model(place / "model"), "scale_invariant_p_rope", train_length=64)
        if recompute:
            model.activation_checkpointing_enable()
        model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(recompute))
        WithLoss(model)(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert calls == [False, True, True]
    assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_other_commands_refuse_the_run(undisturbed, capsys):
    fails(capsys, "docs/huggingface.md", export.main, undisturbed)
    assert not (undisturbed / "hf").exists()


def test_updates_below_the_precision_of_bfloat16_count_on_average():
    weight = torch.nn.Parameter(torch.ones(64, 1024, dtype=torch.bfloat16))
    optimizer = AdamW([weight], lr=2e-5, weight_decay=0.0)
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    # Below 1, the precision is 2^-8, so each weight moves in a share 2e-5 x 2^8 of the steps.
    assert (1 - weight.double().mean()).item() == approx(20 * 2e-5, abs=2.5e-5)
    exact = 1 - 0.999**20  # the second moment grows by a thousandth of a step, below the precision, too
    assert optimizer.state[weight]["exp_avg_sq"].double().mean().item() == approx(exact, rel=0.01)
    before = weight.detach().clone()
    optimizer.found_inf = torch.ones(())  # a step that is not finite
    optimizer.step()
    assert torch.equal(weight, before)


def test_a_step_that_is_not_finite_ends_the_run(place, tmp_path, capsys):
    fails(capsys, "loss", command.main, *arguments(place, tmp_path, "--lr 1e20 --save_every 1"))
    run = tmp_path / "run"
    assert not (run / f"checkpoints/step_{STEPS:06d}.pt").exists() and not (run / "summary.json").exists()


@parametrize("after", [2, 3])
def test_a_resumed_run_equals_the_undisturbed_one_bit_for_bit(after, place, undisturbed, tmp_path, monkeypatch):
    argv = arguments(place, tmp_path, "--method logn_p_rope --resume auto")
    run = tmp_path / "run"
    forward, passes = WithLoss.forward, []

    def stop(self, *args, **options):
        passes.append("per_token" not in options)
        if sum(passes) == 2 * after:  # a step has two micro-batches
            signal.raise_signal(signal.SIGTERM)
        return forward(self, *args, **options)

    with monkeypatch.context() as context:
        context.setattr(WithLoss, "forward", stop)
        assert exit_code(command.main, argv) == 75
    assert (run / "interrupted").read_text() == "SIGTERM\n" and not (run / "summary.json").exists()
    assert (run / f"checkpoints/step_{after:06d}.pt").exists()
    succeeds(command.main, *argv)
    assert_same_run(run, undisturbed)
    shutil.rmtree(run / "checkpoints")  # of a finished run, whose model must stay
    model = (run / "model/model.safetensors").read_bytes()
    succeeds(command.main, *argv)
    assert numbers(run) == numbers(undisturbed)
    assert (run / "model/model.safetensors").read_bytes() == model


@slow
def test_two_processes_equal_one(place, tmp_path):
    fields = "--method logn_p_rope --dtype float32"
    argv = arguments(place, tmp_path, f"{fields} --name two")
    python(*TWO_RANKS, "-m", "scripts.continue_pretraining", *argv)
    assert_close_run(tmp_path / "two", train(place, tmp_path, fields))


@table("more, named", """
    --method ropes    | method
    --val_tokens 1000 | val_tokens
    --model x         | model
    --muon_lr 1       | muon_lr
""")
def test_wrong_usage(more, named, place, tmp_path, capsys):
    fails(capsys, named, command.main, *arguments(place, tmp_path, more))
    assert not (tmp_path / "run").exists()


@parametrize("vocab_size, named", [(128_256, "vocabulary"), (VOCAB, "tokenizer")])
def test_another_model_is_refused(vocab_size, named, place, tmp_path, capsys):
    model = shutil.copytree(place / "model", tmp_path / "model")
    update_json(model / "config.json", vocab_size=vocab_size)
    save_tokenizer(model, vocab_size=290)
    fails(capsys, named, command.main, *arguments(place, tmp_path, model=model))
    assert not (tmp_path / "run").exists()

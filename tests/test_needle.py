"""Fine-tuning on the needle task, and scoring: it learns, resumes bit for bit, and names the user's mistakes."""

import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from commands import fails, read_json, succeeds, table
from test_train import assert_same_numbers

from configs.runs import Needle
from data.needle import Haystack, NeedleTask
from data.tokenizer import load_tokenizer
from optim.schedule import lr_factor
from runtime.checkpoint import latest_checkpoint, load_checkpoint
from runtime.metrics import read_metrics
from scripts import needle
from scripts.shared.runs import load_run

SHORT = "--haystack shards --steps 6 --sequences 4 --examples 5 --lengths 240 480 --device cpu --compile off"


@pytest.fixture
def run(tiny_run, tmp_path):
    return shutil.copytree(tiny_run, tmp_path / "run")


@pytest.fixture
def tune(run):
    """Return a function that fine-tunes the run, and returns its summary."""

    def tune(options=""):
        succeeds(needle.main, run, *SHORT.split(), *options.split())
        return read_json(run / "needle" / "summary.json")

    return tune


@pytest.fixture
def refused(run, capsys):
    """Return a function that expects an error with `named` in it."""
    return lambda options, named: fails(capsys, named, needle.main, run, *SHORT.split(), *options.split())


@pytest.fixture
def load(run):
    """Return a function that returns configuration, model and the task on a split."""

    def load(split, seed):
        config, model = load_run(run, torch.device("cpu"))
        tokenizer = load_tokenizer(config.data_dir)
        haystack = Haystack.from_shards(config.data_dir, split, tokenizer)
        return config, model, NeedleTask(tokenizer, haystack, 240, seed=seed)

    return load


def checkpoint(run):
    return latest_checkpoint(run / "needle" / "checkpoints")


def response_loss(model, batch):
    """Return the mean loss of a batch's response tokens."""
    inputs, targets, mask = map(torch.tensor, batch)
    return model(inputs, targets, per_token=True)[mask].mean()


def test_fine_tuning_learns_by_the_loss_of_the_response_alone(run, tune, load, monkeypatch):
    factors = []
    monkeypatch.setattr(needle, "lr_factor", lambda *args: factors.append(lr_factor(*args)) or factors[-1])
    summary = tune()
    assert factors == [0.5, 1, 1, 1, 1, 0.5]
    records = read_metrics(run / "needle" / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["train_loss"] < records[0]["train_loss"] - 0.1
    assert (summary["seed"], summary["steps"], summary["examples"]) == (3, 6, 5)
    assert summary["greedy"].keys() == summary["teacher_forcing"].keys() == {"240", "480"}
    _, model, task = load("train", seed=3)
    expected = response_loss(model, task.batch(range(4))).item()
    assert records[0]["train_loss"] == pytest.approx(expected, abs=1e-5)


def test_a_killed_fine_tuning_goes_on_to_the_same_weights(run, tune, monkeypatch):
    monkeypatch.setattr(needle, "SAVE_EVERY", 2)
    tune()
    whole = load_checkpoint(checkpoint(run))["model"]
    shutil.rmtree(run / "needle")
    save = needle.save_checkpoint

    def save_and_die(*args, **kwargs):
        save(*args, **kwargs)
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(needle, "save_checkpoint", save_and_die)
        with pytest.raises(RuntimeError, match="killed"):
            tune()
    assert checkpoint(run).stem == "step_000002"
    tune()
    assert len(read_metrics(run / "needle" / "metrics.jsonl")) == 6
    assert_same_numbers(load_checkpoint(checkpoint(run))["model"], whole)


def test_a_curriculum_begins_with_shorter_prompts(tune, refused, monkeypatch):
    """A step has as many tokens of either half: of 8 prompts of 240 here, of 9 of 210 before."""
    drawn, real_batch = [], NeedleTask.batch

    def batch(task, indices):
        drawn.append((task.length, [*indices]))
        return real_batch(task, drawn[-1][1])

    monkeypatch.setattr(NeedleTask, "batch", batch)
    assert tune("--curriculum 210 --sequences 8")["curriculum"] == 210
    assert [length for length, _ in drawn] == 3 * [210] + 3 * [240]
    assert drawn[2][1] == [*range(18, 27)]
    assert drawn[3][1] == [*range(24, 32)]
    refused("--sequences 8", "curriculum")


def test_accuracy_is_by_needle_and_by_distance(load, monkeypatch):
    """A decoder copies the prompt's needles, but for the second number of every example: 2 of 3 are right."""
    config, model, task = load("val", seed=1)
    other = model.blocks[0].attention.method
    examples = {tuple(e.tokens[: e.response_start]): e for e in map(task.example, range(7))}

    def decode(model, prompts, max_new_tokens, *, target_length, stop, method):
        assert target_length == 240 and stop == task.tokenizer.eot and method is other
        rows = []
        for prompt in prompts.tolist():
            first, _, third = examples[tuple(prompt)].response.split(";")
            ids = task.tokenizer.encode(f"{first};Rome=1234567;{third}")
            rows.append((ids + [stop] * max_new_tokens)[: max_new_tokens + 8])
        return torch.tensor([row[: min(map(len, rows))] for row in rows])

    monkeypatch.setattr(needle, "greedy_decode", decode)
    found = needle.measure_accuracy(config, model, task, 7, other)
    assert found["greedy"] == pytest.approx(2 / 3) and found["teacher_forcing"] == 0.0  # the model itself knows nothing
    right, all_ = Counter(), Counter()
    for example in examples.values():
        octaves = [str(2 ** math.floor(math.log2(example.response_start - place))) for place in example.positions]
        right.update(octaves[::2])
        all_.update(octaves)
    assert found["by_distance"] == {octave: [right[octave], count] for octave, count in all_.items()}
    assert len(all_) > 1


def test_teacher_forcing_and_greedy_agree_when_the_model_is_right(load):
    """Fine-tuned on one example until it knows it by heart, both are right."""
    config, model, task = load("val", seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        response_loss(model, task.batch([0])).backward()
        optimizer.step()
    found = needle.measure_accuracy(config, model, task, 1)
    assert found["greedy"] == found["teacher_forcing"] == 1.0


def test_weights_run_as_another_method_are_scored(tune, monkeypatch):
    def measure(config, model, task, examples, method):
        return dict.fromkeys(needle.KINDS, method or 0.0)

    monkeypatch.setattr(needle, "alternative_methods", lambda config: {"other": 0.5})
    monkeypatch.setattr(needle, "measure_accuracy", measure)
    assert tune()["as"]["other"] == dict.fromkeys(needle.KINDS, {"240": 0.5, "480": 0.5})


def test_run_again_does_nothing_but_the_lengths_that_are_new(run, tune, monkeypatch):
    """An interrupted scoring leaves the lengths that are done."""
    measured, measure = [], needle.measure_accuracy

    def measure_one(config, model, task, *others):
        assert task.length != 480 or len(measured) != 1, "interrupted"
        measured.append(task.length)
        return measure(config, model, task, *others)

    monkeypatch.setattr(needle, "measure_accuracy", measure_one)
    with pytest.raises(AssertionError, match="interrupted"):
        tune()
    first = read_json(run / "needle" / "summary.json")
    monkeypatch.setattr(needle, "save_checkpoint", None)  # nothing is trained again
    measured.append("again")
    summary = tune("--lengths 240 480 640")
    assert measured == [240, "again", 480, 640] and summary["greedy"].keys() == {"240", "480", "640"}
    assert first["greedy"] == {"240": summary["greedy"]["240"]}


def test_the_scale_gives_the_settings_and_options_replace_them(monkeypatch):
    calls = []
    monkeypatch.setattr(needle, "run", lambda *args: calls.append(args[:2]))
    for options in ("", "--scale mini --examples 7"):
        succeeds(needle.main, "runs/a", "runs/b", "--device", "cpu", *options.split())
    paper = Needle("c4", steps=300, sequences=64, examples=500)
    mini = Needle("shards", steps=6000, sequences=8, examples=7, curriculum=144)
    assert calls == [(Path(run), settings) for settings in (paper, mini) for run in ("runs/a", "runs/b")]


@table("options, named", """
    --examples 0       | examples
    --curriculum -1    | curriculum
    --curriculum 40    | length 40
    --lengths 40       | length 40
    --lengths 10000000 | haystack
""")
def test_a_mistake_is_named_and_leaves_nothing(run, refused, options, named):
    refused(options, named)
    shutil.rmtree(run / "checkpoints")
    refused("", run)
    assert not (run / "needle").exists()


def test_other_settings_and_damaged_checkpoints_are_named(run, tune, refused):
    tune()
    refused("--steps 9", "steps")
    refused("--examples 6", "examples")
    path = checkpoint(run)
    torch.save(load_checkpoint(path) | dict(step=10**9), path)
    refused("", path.name)

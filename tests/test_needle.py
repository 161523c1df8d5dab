"""Fine-tuning on the needle task, and scoring: that it learns, resumes bit for bit, and says what is wrong."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import train_tiny_run

from configs.sweeps import Needle
from data.needle import Haystack, NeedleTask
from data.tokenizer import load_tokenizer
from model.decoding import greedy_decode
from runtime.checkpoint import latest_checkpoint, load_checkpoint
from runtime.metrics import read_metrics
from scripts import needle
from scripts.evaluate import load_run

ROOT = Path(__file__).parents[1]
SLOW_FIXTURES = ("told_to_stop",)
FIELDS = "--vocab_size 384 --num_layers 1 --num_heads 2 --model_dim 32 --batch_tokens 480 --train_length 240 --steps 4 "
FIELDS += "--cooldown_steps 2 --val_lengths 240 --val_tokens 960 --val_every 0 --compile off --device cpu --seed 3"
SHORT = ["--haystack", "shards", "--steps", "6", "--sequences", "4", "--examples", "5", "--lengths", "240", "480"]
SHORT += ["--device", "cpu"]


def call(monkeypatch, main, *words):
    monkeypatch.setattr(sys, "argv", ["command", *map(str, words)])
    main()


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return train_tiny_run(tmp_path_factory.mktemp("needle"), FIELDS)


@pytest.fixture
def run(pretrained, tmp_path):
    shutil.copytree(pretrained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def tune(run, monkeypatch):
    def tune(*words):
        call(monkeypatch, needle.main, run, *SHORT, "--compile", "off", *words)
        return json.loads((run / "needle" / "summary.json").read_text())

    return tune


def weights(run):
    return load_checkpoint(latest_checkpoint(run / "needle" / "checkpoints"))["model"]


def test_fine_tuning_learns_and_leaves_everything_in_the_run(run, tune, capsys):
    summary = tune()
    records = read_metrics(run / "needle" / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["train_loss"] < records[0]["train_loss"] - 0.1
    assert summary["oracle"] == {"240": 1.0, "480": 1.0} and summary["seed"] == 3 and summary["steps"] == 6
    assert summary["greedy"].keys() == summary["teacher_forcing"].keys() == {"240", "480"}
    assert "| run |" in capsys.readouterr().out


def test_what_was_interrupted_goes_on_and_ends_with_the_same_weights(run, tune, monkeypatch):
    monkeypatch.setattr(needle, "SAVE_EVERY", 2)
    tune()
    whole = weights(run)
    shutil.rmtree(run / "needle")
    real_save, saved = needle.save_checkpoint, []

    def save_and_die(*args, **kwargs):
        saved.append(real_save(*args, **kwargs))
        raise KeyboardInterrupt

    monkeypatch.setattr(needle, "save_checkpoint", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        tune()
    monkeypatch.setattr(needle, "save_checkpoint", real_save)
    assert [path.stem for path in saved] == ["step_000002"]
    tune()
    assert len(read_metrics(run / "needle" / "metrics.jsonl")) == 6
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, whole[name]), name


def start(run, *words):
    """The command in a process of its own, with many steps."""
    words = ["-m", "scripts.needle", run, *SHORT, "--compile", "off", "--steps", 200, *words]
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def metrics(run):
    return run / "needle" / "metrics.jsonl"


def wait_for(process, condition):
    while not condition():
        assert process.poll() is None
        time.sleep(0.01)


def wait_for_steps(process, run, steps):
    wait_for(process, lambda: metrics(run).exists() and metrics(run).read_text().count("\n") >= steps)


@pytest.fixture(scope="module")
def told_to_stop(pretrained, tmp_path_factory):
    """A run whose fine-tuning was told to stop, by SIGTERM and then SIGINT, and ended the third time; what was seen."""
    run, seen = shutil.copytree(pretrained, tmp_path_factory.mktemp("stopped") / "run"), []
    checkpoints = run / "needle" / "checkpoints"
    for number in (signal.SIGTERM, signal.SIGINT):
        process = start(run)
        wait_for_steps(process, run, 2 + (seen[0]["steps"] if seen else 0))
        process.send_signal(number)
        error = process.communicate()[1]
        left = dict(mark=(run / "needle" / "interrupted").read_text(), step=latest_checkpoint(checkpoints).stem)
        seen.append(left | dict(code=process.returncode, error=error, steps=len(read_metrics(metrics(run)))))
    process = start(run)
    process.communicate()
    assert process.returncode == 0
    return run, seen


@pytest.mark.slow
def test_told_to_stop_it_saves_and_exits_as_training_does(told_to_stop):
    _, seen = told_to_stop
    for name, left in zip(("SIGTERM", "SIGINT"), seen):
        assert left["code"] == 75 and f"{name}: stopped; the same command goes on from there" in left["error"]
        assert left["mark"] == f"{name}\n" and left["step"] == f"step_{left['steps']:06d}"  # every step is kept
    assert 2 <= seen[0]["steps"] < seen[1]["steps"] < 200


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_with_the_same_weights(told_to_stop, pretrained, tmp_path):
    whole = shutil.copytree(pretrained, tmp_path / "run")
    start(whole).communicate()
    assert len(read_metrics(metrics(told_to_stop[0]))) == 200 and not (told_to_stop[0] / "needle/interrupted").exists()
    for name, tensor in weights(told_to_stop[0]).items():
        assert torch.equal(tensor, weights(whole)[name]), name


@pytest.mark.slow
def test_told_to_stop_while_it_scores_it_keeps_what_is_saved(run):
    process = start(run, "--examples", 100_000)
    wait_for_steps(process, run, 200)
    wait_for(process, lambda: (run / "needle" / "checkpoints" / "step_000200.pt").exists())
    time.sleep(1)  # it may still be on its way to the first example: that makes no difference
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 75 and (run / "needle" / "interrupted").exists()
    process = start(run)
    process.communicate()
    assert process.returncode == 0 and len(read_metrics(metrics(run))) == 200


@pytest.mark.slow
def test_two_processes_never_fine_tune_the_same_run(run, tune, capsys):
    process = start(run)
    wait_for_steps(process, run, 1)
    process.send_signal(signal.SIGSTOP)  # it cannot end meanwhile
    before = {path: path.read_bytes() for path in (run / "needle").rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as exit:
        tune("--steps", "200")
    assert exit.value.code == 2 and f"needle is in use by process {process.pid} " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (run / "needle").rglob("*") if path.is_file()} == before
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    "words, settings",
    [
        ([], Needle("c4", steps=300, sequences=64, examples=500)),
        (["--scale", "mini", "--examples", "7"], Needle("shards", steps=6000, sequences=8, examples=7, curriculum=144)),
    ],
)
def test_the_scale_gives_the_settings_and_options_replace_them(monkeypatch, words, settings):
    monkeypatch.setattr(sys, "argv", ["needle", "runs/a", *words])
    assert needle.read_arguments()[1] == settings


def test_a_curriculum_begins_with_shorter_prompts(run, tune, monkeypatch):
    """A step has as many tokens of either half: of 8 prompts of 240 here, of 9 of 210 before."""
    drawn, real_batch = [], NeedleTask.batch

    def batch(task, indices):
        drawn.append((task.length, [*indices]))
        return real_batch(task, drawn[-1][1])

    monkeypatch.setattr(NeedleTask, "batch", batch)
    summary = tune("--curriculum", "210", "--sequences", "8")
    assert [length for length, _ in drawn] == 3 * [210] + 3 * [240] and summary["curriculum"] == 210
    assert [indices for _, indices in drawn[2:4]] == [[*range(18, 27)], [*range(24, 32)]]
    with pytest.raises(SystemExit):
        tune("--sequences", "8")  # without it


def test_damaged_files_are_named(run, tune, capsys):
    tune()
    for name in ("scores.json", "settings.json"):
        (run / "needle" / name).write_text("{")
        with pytest.raises(SystemExit) as exit:
            tune()
        assert exit.value.code == 2 and f"needle/{name} is damaged" in capsys.readouterr().err


@pytest.mark.promise(9, "no surprises from outside")
@pytest.mark.parametrize("name", ["needle", "needle/lock", "needle/metrics.jsonl", "needle/settings.json.partial"])
def test_a_link_where_it_writes_is_refused_and_what_it_leads_to_untouched(name, run, tune, tmp_path, faults, capsys):
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "file").write_text("precious")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(treasure if name == "needle" else treasure / "file")
    with faults("links in a run folder"):
        with pytest.raises(SystemExit) as exit:
            tune()
        assert exit.value.code == 2 and f"{run / name} is a symbolic link" in capsys.readouterr().err
        assert [(path.name, path.read_text()) for path in treasure.iterdir()] == [("file", "precious")]


@pytest.mark.parametrize("step", [10**9, -5, 2.5])
def test_a_checkpoint_of_an_odd_step_is_named(step, run, tune, capsys):
    tune()
    path = latest_checkpoint(run / "needle" / "checkpoints")
    torch.save(load_checkpoint(path) | dict(step=step), path)
    with pytest.raises(SystemExit) as exit:
        tune()
    assert exit.value.code == 2 and f"{path} is damaged (step {step})" in capsys.readouterr().err


def test_the_loss_is_that_of_the_response_alone(run, tune):
    tune()
    config, model = load_run(run, torch.device("cpu"))
    tokenizer = load_tokenizer(config.data_dir)
    task = NeedleTask(tokenizer, Haystack.from_shards(config.data_dir, "train", tokenizer), 240, seed=3)
    losses = []
    for example in map(task.example, range(4)):
        tokens = torch.from_numpy(example.tokens).unsqueeze(0)
        log_p = model(tokens[:, :-1])[0].double().log_softmax(dim=-1)
        losses += [-log_p[t - 1, tokens[0, t]].item() for t in range(example.response_start, 241)]
    assert read_metrics(run / "needle" / "metrics.jsonl")[0]["train_loss"] == pytest.approx(np.mean(losses), abs=1e-5)


def test_accuracy_is_by_needle_and_by_what_the_model_says(run, monkeypatch):
    """A decoder that copies the prompt's needles, but for the second number of every example: 2 of 3 are right."""
    config, model = load_run(run, torch.device("cpu"))
    tokenizer = load_tokenizer(config.data_dir)
    task = NeedleTask(tokenizer, Haystack.from_shards(config.data_dir, "val", tokenizer), 240, seed=1)
    examples = {tuple(e.tokens[: e.response_start]): e for e in map(task.example, range(7))}

    def decode(model, prompts, max_new_tokens, *, target_length, stop, method):
        assert target_length == 240 and stop == tokenizer.eot
        rows = []
        for prompt in prompts.tolist():
            example = examples[tuple(prompt)]
            cities, numbers = example.cities, [example.numbers[0], 1234567, example.numbers[2]]
            ids = tokenizer.encode(";".join(f"{c}={n}" for c, n in zip(cities, numbers)))
            rows.append((ids + [stop] * max_new_tokens)[: max_new_tokens + 8])
        return torch.tensor([row[: min(map(len, rows))] for row in rows])

    monkeypatch.setattr(needle, "greedy_decode", decode)
    found = needle.measure_accuracy(config, model, task, 7)
    assert found["greedy"] == pytest.approx(2 / 3) and found["teacher_forcing"] == 0.0  # the model itself knows nothing
    counts = {}
    for example in examples.values():
        for i, position in enumerate(example.positions):
            octave = 2 ** math.floor(math.log2(example.response_start - position))
            right, all_ = counts.get(octave, (0, 0))
            counts[octave] = right + (i != 1), all_ + 1
    assert found["by_distance"] == {str(octave): [*counts[octave]] for octave in sorted(counts)} and len(counts) > 1


def test_teacher_forcing_and_greedy_agree_when_the_model_is_right(run, tune, monkeypatch):
    """Fine-tuned on one example until it knows it by heart, both are right."""
    config, model = load_run(run, torch.device("cpu"))
    tokenizer = load_tokenizer(config.data_dir)
    task = NeedleTask(tokenizer, Haystack.from_shards(config.data_dir, "val", tokenizer), 240, seed=1)
    inputs, targets, mask = map(torch.from_numpy, task.batch([0]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = (model(inputs.contiguous(), targets.contiguous(), per_token=True) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = needle.measure_accuracy(config, model, task, 1)
    assert found["greedy"] == found["teacher_forcing"] == 1.0
    start = task.example(0).response_start
    decoded = greedy_decode(model, inputs[:, :start], 241 - start, target_length=240, stop=tokenizer.eot)
    assert torch.equal(decoded[0], targets[0, start - 1 :])


def test_run_again_does_nothing_but_the_lengths_that_are_new(run, tune, monkeypatch):
    first = tune()
    monkeypatch.setattr(needle, "save_checkpoint", None)  # nothing is trained again
    again = tune("--lengths", "240", "640")
    assert again["greedy"].keys() == {"240", "480", "640"} and again["greedy"]["240"] == first["greedy"]["240"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--examples", "0"], "examples of the needle task must be at least 1, got 0"),
        (["--curriculum", "-1"], "curriculum of the needle task must be 0 or a number of tokens, got -1"),
        (["--curriculum", "241"], "curriculum of the needle task: 241 tokens are more than the training length, 240"),
        (["--curriculum", "40"], "length 40: "),
        (["--lengths", "40"], "length 40: "),
        (["--haystack", "/nowhere"], "/nowhere"),
        (["--lengths", "10000000"], "haystack has"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run, tune, words, message, capsys):
    with pytest.raises(SystemExit) as exit:
        tune(*words)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert exit.value.code == 2 and len(errors) == 1 and message in errors[0]
    assert not (run / "needle").exists()


def test_another_protocol_is_not_mixed_in(run, tune, capsys):
    tune()
    with pytest.raises(SystemExit):
        tune("--steps", "9")
    assert "steps 6 -> 9" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_named_and_the_others_are_scored(run, tmp_path, monkeypatch, capsys):
    shutil.copytree(run, tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty" / "checkpoints")
    with pytest.raises(SystemExit):
        call(monkeypatch, needle.main, tmp_path / "empty", run, *SHORT, "--compile", "off")
    said = capsys.readouterr()
    assert "empty has no checkpoint" in said.err and "| run |" in said.out

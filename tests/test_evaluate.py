"""scripts.evaluate: losses on the run's text and on another, the stored file, and refused text."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import fails, read_json, succeeds, unchanged, update_json
from pytest import approx
from test_train import make_data, newest_state, train_here, validation_losses, write_shards

from data.shards import open_split
from runtime.checkpoint import save_checkpoint
from scripts import evaluate


def call(*argv):
    succeeds(evaluate.main, *argv, "--device", "cpu")


@pytest.fixture
def refused(capsys):
    """Return a function that calls the command, which must name this in its error and evaluate nothing."""

    def refused(named, folder, *argv):
        capsys.readouterr()
        with unchanged(folder):
            fails(capsys, named, evaluate.main, folder, *argv, "--device", "cpu")

    return refused


def first_table(capsys):
    """Return the table of losses that the command has printed."""
    return capsys.readouterr().out.partition("\n\n")[0]


def stored(folder):
    return read_json(folder / "evaluation.json")


def others(folder):
    """Return the evaluations on other texts."""
    return [*map(read_json, folder.glob("evaluation_*.json"))]


def test_losses_equal_the_summary_wherever_the_text_is(data, copied, tmp_path):
    losses = approx(read_json(copied / "summary.json")["val_loss"], abs=1e-5)
    call(copied)
    assert stored(copied)["val_loss"] == losses
    (copied / "evaluation.json").unlink()
    call(copied, "--data", shutil.copytree(data, tmp_path / "moved"))
    assert others(copied) == []
    assert stored(copied)["val_loss"] == losses


def test_rank_0_alone_writes(copied):
    with unchanged(copied):
        evaluate.evaluate(copied, evaluate.World(1, 1, torch.device("cpu")))


def test_other_methods_have_rows_and_the_losses_of_validate_as(data, tmp_path, capsys, refused):
    folder = train_here(data, tmp_path, "--method rope")
    whole = train_here(data, tmp_path / "with", "--method rope --validate_as rope_ntk yarn")
    refused("alibi", folder, "--as", "alibi")
    for method in ("yarn", "rope_ntk"):
        call(folder, "--as", method)
        rows = re.findall(r"^\| (run\b.*?) *\|", first_table(capsys), re.MULTILINE)
        assert rows == ["run", "run", f"run as {method}"]
    expected = read_json(whole / "summary.json")["val_loss_as"]
    assert stored(folder)["val_loss_as"] == {m: approx(losses, rel=1e-6) for m, losses in expected.items()}


def test_losses_by_length_on_the_same_tokens_are_kept_together(finished, copied, data, capsys):
    call(copied, "--lengths", 8, "--val-tokens", 192)
    update_json(copied / "evaluation.json", val_tokens=192)  # as earlier versions wrote it
    call(copied, "--lengths", 96, "--val-tokens", 192)
    kept = stored(copied)
    assert f" {kept['val_loss']['96']:.3f} " in first_table(capsys)
    assert kept["val_tokens"] == {"8": 192, "96": 192} and len(kept["val_loss_by_position"]["96"]) == 8
    for length in (8, 96):
        expected = validation_losses(finished, data, length, 192).mean().item()
        assert kept["val_loss"][str(length)] == approx(expected, abs=1e-5)
    call(copied, "--lengths", 64, "--val-tokens", 128)
    assert stored(copied)["val_loss"].keys() == {"64"}


def test_a_run_that_cannot_be_evaluated_is_named(copied, tmp_path, refused):
    refused(tmp_path, tmp_path, copied)
    refused("val_tokens", copied, "--val-tokens", 0)
    state = newest_state(copied)
    state["model"]["renamed"] = state["model"].popitem()[1]
    save_checkpoint(copied / "checkpoints", 21, state)
    refused("step_000021.pt", copied)
    for checkpoint in (copied / "checkpoints").iterdir():
        checkpoint.unlink()
    refused(copied, copied)
    assert not (copied / "evaluation.json").exists()


def test_losses_on_other_text_are_stored_apart(copied, tmp_path):
    books, code = make_data(tmp_path / "books", seed=1), make_data(tmp_path / "code", seed=2)
    call(copied, "--data", books)
    found = read_json(copied / f"evaluation_{open_split(books, 'val', 64).fingerprint()}.json")
    assert (found["data"], found["step"], found["val_tokens"]) == (str(books), "step_000020", {"16": 256, "64": 256})
    for length in (16, 64):
        loss = validation_losses(copied, books, length, 256).mean().item()
        assert found["val_loss"][str(length)] == approx(loss, abs=1e-5)
    call(copied, "--lengths", 8)
    call(copied, "--lengths", 32, "--data", books)
    call(copied, "--lengths", 8, "--val-tokens", 64, "--data", code)
    found = {Path(other["data"]).name: other for other in others(copied)}
    assert stored(copied)["val_tokens"] == {"8": 256} and found["code"]["val_tokens"] == {"8": 64}
    assert found["books"]["val_loss"].keys() == {"16", "64", "32"}


def test_a_short_text_is_read_in_whole_sequences(copied, tmp_path, refused):
    short = write_shards(tmp_path / "short", val=np.arange(200) % 64)
    call(copied, "--data", short)
    [found] = others(copied)
    assert found["val_tokens"] == {"16": 192, "64": 192}
    refused("val_tokens", copied, "--data", short, "--lengths", 256)


def test_text_of_another_tokenizer_is_refused(copied, tmp_path, refused):
    other = write_shards(tmp_path / "other", val=np.arange(600) % 64, tokenizer="gpt2")
    update_json(copied / "config.json", data_dir=str(tmp_path / "gone"))  # the run's own data need not be there
    refused("gpt2", copied, "--data", other)
    books = make_data(tmp_path / "books", seed=1)
    call(copied, "--data", books)
    (copied / "data.json").unlink()
    refused("tokenizer", copied, "--data", books)


def test_another_text_is_refused_without_its_option(copied, tmp_path, refused):
    replaced, empty = make_data(tmp_path / "replaced", seed=2), tmp_path / "empty"
    update_json(copied / "config.json", data_dir=str(replaced))
    empty.mkdir()
    refused(f"--data {replaced}", copied)
    for place in (empty, tmp_path / "nowhere"):
        refused(place, copied, "--data", place)

"""Far gain: its classes against a brute-force search, its losses against the logits, and the commands."""

import collections
import math

import numpy as np
import pytest
from commands import fails, read_json, refuses, shared, succeeds
from test_copy_gain import VOCAB, assert_close, losses_of, tiny_model
from test_train import plain_losses, steps_and_validations, train_here, write_shards

from data.shards import open_split
from measure.far_gain import CLASSES, check_windows, classify, far_windows, measure_far_gain
from scripts import evaluate
from scripts.shared.runs import with_evaluation

T, WINDOWS = 16, 3
FAR = ("far_loss", "far_gain", "far_gain_error", "far_tokens")


@shared
def stream(shared_path):
    """A text of 800 tokens, some of them copied 20 or 100 tokens later, so that it has tokens of each class."""
    text = np.random.default_rng(0).integers(0, VOCAB, 800)
    for end in range(240, 800, 60):
        text[end - 16 : end] = text[end - 116 : end - 100]
    text[-12:] = text[-26:-14]
    return open_split(write_shards(shared_path, text, text), "val", VOCAB)


def class_of(window, place):
    """Search backwards for the 8 tokens before a place."""
    for other in range(place - 1, 7, -1):
        if (window[other - 8 : other] == window[place - 8 : place]).all():
            return "far" if place - other > T else "near"
    return "none"


def classes_of(window, targets):
    return [class_of(window, place) for place in range(len(window) - targets, len(window))]


def test_a_class_follows_from_the_last_place_with_the_same_context():
    windows = np.random.default_rng(1).integers(0, 2, (50, 16 * T))  # of two tokens, so all classes are frequent
    expected = [classes_of(window, 4) for window in windows]
    found = np.array(CLASSES)[[classify(window, T) for window in windows]]
    assert found.tolist() == expected and {*found.flat} == {*CLASSES}


def test_windows_cover_the_text(stream):
    windows = far_windows(stream, WINDOWS, T, VOCAB)
    assert windows.shape == (WINDOWS, 16 * T)
    for window, start in zip(windows, (0, 272, 800 - 16 * T)):
        assert (window == stream.read(start, 16 * T)).all()
    with refuses(1024):
        check_windows(stream, 4, T)


def test_gains_equal_those_of_the_logits(stream):
    model = tiny_model()
    result = measure_far_gain(losses_of(model, (T, 16 * T)), stream, WINDOWS, T, VOCAB)
    windows = far_windows(stream, WINDOWS, T, VOCAB)
    inputs = windows[:, -T:], windows
    short, long = (plain_losses(model, x).numpy()[:, -4:] for x in inputs)  # (3, 4)
    classes = np.array([classes_of(window, 4) for window in windows])
    assert result["far_tokens"] == collections.Counter(classes.flat)
    for name, count in result["far_tokens"].items():
        members = classes == name
        losses = [losses[members].mean() for losses in (short, long)]
        gain = losses[0] - losses[1]
        deviations = (short - long - gain) * members
        error = math.hypot(*deviations.sum(axis=1)) / count  # tokens of a window add up first
        for key, value in zip(FAR, (losses, gain, error)):
            assert result[key][name] == pytest.approx(value, abs=1e-4)


def test_a_run_measures_it_at_its_end_and_evaluate_again(data, tmp_path, capsys):
    run = train_here(data, tmp_path, "--val_far_windows 1 --validate_as yarn --method rope --steps 10")
    steps, validations = steps_and_validations(run)
    assert [r["step"] for r in (*steps, *validations) if "far_gain" in r] == [10]
    summary = read_json(run / "summary.json")
    assert {*FAR} <= summary.keys() and summary["far_gain_as"]["yarn"].keys() == summary["far_gain"].keys()

    succeeds(evaluate.main, run, "--far", 1, "--device", "cpu")
    stored = read_json(run / "evaluation.json")
    measured = {key: summary.pop(key) for key in FAR}
    assert_close({key: stored[key] for key in FAR}, measured)
    assert with_evaluation(summary, stored)["far_gain"] == stored["far_gain"]
    gain, error = measured["far_gain"]["none"], measured["far_gain_error"]["none"]
    assert f"{gain:.3f} ± {error:.3f}" in capsys.readouterr().out
    fails(capsys, "far gain", evaluate.main, run, "--far", 9, "--device", "cpu")

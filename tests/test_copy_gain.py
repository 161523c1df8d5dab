"""Copy gain and far gain against losses by the logits; micro-batches, ranks, validation and scripts.evaluate."""

import collections
import math
from functools import partial

import numpy as np
import torch
from attention_cases import CPU
from commands import fails, parametrize, read_json, refuses, shared, succeeds, unchanged
from lives import run_ranks
from numpy.lib.stride_tricks import sliding_window_view as windows
from pytest import approx
from test_gpt import make_random_gpt
from test_train import plain_losses, steps_and_validations, train_here, write_shards

from data.shards import open_split
from measure.copy_gain import KINDS, SPAN, SPANS, copy_length, copy_sequences, measure_copy_gain, recovery
from measure.far_gain import CLASSES, check_windows, classify, far_windows, measure_far_gain
from measure.losses import Losses
from results.far import recall
from runtime.metrics import numbers
from runtime.processes import World
from scripts import evaluate
from scripts.keep import make_line
from scripts.shared.runs import read_run, with_evaluation

VOCAB, GAPS = 64, (5, 40)


@shared
def stream(data):
    return open_split(data, "val", VOCAB)  # 800 tokens


SIZES = dict(vocab_size=VOCAB, num_layers=2, num_heads=2, model_dim=16, train_length=16)
tiny_model = partial(make_random_gpt, "nope", **SIZES)


def losses_of(model, lengths, micro_batch_tokens=1000, world=World(0, 1, CPU), **options):
    """Return the function from inputs, targets and positions to losses that the measures take."""
    plans = {length: model.plan(length) for length in lengths}
    return Losses(model, plans, micro_batch_tokens=micro_batch_tokens, world=world, **options)


def measure(model, stream, **options):
    return measure_copy_gain(losses_of(model, map(copy_length, GAPS), **options), stream, GAPS, VOCAB)


@parametrize("gap", [1, 40, 768])  # the last leaves room for one place of the text span
def test_sequences_hold_a_span_the_filler_and_the_span_again(stream, gap):
    sequences = copy_sequences(stream, gap, VOCAB)
    assert sequences.shape == (2, SPANS, 2 * SPAN + gap)
    spans, fillers, copies = np.split(sequences, (SPAN, SPAN + gap), axis=-1)
    assert (spans == copies).all() and (fillers[0] == fillers[1]).all()
    cyclic = np.tile(stream.read(0, len(stream)), 3)
    for filler, span in zip(fillers[1], spans[1]):
        places = (windows(cyclic, gap) == filler).all(axis=1).nonzero()[0]
        assert len(places)
        if gap > 30:  # shorter ones are at several places
            rest = cyclic[places[0] + gap :][: len(stream) - gap]  # all of the text but the filler
            assert (windows(rest, SPAN) == span).all(axis=1).any()


def test_random_spans_follow_the_unigram_frequency(tmp_path):
    coins = [3] * 900 + [7] * 100
    stream = open_split(write_shards(tmp_path, coins, coins), "val", VOCAB)
    spans = copy_sequences(stream, 16, VOCAB)[0, :, :SPAN]
    assert {*spans.flat} == {3, 7}
    assert (spans == 7).mean() == approx(0.1, abs=0.03)  # 1,536 draws: a standard error of 0.008


def test_losses_and_gains_equal_those_of_the_logits(stream):
    model = tiny_model()
    result = measure(model, stream)
    for gap in GAPS:
        for kind, sequences in zip(KINDS, copy_sequences(stream, gap, VOCAB)):
            by_token = plain_losses(model, sequences).numpy()
            first, copy = by_token[:, :31].mean(axis=1), by_token[:, -31:].mean(axis=1)  # of (48,) spans
            gains, losses = first - copy, [first.mean(), copy.mean()]
            error = gains.std(ddof=1) / 48**0.5
            expected = dict(copy_loss=losses, copy_gain=gains.mean(), copy_gain_error=error)
            best = model(torch.from_numpy(sequences)).argmax(dim=-1)[:, -32:-1].numpy()
            expected["copy_accuracy"] = (best == sequences[:, -31:]).mean()
            for name, value in expected.items():
                assert result[name][kind][str(gap)] == approx(value, abs=1e-4)


assert_close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-5)  # through dicts and pairs


def measure_on_rank(rank, world, data, micro_batch_tokens):
    """Return the result of this rank, the number of its batches, and the size of the largest."""
    model, sizes, calls = tiny_model(), [], []
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    options = dict(micro_batch_tokens=micro_batch_tokens, before_batch=lambda: calls.append(rank))
    result = measure(model, open_split(data, "val", VOCAB), world=World(rank, world, CPU), **options)
    return result, len(calls), max(sizes)


@parametrize("micro_batch_tokens", [1, 700, 10**6])
def test_results_do_not_depend_on_ranks_and_micro_batches(stream, data, tmp_path, micro_batch_tokens):
    """96 sequences are shared as 20, 19, 19, 19, 19. All ranks have equally many batches."""
    ranks = run_ranks(measure_on_rank, (5,), tmp_path, data, micro_batch_tokens)[5]
    results, batches, sizes = zip(*ranks)
    assert max(sizes) <= max(micro_batch_tokens, copy_length(max(GAPS)))
    assert len({*batches}) == 1 and all(result == results[0] for result in results)
    assert_close(results[0], measure(tiny_model(), stream))


def test_recovery_is_a_ratio_with_the_error_of_both_gains():
    gains, errors = {"8": 5.0, "64": 4.0, "500": 2.0, "900": 0.0}, {"8": 1.0, "64": 0.3, "500": 0.2, "900": 0.1}
    ratios = recovery(gains, errors, train_length=128)  # 64 + 2 * 32 tokens fit
    assert ratios.keys() == {"500", "900"}
    for gap, pair in ratios.items():
        ratio = gains[gap] / 4
        assert pair == approx((ratio, math.hypot(errors[gap], ratio * 0.3) / 4))


@parametrize(("gain", "train_length"), [(0.5, 128), (-4.0, 128), (4.0, 127)])
def test_a_ratio_to_no_gain_is_left_out(gain, train_length):
    assert recovery({"64": gain, "500": 1.0}, {"64": 0.3, "500": 0.1}, train_length) == {}


# ---- commands


@shared
def run(data, shared_path):
    more = "--val_copy_gaps 8 64 --validate_as yarn --method rope --steps 10 --val_every 1 --val_profile fast"
    return train_here(data, shared_path, more)


def measured(path, name=""):
    """Return the copy gains in a record, or in a file of a run."""
    record = read_json(path / name) if name else path
    return {key: value for key, value in record.items() if key.startswith("copy_")}


def test_a_run_measures_it_at_validations_at_all_lengths(run):
    _, validations = steps_and_validations(run)
    assert [r["step"] for r in validations if "copy_gain" in r] == [0, 4, 8, 10]
    last = measured(validations[-1])
    results = {"copy_loss", "copy_gain", "copy_gain_error", "copy_accuracy"}
    assert last.keys() == results | {f"{name}_as" for name in results}
    assert {"copy_gain/random/64", "copy_gain/text/8", "copy_gain_as/yarn/text/64"} <= numbers(last).keys()
    assert measured(run, "summary.json") == last
    assert validations[0]["copy_gain"]["random"]["8"] == 0  # before the first step all tokens are equally likely


def test_evaluate_measures_it_and_keeps_it(run, capsys):
    def call(options):
        succeeds(evaluate.main, run, "--device", "cpu", *options.split())
        return measured(run, "evaluation.json")

    summary = measured(run, "summary.json")
    assert_close(call("--copy 8 64"), summary)
    table = capsys.readouterr().out
    for kind in KINDS:
        gain, error = (summary[name][kind]["8"] for name in ("copy_gain", "copy_gain_error"))
        assert f"{gain:.3f} ± {error:.3f}" in table
    stored = call("--copy 2 512")
    assert stored["copy_gain"]["text"].keys() == {"2", "8", "64", "512"}
    assert call("") == stored


@parametrize("gap", [0, 769, 800])
def test_wrong_gaps_are_named_and_leave_the_evaluation(run, gap, capsys):
    with unchanged(run):
        fails(capsys, gap, evaluate.main, run, "--copy", gap, "--device", "cpu")


# ---- far gain


T, WINDOWS = 16, 3
FAR = ("far_loss", "far_gain", "far_gain_error", "far_tokens")


@shared
def copying(shared_path):
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


def test_windows_cover_the_text(copying):
    windows = far_windows(copying, WINDOWS, T, VOCAB)
    assert windows.shape == (WINDOWS, 16 * T)
    for window, start in zip(windows, (0, 272, 800 - 16 * T)):
        assert (window == copying.read(start, 16 * T)).all()
    with refuses(1024):
        check_windows(copying, 4, T)


def test_gains_equal_those_of_the_logits(copying):
    model = tiny_model()
    result = measure_far_gain(losses_of(model, (T, 16 * T)), copying, WINDOWS, T, VOCAB)
    windows = far_windows(copying, WINDOWS, T, VOCAB)
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
            assert result[key][name] == approx(value, abs=1e-4)


def test_a_run_measures_it_at_its_end_and_evaluate_again(data, tmp_path, capsys):
    more = "--val_far_windows 1 --validate_as yarn --method rope --steps 10 --val_copy_gaps 40"
    run = train_here(data, tmp_path, more)
    steps, validations = steps_and_validations(run)
    assert [r["step"] for r in (*steps, *validations) if "far_gain" in r] == [10]
    summary = read_json(run / "summary.json")
    assert {*FAR} <= summary.keys() and summary["far_gain_as"]["yarn"].keys() == summary["far_gain"].keys()
    line = make_line(read_run(run))
    assert {key for key in summary if line.get(key) != summary[key]} == {"data", "train_length", "val_tokens"}
    assert [r["copy_gain"] for r in line["curve"]] == [r["copy_gain"] for r in validations]

    succeeds(evaluate.main, run, "--far", 1, "--device", "cpu")
    stored = read_json(run / "evaluation.json")
    measured = {key: summary.pop(key) for key in FAR}
    assert_close({key: stored[key] for key in FAR}, measured)
    assert with_evaluation(summary, stored)["far_gain"] == stored["far_gain"]
    gain, error = measured["far_gain"]["none"], measured["far_gain_error"]["none"]
    assert f"{gain:.3f} ± {error:.3f}" in capsys.readouterr().out
    fails(capsys, "far gain", evaluate.main, run, "--far", 9, "--device", "cpu")


# ---- recall (results/far/recall.py) ----------------------------------------------------------------------------------


class Recaller:
    """Stands for a model that copies what followed an earlier occurrence of the last 4 tokens."""

    def hits(self, inputs, targets, last):
        hits = torch.zeros(len(inputs), last)
        for row, (sequence, wanted) in enumerate(zip(inputs, targets)):
            keys = windows(sequence, recall.PAIR - 1)  # the key in row j ends at position j + 3
            for i, row_of_key in enumerate(range(len(keys) - last, len(keys))):
                first = (keys == keys[row_of_key]).all(axis=1).argmax()
                same = wanted[first + recall.PAIR - 2] == wanted[i - last]
                hits[row, i] = float(first < row_of_key and same)
        return hits


def test_recall_is_that_of_values_by_their_keys(stream, monkeypatch):
    lengths = 200, 500
    monkeypatch.setattr(recall, "LENGTHS", lengths)
    for make in recall.TASKS.values():
        sequence, values = make(stream, 500, VOCAB, np.random.default_rng())
        queries = sequence[-(values[-1] + 1) :].reshape(len(values), -1)
        context = windows(sequence[: -queries.size], recall.PAIR)
        assert len(sequence) == 500 and all((context == pair).all(axis=1).any() for pair in queries)

    losses = losses_of(tiny_model(), [length - 1 for length in lengths])
    perfect, chance = (recall.measure_recall(hits, stream, VOCAB) for hits in (Recaller(), losses))
    for task in recall.TASKS:
        assert min(perfect[task].values()) > 0.98 and max(chance[task].values()) < 0.2

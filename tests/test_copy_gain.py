"""Copy gain against dense float64 computations; micro-batches, ranks, a run's validation and scripts.evaluate."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from commands import exit_code, read_json
from lives import run_ranks
from test_gpt import make_gpt, plain_layers, rms_norm
from test_train import steps_and_validations, train_here, write_shards

from data.shards import open_split
from measure.copy_gain import SPAN, SPANS, copy_length, copy_sequences, measure_copy_gain
from measure.losses import losses_over_ranks
from runtime.metrics import flatten
from runtime.processes import World
from scripts import evaluate

VOCAB, GAPS = 64, (5, 40)
ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def stream(data):
    return open_split(data, "val", VOCAB)  # 800 tokens


def tiny_model():
    torch.manual_seed(0)
    model = make_gpt("nope", vocab_size=VOCAB, num_heads=2, model_dim=16, train_length=16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def measure(model, stream, gaps=GAPS, micro_batch_tokens=1000, world=ALONE, **options):
    plans = {copy_length(gap): model.plan(copy_length(gap)) for gap in gaps}
    losses = partial(losses_over_ranks, model, plans, micro_batch_tokens=micro_batch_tokens, world=world, **options)
    return measure_copy_gain(losses, stream, gaps, VOCAB)


@pytest.mark.parametrize("gap", [1, 40, 768])  # the last leaves room for one place of the text span
def test_sequences_hold_a_span_the_filler_and_the_span_again(stream, gap):
    text, sequences = stream.read(0, len(stream)), copy_sequences(stream, gap, VOCAB)
    assert sequences.shape == (2, SPANS, 2 * SPAN + gap)
    assert (sequences[..., :SPAN] == sequences[..., -SPAN:]).all()
    fillers = sequences[..., SPAN:-SPAN]
    assert (fillers[0] == fillers[1]).all()
    pieces = {bytes(np.take(text, range(i, i + gap), mode="wrap")): i for i in range(len(text))}
    cyclic = np.concatenate([text, text, text])
    for filler, span in zip(fillers[1], sequences[1, :, :SPAN]):
        start = pieces[bytes(filler.astype(text.dtype))]  # one of its places in the text
        if gap > 30:  # shorter ones are at several places
            rest = cyclic[start + gap : start + len(text)]  # all of the text but the filler
            assert any((rest[i : i + SPAN] == span).all() for i in range(len(rest) - SPAN + 1))


def test_random_spans_follow_the_unigram_frequency(tmp_path):
    coins = [3] * 900 + [7] * 100
    spans = copy_sequences(open_split(write_shards(tmp_path, coins, coins), "val", VOCAB), 16, VOCAB)[0, :, :SPAN]
    assert {*spans.flatten().tolist()} == {3, 7}
    assert (spans == 7).mean() == pytest.approx(0.1, abs=0.03)  # 1,536 draws: a standard error of 0.008


def dense_losses(model, tokens):
    """Return the loss of each token but the first, (T - 1,), by the plain form of test_gpt.py in float64."""
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    *_, (*_, x) = plain_layers("nope", weights, tokens[None, :-1], num_heads=2)
    logits = rms_norm(x[0]) @ weights["head"].T
    return -logits.log_softmax(dim=-1)[torch.arange(len(logits)), tokens[1:]]


def test_losses_and_gains_equal_a_dense_computation(stream):
    model = tiny_model()
    result = measure(model, stream)
    for gap in GAPS:
        for kind, sequences in zip(("random", "text"), copy_sequences(stream, gap, VOCAB)):
            by_token = torch.stack([dense_losses(model, torch.from_numpy(row)) for row in sequences])
            first, second = by_token[:, :31].mean(dim=1), by_token[:, -31:].mean(dim=1)
            gains, key = first - second, str(gap)
            expected = [first.mean().item(), second.mean().item()]
            assert result["copy_loss"][kind][key] == pytest.approx(expected, abs=1e-4)
            assert result["copy_gain"][kind][key] == pytest.approx(gains.mean().item(), abs=1e-4)
            error = np.std(gains.numpy(), ddof=1) / math.sqrt(48)
            assert result["copy_gain_error"][kind][key] == pytest.approx(error, abs=1e-4)


def assert_close(result, expected):
    ours, others = flatten(result), flatten(expected)
    assert ours.keys() == others.keys()
    for key, value in others.items():
        assert ours[key] == pytest.approx(value, abs=1e-5), key


@pytest.mark.parametrize("micro_batch_tokens", [1, 700, 10**6])
def test_results_do_not_depend_on_the_micro_batch_size(stream, micro_batch_tokens):
    model, sizes = tiny_model(), []
    expected = measure(model, stream)
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    assert_close(measure(model, stream, micro_batch_tokens=micro_batch_tokens), expected)
    assert max(sizes) <= max(micro_batch_tokens, copy_length(max(GAPS)))


def measure_on_rank(rank, world, data):
    """Return the result of this rank, and the number of its batches."""
    here, calls = World(rank, world, torch.device("cpu")), []
    stream = open_split(data, "val", VOCAB)
    return measure(tiny_model(), stream, world=here, before_batch=lambda: calls.append(rank)), len(calls)


def test_results_do_not_depend_on_the_number_of_ranks(stream, tmp_path):
    """96 sequences are shared as 20, 19, 19, 19, 19. All ranks have equally many batches."""
    results, calls = zip(*run_ranks(measure_on_rank, (5,), tmp_path, stream.paths[0].parent)[5])
    assert all(result == results[0] for result in results) and len({*calls}) == 1
    assert_close(results[0], measure(tiny_model(), stream))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    gaps = dict(val_copy_gaps=(8, 64), validate_as=("yarn",), method="rope")
    return train_here(data, tmp_path_factory.mktemp("runs"), steps=10, val_every=1, val_profile="fast", **gaps)


def measured(record):
    return {key: value for key, value in record.items() if key.startswith("copy_")}


def test_a_run_measures_it_at_validations_at_all_lengths(run):
    _, validations = steps_and_validations(run)
    assert [r["step"] for r in validations if "copy_gain" in r] == [0, 4, 8, 10]
    last = measured(validations[-1])
    assert last.keys() == {"copy_loss", "copy_gain", "copy_gain_error", "copy_gain_as", "copy_loss_as"}
    assert {"copy_gain/random/64", "copy_gain/text/8", "copy_gain_as/yarn/text/64"} <= flatten(last).keys()
    assert measured(read_json(run / "summary.json")) == last
    assert validations[0]["copy_gain"]["random"]["8"] == 0  # before the first step all tokens are equally likely


def test_evaluate_measures_it_and_keeps_it(run, capsys):
    evaluate.main([str(run), "--copy", "8", "64", "--device", "cpu"])
    table = capsys.readouterr().out
    stored, summary = read_json(run / "evaluation.json"), read_json(run / "summary.json")
    assert_close(measured(stored), measured(summary))
    for kind in ("random", "text"):
        assert f"{summary['copy_gain'][kind]['8']:.3f} ± {summary['copy_gain_error'][kind]['8']:.3f}" in table
    evaluate.main([str(run), "--copy", "2", "512", "--device", "cpu"])
    stored = read_json(run / "evaluation.json")
    assert stored["copy_gain"]["text"].keys() == {"2", "8", "64", "512"}
    evaluate.main([str(run), "--device", "cpu"])
    assert measured(read_json(run / "evaluation.json"))["copy_gain"] == stored["copy_gain"]


@pytest.mark.parametrize("gap", [0, 769, 800])
def test_wrong_gaps_are_named_and_leave_the_evaluation(run, gap, capsys):
    before = (run / "evaluation.json").read_bytes() if (run / "evaluation.json").exists() else None
    assert exit_code(evaluate.main, [run, "--copy", gap, "--device", "cpu"]) == 2
    assert str(gap) in capsys.readouterr().err
    assert before == ((run / "evaluation.json").read_bytes() if before else None)

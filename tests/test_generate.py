"""Sampling from a trained run: which tokens are drawn, how the text comes out, and refusals."""

import dataclasses

import pytest
import torch
from commands import exit_code
from tiny_run import train_tiny_run

from data.tokenizer import load_tokenizer
from model.attention.plan import MAX_LENGTH
from model.decoding import greedy_decode, sample
from scripts import generate
from scripts.evaluate import load_run

FIELDS = "--vocab_size 400 --num_layers 2 --train_length 60 --val_lengths 60 --val_tokens 480"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_tiny_run(tmp_path_factory.mktemp("generate"), FIELDS, letters="abcdefgh \u00e9\u4e16", documents=100)


@pytest.fixture
def say(capfd):
    """Return a function that calls the command and returns its exit code, stdout and stderr."""
    return lambda *argv: (exit_code(generate.main, [*argv, "--device", "cpu"]), *capfd.readouterr())


def shares(logits, count=20_000, **options):
    drawn = sample(logits.expand(count, -1), generator=torch.Generator().manual_seed(0), **options)
    return torch.bincount(drawn, minlength=logits.shape[-1]) / count


def test_draws_follow_the_softmax():
    """Shares must be within 5 standard errors."""
    logits = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits.double() / temperature).softmax(0)
        off = (shares(logits, temperature=temperature) - expected).abs()
        assert (off <= 5 * (expected * (1 - expected) / 20_000).sqrt()).all()


def test_top_k_leaves_the_likeliest_with_their_odds():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for top_k, left in [(2, [1, 3]), (9, [0, 1, 2, 3])]:
        found = shares(logits, top_k=top_k)
        expected = torch.zeros(4).index_copy(0, torch.tensor(left), logits.exp()[left])
        assert (found > 0).nonzero().flatten().tolist() == left
        assert (found - expected / expected.sum()).abs().max() < 0.02
    logits = torch.randn(7, 30, generator=torch.Generator().manual_seed(1))
    for options in (dict(temperature=0.0), dict(temperature=1e-6), dict(top_k=1)):
        assert torch.equal(sample(logits, **options), logits.argmax(-1)), options


def test_it_writes_the_tokens_of_greedy_decoding(run, say):
    code, out, _ = say(run, "abc", "--temperature", 0, "--max-new-tokens", 80)
    config, model = load_run(run, torch.device("cpu"))
    tokenizer = load_tokenizer(config.data_dir)
    model.head.data[tokenizer.vocab_size :] = 0  # tokens without text are not written
    before = [tokenizer.eot, *tokenizer.encode("abc")]
    chosen = greedy_decode(model, torch.tensor([before]), 80, stop=tokenizer.eot)[0].tolist()
    text = tokenizer.decode(chosen[: chosen.index(tokenizer.eot)] if tokenizer.eot in chosen else chosen)
    assert (code, out) == (0, "abc" + text + "\n")


def test_a_seed_draws_the_same_text(run, say):
    texts = [say(run, "ab", "--seed", seed, "--max-new-tokens", 30)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_it_ends_where_the_model_ends_the_document(run, say, monkeypatch):
    chosen = iter([5, 6, load_tokenizer(run.parent / "data").eot, 7])
    monkeypatch.setattr(generate, "sample", lambda logits, **options: torch.tensor([next(chosen)]))
    assert say(run, "ab", "--max-new-tokens", 50)[0] == 0 and next(chosen) == 7


def test_text_comes_out_whole_for_any_cut_into_tokens(run):
    """Characters of several bytes are not printed in parts."""
    tokenizer = load_tokenizer(run.parent / "data")
    for text in ("a\u00e9\u4e16 b", "\u4e16\u754c\U0001f600 ok", "\U0001f600"):
        parts = list(generate.text_pieces([], tokenizer.encode(text), tokenizer))
        assert "".join(parts) == text and not any(generate.INCOMPLETE in part for part in parts)


@pytest.mark.parametrize("option, value", [
    ("--max-new-tokens", 0), ("--max-new-tokens", MAX_LENGTH), ("--temperature", -1), ("--temperature", "nan"),
    ("--top-k", 0),
])  # fmt: skip
def test_wrong_values_are_refused_in_one_line(run, say, option, value):
    code, out, err = say(run, "abc", option, value)
    assert (code, out, err.count("\n")) == (2, "", 1) and option.strip("-") in err


def test_the_tokenizer_must_be_the_one_of_the_run(run, tmp_path):
    stored = generate.read_run(run)
    assert generate.tokenizer_of_run(stored).vocab_size == 384
    moved = dataclasses.replace(stored, config=dataclasses.replace(stored.config, data_dir=str(tmp_path)))
    for other in (dataclasses.replace(stored, data=dict(tokenizer="0" * 64)), moved):
        with pytest.raises(ValueError, match="tokenizer"):
            generate.tokenizer_of_run(other)

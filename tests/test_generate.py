"""Sampling from a trained run: what is drawn, how the text comes out, and what is refused."""

import dataclasses
import io
import sys

import pytest
import torch
from tiny_run import train_tiny_run

from data.shards import tokenizer_of
from data.tokenizer import load_tokenizer
from model.attention.base import MAX_LENGTH
from model.decoding import decode, greedy_decode, sample
from scripts import generate
from scripts.evaluate import load_run

FIELDS = "--vocab_size 400 --num_layers 2 --num_heads 2 --model_dim 32 --batch_tokens 480 --train_length 60 --steps 4 "
FIELDS += "--cooldown_steps 2 --val_lengths 60 --val_tokens 480 --val_every 0 --compile off --device cpu --seed 3"
FIELDS += " --method scale_invariant_p_rope"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_tiny_run(tmp_path_factory.mktemp("generate"), FIELDS, letters="abcdefgh \u00e9\u4e16", documents=100)


@pytest.fixture
def say(run, monkeypatch, capfd):
    """Calls the command; returns its exit code and what it printed."""

    def say(*words, typed=None):
        monkeypatch.setattr(sys, "argv", ["generate", *map(str, words), "--device", "cpu"])
        if typed is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        code = 0
        try:
            generate.main()
        except SystemExit as end:
            code = end.code
        return code, *capfd.readouterr()

    return say


# ---- drawing ----


def shares(logits, count=20_000, **how):
    drawn = sample(logits.expand(count, -1), generator=torch.Generator().manual_seed(0), **how)
    return torch.bincount(drawn, minlength=logits.shape[-1]) / count


def test_what_is_drawn_follows_the_softmax():
    """Within 5 standard errors of each share."""
    logits = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits.double() / temperature).softmax(0)
        off = (shares(logits, temperature=temperature) - expected).abs()
        assert (off <= 5 * (expected * (1 - expected) / 20_000).sqrt()).all()


def test_top_k_and_top_p_leave_the_likeliest_with_their_odds():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for how, left in {("top_k", 2): [1, 3], ("top_p", 0.65): [1, 3], ("top_p", 0.71): [1, 2, 3],
                      ("top_p", 0.01): [1], ("top_k", 9): [0, 1, 2, 3]}.items():  # fmt: skip
        found = shares(logits, **dict([how]))
        expected = torch.zeros(4).index_copy(0, torch.tensor(left), logits.exp()[left])
        expected /= expected.sum()
        assert (found > 0).nonzero().flatten().tolist() == left
        assert (found - expected).abs().max() < 0.02
    both = shares(logits, top_k=3, top_p=0.5)  # of the three, 0.4 / 0.9 and 0.3 / 0.9 are needed for a half
    assert (both > 0).nonzero().flatten().tolist() == [1, 3]


def test_without_temperature_it_is_the_most_likely():
    logits = torch.randn(7, 30, generator=torch.Generator().manual_seed(1))
    for how in (dict(temperature=0.0), dict(temperature=1e-6), dict(top_k=1), dict(top_p=1e-9)):
        assert torch.equal(sample(logits, **how), logits.argmax(-1)), how


def test_a_generated_token_is_drawn_from_the_full_computation(run):
    """Each is what the same numbers draw from the logits of a pass without a cache, past the training length."""
    _, model = load_run(run, torch.device("cpu"))
    prompt = torch.randint(384, (2, 50), generator=torch.Generator().manual_seed(2))
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    new = list(decode(model, prompt, 40, choose=lambda logits: sample(logits, generator=generators[0])))
    tokens = torch.cat((prompt, torch.stack(new, dim=1)), dim=1)
    with torch.no_grad():
        logits = model(tokens, plan=model.plan(tokens.shape[1]))[:, 49:-1]
    again = [sample(logits[:, i], generator=generators[1]) for i in range(40)]
    assert torch.equal(torch.stack(again), torch.stack(new))


# ---- the command ----


def test_it_writes_what_greedy_decoding_chooses(run, say):
    code, out, err = say(run, "abc", "--temperature", 0, "--max-new-tokens", 80)
    config, model = load_run(run, torch.device("cpu"))
    tokenizer = load_tokenizer(config.data_dir)
    model.head.data[tokenizer.vocab_size :] = 0  # what stands for nothing is not written
    before = [tokenizer.eot, *tokenizer.encode("abc")]
    chosen = greedy_decode(model, torch.tensor([before]), 80, stop=tokenizer.eot)[0].tolist()
    chosen = chosen[: chosen.index(tokenizer.eot)] if tokenizer.eot in chosen else chosen
    assert code == 0 and out == "abc" + tokenizer.decode(chosen) + "\n"
    assert f"[{len(before)} tokens read" in err and f", {len(chosen)} written in" in err


def test_a_seed_draws_the_same_text_and_another_one_another(run, say):
    texts = [say(run, "ab", "--seed", seed, "--max-new-tokens", 30)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_it_ends_where_the_model_ends_the_document(run, say, monkeypatch):
    eot = load_tokenizer(run.parent / "data").eot
    chosen = iter([5, 6, eot, 7])
    monkeypatch.setattr(generate, "sample", lambda logits, **how: torch.tensor([next(chosen)]))
    code, out, err = say(run, "ab", "--max-new-tokens", 50)
    assert code == 0 and ", 2 written" in err and next(chosen) == 7


def test_without_a_prompt_it_asks_for_lines(run, say):
    code, out, err = say(run, "--max-new-tokens", 3, "--temperature", 0, typed="abc\n\n ab")
    each = [say(run, prompt, "--max-new-tokens", 3, "--temperature", 0)[1] for prompt in ("abc", "", " ab")]
    assert code == 0 and out == "".join(each) and err.count("tokens read") == 3


def test_text_comes_out_whole_whatever_it_is_cut_into(run):
    """Characters of several bytes are not printed in parts; bytes that are no character at all are not held back."""
    tokenizer = load_tokenizer(run.parent / "data")
    for text in ("a\u00e9\u4e16 b", "\u4e16\u754c\U0001f600 ok", "\U0001f600"):
        stream, tokens = generate.TextStream(tokenizer), tokenizer.encode(text)
        parts = [stream.add(token) for token in tokens]
        assert "".join(parts) + stream.rest() == text and not any(generate.INCOMPLETE in part for part in parts)
    byte = tokenizer.encode("\U0001f600")[0]  # the first byte of four
    stream = generate.TextStream(tokenizer)
    assert generate.INCOMPLETE in "".join(stream.add(byte) for _ in range(5))


REFUSED = {
    ("--max-new-tokens", 0): "--max-new-tokens must be from 1 to",
    ("--max-new-tokens", MAX_LENGTH): "lower --max-new-tokens",
    ("--temperature", -1): "--temperature must be 0 or more",
    ("--temperature", "nan"): "--temperature must be 0 or more",
    ("--top-k", 0): "--top-k must be at least 1",
    ("--top-p", 0): "--top-p must be above 0",
    ("--top-p", 1.5): "--top-p must be above 0",
    ("--seed", 2**70): "--seed must have less",
    ("--tokenizer", "nothing"): "unknown tokenizer 'nothing'",
}


@pytest.mark.parametrize("words", REFUSED, ids=str)
def test_wrong_words_are_one_line(run, say, words):
    code, out, err = say(run, "abc", *words)
    assert code == 2 and out == "" and err.count("\n") == 1 and REFUSED[words] in err


def test_a_folder_without_a_run_is_one_line(say, tmp_path):
    code, out, err = say(tmp_path, "abc")
    assert code == 2 and err.count("\n") == 1 and f"{tmp_path} is not a run folder" in err


def test_the_tokenizer_must_be_the_runs_own(run, say, tmp_path):
    stored = generate.read_run(run)

    def stored_as(data, **fields):
        return dataclasses.replace(stored, data=data, config=dataclasses.replace(stored.config, **fields))

    assert stored.data["tokenizer"] == tokenizer_of(stored.config.data_dir)  # what the run's folder says
    with pytest.raises(ValueError, match="has another tokenizer now .* --tokenizer"):
        generate.tokenizer_of_run(stored_as(dict(tokenizer="0" * 64)), None)
    with pytest.raises(ValueError, match="is not here: name it with --tokenizer"):
        generate.tokenizer_of_run(stored_as({}, data_dir=str(tmp_path)), None)
    with pytest.raises(ValueError, match="has 384 tokens, .* has 300: name its own"):
        generate.tokenizer_of_run(stored_as({}, vocab_size=300), str(run.parent / "data"))

"""Sampling from a trained run: which tokens are drawn, how the text comes out, and refusals."""

import dataclasses

import torch
from commands import fails, fixture, parametrize, refuses, shared, succeeds, table
from tiny_run import train_tiny_run

from data.tokenizer import load_tokenizer
from model.attention.plan import MAX_LENGTH
from model.decoding import greedy_decode, sample
from scripts import generate
from scripts.shared.runs import load_run

FIELDS = "--vocab_size 400 --num_layers 2 --train_length 60 --val_lengths 60 --val_tokens 480"
LOGITS = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])


@shared
def run(shared_path):
    return train_tiny_run(shared_path, FIELDS, letters="abcdefgh \u00e9\u4e16", documents=100)


@shared
def tokenizer(run):
    return load_tokenizer(run.parent / "data")


@fixture
def say(run, capfd):
    """Return a function that continues "ab", and returns stdout."""

    def say(options):
        succeeds(generate.main, run, "ab", "--device", "cpu", *options.split())
        return capfd.readouterr().out

    return say


@parametrize("temperature", [0.0, 1e-310, 1e-299, 1e-6, 0.5, 1.0, 2.0])
@parametrize("top_k, least", [(None, -2), (9, -2), (2, 1)])
def test_draws_follow_the_softmax(temperature, top_k, least):
    """Shares must be within 5 standard errors. least: the least logit that may be drawn."""
    generator = torch.Generator().manual_seed(0)
    drawn = sample(LOGITS.expand(20_000, -1), temperature=temperature, top_k=top_k, generator=generator)
    shares = drawn.bincount(minlength=5) / len(drawn)
    expected = (LOGITS.where(LOGITS >= least, -torch.inf) / max(temperature, 1e-6)).softmax(0)
    variances = expected * (1 - expected) / len(drawn)
    assert ((shares - expected).square() <= 25 * variances).all()


def test_it_writes_the_tokens_of_greedy_decoding(run, tokenizer, say, monkeypatch):
    _, model = load_run(run, torch.device("cpu"))
    padding = model.head.data[tokenizer.vocab_size :]  # tokens without text are not written
    padding.zero_()
    prompt = torch.tensor([[tokenizer.eot, *tokenizer.encode("ab")]])
    chosen = greedy_decode(model, prompt, 80, stop=tokenizer.eot)[0].tolist()
    text = tokenizer.decode(chosen).split(tokenizer.eot_text)[0]
    padding.copy_(100 * torch.randn(padding.shape))
    monkeypatch.setattr(generate, "load_run", lambda *arguments: (None, model))
    assert say("--temperature 0 --max-new-tokens 80") == f"ab{text}\n"


def test_a_seed_draws_the_same_text(say):
    texts = [say(f"--seed {seed} --max-new-tokens 30") for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_it_ends_where_the_model_ends_the_document(tokenizer, say, monkeypatch):
    chosen = iter([5, 6, tokenizer.eot, 7])
    monkeypatch.setattr(generate, "sample", lambda logits, **options: torch.tensor([next(chosen)]))
    say("--max-new-tokens 50")
    assert next(chosen) == 7


@parametrize("text", ["a\u00e9\u4e16 b", "\u4e16\u754c\U0001f600 ok", "\U0001f600"])
def test_text_comes_out_whole_for_any_cut_into_tokens(tokenizer, text):
    """Characters of several bytes are not printed in parts."""
    parts = list(generate.text_pieces([], tokenizer.encode(text), tokenizer))
    assert "".join(parts) == text and not any(generate.INCOMPLETE in part for part in parts)


@table("prompt, options, named", f"""
    abc       | --max-new-tokens 0            | max-new-tokens
    abc       | --max-new-tokens {MAX_LENGTH} | max-new-tokens
    abc       | --temperature -1              | temperature
    abc       | --temperature nan             | temperature
    abc       | --top-k 0                     | top-k
    caf\udce9 |                               | prompt
    \ud83d    |                               | prompt
""")
def test_a_wrong_value_and_a_prompt_that_is_not_utf8_are_refused_in_one_line(run, capsys, prompt, options, named):
    fails(capsys, named, generate.main, run, prompt, "--device", "cpu", *options.split())


def test_the_tokenizer_is_the_one_of_the_run_in_its_folder_or_in_its_data(run, tmp_path):
    stored = generate.read_run(run)
    away = dataclasses.replace(stored, config=dataclasses.replace(stored.config, data_dir=str(tmp_path)))
    older = dataclasses.replace(stored, path=tmp_path)  # without a tokenizer in its folder
    for found in stored, away, older:
        assert generate.tokenizer_of_run(found).vocab_size == 384
    for data in dict(tokenizer="0" * 64), {}:
        with refuses("tokenizer"):
            generate.tokenizer_of_run(dataclasses.replace(stored, data=data))
    with refuses("tokenizer"):
        generate.tokenizer_of_run(dataclasses.replace(away, path=tmp_path))

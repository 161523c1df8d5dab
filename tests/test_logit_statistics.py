# ruff: noqa: E402 (imports after importorskip)
"""scripts.logit_statistics on tiny Hugging Face models and a run of ours, against a float64 computation and scipy."""

import functools
import json

import pytest
import reference
import torch

transformers = pytest.importorskip("transformers", reason="an extra: pip install -r requirements-extras.txt")

import tokenizers
from commands import read_json, succeeds, write_files
from scipy import stats
from test_logits import of_pairs
from test_reproduce import call, is_figure  # noqa: F401 (call is a fixture)
from tiny_run import train_tiny_run
from torch.testing import assert_close

from data.tokenizer import load_tokenizer
from model import scores as own
from scripts import logit_statistics
from scripts.hf.convert import attention_layers, convert
from scripts.hf.scores import layer_scores
from scripts.reproduce.logits import PAPERS_MODELS, describe_scores

TEXT = "New England is a region of six states in the northeast of the country . It borders the sea ."
WORDS = ["<bos>", "<unk>", *sorted(set(TEXT.split()))]
SIZES = dict(
    vocab_size=40, hidden_size=48, intermediate_size=64, num_hidden_layers=2, head_dim=16, num_attention_heads=6,
    num_key_value_heads=2, initializer_range=0.2, rope_parameters=dict(rope_type="default", rope_theta=500.0),
)
CAPPED = dict(query_pre_attn_scalar=9, attn_logit_softcapping=0.5, sliding_window=7)  # the scores pass the cap
TOKENS = torch.randint(40, (2, 23), generator=torch.Generator().manual_seed(1))
KEYS = [(0, False), (0, True), (1, False), (1, True)]  # layer, rotated


def make_model(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **(CAPPED if family == "Gemma2" else {}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1, 0.3)
    return model


@pytest.fixture
def folder(tmp_path):
    """A Gemma's folder with a tokenizer."""
    make_model("Gemma2").save_pretrained(tmp_path)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", unk_token="<unk>")
    fast.save_pretrained(tmp_path)
    return write_files(tmp_path, {"text.txt": f"\n{TEXT}\n"})


@torch.no_grad()
def exact_scores(model, tokens):
    """Return the scores of all pairs t > 0 without key 0, in float64: {(layer, rotated): (H, pairs)}."""
    projected = []
    for layer in attention_layers(model):
        for projection in (layer.q_proj, layer.k_proj):
            projection.register_forward_hook(lambda module, inputs, output: projected.append(output.double()))
    model(tokens)
    scale = getattr(model.config, "query_pre_attn_scalar", 16) ** -0.5
    # The reference turns the other way.
    turn = -torch.arange(tokens.shape[1]).double(), reference.rope_frequencies(16, 500.0)
    scores = {}
    for layer, rotated in KEYS:
        pair = projected[2 * layer :][:2]
        q, k = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in pair)
        if rotated:
            q, k = (reference.rotate(x, *turn) for x in (q, k))
        scores[layer, rotated] = scale * of_pairs(q @ k.repeat_interleave(3, dim=1).mT)
    return scores


def recorded_scores(model, **options):
    return {(layer, rotated): scores for layer, rotated, scores in layer_scores(model, TOKENS, 2**18, **options)}


assert_near = functools.partial(assert_close, atol=5e-5, rtol=2e-5)


def test_scores_of_llama_and_of_its_conversions():
    """A model converted to RoPE has the same scores. A model converted to NoPE has only scores without rotation."""
    model = make_model("Llama")
    exact = exact_scores(model, TOKENS)
    for same in (model, convert(model, "rope")):
        assert_near(recorded_scores(same), exact)
    assert [*recorded_scores(convert(model, "scale_invariant_nope"))] == KEYS[::2]
    assert [*recorded_scores(convert(model, "pope"))] == KEYS  # its parameters differ between heads
    found = recorded_scores(convert(model, "scale_invariant_rope", learn_moments=True), calibrate=True)
    assert_near(found[0, True], exact[0, True])
    for number, layer in enumerate(attention_layers(model)):
        change, scores = layer.method.score_change, recorded_scores(model)[number, True]
        assert_near(change.mean.double(), scores.mean(1))
        assert_near(change.log_deviation.exp().double(), scores.std(1))
        assert not layer._forward_pre_hooks


def test_the_command_writes_the_statistics_that_scipy_finds(folder, tmp_path, out, capsys):
    succeeds(logit_statistics.main, folder, "--text", tmp_path / "text.txt", "--out", out)
    tokens = torch.tensor([[0, *map(WORDS.index, TEXT.split())]])
    statistics = read_json(out / "statistics.json")
    exact = exact_scores(make_model("Gemma2"), tokens)
    assert max(scores.max() for scores in exact.values()) > 2 * CAPPED["attn_logit_softcapping"]
    for row, (key, scores) in zip(statistics["layers"], exact.items(), strict=True):
        assert (row["layer"], row["rotated"]) == key and len(row["qq"]["sample"]) == 200
        for x, found in zip([*scores, scores.flatten()], [*row["heads"], row["all"]], strict=True):
            x = x.numpy()
            expected = dict(mean=x.mean(), std=x.std())
            expected |= dict(skewness=stats.skew(x), excess_kurtosis=stats.kurtosis(x))
            expected["ks"], _ = stats.kstest(x, "norm", args=(x.mean(), x.std()))
            assert found == pytest.approx(expected, rel=1e-4, abs=2e-5)
    assert (statistics["tokens"], statistics["pairs"]) == (tokens.numel(), scores.shape[1])
    assert statistics["dtype"] == "float32" and "0.333333" in statistics["scale"]
    assert is_figure(out / "layers")
    assert len(capsys.readouterr().out.split("\n\n")[0].splitlines()) == 2 + 4


def test_a_run_of_ours(tmp_path, monkeypatch):
    """The run has two layers: one without rotation, one with it."""
    run = train_tiny_run(tmp_path, "--method nope,rope+window --num_layers 2 --steps 1 --cooldown_steps 0")
    monkeypatch.chdir(tmp_path)
    succeeds(logit_statistics.main, *"run --text 0.txt --tokens 30".split())
    layers = read_json(tmp_path / "runs/logit_statistics/run/statistics.json")["layers"]  # the default folder
    _, model = logit_statistics.load_run(run, torch.device("cpu"))
    tokenizer = load_tokenizer(tmp_path / "data")
    tokens = [tokenizer.eot, *tokenizer.encode((tmp_path / "0.txt").read_text())][:30]
    expected = own.layer_scores(model, torch.tensor([tokens]), 2**18)
    for row, (layer, rotated, scores) in zip(layers, expected, strict=True):
        found = row["layer"], row["rotated"], row["heads"][0]["std"]
        assert found == (layer, rotated, pytest.approx(scores[0].std(correction=0).item()))
    assert len(layers) == 3 and layers[2]["rotated"]


def test_the_papers_six_figures_and_two_of_a_run(tmp_path, call):  # noqa: F811
    scores = torch.randn(2, 40, dtype=torch.float64)
    layers = [describe_scores(scores, layer=0, rotated=rotated) for rotated in (False, True)]
    about = dict.fromkeys("text text_sha256 scale dtype device commit made command".split(), "?")
    statistics = json.dumps(about | dict(tokens=9, pairs=40, layers=layers))
    for name in (*PAPERS_MODELS, "run"):
        write_files(tmp_path / "runs/logit_statistics", {f"{name}/statistics.json": statistics})
    code, output = call("figure_qq --scale mini")
    titles = [title for title, _ in PAPERS_MODELS.values()]
    assert code == 0 and all(output.out.count(f"| {title} ") == 2 for title in (*titles, "run"))
    figures = [*(tmp_path / "out/figures").iterdir()]
    assert len(figures) == 8 and all(map(is_figure, figures))

# ruff: noqa: E402 (imports after importorskip)
"""scripts.logit_statistics on tiny Hugging Face models and a run of ours, against a float64 computation and scipy."""

import json

import pytest
import scipy.stats
import torch

transformers = pytest.importorskip("transformers", reason="an extra: pip install -r requirements-extras.txt")

import tokenizers
from test_reproduce import call, is_figure  # noqa: F401 (call is a fixture)
from tiny_run import train_tiny_run

from data.tokenizer import load_tokenizer
from model import scores as own
from scripts import logit_statistics
from scripts.hf.convert import convert
from scripts.hf.scores import layer_scores
from scripts.reproduce.logits import PAPERS_MODELS, describe_scores

TEXT = "New England is a region of six states in the northeast of the country . It borders the sea ."
WORDS = ["<bos>", "<unk>", *sorted(set(TEXT.split()))]
SIZES = dict(vocab_size=40, hidden_size=48, intermediate_size=64, num_hidden_layers=2, head_dim=16, rms_norm_eps=1e-5,
             num_attention_heads=6, num_key_value_heads=2, initializer_range=0.2,
             rope_parameters=dict(rope_type="default", rope_theta=500.0))  # fmt: skip
CAPPED = dict(query_pre_attn_scalar=9, attn_logit_softcapping=0.5, sliding_window=7)  # the scores pass the cap
TOKENS = torch.randint(40, (2, 23), generator=torch.Generator().manual_seed(1))


def make_model(family):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES) if family == "llama" else transformers.Gemma2Config(**SIZES, **CAPPED)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1, 0.3)
    return model


@pytest.fixture
def folder(tmp_path):
    """A Gemma's folder with a tokenizer, and text.txt beside it."""
    make_model("gemma2").save_pretrained(tmp_path / "model")
    vocabulary = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(vocabulary)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", unk_token="<unk>")
    fast.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(f"\n{TEXT}\n")
    return tmp_path / "model"


@torch.no_grad()
def exact_scores(model, tokens):
    """Return the scores of all pairs t > 0 without key 0: {(layer, rotated): (H, pairs)}.

    They are computed in float64 from the layers' inputs and the weights alone.
    """
    config = model.config
    inputs = model(tokens, output_hidden_states=True).hidden_states[: config.num_hidden_layers]
    T = tokens.shape[1]
    keep = torch.ones(T, T, dtype=torch.bool).tril(-1)
    keep[:, 0] = False
    gemma = config.model_type == "gemma2"
    scale = config.query_pre_attn_scalar**-0.5 if gemma else config.head_dim**-0.5
    frequencies = 500.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    turn = torch.exp(1j * torch.arange(T, dtype=torch.float64)[:, None] * frequencies)
    scores = {}
    for number, (x, layer) in enumerate(zip(inputs, model.model.layers)):
        x, gain = x.double(), layer.input_layernorm.weight.double()
        x = x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * (1 + gain if gemma else gain)
        projections = layer.self_attn.q_proj, layer.self_attn.k_proj
        q, k = ((x @ p.weight.double().T).unflatten(-1, (-1, 16)).transpose(1, 2) for p in projections)
        for rotated in (False, True):
            if rotated:
                q, k = (torch.complex(*y.chunk(2, dim=-1)) * turn for y in (q, k))
            s = (q @ k.repeat_interleave(3, dim=1).conj().mT).real * scale  # (B, H, T, T)
            scores[number, rotated] = s.transpose(0, 1)[:, :, keep].flatten(1)
    return scores


def recorded_scores(model, tokens):
    return {(layer, rotated): scores for layer, rotated, scores in layer_scores(model, tokens, 2**18)}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_scores_equal_the_dense_computation(family):
    """A model converted to RoPE has the same scores. A model converted to NoPE has only scores without rotation."""
    model = make_model(family)
    exact, recorded = exact_scores(model, TOKENS), recorded_scores(model, TOKENS)
    assert list(recorded) == [(layer, rotated) for layer in range(2) for rotated in (False, True)]
    forms = [recorded]
    if family == "llama":
        forms.append(recorded_scores(convert(model, "rope"), TOKENS))
        assert [*recorded_scores(convert(model, "scale_invariant_nope"), TOKENS)] == [(0, False), (1, False)]
        layer_scores(convert(model, "scale_invariant_rope", learn_moments=True), TOKENS, 2**18, calibrate=True)
        for layer, found in enumerate((exact[0, True], recorded_scores(model, TOKENS)[1, True])):
            change = model.model.layers[layer].self_attn.method.score_change
            moments = torch.stack((change.mean, change.log_deviation.exp())).double()
            torch.testing.assert_close(moments, torch.stack((found.mean(1), found.std(1))), atol=5e-5, rtol=0)
    else:  # otherwise the test would not tell scores before the cap from scores after it
        assert max(scores.abs().max() for scores in exact.values()) > 2 * CAPPED["attn_logit_softcapping"]
    for found in forms:
        for key in exact:
            assert found[key].shape == (6, 2 * 22 * 21 // 2)
            torch.testing.assert_close(found[key], exact[key], atol=5e-5, rtol=2e-5)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_command_writes_the_statistics_that_scipy_finds(folder, tmp_path, capsys):
    logit_statistics.main([str(folder), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")])
    tokens = torch.tensor([[0, *(WORDS.index(word) for word in TEXT.split())]])
    exact = exact_scores(make_model("gemma2"), tokens)
    statistics, T = json.loads((tmp_path / "out" / "statistics.json").read_text()), tokens.shape[1]
    layers = {(row["layer"], row["rotated"]): row for row in statistics["layers"]}
    assert layers.keys() == exact.keys()
    for key, scores in exact.items():
        assert len(layers[key]["qq"]["sample"]) == 200
        found = [*layers[key]["heads"], layers[key]["all"]]
        for x, row in zip([*scores.numpy(), scores.numpy().ravel()], found, strict=True):
            ks = scipy.stats.kstest(x, "norm", args=(x.mean(), x.std())).statistic
            expected = dict(mean=x.mean(), std=x.std(), skewness=scipy.stats.skew(x), ks=ks)
            expected |= dict(excess_kurtosis=scipy.stats.kurtosis(x))
            assert row == pytest.approx(expected, rel=1e-4, abs=2e-5)
    assert (statistics["tokens"], statistics["pairs"], statistics["dtype"]) == (T, (T - 1) * (T - 2) // 2, "float32")
    assert "0.333333" in statistics["scale"]
    assert is_figure(tmp_path / "out" / "layers")
    assert len(capsys.readouterr().out.split("\n\n")[0].splitlines()) == 2 + 4


def test_a_run_of_ours(tmp_path, monkeypatch):
    """The run has two layers: one without rotation, one with it."""
    run = train_tiny_run(tmp_path, "--method nope,rope+window --num_layers 2 --steps 1 --cooldown_steps 0")
    (tmp_path / "text.txt").write_text("abc hg " * 20)
    monkeypatch.chdir(tmp_path)
    logit_statistics.main(["run", "--text", "text.txt", "--tokens", "30"])
    statistics = json.loads((tmp_path / "runs/logit_statistics/run/statistics.json").read_text())  # the default folder
    _, model = logit_statistics.load_run(run, torch.device("cpu"))
    tokenizer = load_tokenizer(tmp_path / "data")
    tokens = torch.tensor([[tokenizer.eot, *tokenizer.encode("abc hg " * 20)][:30]])
    expected = [*own.layer_scores(model, tokens, 2**18)]
    assert [key for *key, _ in expected] == [[0, False], [1, False], [1, True]]
    for row, (layer, rotated, scores) in zip(statistics["layers"], expected, strict=True):
        assert (row["layer"], row["rotated"]) == (layer, rotated)
        assert row["heads"][0]["std"] == pytest.approx(scores[0].std(correction=0).item())


def test_the_papers_six_figures(tmp_path, call):  # noqa: F811
    out, random = tmp_path / "out", torch.randn(2, 40, dtype=torch.float64)
    layers = [describe_scores(random, layer=0, rotated=rotated) for rotated in (False, True)]
    about = dict(tokens=9, pairs=40, text="t", text_sha256="0" * 64, scale="s", dtype="d", device="abacus")
    for name in [*PAPERS_MODELS, "run"]:
        more = dict(commit="0123abc", made="today", command=f"measure {name}", layers=layers)
        folder = tmp_path / "runs" / "logit_statistics" / name
        folder.mkdir(parents=True)
        (folder / "statistics.json").write_text(json.dumps(about | more))
    code, output = call("figure_qq", "--scale", "mini")
    assert code == 0 and all(f"`measure {name}`" in output.out for name in PAPERS_MODELS)
    for name in ("llama_1b", "llama_8b", "gemma_2_27b"):
        assert all(is_figure(out / "figures" / f"figure_qq_{name}_{form}_rotation") for form in ("with", "without"))
    titles = [title for title, _ in PAPERS_MODELS.values()]
    assert all(output.out.count(f"| {title} ") == 2 for title in [*titles, "run"])

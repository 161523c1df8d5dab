"""scripts.logit_statistics: what it measures in tiny models of Hugging Face's classes and in a run of ours, against a
float64 computation from hidden states and scipy; what it writes, and the paper's figures of that."""

import copy
import csv
import dataclasses
import json
import shutil

import numpy as np
import pytest
import scipy.stats
import torch

transformers = pytest.importorskip("transformers", reason="an extra: pip install -r requirements-extras.txt")
tokenizers = pytest.importorskip("tokenizers")

from test_reproduce import call, is_figure  # noqa: E402, F401 (call is a fixture)

from configs.presets import quickstart  # noqa: E402
from data.shards import tokenizer_of  # noqa: E402
from data.text import prepare  # noqa: E402
from data.tokenizer import load_tokenizer  # noqa: E402
from runtime.build import build_model  # noqa: E402
from runtime.checkpoint import save_checkpoint  # noqa: E402
from scripts import logit_statistics  # noqa: E402
from scripts.hf.attention import convert  # noqa: E402
from scripts.hf.load import load_model  # noqa: E402
from scripts.hf.scores import record_layers  # noqa: E402
from scripts.reproduce import logits  # noqa: E402
from scripts.reproduce.qq import PAPERS_MODELS, Kept, read_kept  # noqa: E402

TEXT = "New England is a region of six states in the northeast of the country . It borders the sea ."
SIZES = dict(vocab_size=40, hidden_size=48, intermediate_size=64, num_hidden_layers=2, head_dim=16, rms_norm_eps=1e-5,
             num_attention_heads=6, num_key_value_heads=2, initializer_range=0.2)  # fmt: skip
CAPPED = dict(query_pre_attn_scalar=9, attn_logit_softcapping=0.5, sliding_window=7)  # the scores pass the cap
FAMILIES = dict(
    llama=transformers.LlamaConfig(**SIZES, rope_parameters=dict(rope_type="default", rope_theta=500.0)),
    gemma2=transformers.Gemma2Config(**SIZES, **CAPPED, rope_parameters=dict(rope_type="default", rope_theta=500.0)),
)


def make_model(family):
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1, 0.3)
    return model


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    """A model's folder, as it comes from the hub, with a tokenizer that begins with <bos>."""
    path = tmp_path / "model"
    make_model(request.param).save_pretrained(path)
    words = tokenizers.models.WordLevel({w: i for i, w in enumerate(["<bos>", "<unk>", *sorted(set(TEXT.split()))])},
                                        unk_token="<unk>")  # fmt: skip
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", unk_token="<unk>")
    fast.save_pretrained(path)
    (tmp_path / "text.txt").write_text(f"\n{TEXT}\n")
    return path


@torch.no_grad()
def exact_scores(model, tokens):
    """S of all pairs t > 0 but those with key 0, in float64 from the layers' inputs and the weights alone: by layer and
    whether rotated, (H, pairs)."""
    config = model.config
    inputs = model(tokens, output_hidden_states=True).hidden_states[: config.num_hidden_layers]
    B, T = tokens.shape
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
            shared = k.repeat_interleave(3, dim=1)  # queries 0, 1, 2 share the first head of keys
            s = (q @ shared.conj().mT).real * scale  # (B, H, T, T)
            scores[number, rotated] = s.transpose(0, 1)[:, :, keep].flatten(1)
    return scores


def recorded_scores(model, tokens):
    pairs, scores = logits.score_pairs(*tokens.shape, 2**18, seed=0), {}

    def receive(layer, scale, rotated, q, k):
        scores[layer, rotated] = logits.pair_scores(q, k, pairs, scale)

    record_layers(model, tokens, receive)
    return scores


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# ---- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, implementation", [("llama", "eager"), ("llama", "sdpa"), ("gemma2", "eager")])
def test_scores_are_those_of_the_dense_computation(family, implementation):
    model = make_model(family)
    model.set_attn_implementation(implementation)
    tokens = torch.randint(40, (2, 23), generator=torch.Generator().manual_seed(1))
    exact, recorded = exact_scores(model, tokens), recorded_scores(model, tokens)
    assert list(recorded) == [(layer, rotated) for layer in range(2) for rotated in (False, True)]
    for key, scores in recorded.items():
        assert scores.shape == (6, 2 * 22 * 21 // 2) and scores.dtype == torch.float64
        torch.testing.assert_close(scores, exact[key], atol=2e-5, rtol=2e-5)
    if family == "gemma2":  # else this would not tell scores before the cap from those after it
        assert max(scores.abs().max() for scores in recorded.values()) > 2 * CAPPED["attn_logit_softcapping"]
    assert (recorded[0, True] - recorded[0, False]).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_models_give_the_scores_that_their_method_starts_from(family, tmp_path):
    """RoPE in the place of the model's own gives the model's own scores, and NoPE those without rotation, alone."""
    tokens = torch.randint(40, (1, 23), generator=torch.Generator().manual_seed(1))
    convert(make_model(family), "rope", train_length=64).save_pretrained(tmp_path / "converted")
    model = load_model(tmp_path / "converted")
    exact = exact_scores(model, tokens)
    for key, scores in recorded_scores(model, tokens).items():
        torch.testing.assert_close(scores, exact.pop(key), atol=2e-5, rtol=2e-5)
    assert not exact
    recorded = recorded_scores(convert(model, "scale_invariant_nope"), tokens)
    assert list(recorded) == [(0, False), (1, False)]
    assert model.attention_shared.observe is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_as_before_and_its_next_layers_too(family):
    model = make_model(family)
    tokens = torch.randint(40, (1, 23), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(tokens).logits
        with pytest.raises(ZeroDivisionError):
            record_layers(model, tokens, lambda *_: 1 / 0)
        assert torch.equal(model(tokens).logits, before)  # recording none
    assert not any(module._forward_hooks for module in model.modules())


def test_weights_may_be_offloaded_to_disk(folder, tmp_path):
    pytest.importorskip("accelerate", reason="an extra: pip install -r requirements-extras.txt")
    tokens = torch.randint(40, (1, 23), generator=torch.Generator().manual_seed(1))
    whole = recorded_scores(load_model(folder), tokens)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers.1": "disk", "lm_head": "cpu"}
    model = load_model(folder, device_map=places)
    assert model.model.layers[1].self_attn.q_proj.weight.is_meta
    parts = recorded_scores(model, tokens)
    assert len(parts) == 4 and all(torch.equal(parts[key], whole[key]) for key in whole)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["gemma2"], indirect=True)
def test_the_command_writes_the_statistics_that_scipy_finds(folder, tmp_path, capsys):
    logit_statistics.main([str(folder), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    words = ["<bos>", "<unk>", *sorted(set(TEXT.split()))]
    tokens = torch.tensor([[0, *(words.index(word) for word in TEXT.split())]])
    exact = exact_scores(model, tokens)
    statistics, quantiles = rows(tmp_path / "out" / "statistics.csv"), rows(tmp_path / "out" / "quantiles.csv")
    assert len(statistics) == 2 * 2 * 7 and len(quantiles) == 2 * 2 * (200 + 6 * 50)
    for (layer, rotated), scores in exact.items():
        for head, x in [*enumerate(scores.numpy()), ("all", scores.numpy().ravel())]:
            wanted = dict(layer=str(layer), rotated=str(rotated), head=str(head))
            (row,) = [row for row in statistics if wanted.items() <= row.items()]
            skewness, kurtosis = scipy.stats.skew(x), scipy.stats.kurtosis(x)
            ks = scipy.stats.kstest(x, "norm", args=(x.mean(), x.std())).statistic
            expected = dict(mean=x.mean(), std=x.std(), skewness=skewness, excess_kurtosis=kurtosis, ks=ks)
            assert {key: float(row[key]) for key in expected} == pytest.approx(expected, rel=1e-4, abs=2e-5)
            mine = [row for row in quantiles if wanted.items() <= row.items()]
            n = 200 if head == "all" else 50
            p = (np.arange(n) + 0.5) / n
            np.testing.assert_allclose([float(row["probability"]) for row in mine], p)
            gaussian = scipy.stats.norm.ppf(p, x.mean(), x.std())
            np.testing.assert_allclose([float(row["gaussian"]) for row in mine], gaussian, atol=2e-5, rtol=1e-4)
            sample = scipy.stats.mstats.mquantiles(x, p, alphap=1, betap=1)
            np.testing.assert_allclose([float(row["sample"]) for row in mine], sample, atol=2e-5, rtol=1e-4)
    about = json.loads((tmp_path / "out" / "about.json").read_text())
    T = len(tokens[0])
    assert (about["tokens"], about["pairs"], about["dtype"]) == (T, (T - 1) * (T - 2) // 2, "float32")
    assert about["scale"] == "q.k * 0.333333, before the soft cap at 0.5"
    assert is_figure(tmp_path / "out" / "layers") and is_figure(tmp_path / "out" / "heads")
    page, said = (tmp_path / "out" / "statistics.md").read_text(), capsys.readouterr().out
    table = said.split("\n\n")[0]
    assert table in page and len(table.splitlines()) == 2 + 4


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_long_text_is_cut_and_pairs_are_drawn(folder, tmp_path):
    (tmp_path / "long.txt").write_text(f"{TEXT} " * 9)
    convert(load_model(folder), "nope").save_pretrained(tmp_path / "converted")
    shutil.copytree(folder, tmp_path / "converted", dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("config.json", "*.safetensors"))  # fmt: skip
    options = ["--text", str(tmp_path / "long.txt"), "--tokens", "30", "--pairs", "99", "--dtype", "bfloat16"]
    for model, forms in ((folder, 2), (tmp_path / "converted", 1)):
        logit_statistics.main([str(model), *options, "--out", str(tmp_path / "out")])
        about = json.loads((tmp_path / "out" / "about.json").read_text())
        assert (about["tokens"], about["pairs"], about["dtype"]) == (30, 99, "bfloat16")
        assert ("q.k * 0.25" in about["scale"], "nope" in about["scale"]) == (forms == 2, forms == 1)
        assert len(rows(tmp_path / "out" / "statistics.csv")) == 2 * forms * 7


@pytest.fixture
def run(tmp_path):
    """A run of ours of two layers, as training leaves it: one without rotation, one with it."""
    (tmp_path / "book.txt").write_text("\n".join(f"{TEXT} {number}" for number in range(200)))
    (tmp_path / "text.txt").write_text(TEXT)
    prepare([tmp_path / "book.txt"], tmp_path / "data", "bpe:270")
    config = dataclasses.replace(
        quickstart(), method="nope,rope+window", num_layers=2, num_heads=2, model_dim=32, train_length=64,
        val_lengths=(64,), val_tokens=64, data_dir=str(tmp_path / "data"), vocab_size=270, dtype="float32",
    )  # fmt: skip
    path = tmp_path / "runs" / "mine"
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    (path / "data.json").write_text(json.dumps(dict(tokenizer=tokenizer_of(tmp_path / "data"))))
    torch.manual_seed(0)
    model = build_model(config, torch.float32)
    save_checkpoint(path / "checkpoints", 2, dict(step=2, model=model.state_dict()))
    return path


@pytest.mark.slow
def test_a_run_of_ours(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logit_statistics.main(["runs/mine", "--text", "text.txt"])
    out = tmp_path / "runs" / "logit_statistics" / "mine"  # by default
    statistics = rows(out / "statistics.csv")
    config, model = logit_statistics.load_run(run, torch.device("cpu"))
    tokenizer = load_tokenizer(tmp_path / "data")
    tokens = torch.tensor([[tokenizer.eot, *tokenizer.encode(TEXT)]])
    expected = [(str(layer), str(rotated), scores) for layer, rotated, scores in logits.layer_scores(model, tokens)]
    assert [(layer, rotated) for layer, rotated, _ in expected] == [("0", "False"), ("1", "False"), ("1", "True")]
    assert [(row["layer"], row["rotated"]) for row in statistics[::3]] == [(a, b) for a, b, _ in expected]
    for row, (_, _, scores) in zip(statistics[::3], expected):
        assert row["head"] == "0" and float(row["std"]) == pytest.approx(scores[0].std(correction=0).item())
    assert is_figure(out / "layers") and "nope,rope+window" in (out / "statistics.md").read_text()


# ---- bad input -------------------------------------------------------------------------------------------------------


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        logit_statistics.main([str(argument) for argument in arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_refusals_of_models(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    for arguments, word in [
        (["--text", tmp_path / "none.txt"], "none.txt"),
        (["--text", text, "--tokens", "2"], "--tokens"),
        (["--text", text, "--pairs", "1"], "--pairs"),
    ]:
        assert word in refused(capsys, folder, *arguments)
    text.write_text("England")
    assert "got 2" in refused(capsys, folder, "--text", text)
    text.write_bytes(b"abc \xff")
    assert "utf-8" in refused(capsys, folder, "--text", text)
    text.write_text(TEXT)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert "gpt2" in refused(capsys, folder, "--text", text)


def test_refusals_of_runs(run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    assert "--offload" in refused(capsys, run, "--text", text, "--offload")
    (run / "data.json").write_text(json.dumps(dict(tokenizer="gpt2")))
    assert "tokenizer" in refused(capsys, run, "--text", text)
    shutil.rmtree(run / "checkpoints")
    assert "checkpoint" in refused(capsys, run, "--text", text)


# ---- the paper's figures ---------------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """What the command leaves of three models, each of one layer, where figure_qq looks for it."""
    folders, kept = {}, Kept()
    for rotated in (False, True):
        kept.add(torch.randn(2, 40, dtype=torch.float64), by_head=True, layer=0, rotated=rotated)
    about = dict(model="m", tokens=9, pairs=40, text="t", text_sha256="0" * 64, scale="s", dtype="d", device="abacus")
    monkeypatch.setattr(logit_statistics, "draw_qq", lambda *_: None)  # which other tests look at
    for name in PAPERS_MODELS:
        folders[name] = tmp_path / "runs" / "logit_statistics" / name
        more = dict(commit="0123abc", made="today", command=f"measure {name}")
        logit_statistics.write(folders[name], kept, about | more)
        about["text_sha256"] = "1" * 64
    return folders


@pytest.mark.slow
def test_the_papers_six_figures(measured, tmp_path, call, monkeypatch):  # noqa: F811
    out = tmp_path / "out"
    code, said = call("figure_qq", "--scale", "mini")
    assert code == 0 and "not given the same text" in said.out and "### Missing" not in said.out
    for name in ("llama_1b", "llama_8b", "gemma_2_27b"):
        assert all(is_figure(out / f"figure_qq_{name}_{form}_rotation") for form in ("with", "without"))
    assert all(f"`measure {name}`" in said.out for name in measured)
    found = rows(out / "figure_qq.csv")
    assert [row["model"] for row in found] == [name for name in measured for _ in range(2 * 3)]
    means = [f"{float(row['mean']):.3f}" for row in found if row["head"] == "all"]
    lines = [line for line in said.out.splitlines() if line.startswith("| ")]
    assert [line.split("|")[4].strip() for line in lines[1:]] == means and len(means) == 6
    monkeypatch.setattr("scripts.reproduce.qq.draw_qq", lambda *_: None)  # they are drawn above
    shutil.rmtree(measured["Llama-3.1-8B"])
    code, said = call("figure_qq", "--scale", "mini")
    assert code == 1 and "models used: 2 of 3" in said.out and "### Missing (1)" in said.out
    assert "was made from 3 models, and now there are 2: --force writes over it" in said.err
    assert "models used: 3 of 3" in (out / "figure_qq.md").read_text()


def test_damage_is_named(measured):
    folder = measured["Llama-3.2-1B"]
    assert read_kept(folder)[1].statistics and read_kept(folder.with_name("none")) is None
    (folder / "about.json").rename(folder / "whole.json")
    assert read_kept(folder) is None  # it was being written
    head = "layer,rotated,head,probability,gaussian,sample"
    for file, damage in [
        ("about.json", "{}"), ("about.json", (folder / "whole.json").read_text().replace('"' + "0" * 64 + '"', "null")),
        ("quantiles.csv", ""), ("quantiles.csv", f"{head}\n0,yes,all,1,1,1\n"), ("quantiles.csv", f"{head}\n0,True\n"),
        ("quantiles.csv", f"{head}\n0,True,all,1,1,1\n"), ("statistics.csv", "layer,rotated,head\n0,True,all\n"),
    ]:  # fmt: skip
        shutil.copy(folder / "whole.json", folder / "about.json")
        before = (folder / file).read_text()
        (folder / file).write_text(damage)
        with pytest.raises(ValueError, match="Llama-3.2-1B is damaged .*: delete it and run again"):
            read_kept(folder)
        (folder / file).write_text(before)
        assert read_kept(folder)

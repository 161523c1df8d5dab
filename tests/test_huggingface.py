# ruff: noqa: E402 (imports after importorskip)
"""Our methods inside a tiny Llama of the real class with random weights, and loading models."""

import pytest

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-extras.txt")

import reference
import torch
from attention_cases import parse
from commands import ROOT, parametrize, refuses, slow, update_json, write_files
from tiny_llama import VOCAB, make_model, run_elsewhere, save_model
from torch.testing import assert_close

from model.methods import METHODS
from scripts.continue_pretraining import PAPER
from scripts.hf import load
from scripts.hf.convert import attend_with_method, attention_layers, convert
from scripts.hf.load import load_model

TRAIN_LENGTH, LENGTH = 32, 41
TOKENS = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
GREEDY = dict(do_sample=False, eos_token_id=None, pad_token_id=0)


def convert_and_move(method, **options):
    """Return a converted model whose learned parameters differ in all heads and layers."""
    model = convert(make_model(), method, **options)
    with torch.no_grad():
        for parameter in learned(model):
            parameter += 0.3 * torch.rand(parameter.shape)
    return model


@torch.no_grad()
def logits(model, **options):
    return model(TOKENS, **options).logits


def learned(model):
    return [p for layer in attention_layers(model) for p in layer.method.parameters()]


def assert_near(found, expected, atol):
    assert_close(found, expected, rtol=0, atol=atol, check_dtype=False)


@parametrize("changes", [
    {},
    dict(rope_parameters=dict(rope_type="default", rope_theta=500_000.0)),
    dict(num_key_value_heads=4, head_dim=16),
], ids=str)
def test_rope_in_a_converted_model_is_the_model(changes):
    model = make_model(**changes)
    expected = logits(model)
    assert_near(logits(convert(model, "rope")), expected, 3e-5)
    assert (logits(convert(model, "alibi")) - expected).abs().max() > 0.1
    assert_near(logits(convert(model, "rope")), expected, 3e-5)  # a conversion can be taken back
    assert_near(logits(model.to(torch.bfloat16)), expected, 0.15 * expected.abs().max().item())


@parametrize("case", [*PAPER, "p_rope form=barbero"])
def test_attention_of_a_converted_model_is_the_formula(case):
    name, options = parse(case)
    model = convert_and_move(name, **options)
    assert (len(learned(model)) > 0) == name.startswith("logn")
    generator = torch.Generator().manual_seed(2)
    for layer in attention_layers(model):
        q, k, v = (torch.randn(2, heads, LENGTH, 8, generator=generator) for heads in (4, 2, 2))
        ours, _ = attend_with_method(layer, q, k, v, 0)
        # These models rotate by +angle, the reference by -angle, and neighbouring query heads share keys and values.
        other_way = torch.tensor([1.0] * 4 + [-1.0] * 4, dtype=torch.float64)
        k, v = (x.repeat_interleave(2, dim=1) for x in (k * other_way, v.double()))
        factor = layer.method.query_scale and layer.method.query_scale.scale.double()
        known = dict(options, train_length=TRAIN_LENGTH, learned=factor)
        exact = reference.attention_logits(name, q * other_way, k, **known)
        assert_near(ours.transpose(1, 2), exact.softmax(dim=-1) @ v, 1e-5)


@parametrize("name", [*METHODS, "p_rope+gate", "p_rope+xsa"])
def test_every_method_runs_unless_it_needs_the_layers_input(name):
    if name in "nape nape_entmax fox wall grape_ap p_rope+gate".split():
        with refuses("input"):
            convert(make_model(), name)
    else:
        found = logits(convert(make_model(), name))
        assert found.isfinite().all()
        assert name != "fire" or not found.allclose(logits(convert(make_model(), "nope")), atol=1e-4)


@parametrize("case", [*PAPER, *"""p_rope+sink | pope | stick_breaking | logn_ntk context=length
    | infini_p_rope segment_length=7 | p_rope+xsa learn_share=True""".split("|")])
@torch.no_grad()
def test_a_cache_changes_nothing(case):
    name, options = parse(case)
    model = convert_and_move(name, **options)
    model.attention_shared.target_length = LENGTH + 3  # beyond the training length
    cache, found = None, []
    for piece in TOKENS.split([18, 9, *[1] * (LENGTH - 27)], dim=1):
        output = model(piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    assert_near(torch.cat(found, dim=1), logits(model), 1e-4)
    if name == "logn_ntk":
        new = [model.generate(TOKENS, use_cache=use_cache, max_new_tokens=2, **GREEDY) for use_cache in (True, False)]
        assert torch.equal(*new)


def test_rows_are_one_whole_sequence():
    model = convert(make_model(), "scale_invariant_p_rope")
    mask = torch.ones_like(TOKENS)
    mask[1, 30:] = 0
    packed = torch.arange(LENGTH).remainder(20)[None]
    for options in (dict(attention_mask=mask), dict(position_ids=packed, use_cache=False)):
        with pytest.raises(ValueError):
            logits(model, **options)


def test_refused_conversions():
    llama = make_model()
    rope = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaled = make_model(rope_parameters=rope | dict(original_max_position_embeddings=16))
    bare = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))

    def assert_refused(word, model, name, **options):
        with refuses(word):
            convert(model, name, **options)
        assert not any(hasattr(module, "method") for module in model.modules())

    assert_refused("p_rope", llama, "p_ropo")
    assert_refused("tau", llama, "scale_invariant_p_rope", tao=3)
    assert_refused("base=500000", scaled, "logn_rope")
    assert_refused("gpt2", bare, "rope")
    assert convert(scaled, "rope", base=5e5) and convert(scaled, "p_rope") and convert(scaled, "alibi")


LOAD = """
import importlib.util, sys, torch
from transformers import AutoModelForCausalLM
assert not any(map(importlib.util.find_spec, ("model", "errors", "scripts")))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
half = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype="bfloat16").eval()
tokens = torch.load(sys.argv[2])
with torch.no_grad():
    found = [m(tokens).logits.float() for m in (model, half)]
new = model.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None)
model.save_pretrained(sys.argv[3] + "-again")
again = AutoModelForCausalLM.from_pretrained(sys.argv[3] + "-again", trust_remote_code=True)
with torch.no_grad():
    assert torch.equal(again(tokens).logits, found[0])
torch.save((*found, new), sys.argv[3])
"""


@slow
def test_a_saved_model_loads_where_the_repository_is_not(tmp_path):
    model = convert_and_move("logn_p_rope", train_length=20)
    load.save_model(model, tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))
    assert again.config.attention_method == model.config.attention_method
    with pytest.raises((KeyError, ValueError)):  # never RoPE attention in silence
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=False)
    torch.save(TOKENS, tmp_path / "tokens")
    run_elsewhere(tmp_path, LOAD, "saved", "tokens", "out")
    found, rounded, new = torch.load(tmp_path / "out")
    assert_near(found, logits(model), 3e-5)
    assert 0 < (rounded - found).abs().max() < 0.15 * found.abs().max()
    assert torch.equal(new, model.generate(TOKENS, max_new_tokens=5, **GREEDY))


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    return tmp_path / "model"


@parametrize("fields, place, word", [
    (dict(model_type="gpt2"), "", "gpt2"), (dict(num_hidden_layers=3), "", "layers.2"),
    ({}, "model.gguf", "docs/huggingface.md"),
])
def test_bad_configurations_and_gguf_files(folder, fields, place, word):
    update_json(folder / "config.json", **fields)
    write_files(folder, {"model.gguf": "GGUF"})
    with refuses(word):
        load_model(folder / place)


def test_no_code_of_a_folder_is_run(folder, tmp_path):
    sprung = tmp_path / "sprung"
    code = f"open({str(sprung)!r}, 'w')\nclass Any: pass\n"
    write_files(folder, {"modeling_trap.py": code, "configuration_trap.py": code})
    auto = dict(AutoConfig="configuration_trap.Any", AutoModelForCausalLM="modeling_trap.Any")
    trap = "someone/trap"
    update_json(folder / "config.json", auto_map=auto, _attn_implementation=trap, attn_implementation=trap)
    assert logits(load_model(folder)).isfinite().all()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")  # is not even opened
    with refuses("safetensors", error=OSError):
        load_model(folder)
    assert not sprung.exists()


def test_the_example_of_the_page_runs(folder, tmp_path, monkeypatch, capsys):
    code = (ROOT / "docs/huggingface.md").read_text().split("```python\n")[1].split("```")[0]
    for original, here in (("meta-llama/Llama-2-7b-hf", str(folder)), ('device="cuda"', 'device="cpu"')):
        assert code.count(original) == 1
        code = code.replace(original, here)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.startswith("tensor(")
    model = load_model(tmp_path / "llama-scale-invariant")
    assert model.config.attention_method["options"] == dict(tau=10.0, learn_moments=True)
    change = attention_layers(model)[0].method.score_change
    assert change.mean.all() and change.log_deviation.all()  # measured, and kept in the folder

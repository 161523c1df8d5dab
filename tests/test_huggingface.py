# ruff: noqa: E402 (imports after importorskip)
"""Our methods inside models of Hugging Face's (tiny, randomly initialised, of the real classes), and reading models."""

import json
import math

import pytest

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-extras.txt")

import reference
import torch
from test_methods import assert_refused
from torch.testing import assert_close
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache

from model.kernels.distance import make_coefficients
from model.methods import METHODS, make_method
from model.reference import attention_logits
from scripts.huggingface import attention
from scripts.huggingface.attention import (
    attend_with_method,
    attention_layers,
    convert,
    measure_scores,
    rescale,
    set_target_length,
)
from scripts.huggingface.converted import load_converted
from scripts.huggingface.load import count_parameters, load_model, meta_model

TEN = "rope p_rope nope rope_ntk yarn logn_rope logn_p_rope logn_ntk alibi scale_invariant_p_rope".split()
TRAIN_LENGTH, VOCAB, LENGTH = 32, 99, 41
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=TRAIN_LENGTH, initializer_range=0.3)
CAP, WINDOW = 2.0, 7
FAMILIES = ["llama", "gemma2"]
every_family = pytest.mark.parametrize("family", FAMILIES)


def make_model(family="llama", **changes):
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE | dict(num_hidden_layers=2) | changes)).eval()
    own = dict(num_hidden_layers=4, head_dim=8, query_pre_attn_scalar=12)
    own |= dict(attn_logit_softcapping=CAP, sliding_window=WINDOW)
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE | own | changes, attn_implementation="eager")).eval()


@pytest.fixture(scope="module")
def models():  # each is converted again and again
    return {family: make_model(family) for family in FAMILIES}


def random_tokens(batch=2, length=LENGTH):
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, tokens=None, **how):
    return model(random_tokens() if tokens is None else tokens, **how).logits


def learned(model):
    return [p for layer in attention_layers(model) for p in layer.method.parameters()]


def move_learned(model):
    """Away from what it begins with, so that all heads and layers differ."""
    with torch.no_grad():
        for i, parameter in enumerate(learned(model)):
            parameter += 0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(i))


# ---- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, changes", [
    ("llama", {}),
    ("llama", dict(rope_parameters=dict(rope_type="default", rope_theta=500_000.0))),
    ("llama", dict(num_key_value_heads=4, head_dim=16)),
    ("gemma2", {}),
    ("gemma2", dict(attn_logit_softcapping=None, query_pre_attn_scalar=8)),
])
def test_rope_in_a_converted_model_is_the_model(family, changes):
    model = make_model(family, **changes)
    expected = logits(model)
    assert_close(logits(convert(model, "rope")), expected, rtol=0, atol=3e-5)
    assert (logits(convert(model, "alibi")) - expected).abs().max() > 0.1
    assert_close(logits(convert(model, "rope")), expected, rtol=0, atol=3e-5)  # a conversion can be taken back
    assert_close(logits(model.to(torch.bfloat16)).float(), expected, rtol=0, atol=0.15 * expected.abs().max().item())


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of our attention function, layer by layer."""
    found = []

    def record(layer, *arguments, **others):
        found.append((layer, arguments, others))
        return attend_with_method(layer, *arguments, **others)

    monkeypatch.setattr(attention, "attend_with_method", record)
    yield found
    monkeypatch.undo()
    attention.register()


def conjugate(x):
    """These models rotate by +angle, ours by -angle."""
    return torch.cat([half if i == 0 else -half for i, half in enumerate(x.chunk(2, dim=-1))], dim=-1)


@every_family
@pytest.mark.parametrize("name", TEN)
def test_logits_of_a_converted_model_are_ours(models, calls, name, family):
    model = convert(models[family], name)
    move_learned(model)
    assert (len(learned(model)) > 0) == name.startswith("logn")
    logits(model)
    assert len(calls) == model.config.num_hidden_layers
    for layer, (q, k, v, places, *rest), others in calls[:2]:
        assert places == (0, 0) and q.shape == (2, 4, LENGTH, 8) and k.shape == v.shape == (2, 2, LENGTH, 8)
        # With unit vectors as values the output is the softmax, 8 columns a call.
        units = torch.nn.functional.pad(torch.eye(LENGTH), (0, -LENGTH % 8)).expand(2, 2, -1, -1).split(8, dim=-1)
        ours = torch.cat([attend_with_method(layer, q, k, x, places, *rest, **others)[0] for x in units], dim=-1)
        exact_q, exact_k = conjugate(q.double()), conjugate(k.double().repeat_interleave(2, dim=1))
        number = layer.method.query_scale and layer.method.query_scale.scale.double()
        how = dict(train_length=TRAIN_LENGTH, learned=number)
        if family == "llama":
            exact = reference.attention_logits(name, exact_q, exact_k, **how)
        else:
            assert (layer.method.window is not None) == (layer.layer_idx % 2 == 0)
            exact_q = exact_q * (8 / 12) ** 0.5
            exact = attention_logits(layer.method, exact_q, exact_k, softcap=CAP)
        seen = exact.isfinite()
        ours = ours.transpose(1, 2)[..., :LENGTH]  # (B, H, T, T)
        assert (ours[~seen] == 0).all() and seen.sum() > 2 * LENGTH
        # The logits of a row but for a number, which no softmax knows.
        assert_close(ours[seen].double().log(), exact.log_softmax(dim=-1)[seen], rtol=0, atol=1e-5)


@every_family
@pytest.mark.parametrize("name", ["logn_p_rope", "scale_invariant_p_rope"])
def test_gradients_reach_every_weight(family, name):
    model = convert(make_model(family), name, **(dict(learn_tau=True) if name.startswith("scale") else {})).train()
    move_learned(model)
    tokens = random_tokens()

    def all_gradients():
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return {key: p.grad.clone() for key, p in model.named_parameters()}

    found = all_gradients()
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in found.values())
    assert sum(".method." in key for key in found) == model.config.num_hidden_layers
    model.activation_checkpointing_enable()
    for key, gradient in all_gradients().items():
        assert_close(gradient, found[key], rtol=1e-4, atol=1e-6)
    # and they are right: along the gradient of what is learned, the loss grows by its square
    mine, step = learned(model), 1e-3
    slope = sum(p.grad.square().sum().item() for p in mine) ** 0.5
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for p in mine:
                p += sign * step * p.grad / slope
            losses.append(model(tokens, labels=tokens).loss.item())
            for p in mine:
                p -= sign * step * p.grad / slope
    assert abs((losses[0] - losses[1]) / (2 * step) / slope - 1) < 0.1


def test_every_method_runs_or_says_why_not(models):
    refused = []
    for name in METHODS:
        try:
            convert(models["llama"], name)
        except ValueError as error:
            refused.append(name)
            assert "looks at the input of the layer" in str(error)
            continue
        assert logits(models["llama"]).isfinite().all()
    look = ("nape", "path", "fox")
    assert refused == [name for name in METHODS if name.endswith("gate") or any(part in name for part in look)]


# ---- no bound, and what the deviation is -----------------------------------------------------------------------------


def test_no_kernel_is_told_a_bound(models):
    model = convert(models["llama"], "scale_invariant_p_rope")
    logits(model)
    (plan,) = model.attention_shared.plans.values()
    assert plan.call.product_bound == math.inf
    change = model.model.layers[0].self_attn.method.score_change
    bounded = [
        make_coefficients(change, 4, 8, LENGTH, 0, torch.float32, "cpu", bound).bounded
        for bound in (plan.call.product_bound, 8.0)  # 8: what it would be with QK-norm
    ]
    assert bounded == [False, True]


@every_family
@pytest.mark.parametrize("by", ["layer", "head"])
def test_rescaled_scores_have_deviation_1(family, by):
    model = convert(make_model(family), "logn_p_rope")
    tokens = random_tokens(3)
    before = measure_scores(model, tokens)  # (layers, H, 2)
    assert before.shape == (model.config.num_hidden_layers, 4, 2) and before[..., 1].min() > 1.2
    assert_close(rescale(model, tokens, by)[0], before[0])
    mean, deviation = measure_scores(model, tokens).unbind(-1)
    if by == "head":
        assert_close(deviation, torch.ones_like(deviation), rtol=0, atol=1e-4)
    else:  # of a layer's heads together
        pooled = (deviation.square() + mean.square()).mean(1) - mean.mean(1).square()
        assert_close(pooled, torch.ones_like(pooled), rtol=0, atol=1e-3)
    assert_close(rescale(model, tokens, by)[..., 1], deviation)  # on top of the factors that there are


@torch.no_grad()
def test_measured_scores_are_those_of_the_formula(models, calls):
    model, tokens = convert(models["gemma2"], "p_rope"), random_tokens()
    found = measure_scores(model, tokens, num_queries=LENGTH)
    later = torch.arange(LENGTH)
    counted = (later[:, None] > later) & (later > 0)
    method = make_method("p_rope", num_heads=4, head_dim=8, train_length=TRAIN_LENGTH)  # before window and cap
    for (_, (q, k, *_), _), (mean, deviation) in zip(calls, [layer.unbind(-1) for layer in found], strict=True):
        exact_q, exact_k = conjugate(q.double()), conjugate(k.double().repeat_interleave(2, dim=1))
        scores = attention_logits(method, exact_q * (8 / 12) ** 0.5, exact_k)[:, :, counted].transpose(0, 1).flatten(1)
        assert_close(mean.double(), scores.mean(1), rtol=0, atol=1e-5)
        assert_close(deviation.double(), scores.std(1), rtol=0, atol=1e-5)


# ---- generation ------------------------------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("name, options", [(name, {}) for name in TEN] + [
    ("logn_ntk", dict(context="length")),
    ("yarn", dict(factor=3.0)),
    ("infini_p_rope", dict(segment_length=7)),
    ("swan", dict(window=9)),
    ("p_rope_sink", {}),
    ("pope", {}),
    ("stick_breaking", {}),
], ids=str)
@torch.no_grad()
def test_a_cache_changes_nothing(models, name, options, family):
    if family == "gemma2" and name in ("infini_p_rope", "stick_breaking", "pope"):
        return  # refused, below
    model, tokens = convert(models[family], name, **options), random_tokens()
    move_learned(model)
    set_target_length(model, LENGTH + 3)  # beyond the training length
    full = model(tokens).logits
    first = 18
    output = model(tokens[:, :first], use_cache=True)
    found = [output.logits]
    for start, stop in [(first, 27), *((i, i + 1) for i in range(27, LENGTH))]:  # 9 at once, then one by one
        output = model(tokens[:, start:stop], past_key_values=output.past_key_values, use_cache=True)
        found.append(output.logits)
    assert_close(torch.cat(found, dim=1), full, rtol=0, atol=1e-4)


@every_family
@pytest.mark.parametrize("name", ["logn_ntk", "scale_invariant_p_rope"])
def test_generate_with_a_cache_is_generate_without(models, name, family):
    model, tokens = convert(models[family], name), random_tokens(length=9)
    set_target_length(model, 44)
    how = dict(max_new_tokens=35, do_sample=False, eos_token_id=None, pad_token_id=0)
    cached = model.generate(tokens, **how)
    assert cached.shape == (2, 44) and torch.equal(cached, model.generate(tokens, use_cache=False, **how))
    assert model.generate(tokens, **how | dict(num_beams=2, max_new_tokens=9)).shape == (2, 18)


def test_a_length_that_matters_must_be_told(models):
    tokens = random_tokens()

    def decode(until):
        output = model(tokens[:, :20], use_cache=True)
        for i in range(20, until):
            output = model(tokens[:, i:i + 1], past_key_values=output.past_key_values, use_cache=True)

    model = convert(models["llama"], "rope_ntk")
    decode(TRAIN_LENGTH)  # up to which NTK is RoPE
    with assert_refused("rope_ntk follows the length", "set_target_length"):
        decode(TRAIN_LENGTH + 1)
    set_target_length(model, TRAIN_LENGTH + 1)
    decode(TRAIN_LENGTH + 1)
    with assert_refused("told that sequences have 33 tokens", "this has 41"):
        logits(model)
    decode_rope = convert(models["llama"], "logn_p_rope")
    assert decode_rope is model
    decode(LENGTH)  # LogN's own form follows a query's position alone


def test_what_is_not_one_whole_sequence_a_row(models):
    model, tokens = convert(models["llama"], "scale_invariant_p_rope"), random_tokens()
    mask = torch.ones_like(tokens)
    mask[1, 30:] = 0
    found = logits(model, attention_mask=mask)
    assert_close(found[1, :30], logits(model, tokens[1:, :30])[0], rtol=0, atol=1e-5)
    with assert_refused("padding after the tokens", "equal length"):
        logits(model, attention_mask=mask.flip(1))
    with assert_refused("padding after the tokens", "not in generation"):
        model.generate(tokens, attention_mask=mask, max_new_tokens=2, pad_token_id=0)
    with assert_refused("one sequence a row"):
        logits(model, position_ids=torch.arange(LENGTH).remainder(20)[None], use_cache=False)
    with assert_refused("its own mask"):
        logits(model, attention_mask=torch.zeros(2, 1, LENGTH, LENGTH))
    with assert_refused("DynamicCache"):
        logits(model, past_key_values=StaticCache(config=model.config, max_cache_len=64))


# ---- what is refused, and what is saved ------------------------------------------------------------------------------


def test_conversions_that_are_refused(models):
    llama, gemma = models["llama"], models["gemma2"]
    with assert_refused("unknown attention method", "p_rope"):
        convert(llama, "p_ropo")
    with assert_refused("unknown option", "tau"):
        convert(llama, "scale_invariant_p_rope", tao=3)
    for name in ("infini_rope", "stick_breaking"):
        with assert_refused(f"{name} replaces the softmax", "caps its scores"):
            convert(gemma, name)
    with assert_refused("pope is not linear in q"):
        convert(gemma, "pope")
    with assert_refused("pope", "not linear in q"):
        rescale(convert(llama, "pope"), random_tokens())
    with assert_refused("by layer or by head"):
        rescale(llama, random_tokens(), "row")
    scaled = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=16)
    other = make_model(rope_parameters=scaled)
    with assert_refused("rope type llama3", "give base=500000"):
        convert(other, "logn_rope")
    assert not hasattr(attention_layers(other)[0], "method")  # nothing half done
    assert convert(other, "rope", base=5e5) and convert(other, "p_rope") and convert(other, "alibi")
    with assert_refused("no dropout", "attention_dropout=0.0"):
        convert(make_model(attention_dropout=0.1), "rope")
    other.model.layers[1].mlp.to("meta")  # as accelerate does to what it offloads
    with assert_refused("offloaded", "what logn_p_rope learns"):
        convert(other, "logn_p_rope")
    convert(other, "scale_invariant_p_rope")
    bare = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    with assert_refused("llama and gemma2", "not gpt2"):
        convert(bare, "rope")


def test_half_of_the_pairs_of_barbero_keep_the_models_frequencies(models):
    model = convert(models["llama"], "p_rope", form="barbero")
    base = model.config.rope_parameters["rope_theta"]
    frequencies, _ = attention_layers(model)[0].method.rotation.frequencies(1)
    assert_close(frequencies, torch.tensor([1, base**-0.25, 0, 0], dtype=torch.float64))
    assert attention_layers(convert(model, "p_rope"))[0].method.rotation.base == 1024


def test_logn_begins_at_a_mean_factor_of_1(models):
    model = convert(models["llama"], "logn_rope", train_length=4096)
    assert learned(model)[0].tolist() == pytest.approx([0.1366] * 4, abs=1e-4)


@every_family
def test_a_converted_model_is_saved_and_loaded(tmp_path, family):
    model = convert(make_model(family), "logn_p_rope", train_length=20, form="barbero")
    move_learned(model)
    rescale(model, random_tokens())
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    again = load_converted(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.config.attention_method == model.config.attention_method
    with assert_refused("was converted", "load_converted"):
        load_model(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for damage in ("x", dict(name="rope"), fields["attention_method"] | dict(name=3)):
        (tmp_path / "config.json").write_text(json.dumps(fields | dict(attention_method=damage)))
        with assert_refused("attention"):
            load_converted(tmp_path)


def test_llama_2_7b_converts_on_the_meta_device():
    config = LlamaConfig(max_position_embeddings=4096)  # whose other defaults are Llama-2-7B's
    model = meta_model(config)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters()) == 6_738_415_616
    for name in TEN:
        convert(model, name)
        assert sum(p.numel() for p in model.parameters()) - 6_738_415_616 == (1024 if name.startswith("logn") else 0)
        assert all(p.is_meta for p in model.parameters())

"""The newer mechanisms against formulas written from their papers, in float64 and one row at a time: values, gradients,
every backend that runs them here, layers that differ."""

import math

import pytest
import torch
from test_gpt import random_tokens
from test_methods import assert_near, assert_refused, cast, gradients, random, random_qkv

from model.attention import attend, choose_backend, make_plan
from model.backends import BACKENDS
from model.gpt import GPT
from model.methods import METHODS, layer_pattern, make_layers, make_method
from model.reference import attention_logits, plain_attention

SHAPES = [(2, 3, 16, 1), (2, 2, 16, 37), (1, 4, 32, 130), (1, 2, 8, 300)]  # batch, heads, head dimension, tokens
OPTIONS = dict(rope_window=dict(window=29), p_rope_window=dict(window=1))


def make(name, num_heads, head_dim, **options):
    method = make_method(name, num_heads=num_heads, head_dim=head_dim, train_length=64, **options)
    for seed, parameter in enumerate(method.parameters()):
        parameter.data = 0.3 * random(*parameter.shape, seed=seed).float()
    return method


# ---- the formulas, row by row ----------------------------------------------------------------------------------------


def forgetting(method, logits, x):
    """Lin et al. 2025, equation 3: D_ij, the sum of log f_l over j < l <= i, is added to the logits."""
    weight, bias = method.key_bias.weight.double(), method.key_bias.bias_of_gate.double()
    log_f = torch.log(1 / (1 + torch.exp(-(torch.einsum("btc,hc->bht", x, weight) + bias[:, None]))))
    rows = []
    for i in range(logits.shape[2]):
        decay = [log_f[:, :, j + 1 : i + 1].sum(-1) for j in range(i + 1)]
        decay += [torch.full_like(decay[0], -math.inf)] * (logits.shape[3] - i - 1)
        rows.append(logits[:, :, i] + torch.stack(decay, dim=-1))
    return torch.stack(rows, dim=2)


def literal(name, method, q, k, v, x):
    """Return the output of the softmax from logits without the newer mechanisms, to which these are added one by one.
    """
    base = [mechanism for mechanism in (method.rotation, method.query_scale, method.score_change) if mechanism]
    logits = attention_logits(type(method)(name, q.shape[1], q.shape[3], method.train_length, base), q, k, x=x)
    if method.key_bias is not None:
        logits = forgetting(method, logits, x)
    outputs = []
    for i in range(q.shape[2]):
        first = 0 if method.window is None else max(0, i - method.window.window + 1)
        weights = logits[:, :, i, first : i + 1].exp()
        total = weights.sum(-1, keepdim=True)
        if method.sink is not None:
            total = total + method.sink.logit.double().exp()[:, None]
        outputs.append(torch.einsum("bhj,bhjd->bhd", weights / total, v[:, :, first : i + 1]))
    return torch.stack(outputs, dim=2)


NAMES = ["fox", "fox_p_rope", "fox_scale_invariant", "fox_scale_invariant_p_rope", "rope_window", "p_rope_window",
         "p_rope_sink", "scale_invariant_p_rope_sink"]
every_name = pytest.mark.parametrize("name", NAMES)


def test_each_is_in_the_table():
    assert set(NAMES) <= set(METHODS)


@every_name
@pytest.mark.parametrize("batch, num_heads, head_dim, length", SHAPES)
def test_the_formula_is_that_of_the_paper(name, batch, num_heads, head_dim, length):
    method = make(name, num_heads, head_dim, **OPTIONS.get(name, {})).double()
    inputs = [*random_qkv(num_heads, head_dim, length, batch), random(batch, length, num_heads * head_dim, seed=9)]
    inputs = [x.detach().requires_grad_() for x in inputs]
    expected, ours = literal(name, method, *inputs), plain_attention(method, *inputs[:3], x=inputs[3])
    inputs += method.parameters()
    assert_near(ours, expected, 1e-12)
    for gradient, truth in zip(gradients(ours, inputs), gradients(expected, inputs), strict=True):
        assert_near(gradient, truth, 1e-11)


# ---- backends --------------------------------------------------------------------------------------------------------


def backends_here(name, dtype, head_dim, length, grad=True):
    """Triton's interpreter is slow (longer sequences are in test_kernel_extras.py), and wrong in bfloat16."""
    method = make(name, 2, head_dim, **OPTIONS.get(name, {}))
    usable = [b for b in BACKENDS if BACKENDS[b].find_problem(method, torch.device("cpu"), dtype) is None]
    unfit = {"flex"} if grad else set()  # which has no gradients on a CPU
    if length > 64 or dtype == torch.bfloat16:
        unfit.add("triton")
    return [b for b in usable if b not in unfit]


@every_name
@pytest.mark.parametrize("batch, num_heads, head_dim, length", SHAPES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_backends_agree_with_the_formula(name, batch, num_heads, head_dim, length, dtype, tolerance):
    method = make(name, num_heads, head_dim, **OPTIONS.get(name, {}))
    exact = [*random_qkv(num_heads, head_dim, length, batch), random(batch, length, num_heads * head_dim, seed=9)]
    exact = [x.detach().to(dtype).double().requires_grad_() for x in exact]
    parameters = list(method.parameters())
    expected = plain_attention(method, *exact[:3], x=exact[3])
    truth = gradients(expected, exact + parameters)
    if method.key_bias is not None:  # the last bits of biases that are large are not those of logits
        largest = method.key_bias.bias(method.key_bias.of_tokens(exact[3])).abs().max().item()
        tolerance += 2 * torch.finfo(torch.float32).eps * largest
    tried = backends_here(name, dtype, head_dim, length)
    assert "blocks" in tried
    for backend in tried:
        inputs = cast(exact, dtype)
        output = attend(method, *inputs[:3], x=inputs[3], backend=backend)
        assert output.dtype == dtype
        assert_near(output, expected, tolerance)
        for gradient, true in zip(gradients(output, inputs + parameters), truth, strict=True):
            assert_near(gradient, true, tolerance)


def test_what_a_backend_lacks_is_said_and_the_next_is_chosen():
    for name, words in [("fox", "biases of keys"), ("rope_window", "windows"), ("p_rope_sink", "sinks")]:
        with assert_refused(f"attention_backend sdpa cannot run: it has no {words}: use auto"):
            choose_backend(make(name, 2, 16), torch.device("cpu"), "sdpa")
    method = make("fox", 2, 16)
    for backend in set(BACKENDS) - {"blocks"}:
        reason = BACKENDS[backend].find_problem(method, torch.device("cpu"), torch.float32)
        if reason is not None:
            with assert_refused(f"attention_backend {backend} cannot run: {reason}"):
                choose_backend(method, torch.device("cpu"), backend)
    assert choose_backend(method, torch.device("cpu"))[0] in ("cpu", "blocks")
    with assert_refused("fox needs x, the input of the layer"):
        attend(method, *random_qkv(2, 16, 5))


# ---- layers that differ ----------------------------------------------------------------------------------------------


def test_a_pattern_repeats_over_the_layers():
    shape = dict(num_heads=2, head_dim=8, train_length=64)
    assert [m.name for m in make_layers("rope_window,nope", 3, **shape)] == ["rope_window", "nope", "rope_window"]
    windows = [m.window and m.window.window for m in make_layers("rnope_swa", 5, **shape, window=9)]
    assert windows == [None, 9, 9, 9, None] and len(layer_pattern("rnope_swa")) == 4
    scaled = make_layers("rnope_swa", 2, **shape, length_scale=1 / 16)[1]
    assert scaled.window.window == 32 and scaled.rotation.base == 625


def test_a_model_of_layers_that_differ_is_those_layers():
    """Its loss is that of layers run one by one, each with its own method and plan."""
    shape = dict(vocab_size=97, num_layers=5, num_heads=2, model_dim=32, train_length=16)
    options = dict(window=7, tau=2.0)
    model = GPT(method="scale_invariant_nope,rope_window", method_options=options, **shape)
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = random(*parameter.shape, seed=seed).float() * parameter.shape[-1] ** -0.5
    tokens, targets = random_tokens(40)
    x = model.embed(tokens)
    for block, name in zip(model.blocks, ["scale_invariant_nope", "rope_window"] * 3):
        own = options["tau"] if name == "scale_invariant_nope" else options["window"]
        key = "tau" if name == "scale_invariant_nope" else "window"
        method = make_method(name, num_heads=2, head_dim=16, train_length=16, **{key: own})
        block.attention.method = method
        x = block(x, make_plan(method, 40, 40))
    logits = torch.nn.functional.rms_norm(x, (32,)) @ model.head.T
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert_near(model(tokens, targets), expected.detach(), 1e-5)


@pytest.mark.parametrize("name, words", [
    ("rope,nope,", "unknown attention method ''"), ("rope,noep", "did you mean nope"),
    ("rnope_swa,rope", "is a pattern of layers itself"), ("rpoe", "did you mean rope"),
])
def test_patterns_that_there_are_not_are_refused(name, words):
    with assert_refused(words):
        make_layers(name, 2, num_heads=2, head_dim=8, train_length=64)
    with assert_refused("is not the same in all layers"):
        make_method("rnope_swa", num_heads=2, head_dim=8, train_length=64)


# ---- gates -----------------------------------------------------------------------------------------------------------


def test_a_gate_multiplies_the_heads_outputs():
    """Qiu et al. 2025, equation 5: Y' = Y * sigmoid(X W), before the output projection."""
    shape = dict(vocab_size=97, num_layers=1, num_heads=2, model_dim=32, train_length=16)
    gated, plain = GPT(method="p_rope_gate", **shape), GPT(method="p_rope", **shape)
    weight = gated.blocks[0].attention.method.output_gate.weight
    weight.data = random(32, 32, seed=1).float()
    for model in (gated, plain):
        model.blocks[0].attention.qkv.data = random(3, 32, 32, seed=2).float()
        model.blocks[0].attention.proj.data = torch.eye(32)
    x = random(2, 9, 32, seed=3).float()
    y, expected = (m.blocks[0].attention(x, m.plan(9)[0]) for m in (gated, plain))
    assert_near(y, (expected.double() / (1 + torch.exp(-x.double() @ weight.double().T))).detach(), 1e-5)
    y.sum().backward()
    assert weight.grad.abs().min() > 0

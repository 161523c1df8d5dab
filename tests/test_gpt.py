"""The model against a plain float64 form of it, its initial state, and what length and precision change."""

import dataclasses
from types import SimpleNamespace

import reference
import torch
from attention_cases import CPU, assert_near, cast, half_precision, random
from commands import parametrize, refuses, slow, table
from pytest import approx
from test_methods import NAMES

from configs.config import Config
from configs.presets import PRESETS
from measure.validation import uncompiled
from model.activations import relu_squared
from model.gpt import GPT
from runtime.build import compile_model
from runtime.processes import World

VOCAB, LAYERS, HEADS, DIM, TRAIN_LENGTH = 97, 2, 6, 96, 32  # head_dim 16

every_method = parametrize("name", NAMES)


def make_gpt(name="scale_invariant_p_rope", seed=0, dtype=torch.float32, **shape):
    torch.manual_seed(seed)
    fields = dict(
        vocab_size=VOCAB, num_layers=LAYERS, num_heads=HEADS, model_dim=DIM, train_length=TRAIN_LENGTH,
        position_scale=1.0, method=name, method_options=options_of(name),
    )
    return GPT(SimpleNamespace(**fields | shape), dtype)


def options_of(name):
    return dict(segment_length=20) if name.startswith("infini") else {}


def make_random_gpt(name="scale_invariant_p_rope", **arguments):
    """Return a model with no parameter at zero or at its initial value."""
    model = make_gpt(name, **arguments)
    for i, parameter in enumerate(model.parameters()):
        scale = 0.5 if parameter.ndim < 2 else 1.5 * parameter.shape[-1] ** -0.5
        parameter.data = scale * random(*parameter.shape, seed=i).float()
    return model


def random_tokens(length, batch=2, vocab_size=VOCAB):
    """tokens and targets, each (batch, length)."""
    tokens = torch.randint(vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def rms_norm(x):
    return x / (x.square().mean(dim=-1, keepdim=True) + 2.0 ** -23).sqrt()


def plain_layers(name, p, tokens):
    """Yield q and k (B, H, T, D) after QK-norm, the method's parameter, and the output (B, T, C) of each layer.

    The layers are record #8 of modded-nanogpt with the method in its attention. p: parameters by name, in float64.
    """
    x = rms_norm(p["embedding.weight"][tokens])  # (B, T, C)
    for layer in range(LAYERS):
        mine = {key.removeprefix(f"blocks.{layer}."): value for key, value in p.items()}
        learned = next((mine[key] for key in mine if key.startswith("attention.method")), None)
        q, k, v = (rms_norm(x) @ matrix.T for matrix in mine["attention.qkv"])
        by_head = [y.unflatten(-1, (HEADS, -1)) for y in (q, k, v)]
        q, k, v = (y.transpose(1, 2) for y in by_head)  # (B, H, T, D)
        q, k = rms_norm(q), rms_norm(k)
        y = reference.attend(name, q, k, v, train_length=TRAIN_LENGTH, learned=learned, **options_of(name))
        x = x + y.transpose(1, 2).flatten(2) @ mine["attention.proj"].T
        x = x + (rms_norm(x) @ mine["mlp.up"].T).clamp(min=0) ** 2 @ mine["mlp.down"].T
        yield q, k, learned, x


@every_method
@parametrize("length", [1, TRAIN_LENGTH, 4 * TRAIN_LENGTH + 3])
def test_loss_and_all_gradients_equal_the_plain_form(name, length):
    model = make_random_gpt(name)
    exact = {key: value.detach().double().requires_grad_() for key, value in model.named_parameters()}
    tokens, targets = random_tokens(length)
    *_, (*_, x) = plain_layers(name, exact, tokens)
    logits = rms_norm(x) @ exact["head"].T  # (B, T, V)
    expected = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
    losses = model(tokens, targets, per_token=True)
    assert losses.dtype == torch.float32
    assert_near(losses, expected, 5e-5)
    loss = model(tokens, targets, plan=model.plan(length))
    assert torch.equal(loss, losses.mean()) and torch.equal(loss, model(tokens, targets))
    assert_near(loss, expected.mean(), 1e-5)
    gradients = torch.autograd.grad(loss, model.parameters(), materialize_grads=True)
    truth = torch.autograd.grad(expected.mean(), exact.values(), materialize_grads=True)
    for gradient, true in zip(gradients, truth, strict=True):
        assert (gradient - true).norm() <= 1e-4 * true.norm() + 1e-7
    assert_near(model(tokens), logits, 5e-5)
    assert_near(model(tokens, last=1), logits[:, -1:], 5e-5)


@every_method
@table("preset, matrices, numbers", """
    gpt_162m_4k | 162_201_600 | 72
    gpt_304m_4k | 304_349_184 | 128
    quickstart  | 851_968     | 6
    mini_large  | 2_555_904   | 12
""")
def test_parameter_count(preset, matrices, numbers, name):
    """numbers: one a layer and head, of the methods that learn it."""
    with torch.device("meta"):
        model = GPT(dataclasses.replace(PRESETS[preset](), method=name))
    extra = int(numbers) * name.startswith(("logn", "infini"))
    assert sum(p.numel() for p in model.parameters()) == int(matrices) + extra


def assert_uniform(weight, bound):
    assert bound * 0.999 < weight.abs().max() <= bound
    assert abs(weight.mean()) < 0.02 * bound
    assert weight.std().item() == approx(bound / 3**0.5, rel=0.02)


def test_initial_distributions():
    model = make_gpt(vocab_size=1000)
    embedding = model.embedding.weight
    assert embedding.mean().item() == approx(0, abs=0.02)
    assert embedding.std().item() == approx(1, abs=0.02)
    assert (embedding.abs() > 2).float().mean().item() == approx(0.0455, abs=0.004)  # of a normal distribution
    for block in model.blocks:
        for matrix in (*block.attention.qkv, block.mlp.up):
            assert_uniform(matrix, DIM ** -0.5)
        assert not block.attention.proj.any() and not block.mlp.down.any()
    assert not model.head.any()


@every_method
def test_the_seed_alone_decides_the_initial_weights(name):
    """Methods start from the same weights, so that runs of one seed differ by the method alone."""
    shared = dict(make_gpt("nope", seed=5).named_parameters())
    again, other = (dict(make_gpt(name, seed=seed).named_parameters()) for seed in (5, 6))
    for key, weight in shared.items():
        assert torch.equal(again[key], weight)
        assert not weight.any() or not torch.equal(other[key], weight)


def test_heads_that_do_not_divide_the_width_are_refused():
    with refuses("model_dim 96", "num_heads 5"):
        make_gpt(num_heads=5)


@torch.no_grad()
@every_method
def test_bfloat16_losses_are_near_float32(name):
    exact, rough = make_random_gpt(name), make_random_gpt(name, dtype=torch.bfloat16)
    tokens, targets = random_tokens(100)
    losses, rounded = (model(tokens, targets, per_token=True) for model in (exact, rough))
    assert rounded.dtype == rough(tokens).dtype == torch.float32
    assert 0 < (rounded - losses).square().mean().sqrt() < 0.03 * losses.std()


def test_bfloat16_gradients_are_near_float32():
    models = [make_random_gpt("logn_p_rope", dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    gradients = [torch.autograd.grad(model(*random_tokens(100)), model.parameters()) for model in models]
    assert {gradient.dtype for gradient in gradients[1]} == {torch.float32}  # of the parameters
    errors = [(rough - exact).norm() / exact.norm() for exact, rough in zip(*gradients)]
    assert sum(errors) / len(errors) < 0.03  # of one LogN scale a head alone, 6 numbers, up to 0.06


@half_precision
def test_relu_squared_is_as_exact_as_its_roundings(dtype):
    x, dy = cast([3 * random(5001, seed=seed) for seed in (0, 1)], dtype)
    x.data[:3] = torch.tensor([0.0, -0.0, 1e-18])
    y = relu_squared(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    exact_y, exact_dx = x.double().relu() ** 2, 2 * x.double().relu() * dy.double()
    half = torch.finfo(dtype).eps / 2  # of the output; its root has half of that, and the gradient's own is added
    assert ((y.double() - exact_y).abs() <= 1.01 * half * exact_y).all()
    assert ((dx.double() - exact_dx).abs() <= 1.51 * 1.01 * half * exact_dx.abs()).all()


@slow
def test_compiled_blocks_compute_the_losses_of_the_model_whose_weights_they_share():
    model = make_random_gpt()
    models, stats = (model, uncompiled(model)), torch._dynamo.utils.counters["stats"]
    compile_model(model, Config(compile="on"), World(0, 1, CPU))
    torch._dynamo.reset()
    stats.clear()
    for scale in (1, 0.5):  # of weights that training changes later
        for parameter in model.parameters():
            parameter.data *= scale
        for length in (32, 70):
            plan = model.plan(length)
            with torch.no_grad():
                losses = [each(*random_tokens(length), plan=plan, per_token=True) for each in models]
            assert_near(*losses, 1e-5)
    compiled, eager = (dict(each.named_parameters()) for each in models)
    assert [*compiled] == [*eager]
    assert stats["unique_graphs"] == 2  # a length, for all blocks


@slow
def test_many_lengths_and_incomplete_micro_batches_stay_within_the_limit_of_compilations(monkeypatch):
    by_inductor = torch.compile
    monkeypatch.setattr("torch.compile", lambda *model, **options: by_inductor(*model, backend="eager", **options))
    lengths = [n for n in range(16, 337) if 20160 % n == 0]
    assert len(lengths) > 36
    model = make_random_gpt(num_layers=1)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=False):
        compiled = compile_model(model, Config(), World(0, 1, CPU))
        for length in lengths:
            plan = model.plan(length)
            for batch in (2, 1):
                tokens, targets = random_tokens(length, batch=batch)
                compiled(tokens, targets, plan=plan).backward()

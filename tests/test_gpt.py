"""The model against a plain float64 form of it, its initial state, causality, and what length and precision change."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import reference
import torch
from commands import refuses
from test_methods import NAMES, assert_near, random
from torch.testing import assert_close

from configs.config import Config
from configs.presets import PRESETS
from measure.validation import uncompiled
from model.activations import relu_squared
from model.gpt import GPT
from runtime.build import compile_model
from runtime.processes import World

VOCAB, LAYERS, HEADS, DIM, TRAIN_LENGTH = 97, 2, 6, 96, 32  # head_dim 16

every_method = pytest.mark.parametrize("name", NAMES)


def make_gpt(name="scale_invariant_p_rope", seed=0, dtype=torch.float32, **shape):
    torch.manual_seed(seed)
    shape = dict(vocab_size=VOCAB, num_layers=LAYERS, num_heads=HEADS, model_dim=DIM, train_length=TRAIN_LENGTH) | shape
    options = dict(segment_length=20) if name.startswith("infini") else {}
    return GPT(SimpleNamespace(**dict(method_options=options, position_scale=1.0, method=name) | shape), dtype)


def randomize(model):
    """Return the model with no parameter at zero or at its initial value."""
    for i, parameter in enumerate(model.parameters()):
        scale = 0.5 if parameter.ndim < 2 else 1.5 * parameter.shape[-1] ** -0.5
        parameter.data = scale * random(*parameter.shape, seed=i).float()
    return model


def make_random_gpt(name="scale_invariant_p_rope", **arguments):
    return randomize(make_gpt(name, **arguments))


def random_tokens(length, batch=2, vocab_size=VOCAB, seed=0):
    """tokens and targets, each (batch, length)."""
    tokens = torch.randint(vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def rms_norm(x):
    return x / (x.square().mean(dim=-1, keepdim=True) + 2.0 ** -23).sqrt()


def plain_layers(name, p, tokens, num_heads=HEADS):
    """Yield q and k (B, H, T, D) after QK-norm, the method's parameter, and the output (B, T, C) of each layer.

    The layers are record #8 of modded-nanogpt with the method in its attention. p: parameters by name, in float64.
    """
    options = dict(segment_length=20) if name.startswith("infini") else {}
    x = rms_norm(p["embedding.weight"][tokens])  # (B, T, C)
    for layer in range(LAYERS):
        mine = {key.removeprefix(f"blocks.{layer}."): value for key, value in p.items()}
        learned = next((value for key, value in mine.items() if key.startswith("attention.method")), None)
        q, k, v = (rms_norm(x) @ matrix.T for matrix in mine["attention.qkv"])
        q, k, v = (y.unflatten(-1, (num_heads, -1)).transpose(1, 2) for y in (q, k, v))  # (B, H, T, D)
        q, k = rms_norm(q), rms_norm(k)
        y = reference.attend(name, q, k, v, train_length=TRAIN_LENGTH, learned=learned, **options)
        x = x + y.transpose(1, 2).flatten(2) @ mine["attention.proj"].T
        x = x + (rms_norm(x) @ mine["mlp.up"].T).clamp(min=0) ** 2 @ mine["mlp.down"].T
        yield q, k, learned, x


@every_method
@pytest.mark.parametrize("length", [1, TRAIN_LENGTH, 4 * TRAIN_LENGTH + 3])
def test_loss_and_all_gradients_equal_the_plain_form(name, length):
    model = make_random_gpt(name)
    exact = {key: value.detach().double().requires_grad_() for key, value in model.named_parameters()}
    tokens, targets = random_tokens(length)
    *_, (*_, x) = plain_layers(name, exact, tokens)
    logits = rms_norm(x) @ exact["head"].T  # (B, T, V)
    expected = -logits.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    losses = model(tokens, targets, per_token=True)
    assert losses.dtype == torch.float32
    assert_near(losses, expected, 5e-5)
    loss = model(tokens, targets, plan=model.plan(length))
    assert torch.equal(loss, losses.mean()) and torch.equal(loss, model(tokens, targets))
    assert_near(loss, expected.mean(), 1e-5)
    gradients = torch.autograd.grad(loss, model.parameters(), materialize_grads=True)
    truth = torch.autograd.grad(expected.mean(), exact.values(), materialize_grads=True)
    for key, gradient, true in zip(exact, gradients, truth):
        assert (gradient - true).norm() <= 1e-4 * true.norm() + 1e-7, key
    with torch.no_grad():
        assert_near(model(tokens), logits.detach(), 5e-5)
        assert_near(model(tokens, last=1), logits[:, -1:].detach(), 5e-5)


@every_method
@pytest.mark.parametrize("preset, matrices, numbers", [("gpt_162m_4k", 162_201_600, 72),
                                                       ("gpt_304m_4k", 304_349_184, 128)])
def test_parameter_count(preset, matrices, numbers, name):
    config = PRESETS[preset]()
    with torch.device("meta"):
        model = GPT(dataclasses.replace(config, method=name))
    extra = numbers if name.startswith(("logn", "infini")) else 0  # one number a layer and head
    assert sum(p.numel() for p in model.parameters()) == matrices + extra


def assert_uniform(weight, bound):
    assert bound * 0.999 < weight.abs().max() <= bound
    assert abs(weight.mean()) < 0.02 * bound
    assert_close(weight.std().item(), bound / math.sqrt(3), rtol=0.02, atol=0)


def test_initial_distributions():
    model = make_gpt(vocab_size=1000)
    embedding = model.embedding.weight
    assert_close(torch.stack([embedding.mean(), embedding.std()]).detach(), torch.tensor([0.0, 1.0]), rtol=0, atol=0.02)
    assert (embedding.abs() > 2).float().mean().item() == pytest.approx(0.0455, abs=0.004)  # of a normal distribution
    for block in model.blocks:
        for matrix in (*block.attention.qkv, block.mlp.up):
            assert_uniform(matrix.detach(), DIM ** -0.5)
        assert block.attention.proj.count_nonzero() == block.mlp.down.count_nonzero() == 0
    assert model.head.count_nonzero() == 0


@every_method
def test_the_seed_alone_decides_the_initial_weights(name):
    """Methods start from the same weights, so that runs of one seed differ by the method alone."""
    shared = dict(make_gpt("nope", seed=5).named_parameters())
    again, other = (dict(make_gpt(name, seed=seed).named_parameters()) for seed in (5, 6))
    for key, weight in shared.items():
        assert_close(again[key], weight, rtol=0, atol=0)
        assert weight.count_nonzero() == 0 or not torch.equal(other[key], weight)


def test_heads_that_do_not_divide_the_width_are_refused():
    with refuses("model_dim 96", "num_heads 5"):
        make_gpt(num_heads=5)


@torch.no_grad()
@every_method
def test_a_token_changes_no_loss_before_it(name):
    model = make_random_gpt(name)
    tokens, targets = random_tokens(4 * TRAIN_LENGTH + 3)
    before = model(tokens, targets, per_token=True)
    for t in (1, TRAIN_LENGTH, 100, 130):
        changed = tokens.clone()
        changed[:, t] = (tokens[:, t] + 1) % VOCAB
        after = model(changed, targets, per_token=True)
        assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-5)
        assert ((after - before)[:, t:].abs() > 1e-4).float().mean() > 0.9


@torch.no_grad()
@every_method
def test_bfloat16_losses_are_near_float32(name):
    losses = [make_random_gpt(name, dtype=dtype)(*random_tokens(100), per_token=True)
              for dtype in (torch.float32, torch.bfloat16)]
    assert losses[1].dtype == make_gpt(name, dtype=torch.bfloat16)(random_tokens(5)[0]).dtype == torch.float32
    assert 0 < (losses[1] - losses[0]).square().mean().sqrt() < 0.03 * losses[0].std()


def test_bfloat16_gradients_are_near_float32():
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_random_gpt("logn_p_rope", dtype=dtype)
        gradients.append(torch.autograd.grad(model(*random_tokens(100)), model.parameters()))
    assert {gradient.dtype for gradient in gradients[1]} == {torch.float32}  # of the parameters
    errors = [(rough - exact).norm() / exact.norm() for exact, rough in zip(*gradients)]
    assert sum(errors) / len(errors) < 0.03  # of one LogN scale a head alone, 6 numbers, up to 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_squared_is_as_exact_as_its_roundings(dtype):
    x, dy = (3 * random(5001, seed=seed) for seed in (0, 1))
    x[:3] = torch.tensor([0.0, -0.0, 1e-18])
    x, dy = x.to(dtype).requires_grad_(), dy.to(dtype)
    y = relu_squared(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    exact_y, exact_dx = x.double().relu() ** 2, 2 * x.double().relu() * dy.double()
    half = torch.finfo(dtype).eps / 2  # of the output; its root has half of that, and the gradient's own is added
    assert ((y.double() - exact_y).abs() <= 1.01 * half * exact_y).all()
    assert ((dx.double() - exact_dx).abs() <= 1.51 * 1.01 * half * exact_dx.abs()).all()


@pytest.mark.slow
def test_compiled_blocks_compute_the_losses_of_the_model_whose_weights_they_share():
    model = make_random_gpt()
    eager, stats = uncompiled(model), torch._dynamo.utils.counters["stats"]
    compile_model(model, Config(compile="on"), World(0, 1, torch.device("cpu")))
    torch._dynamo.reset()
    stats.clear()
    for scale in (1, 0.5):  # of weights that training changes later
        for parameter in model.parameters():
            parameter.data *= scale
        for length in (32, 70):
            tokens, targets = random_tokens(length)
            plan = model.plan(length)
            with torch.no_grad():
                assert_near(model(tokens, targets, plan=plan, per_token=True),
                            eager(tokens, targets, plan=plan, per_token=True), 1e-5)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in eager.named_parameters()]
    assert stats["unique_graphs"] == 2  # a length, for all blocks

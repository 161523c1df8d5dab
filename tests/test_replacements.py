"""Replacements of softmax attention against float64 formulas written from their sources, one query after the other."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    are_finite,
    assert_near,
    assert_same_function,
    attend,
    cast,
    gradients,
    make_inputs,
    random,
    random_qkv,
)
from commands import parametrize, slow
from reference import alibi_slopes
from test_gpt import make_random_gpt, random_tokens
from test_rivals import by_rows, check_formula, make, nape
from torch import sigmoid

from model import query_blocks
from model.methods.base import Shape
from model.methods.make import make_method
from model.methods.nape import entmax

SHAPES = [(2, 3, 16, 1), (2, 3, 16, 37), (1, 2, 8, 150)]  # batch, heads, head dimension, tokens
SHAPES += [pytest.param(1, 4, 32, 300, marks=slow)]


def project(x, weight):
    """Return W x for each head, (B, H, T, width), from x (B, T, C) and W (H, width, C)."""
    return torch.einsum("btc,hwc->bhtw", x, weight.double())


def wall(method, q, k, x):
    """Tilde Research 2026: each channel of a product q.k is multiplied by the gates between key and query."""
    weight, bias = method.replacement.weight, method.replacement.bias.double()
    f = sigmoid(project(x, weight.unflatten(0, bias.shape)) + bias[:, None])  # (B, H, T, D)

    def weights(i, t, S):
        gates = F.pad(f[:, :, 1 : i + 1], (0, 0, 0, 1), value=1.0)
        decay = gates.flip(2).cumprod(dim=2).flip(2)  # of the keys 0 to i
        products = q[:, :, i, None] * k[:, :, : i + 1] * decay
        return (products.sum(-1) / q.shape[-1] ** 0.5).softmax(dim=-1)
    return weights


def softplus(method, q, k, x):
    """Gao et al. 2025, equations 4 and 5. The rows of their matrix O are 1, but the first three are 0."""
    D = q.shape[-1]

    def weights(i, t, S):
        n, cosine = i + 1, S / D**0.5  # QK-norm gives q and k the norm sqrt(D)
        A = torch.log(1 + torch.exp(math.log(D) * math.log(n) * cosine))
        A = n * A / A.sum(-1, keepdim=True)
        A = torch.clamp(A - int(i > 2), min=0) ** 15
        return A / A.sum(-1, keepdim=True)
    return weights


def path_bias(method, q, k, x):
    """Zhang et al. 2025, GRAPE-AP as in the authors' code: p_i and p_l, rotated as complex numbers, for each l."""
    H = q.shape[1]
    p = project(x, method.replacement.weight.unflatten(0, (H, 8)))
    normalised = p / p.square().mean(-1, keepdim=True).sqrt()
    turn = torch.exp(-1j * torch.arange(q.shape[2], dtype=torch.float64))[:, None]
    rotated = torch.complex(*normalised.chunk(2, dim=-1)) * turn
    rotated = torch.cat((rotated.real, rotated.imag), dim=-1)

    def weights(i, t, S):
        products = (p[:, :, i, None] * rotated[:, :, : i + 1]).sum(-1)
        steps = alibi_slopes(H)[:, None] * torch.log(sigmoid(products / 8))
        sums = [steps[:, :, j + 1 :].sum(-1) for j in range(i + 1)]
        return (S + torch.stack(sums, dim=-1)).softmax(dim=-1)
    return weights


def sorted_entmax(z):
    """Peters et al. 2019, algorithm 2: the threshold from mean and variance of the k largest of z / 2."""
    ordered = (z / 2).sort(dim=-1, descending=True).values
    k = torch.arange(1, z.shape[-1] + 1)
    mean = ordered.cumsum(-1) / k
    squares = ordered.square().cumsum(-1) / k
    threshold = mean - ((1 - k * (squares - mean**2)) / k).clamp(min=1e-30).sqrt()
    last = (threshold <= ordered).sum(-1, keepdim=True) - 1
    return torch.clamp(z / 2 - threshold.gather(-1, last), min=0) ** 2


def nape_entmax(method, q, k, x):
    row = nape(method, q, k, x)
    return lambda i, t, S: sorted_entmax(row(i, t, S))


FORMULAS = {"wall": wall, "softplus": softplus, "grape_ap": path_bias, "nape_entmax": nape_entmax}


@parametrize("name", FORMULAS)
@parametrize("batch, num_heads, head_dim, length", SHAPES)
def test_a_replacement_computes_the_formula_of_its_source(name, batch, num_heads, head_dim, length):
    tolerances = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 0.03}
    check_formula(make(name, num_heads, head_dim), FORMULAS[name], length, batch, tolerances)


@slow
@parametrize("name", ["stick_breaking", "scale_invariant_p_rope"])
def test_a_compiled_block_does_not_unroll_the_loop_over_a_long_text(name, monkeypatch):
    monkeypatch.setattr(query_blocks, "LONGEST_COMPILED", 256)
    model, operations = make_random_gpt(name), []

    def count(graph, inputs):
        operations.append(len(graph.graph.nodes))
        return graph.forward

    plan = model.plan(700, backend="blocks")
    losses = functools.partial(model, *random_tokens(700, batch=1), plan=plan, per_token=True)
    with torch.inference_mode():
        expected = losses()
        for block in model.blocks:
            block.compile(dynamic=False, backend=count)
        assert_near(losses(), expected, 1e-5)
    assert operations and max(operations) < 200


@parametrize("bias", [-40.0, 4.0])
def test_wall_survives_gates_whose_products_underflow(bias):
    method = make("wall")
    method.replacement.bias.data += bias * random(2, 8, seed=5).abs().float()
    inputs = make_inputs(method, 150, batch=1)
    output = attend(method, *inputs)
    assert_near(output, by_rows(wall, method, *cast(inputs, torch.float64)), 1e-5)
    assert are_finite(output, [*inputs, *method.parameters()])


def test_wall_forgets_at_first_over_the_scaled_memory():
    for scale in (1, 1 / 16):  # the authors' bias is 8
        replacement = make_method("wall", Shape(2, 8, 64, scale)).replacement
        log_f = replacement.token_features(random(1, 5, 16, seed=1).float())
        expected = -math.log1p(math.exp(-8) / scale)
        assert_near(log_f, torch.full((1, 2, 5, 8), expected), 1e-6)


def test_softplus_survives_powers_that_overflow():
    """One key along the query and 1999 keys against it: n A is near 2000, and 2000^15 overflows float32."""
    q = 8 * F.normalize(random(1, 2, 1, 64, seed=1), dim=-1)
    v = random(1, 2, 2000, 64, seed=2)
    k = -q.repeat(1, 1, 2000, 1)
    k[:, :, 700] *= -1
    inputs = cast([q, k, v], torch.float32)
    output = attend(make("softplus", 2, 64), *inputs)
    assert_near(output, v[:, :, 700:701], 1e-5)
    assert are_finite(output, inputs)


def test_softplus_gives_no_weight_where_all_keys_score_alike():
    q, k, v = cast(random_qkv(2, 16, 150, batch=1), torch.float32)
    output = attend(make("softplus", 2, 16), 0 * q, k, v)
    means = [v[:, :, :n].mean(2) for n in (1, 2, 3)]
    assert_near(output[:, :, :3], torch.stack(means, dim=2), 1e-5)
    assert not output[:, :, 3:].any()
    assert are_finite(output, [q, k, v])


@parametrize("spread", [0.0, 0.01, 1.0, 30.0])
def test_entmax_finds_its_threshold_among_many_keys(spread):
    """From equal keys, which all have weight, to one key alone."""
    z = (spread * random(3, 20_000, seed=1)).requires_grad_()
    weights, expected = entmax(z), sorted_entmax(z)
    assert_near(weights, expected, 1e-9)
    assert_same_function(weights, [z], expected, gradients(expected, [z]), 1e-6)
    assert_near(entmax(z.float()), expected, 1e-5)


@torch.no_grad()
def test_the_path_bias_starts_at_random():
    method = make("grape_ap", 4, 64)
    method.reset_parameters()
    assert method.replacement.weight.std().item() == pytest.approx(0.5 / 256**0.5, rel=0.05)

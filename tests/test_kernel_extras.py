"""Biases of keys, windows and sinks in the backends for GPUs, against the formula in float64, row by row.

The Triton kernels run in the interpreter where there is no GPU, FlexAttention by its own formula (see each test).
"""

import dataclasses
import math

import pytest
import torch
from test_methods import assert_near, assert_refused, assert_same_function, cast, random

pytest.importorskip("triton")

import test_kernels  # noqa: E402
from test_kernels import DEVICE, alibi, bent, coefficients_of, random_inputs, scale_invariant, smooth  # noqa: E402

from model.attention.base import bound_products  # noqa: E402
from model.attention.triton import flash  # noqa: E402
from model.attention.triton.distance import Coefficients, make_coefficients  # noqa: E402
from model.attention.triton.flash import flash_attention  # noqa: E402

pytestmark = pytest.mark.slow

small, tiles = test_kernels.small, test_kernels.tiles  # fixtures


def literal(formula, q, k, v, *, q_offset=0, window=None, key_bias=None, sink=None):
    """Return the output, one query at a time, of exponentials that are summed as they stand."""
    heads = torch.arange(q.shape[1])[:, None]
    rows = []
    for i in range(q_offset, q_offset + q.shape[2]):
        keys = torch.arange(0 if window is None else max(0, i - window + 1), i + 1)
        a, m = (1.0, 0.0) if formula is None else formula((i - keys).double(), heads)
        logits = a * torch.einsum("bhd,bhkd->bhk", q[:, :, i - q_offset], k[:, :, keys]) / math.sqrt(q.shape[3]) + m
        if key_bias is not None:
            logits = logits + key_bias[:, :, keys]
        total = torch.zeros_like(logits[..., :1]) if sink is None else sink[:, None].exp()
        weights = logits.exp()
        rows.append(torch.einsum("bhk,bhkd->bhd", weights / (weights.sum(-1, keepdim=True) + total), v[:, :, keys]))
    return torch.stack(rows, dim=2)


def make_extras(kinds, batch, heads, keys, window):
    """What literal and a kernel take beside q, k, v, in float64, from the letters b, w and s."""
    extras = dict(window=window) if "w" in kinds else {}
    if "b" in kinds:
        extras["key_bias"] = random(batch, heads, keys, seed=50).requires_grad_()
    if "s" in kinds:
        extras["sink"] = random(heads, seed=51).requires_grad_()
    return extras


def compare_extras(run, formula, exact, extras, q_offset, tolerance):
    """Values, and gradients of q, k, v, the keys' biases and sinks; run takes all of these."""
    expected = literal(formula, *exact, q_offset=q_offset, **extras)
    learned = {name: x for name, x in extras.items() if name != "window"}
    inputs = cast([*exact, *learned.values()], torch.float32)
    q, k, v, *more = (x.to(DEVICE) for x in inputs)
    output = run(q, k, v, **dict(zip(learned, more)))
    assert output.dtype == torch.float32
    assert_same_function(output.cpu(), inputs, expected, [*exact, *learned.values()], tolerance)


def check_extras(formula, exact, extras, *, q_offset=0, made=None, tolerance=1e-5):
    """As compare_extras, by the Triton kernels."""
    q, k, _ = exact
    made = made or coefficients_of(formula, q.shape[1], q.shape[3], k.shape[2], q_offset)
    made = made or Coefficients(torch.empty(0, 1, k.shape[2] + 256, device=DEVICE))
    made = dataclasses.replace(made, window=extras.get("window"))
    def run(q, k, v, **more):
        return flash_attention(q, k, v, made, q_offset=q_offset, **more)
    compare_extras(run, formula, exact, extras, q_offset, tolerance)


# ---- the Triton kernels ----------------------------------------------------------------------------------------------


def test_the_literal_form_without_extras_is_that_of_the_other_tests():
    exact = random_inputs(2, 9, 16, keys=12)
    assert_near(literal(smooth, *exact, q_offset=3), test_kernels.formula_attention(smooth, *exact, 3).detach(), 1e-12)


@pytest.mark.parametrize("formula, kinds", [
    (None, "b"), (None, "w"), (None, "s"), (alibi, "bws"), (scale_invariant, "s"), (scale_invariant, "bws"),
    (smooth, "bws"), (test_kernels.rough, "bws"),
])
def test_each_with_every_kind_of_formula(formula, kinds, small):
    """Tiles of 16 and 32: with windows of 21, some tiles are cut on both sides."""
    check_extras(formula, random_inputs(2, 50, 16), make_extras(kinds, 1, 2, 50, 21))


@pytest.mark.parametrize("formula, window", [
    *((None, window) for window in (1, 2, 15, 16, 17, 33, 48, 69, 70)), (smooth, 1), (smooth, 32), (smooth, 10**30),
])
def test_windows_around_the_lengths_of_tiles_and_of_the_sequence(formula, window, small):
    check_extras(formula, random_inputs(1, 70, 16), dict(window=window))


@pytest.mark.parametrize("shape, window", [((16, 64), 1), ((16, 64), 40), ((64, 16), 1), ((64, 16), 65)])
def test_windows_in_tiles_of_other_shapes(shape, window, tiles):
    tiles(shape, shape, shape)
    check_extras(None, random_inputs(1, 100, 16), dict(window=window))


@pytest.mark.parametrize("queries, keys, q_offset, window", [
    (1, 70, 69, 20), (33, 70, 37, 1), (33, 70, 37, 45), (20, 70, 32, 17), (3, 70, 50, 20),
])
def test_offsets(queries, keys, q_offset, window, small):
    """Also keys that no query sees: after the last, and before the window of the first."""
    extras = make_extras("bws", 2, 1, keys, window)
    check_extras(scale_invariant, random_inputs(1, queries, 16, keys=keys, batch=2), extras, q_offset=q_offset)


@pytest.mark.parametrize("length", [1, 16, 33])
def test_lengths_around_those_of_tiles(length, small):
    check_extras(alibi, random_inputs(3, length, 16, batch=2), make_extras("bws", 2, 3, length, 7))


@pytest.mark.parametrize("window", [510, 700])
def test_windows_over_tiles_of_every_kind(window, tiles):
    """With near, far and line ones inside of the window, or with none of lines; its edge reads the table."""
    tiles((32, 32), (32, 16), (16, 32))
    queries, q_offset = 40, 733
    made = coefficients_of(bent, 1, 16, q_offset + queries, q_offset)
    assert 128 < made.far < 500 and 510 < made.line < 650
    exact = random_inputs(1, queries, 16, keys=q_offset + queries)
    check_extras(bent, exact, make_extras("bws", 1, 1, q_offset + queries, window), q_offset=q_offset, made=made)


def test_tiles_outside_of_the_window_are_not_read(small):
    """NaN is in all keys and values that no query sees, but for those of tiles in which there is another."""
    exact = random_inputs(1, 32, 16, keys=200)
    hidden = (torch.arange(200) < 128).view(-1, 1)  # 168 - 24 = 144 is the first that is seen, in a tile from 128 on
    inputs = [x.detach().float() for x in exact]
    inputs[1:] = [x.masked_fill(hidden, math.nan) for x in inputs[1:]]
    q, k, v = (x.to(DEVICE).requires_grad_() for x in inputs)
    made = Coefficients(torch.empty(0, 1, 456, device=DEVICE), window=25)
    output = flash_attention(q, k, v, made, q_offset=168)
    assert_near(output.cpu(), literal(None, *exact, q_offset=168, window=25).detach(), 1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(output.sum(), (q, k, v)))


@pytest.mark.parametrize("logit", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("bounded", [False, True])
def test_sinks_of_any_size_with_and_without_a_running_maximum(logit, bounded, small):
    q, k, v = (x.detach() for x in random_inputs(1, 40, 16))
    q, k = (torch.nn.functional.rms_norm(x, (16,)) for x in (q, k))
    exact = cast([q, k, v], torch.float64)
    change, bound = test_kernels.change_of(scale_invariant, 1), bound_products(16, torch.float32)
    bound = bound if bounded else math.inf
    made = make_coefficients(change, 1, 16, 40, 0, torch.float32, DEVICE, bound)
    assert made.bounded == bounded
    extras = dict(sink=torch.tensor([logit], dtype=torch.float64, requires_grad=True), window=19)
    check_extras(scale_invariant, exact, extras, made=made)


def test_biases_are_not_bounded(small):
    """Where the products of q and k are, and the biases are beyond what exp2 takes."""
    q, k, v = (x.detach() for x in random_inputs(1, 40, 16))
    exact = cast([*(torch.nn.functional.rms_norm(x, (16,)) for x in (q, k)), v], torch.float64)
    made = make_coefficients(None, 1, 16, 40, 0, torch.float32, DEVICE, bound_products(16, torch.float32))
    assert made.bounded
    bias = (300 + 10 * random(1, 1, 40, seed=50)).detach().requires_grad_()
    check_extras(None, exact, dict(key_bias=bias), made=made, tolerance=8 * 2**-24 * 340)


def test_a_learned_tau_with_all_of_them(small):
    method = test_kernels.learned_method(2, "scale_invariant_nope")
    change = method.to(DEVICE).score_change
    tau = change.log_tau.detach().cpu().double().requires_grad_()
    exact, extras = random_inputs(2, 40, 16), make_extras("bws", 1, 2, 40, 13)
    def learned(t, h):
        a_squared = 1 + 2 * torch.log1p(t / tau[h].exp())
        return a_squared.sqrt(), 1 - a_squared
    expected = literal(learned, *exact, **extras)
    made = make_coefficients(change, 2, 16, 40, 0, torch.float32, DEVICE)
    more = {name: extras[name].detach().float().to(DEVICE) for name in ("key_bias", "sink")}
    inputs = (x.detach().float().to(DEVICE) for x in exact)
    output = flash_attention(*inputs, dataclasses.replace(made, window=13), **more)
    assert_near(output.cpu(), expected.detach(), 1e-5)
    dout = random(*expected.shape, seed=60)
    (gradient,) = torch.autograd.grad(output, change.log_tau, dout.float().to(DEVICE))
    assert_near(gradient.cpu(), torch.autograd.grad(expected, tau, dout)[0], 1e-5)


def test_biases_in_any_layout_and_dtype(small):
    """As (B, T, H) makes them, and in float16, which is exact here."""
    q, k, v = (x.detach().float().to(DEVICE) for x in random_inputs(3, 20, 16, batch=2))
    bias = random(2, 20, 3, seed=5).half().to(DEVICE).transpose(1, 2)
    expected = flash_attention(q, k, v, key_bias=bias.float().contiguous())
    assert torch.equal(flash_attention(q, k, v, key_bias=bias), expected)


@pytest.mark.parametrize("with_sink", [False, True])
def test_sums_of_the_gradients_of_many_biases_are_right_in_low_precision(with_sink, small):
    """As forgetting attention adds them up: what the output was rounded by would be most of such a sum."""
    q, k, v, do = (x.detach().half().double() for x in (*random_inputs(2, 300, 16), random(1, 2, 300, 16, seed=9)))
    bias = 0.3 * torch.arange(300.0).expand(1, 2, 300).double()
    sink = [torch.zeros(2, dtype=torch.float64)] if with_sink else []
    v = (v + 8).half().double()  # the gradients do not see the 8, but the output is rounded by more
    exact = [x.detach().requires_grad_() for x in (q, k, v, bias, *sink)]
    more = dict(sink=exact[4]) if with_sink else {}
    expected = torch.autograd.grad(literal(None, *exact[:3], key_bias=exact[3], **more), exact[3], do)[0].cumsum(-1)
    inputs = [x.half().requires_grad_() for x in (q, k, v)] + [x.detach().float().requires_grad_() for x in exact[3:]]
    more = dict(sink=inputs[4]) if with_sink else {}
    output = flash_attention(*inputs[:3], None, key_bias=inputs[3], **more)
    (gradient,) = torch.autograd.grad(output, inputs[3], do.half())
    assert (gradient.double().cumsum(-1) - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize("name, shape", [
    ("key_bias", (1, 2, 19)), ("key_bias", (2, 20)), ("sink", (3,)), ("sink", (1, 2)),
])
def test_extras_of_other_shapes_are_refused(name, shape):
    with assert_refused(name, str(shape)):
        flash_attention(*torch.zeros(3, 1, 2, 20, 16, device=DEVICE), **{name: torch.zeros(shape, device=DEVICE)})


def test_opcheck(small):
    extras = make_extras("bs", 1, 2, 20, None)
    more = [x.detach().float().to(DEVICE).requires_grad_() for x in extras.values()]
    inputs = [x.to(DEVICE).detach().requires_grad_() for x in cast(random_inputs(2, 20, 16), torch.float32)]
    functions = torch.empty(0, 1, 276, device=DEVICE), None, None, [], 2**31 - 1, 2**31 - 1, 7, 0
    torch.library.opcheck(flash.forward_op, (*inputs, None, *more, *functions))
    output, lse = flash.forward_op(*inputs, None, *more, *functions)
    arguments = [x.detach() for x in (torch.ones_like(output), *inputs, output, lse, *more)]
    torch.library.opcheck(flash.backward_op, (*arguments, *functions))

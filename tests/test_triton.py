"""Our Triton attention kernel against its formula in float64: all tiles, extras, bounded softmax, machine code.

With a GPU the kernels are compiled; without one they run in Triton's interpreter (conftest.py). test_attention.py and
test_check.py run whole methods by it; here are the lengths, functions and tiles that no method of ours has.
"""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import reference
import torch
from attention_cases import LAYOUTS, Plain, assert_near, random
from torch.nn.functional import rms_norm

pytest.importorskip("triton")

from model.attention import attend, choose_backend, make_plan, triton  # noqa: E402
from model.attention.base import bound_products  # noqa: E402
from model.attention.triton import flash  # noqa: E402
from model.attention.triton.distance import EVERYWHERE, LOG2E, NOWHERE, TOLERANCE, make_coefficients  # noqa: E402
from model.attention.triton.flash import Tiles, flash_attention  # noqa: E402
from model.gpt import GPT  # noqa: E402
from model.methods import make_method  # noqa: E402
from model.methods.base import Method, QueryScale, ScoreChange  # noqa: E402

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).parents[1]
ROLES = ("forward", "query_gradient", "key_gradient")
F64 = torch.float64

# ---- formulas: a, m at distances t and heads h, in float64 -----------------------------------------------------------


def scale_invariant(t, h):
    return reference.scale_invariant(t)


def alibi(t, h):
    return 1.0, -reference.alibi_slopes(len(h))[h] * t


def parabola(t, h):
    """One function; its cubics are exact, so all tiles from 128 tokens on are far ones."""
    a = 1 + (t / 400) ** 2
    return a, 1 - a * a


def smooth(t, h):
    """m is not 1 - a^2, and both depend on the head."""
    return 1 + 0.1 * h + 0.3 * (t / 400) ** 2, -t / 200 - (t / 500) ** 3 / (h + 1)


def line_and_curve(t, h):
    return 0.5 + 0.002 * t, -((t / 400) ** 2)


def curve_and_constant(t, h):
    return 2 - (t / 700) ** 2, 0 * t


def constant(t, h):
    return 1.5 - 0.2 * h, 0 * t


def constant_of_one_function(t, h):
    return 1.25 + 0 * t, -0.5625 + 0 * t  # m = 1 - a^2


def bent(t, h):
    """Lines in the end: on float32's grid from 592 tokens on, and cubics from 560 on."""
    return 1 + 0.1 * h + t / 1000 + 0.5 * torch.exp(-t / 30), -t / 100 - torch.exp(-t / 28)


def bent_of_one_function(t, h):
    a, _ = bent(t, 0 * h)
    return a, 1 - a * a


def rough(t, h):
    return 1 + 0.3 * (t % 7 == 2), -(t % 5) / (3 + h)


def rough_in_one_head(t, h):
    return 2 - t / 900, -((t % 11 == 0) & (h == 1)).double()


FORMULAS = [alibi, scale_invariant, parabola, smooth, line_and_curve, curve_and_constant, constant,
            constant_of_one_function, rough, rough_in_one_head]


def coefficients_of(formula, heads, head_dim, keys, q_offset=0, dtype=torch.float32, bound=math.inf):
    change = None if formula is None else Plain(formula)
    return make_coefficients(change, heads, head_dim, keys, q_offset, dtype, DEVICE, bound)


def literal(formula, q, k, v, q_offset=0, window=None, key_bias=None, sink=None):
    """softmax(a S + m + b) v over the keys that each query sees, with one more logit for a sink."""
    (_, H, Tq, D), Tk = q.shape, k.shape[2]
    t = torch.arange(q_offset, q_offset + Tq)[:, None] - torch.arange(Tk)
    a, m = (1.0, 0.0) if formula is None else formula(t.clamp(min=0).double(), torch.arange(H)[:, None, None])
    logits = a * (q @ k.mT) / math.sqrt(D) + m
    if key_bias is not None:
        logits = logits + key_bias[:, :, None]
    logits = logits.masked_fill((t < 0) | (t >= (window or Tk)), -math.inf)
    if sink is not None:
        logits = torch.cat([logits, sink[:, None, None].expand(*logits.shape[:-1], 1)], dim=-1)
    return logits.softmax(dim=-1)[..., :Tk] @ v


# ---- the comparison --------------------------------------------------------------------------------------------------


@pytest.fixture
def tiles(monkeypatch):
    """Choose the tiles: (queries, keys) of each of the three kernels."""
    def choose(*shapes):
        by_role = {role: Tiles(*shape, 4, 1) for role, shape in zip(ROLES, shapes, strict=True)}
        monkeypatch.setattr(flash, "choose_tiles", lambda *args: by_role)

    return choose


@pytest.fixture
def small(tiles):
    tiles((32, 16), (16, 32), (32, 16))


def random_inputs(heads, queries, head_dim, *, batch=1, keys=None, normalised=False):
    lengths = queries, keys or queries, keys or queries
    q, k, v = (random(batch, heads, T, head_dim, seed=T + i) for i, T in enumerate(lengths))
    return [rms_norm(q, (head_dim,)), rms_norm(k, (head_dim,)), v] if normalised else [q, k, v]


def check(formula, inputs, *, q_offset=0, made=None, window=None, tolerance=1e-5, **extras):
    """Values, and gradients of q, k, v, key_bias and sink."""
    q, k, v = (x.detach() for x in inputs)
    made = made or coefficients_of(formula, q.shape[1], q.shape[3], k.shape[2], q_offset)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, *extras.values())]
    expected = literal(formula, *exact[:3], q_offset, window, **dict(zip(extras, exact[3:])))
    ours = [x.detach().float().to(DEVICE).requires_grad_() for x in exact]
    output = flash_attention(*ours[:3], dataclasses.replace(made, window=window), q_offset=q_offset,
                             **dict(zip(extras, ours[3:])))
    assert_near(output, expected, tolerance)
    weight = random(*expected.shape, seed=3)
    gradients = torch.autograd.grad(output, ours, weight.float().to(DEVICE))
    for mine, truth in zip(gradients, torch.autograd.grad(expected, exact, weight), strict=True):
        assert_near(mine, truth, tolerance)


def biases_and_sink(kinds, heads, keys, batch=1):
    return {name: random(*shape, seed=50) for letter, name, shape in
            [("b", "key_bias", (batch, heads, keys)), ("s", "sink", (heads,))] if letter in kinds}


# ---- shapes, functions, extras ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("formula", [None, *FORMULAS])
@pytest.mark.parametrize("bounded", [False, True])
def test_every_formula(formula, bounded, small):
    """With a running maximum, and without where the logits of normalised q and k are bounded."""
    made = coefficients_of(formula, 2, 16, 50, bound=bound_products(16, torch.float32) if bounded else math.inf)
    assert made.bounded == bounded
    check(formula, random_inputs(2, 50, 16, normalised=True), made=made)


@pytest.mark.parametrize("formula, kinds, window", [
    (None, "b", None), (None, "s", None), (alibi, "bs", 21), (scale_invariant, "bs", 21), (smooth, "bs", 21),
    (rough, "bs", 21), *((None, "", window) for window in (1, 15, 16, 17, 33, 49, 50)), (smooth, "", 1),
    (smooth, "bs", 10**9),
])
def test_biases_sinks_and_windows(formula, kinds, window, small):
    """Tiles of 16 and 32: with windows of 21, some tiles are cut on both sides."""
    check(formula, random_inputs(2, 50, 16), window=window, **biases_and_sink(kinds, 2, 50))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 64, 65])
def test_lengths_around_those_of_tiles(length, small):
    check(smooth, random_inputs(1, length, 16))
    check(alibi, random_inputs(3, length, 16, batch=2), window=7, **biases_and_sink("bs", 3, length, batch=2))


@pytest.mark.parametrize("shape, window", [((16, 16), None), ((64, 16), 65), ((16, 64), 1), ((128, 128), 40)])
def test_tile_shapes(shape, window, tiles):
    tiles(shape, shape, shape)
    check(scale_invariant, random_inputs(1, 130, 16), window=window)


@pytest.mark.parametrize("formula", [None, scale_invariant])
def test_the_tiles_of_the_code(formula):
    check(formula, random_inputs(2, 100, 64))


@pytest.mark.parametrize("head_dim", [1, 16, 20, 96, 128, 256])
def test_head_dimensions(head_dim):
    check(smooth, random_inputs(1, 66, head_dim))


@pytest.mark.parametrize("queries, q_offset", [(1, 69), (33, 37), (20, 32), (33, 17), (3, 50)])
@pytest.mark.parametrize("window", [None, 20, 45])
def test_query_offsets(queries, q_offset, window, small):
    """Also keys that no query sees: after the last, and before the window of the first."""
    inputs, extras = random_inputs(1, queries, 16, keys=70, batch=2), biases_and_sink("bs" if window else "", 1, 70, 2)
    check(scale_invariant, inputs, q_offset=q_offset, window=window, **extras)


@pytest.mark.parametrize("formula", [None, scale_invariant, smooth])
def test_large_logits(formula, small):
    """A float32 logit L has an error of up to 2^-24 |L|, and that is the relative error of its probability."""
    q, k, v = random_inputs(2, 70, 16)
    largest = (900 * q @ k.mT).abs().max().item() / 4
    check(formula, [30 * q, 30 * k, v], tolerance=8 * 2**-24 * largest)


@pytest.mark.parametrize("shift", [-2000, 2000])
def test_a_large_constant_in_m_changes_nothing_but_rounding(shift, small):
    """Rows beyond the end of a tile would overflow, were they not left out."""
    check(lambda t, h: (1.0, shift - t / 50), random_inputs(1, 40, 16), tolerance=8 * 2**-24 * abs(shift))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_inputs_and_of_the_output_gradient(layout, small):
    vectors = [random(2, 2, 20, 16, seed=i).float().to(DEVICE) for i in range(4)]

    def run(*tensors):
        *inputs, do = tensors
        inputs = [x.detach().requires_grad_() for x in inputs]
        output = flash_attention(*inputs, coefficients_of(scale_invariant, 2, 16, 20))
        return [output, *torch.autograd.grad(output, inputs, do)]

    views = [layout(x) for x in vectors]
    assert all(map(torch.equal, run(*views), run(*(x.contiguous() for x in views))))


# ---- polynomials -----------------------------------------------------------------------------------------------------


def functions_in_bits(formula, t, head_dim):
    """The contents of the table and of the polynomials: (n, H, T)."""
    a, m = formula(t, torch.arange(3)[:, None])
    a, m, _ = torch.broadcast_tensors(torch.as_tensor(a, dtype=F64), m, torch.empty(3, len(t)))
    if torch.allclose(m, 1 - a * a):
        return torch.stack([a * LOG2E**0.5])
    return torch.stack([a * LOG2E / head_dim**0.5, m * LOG2E])


@pytest.mark.parametrize("q_offset", [0, 1003])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("formula", [*FORMULAS, bent])
def test_tables_and_polynomials_are_the_formula(formula, dtype, q_offset):
    """At all distances that a far tile can have, in all heads, to the tolerance of the dtype; lines are lines."""
    made = coefficients_of(formula, 3, 20, 2100, q_offset, dtype)
    t = torch.arange(2100)
    exact = functions_in_bits(formula, t.double(), 20)
    assert ((made.table.cpu().expand(-1, 3, -1)[..., :2100] - exact).abs() <= 1e-7 * (1 + exact.abs())).all()
    polynomials, first = made.polynomials.cpu().double().expand(-1, 3, -1, -1), q_offset % 16 - 128
    for D in range(first, 2100, 16):
        if D < made.far:
            continue
        near = t[(t > D - 128) & (t < D + 128)]
        for f, degree in enumerate(made.degrees):
            c = polynomials[f, :, (D - first) // 16]
            assert D < made.line or degree < 3 or not c[:, 2:].any()
            x = (near if degree < 3 else near - D).double()
            value = sum(c[:, n, None] * x**n for n in range(4))
            assert ((value - exact[f][:, near]).abs() <= TOLERANCE[dtype] * (1 + exact[f][:, near].abs())).all()


@pytest.mark.parametrize("formula, degrees, far", [
    (alibi, (0, 1), EVERYWHERE), (constant, (0, 0), EVERYWHERE), (constant_of_one_function, (0,), EVERYWHERE),
    (parabola, (3,), 128), (smooth, (3, 3), 128), (line_and_curve, (1, 3), 128), (curve_and_constant, (3, 0), 128),
    (rough, (3, 3), NOWHERE), (rough_in_one_head, (1, 3), NOWHERE),
])
def test_degrees_and_the_first_far_tile(formula, degrees, far):
    made = coefficients_of(formula, 3, 16, 1000)
    assert (made.degrees, made.far) == (degrees, far)


def test_most_tiles_of_long_sequences_are_far_and_then_lines():
    """Of the paper's method in bfloat16: cubics from 464 tokens on, lines from 2,272 on, which are 93 % at 64k."""
    made = coefficients_of(scale_invariant, 1, 128, 4096, dtype=torch.bfloat16)
    assert 128 < made.far < 500 and made.far < made.line < 2300
    assert coefficients_of(scale_invariant, 1, 128, 4096).far < 2000


@pytest.mark.parametrize("formula, q_offset, window", [
    (parabola, 0, None), (smooth, 213, None), (line_and_curve, 224, None), (curve_and_constant, 0, None),
    (smooth, 0, 200),
])
def test_far_tiles(formula, q_offset, window, tiles):
    tiles((64, 64), (64, 32), (32, 64))
    made = coefficients_of(formula, 1, 16, 300, q_offset)
    assert made.far == 128 + q_offset % 16
    check(formula, random_inputs(1, 300 - q_offset, 16, keys=300), q_offset=q_offset, made=made, window=window)


@pytest.mark.parametrize("formula, window", [(bent, None), (bent_of_one_function, None), (bent, 510), (bent, 700)])
def test_tiles_of_lines(formula, window, tiles):
    """Beyond near and far ones, which these queries see too; a window's edge reads the table."""
    tiles((32, 32), (32, 16), (16, 32))
    queries, q_offset = 50, 713
    made = coefficients_of(formula, 1, 16, q_offset + queries, q_offset)
    assert 128 < made.far < made.line < q_offset and made.line - made.far >= 32
    inputs, extras = random_inputs(1, queries, 16, keys=763), biases_and_sink("bs" if window else "", 1, 763)
    check(formula, inputs, q_offset=q_offset, made=made, window=window, **extras)


def test_each_tile_reads_only_its_own_numbers(tiles):
    """NaN is where the table is for far tiles only, cubics for near ones, and in the curvature of lines."""
    tiles((32, 32), (32, 16), (16, 32))
    made = coefficients_of(bent, 1, 16, 760, 704)
    made.table[:, :, made.far + 32:] = math.nan
    made.polynomials[:, :, : (made.far + 128) // 16] = math.nan
    made.polynomials[:, :, (made.line + 128) // 16:, 2:] = math.nan
    check(bent, random_inputs(1, 56, 16, keys=760), q_offset=704, made=made)


def test_tiles_outside_of_the_window_are_not_read(small):
    """NaN is in all keys and values that no query sees, but for those of tiles in which there is another."""
    q, k, v = random_inputs(1, 32, 16, keys=200)
    hidden = (torch.arange(200) < 128).view(-1, 1)  # the first that is seen is 144, in a tile from 128 on
    inputs = [x.float().to(DEVICE).requires_grad_() for x in (q, *(x.masked_fill(hidden, math.nan) for x in (k, v)))]
    made = dataclasses.replace(coefficients_of(None, 1, 16, 200), window=25)
    output = flash_attention(*inputs, made, q_offset=168)
    assert_near(output, literal(None, q, k, v, 168, window=25), 1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(output.sum(), inputs))


# ---- the softmax without a running maximum ---------------------------------------------------------------------------


def extreme_inputs(queries, keys, head_dim):
    """Vectors of +1 or of -1: S is sqrt(D) or -sqrt(D), in any row of either sign but for the first three."""
    sign = torch.ones(1, 1, keys, 1, dtype=F64)
    sign[:, :, 3::2] = -1
    q, k = sign[:, :, keys - queries:].expand(-1, -1, -1, head_dim), sign.expand(-1, -1, -1, head_dim)
    q = q * torch.where(torch.arange(queries) % 4 < 2, 1.0, -1.0)[:, None]
    return [q, k, random(1, 1, keys, head_dim, seed=0)]


@pytest.mark.parametrize("formula", [None, alibi, scale_invariant])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_extreme_products(formula, head_dim, small):
    made = coefficients_of(formula, 1, head_dim, 50, bound=bound_products(head_dim, torch.float32))
    assert made.bounded
    check(formula, extreme_inputs(50, 50, head_dim), made=made)


@pytest.mark.parametrize("scale, is_bounded", [(0.99, True), (1.01, False)])
def test_logits_at_the_edge_of_the_bound(scale, is_bounded, small):
    """From -95 to 91 bits in float32, of whose sums the largest and smallest must survive; beyond, the other form."""
    a, m = scale * 93 / (LOG2E * 16), -2 / LOG2E
    def steep(t, h):
        return a, m + 0 * t
    made = coefficients_of(steep, 1, 256, 50, bound=bound_products(256, torch.float32))
    assert made.bounded == is_bounded
    check(steep, extreme_inputs(50, 50, 256), made=made, tolerance=4 * 95 * 2**-24)


def test_without_the_bound_there_is_no_result(small):
    """`bounded` takes the running maximum out, so only its condition protects from overflow."""
    inputs = [(30 * x).float().to(DEVICE) for x in random_inputs(1, 40, 16)]
    made = coefficients_of(alibi, 1, 16, 40, bound=16 * 900)
    assert not made.bounded and flash_attention(*inputs, made).isfinite().all()
    assert not flash_attention(*inputs, dataclasses.replace(made, bounded=True)).isfinite().all()


@pytest.mark.parametrize("logit", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("bounded", [False, True])
def test_sinks_of_any_size(logit, bounded, small):
    made = coefficients_of(scale_invariant, 1, 16, 40, bound=bound_products(16, torch.float32) if bounded else math.inf)
    check(scale_invariant, random_inputs(1, 40, 16, normalised=True), made=made, window=19, sink=torch.tensor([logit]))


def test_biases_are_not_bounded(small):
    made = coefficients_of(None, 1, 16, 40, bound=bound_products(16, torch.float32))
    assert made.bounded
    bias = 300 + 10 * random(1, 1, 40, seed=50)
    check(None, random_inputs(1, 40, 16, normalised=True), made=made, tolerance=8 * 2**-24 * 340, key_bias=bias)


class Gain(QueryScale):
    """Multiplies queries by a number that is not learned."""

    def __init__(self, gain):
        super().__init__()
        self.gain = gain

    def table(self, positions, target_length):
        return torch.full(positions.shape, float(self.gain))

    def multiplier(self, table, x):
        return table.expand(2, -1)


def steep_line(t, h):
    return 1.0, 0.1 * t


@pytest.mark.parametrize("formula, head_dim, length, dtype, expected", [
    (None, 256, 65536, torch.bfloat16, True), (scale_invariant, 128, 65536, torch.bfloat16, True),
    (scale_invariant, 256, 65536, torch.float32, True), (steep_line, 128, 256, torch.float32, True),
    (steep_line, 128, 4096, torch.float32, False), (scale_invariant, 128, 4096, torch.float16, False),
    (lambda t, h: (6.0, 0 * t), 128, 4096, torch.float32, False),
    (lambda t, h: (1.0, math.nan * t), 128, 16, torch.float32, False),
])
def test_where_the_bound_holds(formula, head_dim, length, dtype, expected):
    made = coefficients_of(formula, 6, head_dim, length, dtype=dtype, bound=bound_products(head_dim, dtype))
    assert made.bounded == expected
    assert not coefficients_of(formula, 6, head_dim, length, dtype=dtype).bounded  # of q and k of any norm


def test_who_gets_the_bound():
    """A caller who says that q and k are normalised, unless a learned or large scale may break the bound."""
    shape = dict(num_heads=2, head_dim=16, train_length=64)

    def bounded(name, mechanisms=None, normalised=True, **options):
        method = Method(name, **shape, mechanisms=mechanisms) if mechanisms else make_method(name, **shape, **options)
        method = method.to(DEVICE)
        plan = make_plan(method, 40, 40, device=DEVICE, backend="triton", normalised=normalised)
        return triton.prepare(method.score_change, plan, plan.prepared).bounded

    assert bounded("mine", [Gain(15)]) and not bounded("mine", [Gain(17)])
    for name in ("p_rope", "nope", "alibi", "scale_invariant_p_rope", "yarn"):
        assert bounded(name) and not bounded(name, normalised=False)
    assert not bounded("logn_p_rope") and not bounded("scale_invariant_nope", learn_tau=True)


# ---- low precision, learned functions, whole models ------------------------------------------------------------------


@pytest.mark.parametrize("with_sink", [False, True])
def test_sums_of_the_gradients_of_many_biases_are_right_in_low_precision(with_sink, small):
    """As forgetting attention adds them up: the rounding of the output would be most of such a sum."""
    q, k, v, do = (x.half().double() for x in (*random_inputs(2, 300, 16), random(1, 2, 300, 16, seed=9)))
    v = (v + 8).half().double()  # the gradients do not see the 8, but the output is rounded by more
    bias = (0.3 * torch.arange(300.0).expand(1, 2, 300)).double().requires_grad_()
    more = dict(sink=torch.zeros(2, dtype=F64)) if with_sink else {}
    expected = torch.autograd.grad(literal(None, q, k, v, key_bias=bias, **more), bias, do)[0].cumsum(-1)
    ours = bias.detach().float().to(DEVICE).requires_grad_()
    more = {name: x.float().to(DEVICE) for name, x in more.items()}
    output = flash_attention(*(x.half().to(DEVICE) for x in (q, k, v)), None, key_bias=ours, **more)
    (gradient,) = torch.autograd.grad(output, ours, do.half().to(DEVICE))
    assert (gradient.double().cpu().cumsum(-1) - expected).abs().max() < 0.01 * expected.abs().max()


class LearnedSlopes(ScoreChange):
    """a = 1 and m = -slope_h t with learned slopes: two functions."""

    def __init__(self, *sizes):
        super().__init__()
        self.log_slope = torch.nn.ParameterList(torch.linspace(-1, -3, size) for size in sizes)

    def coefficients(self, distance, head):
        return 1.0, -sum(torch.exp(p[head].to(distance.dtype)) for p in self.log_slope) * distance


@pytest.mark.parametrize("compiled", [False, True])
def test_a_learned_function(compiled, small):
    """With a plan, as in training, made once; the coefficients are made anew in each pass, and in the graph."""
    torch._dynamo.reset()
    method = Method("mine", 2, 16, 64, [LearnedSlopes(2)]).to(DEVICE)
    run = torch.compile(attend, fullgraph=True, dynamic=False) if compiled else attend
    q, k, v = random_inputs(2, 50, 16)
    slope = torch.linspace(-1, -3, 2, dtype=F64, requires_grad=True)
    expected = literal(lambda t, h: (1.0, -torch.exp(slope[h]) * t), q, k, v)
    plan = make_plan(method, 50, 50, device=DEVICE, backend="triton")
    output = run(method, *(x.float().to(DEVICE) for x in (q, k, v)), plan=plan)
    assert_near(output, expected.detach(), 1e-5)
    weight = random(*expected.shape, seed=3)
    (ours,) = torch.autograd.grad(output, list(method.parameters()), weight.float().to(DEVICE))
    assert_near(ours, torch.autograd.grad(expected, slope, weight)[0], 1e-5)


@pytest.mark.parametrize("sizes", [(2, 2), (1,), (4,)])
def test_other_than_one_learned_number_a_head_is_refused(sizes):
    method = Method("mine", 2, 16, 64, [LearnedSlopes(*sizes)])
    assert "mine" in triton.unsupported(method, torch.device("cuda"), torch.float32)
    assert choose_backend(method, torch.device("cuda"))[0] == "flex"


@pytest.mark.parametrize("options", [{}, dict(learn_tau=True)])
def test_a_gpt_has_the_same_gradients_as_with_plain_pytorch(options, small):
    torch.manual_seed(0)
    model = GPT(vocab_size=50, num_layers=2, num_heads=2, model_dim=32, train_length=64,
                method="scale_invariant_p_rope", method_options=options)
    for parameter in model.parameters():  # output projections start at 0, where nothing before them has a gradient
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    model.to(DEVICE)
    tokens = torch.randint(50, (2, 41), device=DEVICE)
    results = []
    for backend in ("blocks", "triton"):
        plan = model.plan(40, backend=backend)
        loss = model(tokens[:, :-1], tokens[:, 1:], plan=plan)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert options or plan[0].prepared.bounded  # the model says that q and k are normalised
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected, 1e-5)


def test_forward_and_backward_repeat_bit_by_bit():
    inputs = [x.float().to(DEVICE).requires_grad_() for x in random_inputs(4, 140, 32)]
    made, runs = coefficients_of(scale_invariant, 4, 32, 140), []
    for _ in range(2 if DEVICE == "cpu" else 20):
        output = flash_attention(*inputs, made)
        runs.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    assert all(torch.equal(x, first) for run in runs for x, first in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("learned", [False, True])
def test_opcheck(learned, small):
    change = LearnedSlopes(2).to(DEVICE) if learned else Plain(scale_invariant)
    made = make_coefficients(change, 2, 16, 20, 0, torch.float32, DEVICE)
    inputs = [x.float().to(DEVICE).requires_grad_() for x in random_inputs(2, 20, 16)]
    extras = [x.float().to(DEVICE).requires_grad_() for x in biases_and_sink("bs", 2, 20).values()]
    functions = made.table, made.polynomials, made.tangent, list(made.degrees), made.far, made.line, 7, 0
    torch.library.opcheck(flash.forward_op, (*inputs, made.parameter, *extras, *functions))
    output, lse = flash.forward_op(*inputs, made.parameter, *extras, *functions)
    arguments = [x.detach() for x in (torch.ones_like(output), *inputs, output, lse, *extras)]
    torch.library.opcheck(flash.backward_op, (*arguments, *functions))


# ---- machine code ----------------------------------------------------------------------------------------------------

COMPILE = """
import dataclasses, re, sys, torch
from model.attention.triton import cross_entropy, flash
from model.attention.triton.distance import make_coefficients
from model.methods import make_method
from tests.machine_code import compile_launch, count, flash_launches, innermost_loops, record_launches

for case in sys.argv[1:]:
    arch, dtype, head_dim, name, options = eval(case, vars(torch))
    method = make_method(name, num_heads=2, head_dim=head_dim, train_length=64, **options)
    coefficients = make_coefficients(method.score_change, 2, head_dim, 300, 0, dtype, "cpu", 1.1 * head_dim)
    coefficients = dataclasses.replace(coefficients, window=method.window and method.window.window)
    key_bias = method.key_bias and torch.zeros(1, 2, 300)
    inputs = torch.zeros(4, 1, 2, 300, head_dim, dtype=dtype)
    for role, launch in flash_launches(flash, inputs, coefficients, arch, key_bias).items():
        if role != "delta":
            ptx, listing, _ = compile_launch(launch, arch)
            logits = launch.constants["QUERIES"] * launch.constants["KEYS"] / (32 * launch.options["num_warps"])
            spills = [count(loop, "LDL", "STL") / logits for loop in innermost_loops(listing, "MMA")]
            print(case, role, bool(re.search(r"\\b(atom|red)\\.", ptx)), max(spills, default=0) < 1)

for arch in (80, 90):
    for V in (50304, 50257):
        arguments = torch.zeros(1, V, dtype=torch.bfloat16), torch.zeros(1, dtype=int), torch.zeros(1), True
        run = lambda: cross_entropy.cross_entropy_(*arguments)
        _, listing, stack = compile_launch(*record_launches(cross_entropy, ["cross_entropy_kernel"], run), arch)
        waits = max(count(loop, "BAR", "SHFL") for loop in innermost_loops(listing, "MUFU"))
        print(arch, V, "ATOM" in listing, waits == stack == 0, "LDG.E.128" in listing, "STG.E.128" in listing)
"""
CASES = [  # arch, dtype, head_dim, method, options
    "80, float32, 20, 'scale_invariant_nope', {'learn_tau': True}", "80, float16, 64, 'alibi', {}",
    "90, bfloat16, 128, 'scale_invariant_nope', {}", "90, bfloat16, 128, 'scale_invariant+forget', {}",
    "90, bfloat16, 128, 'rope+window', {'window': 130}",
]


def test_the_kernels_compile_for_gpus_without_atomics_or_spills():
    """Spills: less than one instruction a logit, of 10 to 25 of all kinds. The cross-entropy moves 16 bytes at a time
    where rows begin at multiples of them, and no thread waits for another within a walk over a row."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = subprocess.run([sys.executable, "-c", COMPILE, *CASES], cwd=ROOT, env=env, capture_output=True, text=True)
    expected = [f"{case} {role} False True" for case in CASES for role in ROLES]
    expected += [f"{arch} {V} False True {V == 50304} {V == 50304}" for arch in (80, 90) for V in (50304, 50257)]
    assert code.stdout.splitlines() == expected, code.stderr


@pytest.mark.parametrize("device, dtype, head_dim", [
    ("cuda", F64, 64), ("cuda", torch.int32, 64), ("cuda", torch.float32, 257), ("xpu", torch.float32, 64),
])
def test_the_kernels_say_where_they_cannot_run(device, dtype, head_dim, monkeypatch):
    monkeypatch.setattr(flash, "INTERPRETED", False)
    assert flash.kernel_problem(torch.device(device), dtype, head_dim) is not None

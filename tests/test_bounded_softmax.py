"""The Triton kernel's softmax without a running maximum, where |q| = |k| = sqrt(D) bounds the logits.

Values and gradients against the formula in float64, at the largest and smallest logits that there can be; and who gets
that form: what the model runs, where the bound holds, and nobody who does not say that q and k are normalised.
"""

import dataclasses
import math

import pytest
import torch
from test_methods import assert_near, assert_refused, cast, make, random

pytest.importorskip("triton")

import test_kernels  # noqa: E402
from test_kernels import DEVICE, alibi, check, formula_attention, random_inputs, scale_invariant, smooth  # noqa: E402

from model.attention import (  # noqa: E402
    attend,
    make_plan,
    transform,
    triton,  # noqa: E402
)
from model.attention.base import bound_products  # noqa: E402
from model.attention.triton.distance import LOG2E, make_coefficients  # noqa: E402
from model.attention.triton.flash import flash_attention  # noqa: E402
from model.gpt import GPT  # noqa: E402
from model.methods.base import Method, QueryScale, ScoreChange  # noqa: E402
from model.methods.p_rope import PRoPE  # noqa: E402

pytestmark = pytest.mark.slow

small, tiles = test_kernels.small, test_kernels.tiles  # fixtures


def bounded_coefficients(formula, num_heads, head_dim, keys, q_offset=0, dtype=torch.float32, bound=None):
    change = None if formula is None else test_kernels.change_of(formula, num_heads)
    bound = bound or bound_products(head_dim, dtype)
    return make_coefficients(change, num_heads, head_dim, keys, q_offset, dtype, DEVICE, bound)


def normalised_inputs(*shape, **options):
    """q and k of the norm sqrt(D), and v."""
    q, k, v = (x.detach() for x in random_inputs(*shape, **options))
    q, k = (torch.nn.functional.rms_norm(x, x.shape[-1:]) for x in (q, k))
    return cast([q, k, v], torch.float64)


def extreme_inputs(queries, keys, head_dim):
    """Vectors of +1 or of -1: S is sqrt(D) or -sqrt(D), in any row of either sign but for the first three."""
    sign = torch.ones(1, 1, keys, 1, dtype=torch.float64)
    sign[:, :, 3::2] = -1
    q, k = sign[:, :, keys - queries:].expand(-1, -1, -1, head_dim), sign.expand(-1, -1, -1, head_dim)
    q = q * torch.where(torch.arange(queries) % 4 < 2, 1.0, -1.0)[:, None]
    return cast([q, k, random(1, 1, keys, head_dim, seed=0)], torch.float64)


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formula", [None, alibi, scale_invariant, smooth, test_kernels.rough_in_one_head])
def test_every_formula(formula, small):
    made = bounded_coefficients(formula, 2, 16, 50)
    assert made.bounded
    check(formula, normalised_inputs(2, 50, 16), coefficients=made)


@pytest.mark.parametrize("length", [1, 33, 65])
@pytest.mark.parametrize("formula", [None, scale_invariant])
def test_awkward_lengths(formula, length, small):
    check(formula, normalised_inputs(1, length, 20), coefficients=bounded_coefficients(formula, 1, 20, length))


@pytest.mark.parametrize("queries, q_offset", [(1, 69), (33, 37)])
@pytest.mark.parametrize("formula", [None, scale_invariant])
def test_query_offsets(formula, queries, q_offset, small):
    made = bounded_coefficients(formula, 1, 16, 70, q_offset)
    check(formula, normalised_inputs(1, queries, 16, keys=70), q_offset=q_offset, coefficients=made)


@pytest.mark.parametrize("formula", [smooth, test_kernels.line_and_curve])
def test_far_tiles(formula, tiles):
    tiles((64, 64), (64, 32), (32, 64))
    made = bounded_coefficients(formula, 1, 16, 260)
    assert made.bounded and made.far == 128 and made.line > 260
    check(formula, normalised_inputs(1, 260, 16), coefficients=made)


@pytest.mark.parametrize("formula", [None, alibi, scale_invariant])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_extreme_products(formula, head_dim, small):
    """All products at their bound, of both signs."""
    made = bounded_coefficients(formula, 1, head_dim, 50)
    assert made.bounded
    check(formula, extreme_inputs(50, 50, head_dim), coefficients=made)


def test_the_largest_logits_of_64k(tiles):
    """A row whose logits all are as large as they can be, and one where they are as small."""
    tiles((16, 128), (16, 16), (16, 16))
    keys, u = 65536, torch.ones(1, 1, 1, 128, dtype=torch.float64)
    exact = [torch.cat([u, -u], dim=2), u.expand(-1, -1, keys, -1), random(1, 1, keys, 128, seed=1)]
    made = bounded_coefficients(scale_invariant, 1, 128, keys, keys - 2)
    assert made.bounded
    expected = formula_attention(scale_invariant, *exact, keys - 2)
    inputs = [x.float().to(DEVICE) for x in exact]
    with torch.no_grad():
        assert_near(flash_attention(*inputs, made, q_offset=keys - 2), expected, 1e-5)


@pytest.mark.parametrize("scale, is_bounded", [(0.99, True), (1.01, False)])
def test_logits_at_the_edge_of_the_bound(scale, is_bounded, small):
    """From -95 to 91 bits in float32, of whose sums the largest and smallest must survive; beyond, the other form."""
    head_dim, length = 256, 50
    a, m = scale * 93 / (LOG2E * head_dim**0.5), -2 / LOG2E

    def steep(t, h):
        return a, m + 0 * t

    made = bounded_coefficients(steep, 1, head_dim, length)
    assert made.bounded == is_bounded
    check(steep, extreme_inputs(length, length, head_dim), coefficients=made, tolerance=4 * 95 * 2**-24)


def test_large_values_do_not_overflow(small):
    """Up to 2^30, with the largest logits."""
    *qk, v = (x.detach() for x in extreme_inputs(40, 40, 256))
    v = 2.0**29 * v.clamp(-2, 2)
    made = bounded_coefficients(lambda t, h: (91 / (LOG2E * 16), -2 / LOG2E + 0 * t), 1, 256, 40)
    assert made.bounded
    output = flash_attention(*(x.float().to(DEVICE) for x in (*qk, v)), made).cpu()
    expected = formula_attention(lambda t, h: (91 / (LOG2E * 16), -2 / LOG2E + 0 * t), *qk, v)
    assert_near(output / 2.0**29, expected / 2.0**29, 4 * 91 * 2**-24)


def test_without_the_bound_there_is_no_result(small):
    """What the running maximum is for, and that `bounded` takes it out."""
    exact = [30 * x.detach() for x in random_inputs(1, 40, 16)]
    made = bounded_coefficients(alibi, 1, 16, 40, bound=16 * 900)
    assert not made.bounded
    inputs = [x.float().to(DEVICE) for x in exact]
    assert flash_attention(*inputs, made).isfinite().all()
    assert not flash_attention(*inputs, dataclasses.replace(made, bounded=True)).isfinite().all()


@pytest.mark.parametrize("head_dim, q_offset", [(64, 512), (128, 512), (128, 2304)])
def test_polynomials_of_bfloat16_add_little_to_its_rounding(head_dim, q_offset, tiles):
    """Their tolerance is its own: in float32, their error in output and gradients is below a 20th of what bfloat16's
    rounding of probabilities, output and gradients makes of the dense formula."""
    tiles((128, 128), (128, 128), (128, 128))
    queries, keys = 128, q_offset + 128
    made = bounded_coefficients(scale_invariant, 1, head_dim, keys, q_offset, torch.bfloat16)
    assert made.far < q_offset and (made.line < q_offset) == (q_offset > 2272)
    exact = cast(normalised_inputs(1, queries, head_dim, keys=keys), torch.bfloat16)
    inputs = [x.detach().float().to(DEVICE).requires_grad_() for x in exact]
    doubles = cast(exact, torch.float64)
    do = random(1, 1, queries, head_dim, seed=4)
    expected = formula_attention(scale_invariant, *doubles, q_offset)
    truth = [expected, *torch.autograd.grad(expected, doubles, do)]
    output = flash_attention(*inputs, made, q_offset=q_offset)
    ours = [output, *torch.autograd.grad(output, inputs, do.float().to(DEVICE))]
    full = [torch.nn.functional.pad(exact[0].detach(), (0, 0, q_offset, 0)), *(x.detach() for x in exact[1:])]
    full_do = torch.nn.functional.pad(do, (0, 0, q_offset, 0))
    rounded = test_kernels.dense_low_precision(scale_invariant, *(x.float() for x in (*full, full_do)), torch.bfloat16)
    rounded = [x[:, :, q_offset:] if x.shape == full[0].shape and i < 2 else x for i, x in enumerate(rounded)]
    for name, x, plain, true in zip(("o", "dq", "dk", "dv"), ours, rounded, truth, strict=True):
        assert (x.cpu() - true).norm() <= 0.05 * (plain - true).norm(), name


# ---- who gets it -----------------------------------------------------------------------------------------------------


class Logits(ScoreChange):
    def __init__(self, a, m):
        super().__init__()
        self.a, self.m = a, m

    def coefficients(self, distance, head):
        return self.a + 0 * distance, self.m * distance


@pytest.mark.parametrize("change, head_dim, length, dtype, expected", [
    (None, 256, 65536, torch.bfloat16, True),
    ("scale_invariant_nope", 128, 4096, torch.bfloat16, True),
    ("scale_invariant_nope", 128, 65536, torch.bfloat16, True),
    ("scale_invariant_nope", 256, 65536, torch.float32, True),
    ("alibi", 128, 65536, torch.bfloat16, True),
    (Logits(3.0, 0.0), 128, 4096, torch.float32, True),
    (Logits(1.0, 0.1), 128, 256, torch.float32, True),  # it grows by a tenth a token: up to 37 + 16 bits
    (Logits(1.0, 0.1), 128, 4096, torch.float32, False),
    (Logits(6.0, 0.0), 128, 4096, torch.float32, False),
    (Logits(1.0, math.nan), 128, 16, torch.float32, False),
    ("scale_invariant_nope", 128, 4096, torch.float16, False),  # it has no such exponents
    (None, 64, 128, torch.float16, False),
])
def test_where_the_bound_holds(change, head_dim, length, dtype, expected):
    change = make(change).score_change if isinstance(change, str) else change
    made = make_coefficients(change, 6, head_dim, length, 0, dtype, "cpu", bound_products(head_dim, dtype))
    assert made.bounded == expected
    assert not make_coefficients(change, 6, head_dim, length, 0, dtype, "cpu").bounded  # of other q and k


@pytest.mark.parametrize("m_0, expected", [(-87, True), (-89, False), (82, True), (84, False)])
def test_a_constant_moves_all_logits_towards_the_end_of_float32(m_0, expected):
    """D = 16, 2^9 keys: 5.2 bits about m_0, of which 9 + 24 bits above -126 and 9 + 30 below 127 are left."""
    class Constant(ScoreChange):
        def coefficients(self, distance, head):
            return 0.9, m_0 / LOG2E + 0 * distance

    assert make_coefficients(Constant(), 1, 16, 512, 0, torch.float32, "cpu", 16.0).bounded == expected


class Gain(QueryScale):
    """Multiplies queries by a number that is not learned."""

    def __init__(self, gain):
        super().__init__()
        self.gain = gain

    def table(self, positions, target_length):
        return torch.full(positions.shape, float(self.gain))

    def multiplier(self, table, x):
        return table.expand(2, -1)


class Amplitude(PRoPE):
    def frequencies(self, target_length):
        return super().frequencies(target_length)[0], 3.0


def plan(method, **options):
    return make_plan(method, 40, 40, device=DEVICE, backend="triton", **options)


@pytest.mark.parametrize("name", ["p_rope", "nope", "alibi", "scale_invariant_p_rope", "yarn"])
def test_a_caller_who_does_not_say_that_q_and_k_are_normalised_gets_the_running_maximum(name, small):
    method = make(name, 2)
    assert not plan(method).prepared.bounded and plan(method, normalised=True).prepared.bounded
    inputs = [1e4 * x.detach().float().to(DEVICE) for x in random_inputs(2, 40, 16)]
    assert attend(method, *inputs, backend="triton").isfinite().all()


@pytest.mark.parametrize("name, options", [
    ("logn_p_rope", {}),
    ("scale_invariant_nope", dict(learn_tau=True)),
    ("scale_invariant_nope", dict(learn_gain=True)),
])
def test_what_is_learned_keeps_the_running_maximum(name, options):
    """Training may raise it over any bound."""
    method = make(name, 2, **options).to(DEVICE)
    made = plan(method, normalised=True)
    assert not triton.prepare(method.score_change, made, made.prepared).bounded


def test_rotations_that_lengthen_and_scaled_queries_count():
    """At D = 16 plain logits stay within 5.8 bits; what is left is used up by a factor of 15."""
    def bounded(*mechanisms):
        method = Method("mine", 2, 16, 64, list(mechanisms))
        made = plan(method, normalised=True)
        assert made.product_bound == pytest.approx(bound_products(16, torch.float32, gains(mechanisms)))
        return made.prepared.bounded

    def gains(mechanisms):
        return math.prod(m.gain if isinstance(m, Gain) else 9.0 for m in mechanisms)

    assert bounded() and bounded(Gain(15)) and bounded(Amplitude(2, 16, 64))
    assert not bounded(Gain(17)) and not bounded(Gain(2), Amplitude(2, 16, 64))


def test_products_after_rotation_stay_within_the_bound():
    """As the model makes q and k: normalised, rounded, rotated, rounded."""
    for name, dtype in [("p_rope", torch.bfloat16), ("yarn", torch.bfloat16), ("yarn", torch.float32)]:
        method = make(name, 2, 16)
        made = make_plan(method, 300, 300, dtype=dtype, backend="blocks", normalised=True)
        q = torch.nn.functional.rms_norm(random(4, 2, 300, 16, seed=0).to(dtype), (16,))
        q, _ = transform(method, q, q, made)
        assert (q.double() @ q.double().mT).abs().max() <= made.product_bound <= 1.2 * 16 * 1.3


@pytest.mark.parametrize("method_options", [{}, dict(learn_tau=True)])
def test_the_model_says_that_q_and_k_are_normalised(method_options, small):
    torch.manual_seed(0)
    model = GPT(vocab_size=50, num_layers=1, num_heads=2, model_dim=32, train_length=64,
                method="scale_invariant_p_rope", method_options=method_options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 3.0)
    model.to(DEVICE)
    tokens = torch.randint(50, (2, 41), device=DEVICE)
    results = []
    for backend in ("blocks", "triton"):
        made = model.plan(40, backend=backend)
        loss = model(tokens[:, :-1], tokens[:, 1:], plan=made)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert method_options or made[0].prepared.bounded
    for actual, expected in zip(results[1], results[0], strict=True):
        assert_near(actual, expected, 1e-5)


def test_coefficients_that_were_bounded_for_another_dtype_are_refused():
    made = bounded_coefficients(scale_invariant, 1, 16, 20)
    with assert_refused("float16", "make them for it"):
        flash_attention(*torch.zeros(3, 1, 1, 20, 16, dtype=torch.float16, device=DEVICE), made)

"""The Triton attention kernel against its formula in float64: values, gradients, refusals.

With a GPU the kernels are compiled; without one they run in Triton's interpreter (conftest.py). Where nothing else is
said, float32 has to agree to 1e-5 of the largest entry of a tensor, or to 1e-5 where all entries are smaller than 1.
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
from test_methods import NAMES, assert_near, assert_refused, assert_same_function, cast, make, random

pytest.importorskip("triton")

from model.attention import (  # noqa: E402
    attend,
    choose_backend,
    make_plan,
    triton,  # noqa: E402
)
from model.attention.check import check_backend  # noqa: E402
from model.attention.reference import plain_attention  # noqa: E402
from model.attention.triton import flash  # noqa: E402
from model.attention.triton.distance import (  # noqa: E402
    EVERYWHERE,
    LOG2E,
    NOWHERE,
    TOLERANCE,
    make_coefficients,
)
from model.attention.triton.flash import Tiles, flash_attention  # noqa: E402
from model.gpt import GPT  # noqa: E402
from model.methods.base import Method, ScoreChange  # noqa: E402

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).parent.parent
ROLES = ("forward", "query_gradient", "key_gradient")
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's bfloat16 products are wrong")

# ---- formulas: a, m at distances t and heads h, in float64 -----------------------------------------------------------


def scale_invariant(t, h):
    return reference.scale_invariant(t)


def alibi(t, h):
    return 1.0, -reference.alibi_slopes(len(h))[h] * t


def parabola(t, h):
    """One function, as for scale_invariant; but its cubics are exact: all tiles from 128 tokens on are far ones."""
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


def line_and_bent(t, h):
    return 0.5 + 0.002 * t, -t / 100 - 0.5 * torch.exp(-t / 30)


def rough(t, h):
    return 1 + 0.3 * (t % 7 == 2), -(t % 5) / (3 + h)


def rough_in_one_head(t, h):
    return 2 - t / 900, -((t % 11 == 0) & (h == 1)).double()


OWN = [parabola, smooth, line_and_curve, curve_and_constant, constant, constant_of_one_function, rough,
       rough_in_one_head]
FORMULAS = [None, alibi, scale_invariant, *OWN]  # None: plain causal attention


class Formula(ScoreChange):
    def __init__(self, formula):
        super().__init__()
        self.coefficients = formula


def change_of(formula, num_heads):
    """That of the model where the model has it: reference.py and the formula above are then its check."""
    names = {scale_invariant: "scale_invariant_nope", alibi: "alibi"}
    return make(names[formula], num_heads).score_change if formula in names else Formula(formula)


def coefficients_of(formula, num_heads, head_dim, keys, q_offset=0, dtype=torch.float32):
    if formula is None:
        return None
    return make_coefficients(change_of(formula, num_heads), num_heads, head_dim, keys, q_offset, dtype, DEVICE)


def formula_attention(formula, q, k, v, q_offset=0):
    """softmax(a S + m) v over the keys j <= i, in the dtype of q."""
    num_heads, head_dim = q.shape[1], q.shape[3]
    i, j = torch.arange(q_offset, q_offset + q.shape[2]), torch.arange(k.shape[2])
    t = (i[:, None] - j).clamp(min=0).double()
    a, m = (1.0, 0.0) if formula is None else formula(t, torch.arange(num_heads)[:, None, None])
    logits = (a * (q @ k.mT) / math.sqrt(head_dim) + m).to(q.dtype)
    return logits.masked_fill(i[:, None] < j, -math.inf).softmax(dim=-1) @ v


# ---- the comparison --------------------------------------------------------------------------------------------------


@pytest.fixture
def tiles(monkeypatch):
    """Chooses the tiles: (queries, keys) of each of the three kernels."""
    def choose(*shapes):
        by_role = {role: Tiles(*shape, 4, 1) for role, shape in zip(ROLES, shapes, strict=True)}
        monkeypatch.setattr(flash, "choose_tiles", lambda *args: by_role)

    return choose


@pytest.fixture
def small(tiles):
    tiles((32, 16), (16, 32), (32, 16))


def random_inputs(heads, queries, head_dim, *, batch=1, keys=None, seed=0):
    lengths = queries, keys or queries, keys or queries
    return [random(batch, heads, T, head_dim, seed=1000 * seed + i).requires_grad_() for i, T in enumerate(lengths)]


def check(formula, exact, *, q_offset=0, coefficients=None, tolerance=1e-5):
    """Values, and gradients of q, k, v."""
    q, k, _ = exact
    expected = formula_attention(formula, *exact, q_offset)
    inputs = cast(exact, torch.float32)
    made = coefficients or coefficients_of(formula, q.shape[1], q.shape[3], k.shape[2], q_offset)
    output = flash_attention(*(x.to(DEVICE) for x in inputs), made, q_offset=q_offset)
    assert output.dtype == torch.float32
    assert_same_function(output.cpu(), inputs, expected, exact, tolerance)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formula", FORMULAS)
def test_every_formula(formula, small):
    check(formula, random_inputs(2, 50, 16))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 64, 65])
@pytest.mark.parametrize("formula", [None, smooth])
def test_lengths_around_those_of_tiles(formula, length, small):
    check(formula, random_inputs(1, length, 16, seed=length))


@pytest.mark.parametrize("shape", [(16, 16), (64, 16), (16, 64), (128, 128)])
def test_tile_shapes(shape, tiles):
    tiles(shape, shape, shape)
    check(scale_invariant, random_inputs(1, 130, 16))


@pytest.mark.parametrize("formula", [None, alibi, scale_invariant])
def test_the_tiles_of_the_code(formula):
    check(formula, random_inputs(2, 100, 64))


@pytest.mark.parametrize("batch, heads", [(3, 1), (1, 6), (2, 3)])
@pytest.mark.parametrize("formula", [alibi, scale_invariant])
def test_batches_and_heads(formula, batch, heads, small):
    check(formula, random_inputs(heads, 20, 16, batch=batch))


@pytest.mark.parametrize("head_dim", [1, 16, 20, 32, 64, 96, 128, 256])
def test_head_dimensions(head_dim):
    check(smooth, random_inputs(1, 66, head_dim, seed=head_dim))


@pytest.mark.parametrize("queries, keys, q_offset", [
    (1, 70, 69),  # decoding
    (33, 70, 37), (20, 70, 32), (33, 70, 17), (3, 70, 50),  # shards, and keys that no query sees
])
@pytest.mark.parametrize("formula", [None, alibi, scale_invariant])
def test_query_offsets(formula, queries, keys, q_offset, small):
    check(formula, random_inputs(1, queries, 16, keys=keys, seed=q_offset), q_offset=q_offset)


@pytest.mark.parametrize("formula", [None, alibi, scale_invariant, smooth])
def test_large_logits(formula, small):
    """A float32 logit L has an error of up to 2^-24 |L|, and that is the relative error of its probability."""
    exact = [x.detach() * scale for x, scale in zip(random_inputs(2, 70, 16), (30, 30, 1))]
    largest = (exact[0] @ exact[1].mT).abs().max().item() / 4
    assert largest > 1000
    check(formula, cast(exact, torch.float64), tolerance=8 * 2**-24 * largest)


@pytest.mark.parametrize("shift", [-2000, 2000])
def test_a_large_constant_in_m_changes_nothing_but_rounding(shift, small):
    """Rows beyond the end of a tile would overflow, were they not left out."""
    check(lambda t, h: (1.0, shift - t / 50), random_inputs(1, 40, 16), tolerance=8 * 2**-24 * abs(shift))


# ---- layouts ---------------------------------------------------------------------------------------------------------

LAYOUTS = dict(
    of_the_model=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    every_second_channel=lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    transposed=lambda x: x.mT.contiguous().mT,
    of_a_longer_one=lambda x: torch.nn.functional.pad(x, (3, 5, 2, 0))[:, :, 2:, 3:-5],
    expanded=lambda x: x[:1, :1].expand_as(x),
)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_inputs_and_of_the_output_gradient(layout, small):
    q, k, v, do = (random(2, 2, 20, 16, seed=i).float().to(DEVICE) for i in range(4))
    made = coefficients_of(scale_invariant, 2, 16, 20)

    def run(*tensors):
        *inputs, do = tensors
        inputs = [x.detach().requires_grad_() for x in inputs]
        output = flash_attention(*inputs, made)
        return [output, *torch.autograd.grad(output, inputs, do)]

    views = [layout(x) for x in (q, k, v, do)]
    for actual, expected in zip(run(*views), run(*(x.contiguous() for x in views)), strict=True):
        assert torch.equal(actual, expected)


# ---- polynomials -----------------------------------------------------------------------------------------------------


def functions_in_bits(formula, t, head_dim):
    """What the table and the polynomials are of: (n, H, T)."""
    a, m = formula(t, torch.arange(3)[:, None])
    a, m, _ = torch.broadcast_tensors(torch.as_tensor(a, dtype=torch.float64), m, torch.empty(3, len(t)))
    if torch.allclose(m, 1 - a * a):
        return torch.stack([a * LOG2E**0.5])
    return torch.stack([a * LOG2E / head_dim**0.5, m * LOG2E])


def polynomial(coefficients, degree, t, D):
    x = (t if degree < 3 else t - D).double()
    return sum(coefficients[..., n, None].double().cpu() * x**n for n in range(degree + 1))


@pytest.mark.parametrize("q_offset", [0, 5, 1003])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("formula", FORMULAS[1:])
def test_tables_and_polynomials_are_the_formula(formula, dtype, q_offset):
    """At all distances that a far tile can have, in all heads, to the tolerance of the dtype."""
    made = coefficients_of(formula, 3, 20, 2100, q_offset, dtype)
    t = torch.arange(2100)
    exact = functions_in_bits(formula, t.double(), 20)
    table = made.table.cpu().expand(-1, 3, -1)[..., : len(t)]
    assert ((table - exact).abs() <= 1e-7 * (1 + exact.abs())).all()
    polynomials = made.polynomials.expand(-1, 3, -1, -1)
    first = q_offset % 16 - 128
    for D in range(first, 2100, 16):
        if D < made.far:
            continue
        near = t[(t > D - 128) & (t < D + 128)]
        for f, degree in enumerate(made.degrees):
            value = polynomial(polynomials[f, :, (D - first) // 16], degree, near, D)
            assert ((value - exact[f][:, near]).abs() <= TOLERANCE[dtype] * (1 + exact[f][:, near].abs())).all()


@pytest.mark.parametrize("formula, degrees, far", [
    (alibi, (0, 1), EVERYWHERE),
    (constant, (0, 0), EVERYWHERE),
    (constant_of_one_function, (0,), EVERYWHERE),
    (parabola, (3,), 128),
    (smooth, (3, 3), 128),
    (line_and_curve, (1, 3), 128),
    (curve_and_constant, (3, 0), 128),
    (rough, (3, 3), NOWHERE),
    (rough_in_one_head, (1, 3), NOWHERE),
])
def test_degrees_and_the_first_far_tile(formula, degrees, far):
    made = coefficients_of(formula, 3, 16, 1000)
    assert (made.degrees, made.far) == (degrees, far)


@pytest.mark.parametrize("dtype, near", [(torch.float32, 2000), (torch.bfloat16, 500)])
def test_most_tiles_of_long_sequences_are_far(dtype, near):
    for q_offset in (0, 7):
        assert 128 < coefficients_of(scale_invariant, 6, 128, 4096, q_offset, dtype).far < near


@pytest.mark.parametrize("q_offset", [0, 213, 224])
@pytest.mark.parametrize("formula", [parabola, smooth, line_and_curve, curve_and_constant])
def test_far_tiles(formula, q_offset, tiles):
    tiles((64, 64), (64, 32), (32, 64))
    made = coefficients_of(formula, 1, 16, 300, q_offset)
    assert made.far == 128 + q_offset % 16
    exact = random_inputs(1, 300 - q_offset, 16, keys=300, seed=q_offset)
    check(formula, exact, q_offset=q_offset, coefficients=made)


@pytest.mark.parametrize("formula", [bent, bent_of_one_function, line_and_bent])
def test_tiles_of_lines(formula, tiles):
    """Beyond near and far ones, which these queries see too."""
    tiles((32, 32), (32, 16), (16, 32))
    queries, q_offset = 50, 713
    made = coefficients_of(formula, 1, 16, q_offset + queries, q_offset)
    assert 128 < made.far < made.line < q_offset and made.line - made.far >= 32
    check(formula, random_inputs(1, queries, 16, keys=q_offset + queries), q_offset=q_offset, coefficients=made)


def test_each_tile_reads_only_what_is_for_it(tiles):
    """NaN is where the table is for far tiles only, cubics for near ones, and what makes a cubic of a line."""
    tiles((32, 32), (32, 16), (16, 32))
    made = coefficients_of(bent, 1, 16, 760, 704)
    made.table[:, :, made.far + 32:] = math.nan
    made.polynomials[:, :, : (made.far + 128) // 16] = math.nan
    made.polynomials[:, :, (made.line + 128) // 16:, 2:] = math.nan
    check(bent, random_inputs(1, 56, 16, keys=760), q_offset=704, coefficients=made)


def test_lines_of_the_paper_s_method():
    """In bfloat16 from 2,272 tokens on, which are 93 % of the tiles at 64k."""
    made = coefficients_of(scale_invariant, 1, 128, 4096, dtype=torch.bfloat16)
    assert made.far < made.line < 2300
    t = torch.arange(4096)
    exact = functions_in_bits(scale_invariant, t.double(), 128)[0, 0]
    for D in range(made.line, 4096, 16):
        coefficients = made.polynomials[0, 0, (D + 128) // 16].cpu()
        assert not coefficients[2:].any()
        near = t[(t > D - 128) & (t < D + 128)]
        error = (polynomial(coefficients[None], 1, near - D, 0)[0] - exact[near]).abs()
        assert (error <= TOLERANCE[torch.bfloat16] * (1 + exact[near])).all()
    assert made.polynomials[0, 0, (made.line + 128) // 16 - 1, 2:].any()


@pytest.mark.parametrize("queries, q_offset", [(70, 1530), (1, 1599), (50, 1507)])
def test_far_tiles_of_the_paper_s_method(queries, q_offset, tiles):
    tiles((128, 128), (128, 128), (128, 128))
    method = make("scale_invariant_nope", 1).to(DEVICE)
    exact = random_inputs(1, queries, 16, keys=1600)
    inputs = cast(exact, torch.float32)
    moved = [x.to(DEVICE) for x in inputs]
    plan = make_plan(method, queries, 1600, q_offset=q_offset, device=DEVICE, backend="triton")
    assert plan.prepared.far < q_offset
    output = attend(method, *moved, plan=plan)
    expected = formula_attention(scale_invariant, *exact, q_offset)
    assert_same_function(output.cpu(), inputs, expected, exact, 1e-5)


def test_a_table_in_place_of_polynomials_gives_the_same(tiles):
    tiles((64, 64), (64, 64), (64, 64))
    made = coefficients_of(smooth, 1, 16, 300)
    check(smooth, random_inputs(1, 300, 16), coefficients=dataclasses.replace(made, far=NOWHERE, line=NOWHERE))


# ---- repeatable -----------------------------------------------------------------------------------------------------


def test_forward_and_backward_repeat_bit_by_bit():
    inputs = [x.to(DEVICE) for x in cast(random_inputs(4, 140, 32), torch.float32)]
    made = coefficients_of(scale_invariant, 4, 32, 140)
    runs = []
    for _ in range(2 if DEVICE == "cpu" else 20):
        output = flash_attention(*inputs, made)
        runs.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    assert all(torch.equal(x, first) for run in runs for x, first in zip(run, runs[0], strict=True))


# ---- machine code ----------------------------------------------------------------------------------------------------

# arguments, each: arch, dtype, head_dim, method, options
COMPILE = """
import dataclasses, re, sys, torch
from model.attention.triton import flash
from model.attention.triton.distance import make_coefficients
from model.methods import make_method
from tests.machine_code import compile_launch, count, flash_launches, innermost_loops

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
            atomic = bool(re.search(r"\\b(atom|red)\\.", ptx))
            print(case, role, atomic, f"sm_{arch}" in ptx, max(spills, default=0) < 1)
"""
COMPILED = [
    "80, float32, 20, 'scale_invariant_nope', {'learn_tau': True}",
    "80, float16, 64, 'alibi', {}",
    "90, bfloat16, 128, 'scale_invariant_nope', {}",
    "90, bfloat16, 128, 'scale_invariant+forget', {}",
    "90, bfloat16, 128, 'rope+window', {'window': 130}",
]


def test_the_kernels_compile_for_gpus_without_atomics_or_spills():
    """Spills: less than one instruction a logit, of 10 to 25 of all kinds; versions of Triton differ in them."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = subprocess.run([sys.executable, "-c", COMPILE, *COMPILED], cwd=ROOT, env=env, capture_output=True, text=True)
    assert code.stdout.splitlines() == [f"{c} {role} False True True" for c in COMPILED for role in ROLES], code.stderr


# ---- low precision ---------------------------------------------------------------------------------------------------


def dense_low_precision(formula, q, k, v, do, dtype):
    """Output, dq, dk, dv as a dense computation has them: products in float32 of numbers of that dtype."""
    def rounded(x):
        return x.to(dtype).float()
    num_heads, T, head_dim = q.shape[1:]
    t = torch.arange(T)[:, None] - torch.arange(T)
    a, m = (1.0, 0.0) if formula is None else formula(t.clamp(min=0).double(), torch.arange(num_heads)[:, None, None])
    logits = (a * (q @ k.mT) / math.sqrt(head_dim) + m).float().masked_fill(t < 0, -math.inf)
    p = logits.softmax(dim=-1)
    o = rounded(rounded(p) @ v)
    ds = p * (do @ v.mT - (o * do).sum(dim=-1, keepdim=True))
    ds = rounded(ds * a / math.sqrt(head_dim))
    return o, rounded(ds @ k), rounded(ds.mT @ q), rounded(rounded(p).mT @ do)


@pytest.mark.parametrize("heads, length, head_dim, scale", [(1, 200, 64, 1), (1, 150, 128, 3), (2, 66, 20, 1)])
@pytest.mark.parametrize("formula", [None, alibi, scale_invariant, parabola, smooth, rough])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=needs_cuda)])
def test_low_precision_is_as_good_as_dense(dtype, formula, heads, length, head_dim, scale):
    """Relative Frobenius errors of output, dq, dk, dv: at most 1.5 times those of the dense computation."""
    exact = [x.detach().to(dtype) for x in random_inputs(heads, length, head_dim, seed=length)]
    exact[0] *= scale
    do = random(*exact[0].shape, seed=4).to(dtype)
    inputs = [x.clone().to(DEVICE).requires_grad_() for x in exact]
    output = flash_attention(*inputs, coefficients_of(formula, heads, head_dim, length, dtype=dtype))
    assert output.dtype == dtype
    ours = [output, *torch.autograd.grad(output, inputs, do.to(DEVICE))]
    dense = dense_low_precision(formula, *(x.float() for x in (*exact, do)), dtype)
    exact = cast(exact, torch.float64)
    truth = formula_attention(formula, *exact)
    truth = [truth, *torch.autograd.grad(truth, exact, do.double())]
    for name, x, plain, true in zip(("o", "dq", "dk", "dv"), ours, dense, truth, strict=True):
        assert (x.cpu() - true).norm() <= 1.5 * (plain - true).norm(), name


# ---- learned tau -----------------------------------------------------------------------------------------------------


def learned_method(num_heads, name="scale_invariant_p_rope"):
    method = make(name, num_heads, learn_tau=True)
    torch.nn.init.normal_(method.score_change.log_tau, 1.0, 1.0, generator=torch.Generator().manual_seed(0))
    return method


def check_learned(run, backend, q_offset=0, num_heads=3, length=40):
    """Values, and gradients of q, k, v and of each head's log(tau), by float64 autograd through the formula."""
    method = learned_method(num_heads)
    (log_tau,) = method.parameters()
    exact = random_inputs(num_heads, length, 16, batch=2)
    learned = log_tau.detach().double().requires_grad_()
    expected = reference.attend(method.name, *exact, train_length=64, learn_tau=True, learned=learned)[:, :, q_offset:]
    q, k, v = inputs = cast(exact, torch.float32)
    moved = [x.to(DEVICE) for x in (q[:, :, q_offset:], k, v)]
    output = run(method.to(DEVICE), *moved, q_offset=q_offset, backend=backend).cpu()
    assert_same_function(output, [*inputs, log_tau], expected, [*exact, learned], 1e-5)


@pytest.mark.parametrize("q_offset", [0, 1, 39])
@pytest.mark.parametrize("backend", ["triton", "blocks", "auto"])
def test_learned_tau(backend, q_offset, small):
    check_learned(attend, backend, q_offset)


@pytest.mark.parametrize("backend", ["triton", "blocks"])
def test_learned_tau_compiled(backend, small):
    """With a plan, as in training, made once; the coefficients are made anew in the graph."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)

    def run(method, q, k, v, q_offset, backend):
        plan = make_plan(method, q.shape[2], k.shape[2], q_offset=q_offset, device=DEVICE, backend=backend)
        return compiled(method, q, k, v, plan=plan)

    check_learned(run, backend, q_offset=3)


def test_learned_tau_in_the_plain_form():
    """The plain form is what the backends are held to elsewhere: its gradient is held to reference.py here."""
    check_learned(lambda method, *inputs, q_offset, backend: plain_attention(method.cpu(), *(x.cpu() for x in inputs)),
                  None)


def test_learned_tau_of_two_functions(small):
    """A researcher's own: a_t = 1, m_t = -slope_h t with learned slopes."""
    class Slopes(ScoreChange):
        def __init__(self):
            super().__init__()
            self.log_slope = torch.nn.Parameter(torch.tensor([-1.0, -3.0]))

        def coefficients(self, distance, head):
            return 1.0, -torch.exp(self.log_slope[head].to(distance.dtype)) * distance

    change = Slopes()
    slope = change.log_slope.detach().double().requires_grad_()
    exact = random_inputs(2, 50, 16)
    expected = formula_attention(lambda t, h: (1.0, -torch.exp(slope[h]) * t), *exact)
    inputs = cast(exact, torch.float32)
    made = make_coefficients(change.to(DEVICE), 2, 16, 50, 0, torch.float32, DEVICE)
    output = flash_attention(*(x.to(DEVICE) for x in inputs), made).cpu()
    assert_same_function(output, [*inputs, change.log_slope], expected, [*exact, slope], 1e-5)


def test_a_gpt_of_learned_tau_has_the_same_gradients_on_both_backends(small):
    torch.manual_seed(0)
    model = GPT(vocab_size=50, num_layers=2, num_heads=2, model_dim=32, train_length=64,
                method="scale_invariant_p_rope", method_options=dict(learn_tau=True))
    for parameter in model.parameters():  # output projections start at 0, where nothing before them has a gradient
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    model.to(DEVICE)
    tokens = torch.randint(50, (2, 41), device=DEVICE)
    losses, grads = [], []
    for backend in ("blocks", "triton"):
        loss = model(tokens[:, :-1], tokens[:, 1:], plan=model.plan(40, backend=backend))
        losses.append(loss)
        grads.append(dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())))))
    assert_near(losses[1], losses[0], 1e-5)
    for name, expected in grads[0].items():
        assert expected.abs().min() > 0 or "log_tau" not in name
        assert_near(grads[1][name], expected, 1e-5)


# ---- the backend -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_attend_by_the_kernel_is_the_reference(name, small):
    method = make(name, 2).to(DEVICE)
    learned = next((p.detach().cpu().double() for p in method.parameters()), None)
    exact = random_inputs(2, 33, 16)
    expected = reference.attend(name, *exact, train_length=64, learned=learned)
    inputs = cast(exact, torch.float32)
    output = attend(method, *(x.to(DEVICE) for x in inputs), backend="triton").cpu()
    assert_same_function(output, inputs, expected, exact, 1e-5)


@pytest.mark.parametrize("learn_tau", [True, False])
def test_opcheck(learn_tau, small):
    method = learned_method(2) if learn_tau else make("scale_invariant_nope", 2)
    made = make_coefficients(method.to(DEVICE).score_change, 2, 16, 20, 0, torch.float32, DEVICE)
    inputs = [x.to(DEVICE).detach().requires_grad_() for x in cast(random_inputs(2, 20, 16), torch.float32)]
    functions = made.table, made.polynomials, made.tangent, list(made.degrees), made.far, made.line, 0, 0
    torch.library.opcheck(flash.forward_op, (*inputs, made.parameter, None, None, *functions))
    output, lse = flash.forward_op(*inputs, made.parameter, None, None, *functions)
    arguments = [x.detach() for x in (torch.ones_like(output), *inputs, output, lse)]
    torch.library.opcheck(flash.backward_op, (*arguments, None, None, *functions))


# ---- refusals --------------------------------------------------------------------------------------------------------


def shapes_and_words():
    q = (2, 6, 5, 16)
    return [
        (q, (2, 3, 5, 16), (2, 3, 5, 16), "2, 3, 5, 16"),
        (q, (2, 6, 5, 16), (2, 6, 4, 16), "4, 16"),
        (q, (1, 6, 5, 16), (1, 6, 5, 16), "1, 6, 5, 16"),
        (q, (2, 6, 5, 32), (2, 6, 5, 32), "5, 32"),
        (q, (2, 6, 5, 16), (2, 6, 5, 32), "5, 32"),
        (q, (2, 6, 4, 16), (2, 6, 4, 16), "4 keys"),
        ((6, 5, 16), (6, 5, 16), (6, 5, 16), "6, 5, 16"),
        ((1, 1, 5, 257), (1, 1, 5, 257), (1, 1, 5, 257), "257"),
        ((1, 1, 5, 0), (1, 1, 5, 0), (1, 1, 5, 0), "0"),
    ]


def zeros(*shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in shapes]


@pytest.mark.parametrize("q, k, v, word", shapes_and_words())
def test_shapes_that_do_not_fit_are_refused(q, k, v, word):
    with assert_refused(word):
        flash_attention(*zeros(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64])
def test_other_dtypes_are_refused(dtype):
    with assert_refused(str(dtype).removeprefix("torch.")):
        flash_attention(*zeros(*[(1, 1, 5, 16)] * 3, dtype=dtype))


@pytest.mark.parametrize("which", range(3))
def test_mixed_dtypes_are_refused(which):
    inputs = zeros(*[(1, 1, 5, 16)] * 3)
    inputs[which] = inputs[which].half()
    with assert_refused("float32", "float16"):
        flash_attention(*inputs)


@pytest.mark.parametrize("queries, q_offset", [(5, 1), (1, 5), (3, 3), (5, -1)])
def test_offsets_out_of_range_are_refused(queries, q_offset):
    with assert_refused(f"{queries} queries from position {q_offset}"):
        flash_attention(*zeros((1, 1, queries, 16), *[(1, 1, 5, 16)] * 2), q_offset=q_offset)


@pytest.mark.parametrize("heads, keys, word", [(3, 20, "3 heads"), (6, 19, "20 keys")])
def test_coefficients_of_other_heads_or_fewer_keys_are_refused(heads, keys, word):
    with assert_refused("coefficients", word):
        flash_attention(*zeros(*[(1, 6, 20, 16)] * 3), coefficients_of(alibi, heads, 16, keys))


def test_more_positions_than_an_int32_holds_are_refused():
    """Expanded tensors: one number in memory."""
    q, kv = (torch.zeros(1, 1, 1, 1, device=DEVICE).expand(1, 1, n, 16) for n in (5, 2**30 + 1))
    with assert_refused(str(2**30 + 1)):
        flash_attention(q, kv, kv)
    for backend in ("auto", "triton"):
        with assert_refused(str(2**30 + 1)):
            make_plan(make("scale_invariant_nope"), 5, 2**30 + 1, device=DEVICE, backend=backend)


class Learned(ScoreChange):
    def __init__(self, *sizes):
        super().__init__()
        self.learned = torch.nn.ParameterList(torch.zeros(size) for size in sizes)

    def coefficients(self, distance, head):
        return 1.0, -sum(p.sum() for p in self.learned) * distance


@pytest.mark.parametrize("sizes", [(6, 6), (1,), (12,), (6, 1)])
def test_a_change_of_other_than_one_learned_number_a_head_is_refused(sizes):
    change = Learned(*sizes)
    method = Method("mine", 6, 16, 64, [change])
    with assert_refused("one learned number a head", "mine", "auto"):
        make_plan(method, 5, 5, device=DEVICE, backend="triton")
    backend, why = choose_backend(method, torch.device("cuda"))
    assert backend == "flex"


ON_A_CPU = """
import torch
from model.attention import make_plan
from model.attention.triton.flash import flash_attention
from model.methods import make_method

method = make_method("scale_invariant_nope", num_heads=2, head_dim=16, train_length=64)
for run in (lambda: flash_attention(*torch.zeros(3, 1, 2, 5, 16)), lambda: make_plan(method, 5, 5, backend="triton")):
    try:
        run()
    except ValueError as error:
        print(error)
"""


def test_a_cpu_without_the_interpreter_is_refused():
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    output = subprocess.run([sys.executable, "-c", ON_A_CPU], cwd=ROOT, env=env, capture_output=True, text=True)
    lines = output.stdout.splitlines()
    assert len(lines) == 2 and all("TRITON_INTERPRET=1" in line and "not on cpu" in line for line in lines), output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=needs_cuda)])
@pytest.mark.parametrize("name", ["alibi", "scale_invariant_p_rope"])
def test_the_check_before_use_passes(name, dtype, small):
    with torch.inference_mode():  # as when decoding
        assert check_backend(triton, make(name, 2, 16), torch.device(DEVICE), dtype, [70]) is None


def test_a_kernel_that_is_wrong_or_fails_is_not_used(small, monkeypatch):
    arguments = triton, make("scale_invariant_nope", 2, 16), torch.device(DEVICE), torch.float32
    with monkeypatch.context() as patch:
        patch.setattr(flash, "LOG2E", 1.44)
        assert "times the allowed error" in check_backend(*arguments, [40])
    monkeypatch.setattr(flash, "choose_tiles", lambda *args: 1 / 0)
    assert "check with ZeroDivisionError: division by zero" in check_backend(*arguments, [40])


def test_coefficients_for_another_offset_are_refused():
    q, k, v = (x.float().to(DEVICE) for x in random_inputs(2, 5, 16, keys=40))
    coefficients = coefficients_of(scale_invariant, 2, 16, 40, q_offset=16)
    flash_attention(q, k, v, coefficients, q_offset=32)
    with assert_refused("coefficients", "offset", "33"):
        flash_attention(q, k, v, coefficients, q_offset=33)

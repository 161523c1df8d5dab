"""Our Triton attention kernel against its formula in float64: all tiles, key biases, windows, sinks, machine code.

With a GPU the kernels are compiled; without one they run in Triton's interpreter (conftest.py). test_attention.py and
test_check.py run whole methods. This file has lengths, functions and tiles that no method of ours has.
"""

import math
import os
import subprocess
import sys

import pytest
import reference
import torch
from attention_cases import GivenBias, Plain, assert_near, check, make_case, make_inputs, random
from commands import ROOT

pytest.importorskip("triton")

from model.attention import attend, make_plan, triton  # noqa: E402
from model.attention.base import extra_logits  # noqa: E402
from model.attention.reference import plain_attention  # noqa: E402
from model.attention.triton import flash  # noqa: E402
from model.attention.triton.flash import Tiles  # noqa: E402
from model.methods.base import Method  # noqa: E402
from model.methods.sink import LearnedSink  # noqa: E402
from model.methods.window import SlidingWindow  # noqa: E402

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROLES = ("forward", "query_gradient", "key_gradient")


def scale_invariant(t, h):
    return reference.scale_invariant(t)


def smooth(t, h):
    """m is not 1 - a^2, and both depend on the head."""
    return 1 + 0.1 * h + 0.3 * (t / 400) ** 2, -t / 200 - (t / 500) ** 3 / (h + 1)


def rough(t, h):
    return 1 + 0.3 * (t % 7 == 2), -(t % 5) / (3 + h)


def constant(t, h):
    return 1.5, 0 * t


def make(formula, window=None, extras="", num_heads=2, head_dim=16):
    """Return the method of a formula a, m. extras: b for key biases, s for a sink."""
    shape = dict(num_heads=num_heads, head_dim=head_dim, train_length=64)
    mechanisms = [] if formula is None else [Plain(formula)]
    mechanisms += [SlidingWindow(**shape, window=window)] if window else []
    mechanisms += [GivenBias(**shape)] * ("b" in extras) + [LearnedSink(**shape, sink_init=0.7)] * ("s" in extras)
    return Method("mine", **shape, mechanisms=mechanisms).to(DEVICE)


def check_kernel(method, length, **options):
    check("triton", method, length, device=DEVICE, **options)


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


@pytest.mark.parametrize("formula, extras, window", [
    (smooth, "", None), (rough, "", None), (constant, "", None), (None, "b", None), (None, "s", None),
    (scale_invariant, "bs", 21), (smooth, "bs", 21), (rough, "bs", 21), (smooth, "", 1), (smooth, "bs", 10**9),
    *((None, "", window) for window in (1, 15, 16, 17, 33, 49, 50)),
])
def test_formulas_biases_sinks_and_windows(formula, extras, window, small):
    """Tiles of 16 and 32: with windows of 21, some tiles are cut on both sides."""
    check_kernel(make(formula, window, extras), 50)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 64, 65])
def test_lengths_near_the_size_of_a_tile(length, small):
    check_kernel(make(smooth, num_heads=1), length, batch=1)
    check_kernel(make(scale_invariant, 7, "bs", num_heads=3), length)


@pytest.mark.parametrize("shape, window", [((16, 16), None), ((64, 16), 65), ((16, 64), 1), ((128, 128), 40)])
def test_tile_shapes(shape, window, tiles):
    tiles(shape, shape, shape)
    check_kernel(make(scale_invariant, window, num_heads=1), 130, batch=1)


@pytest.mark.parametrize("head_dim", [1, 16, 20, 64, 128, 256])
def test_head_dimensions_in_the_tiles_of_the_code(head_dim):
    check_kernel(make(smooth, num_heads=1, head_dim=head_dim), 66, batch=1)


@pytest.mark.parametrize("queries", [1, 3, 20, 33, 53])
@pytest.mark.parametrize("window", [None, 20, 45])
def test_the_last_queries(queries, window, small):
    """Some keys come before the window of the first query, so no query sees them."""
    check_kernel(make(scale_invariant, window, "s"), 70, queries=queries)


def test_the_last_queries_with_key_biases(small):
    method = make(scale_invariant, 45, "b")
    q, k, v, x = (y.detach() for y in make_inputs(method, 70, device=DEVICE))
    plan = make_plan(method, 20, 70, q_offset=50, backend="triton", device=DEVICE)
    more = extra_logits(method, method.of_tokens(x))
    output = triton.run(q[:, :, 50:], k, v, q_offset=50, prepared=plan.prepared, **more)
    assert_near(output, plain_attention(method, q, k, v, x=x)[:, :, 50:], 1e-5)


@pytest.mark.parametrize("formula", [None, scale_invariant, smooth])
def test_large_logits(formula, small):
    """A float32 logit L has an error of up to 2^-24 |L|. Its probability has the same relative error."""
    method = make(formula)
    q, k, v, x = make_inputs(method, 70, device=DEVICE)
    largest = (900 * q @ k.mT).abs().max().item() / 4
    inputs = [y.detach().requires_grad_() for y in (30 * q, 30 * k, v, x)]
    check_kernel(method, 70, inputs=inputs, tolerance=8 * 2**-24 * largest)


@pytest.mark.parametrize("shift", [-2000, 2000])
def test_a_large_constant_in_m_changes_nothing_but_rounding(shift, small):
    """Rows beyond the end of a tile would overflow, were they not left out."""
    check_kernel(make(lambda t, h: (1.0, shift - t / 50)), 40, tolerance=8 * 2**-24 * abs(shift))


@pytest.mark.parametrize("logit", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("formula", [None, scale_invariant])
def test_sinks_of_any_size(formula, logit, small):
    method = make(formula, 19, "s")
    method.sink.logit.data.fill_(logit)
    check_kernel(method, 40)


def test_tiles_outside_of_the_window_are_not_read(small):
    """Keys and values of tiles that no query sees are NaN."""
    method = make(None, 25, num_heads=1)
    q, k, v, _ = (y.detach() for y in make_inputs(method, 200, device=DEVICE))
    expected = plain_attention(method, q, k, v)[:, :, 168:]
    hidden = (torch.arange(200) < 128).view(-1, 1)  # the first that is seen is 144, in a tile from 128 on
    inputs = [x.requires_grad_() for x in (q[:, :, 168:], *(x.masked_fill(hidden, math.nan) for x in (k, v)))]
    output = attend(method, *inputs, q_offset=168, backend="triton")
    assert_near(output, expected, 1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(output.sum(), inputs))


@pytest.mark.parametrize("extras", ["b", "bs"])
def test_sums_of_the_gradients_of_many_biases_are_right_in_low_precision(extras, small):
    """Forgetting attention sums them up. The rounding of the output would be most of such a sum."""
    method = make(None, extras=extras)
    q, k, v, _ = (y.detach().half() for y in make_inputs(method, 300, batch=1, device=DEVICE))
    v = v + 8  # the gradients do not see the 8, but the output is rounded by more
    x = (0.3 * torch.arange(300.0, device=DEVICE)).view(1, -1, 1).expand(1, 300, 32).clone().requires_grad_()
    weight = random(1, 2, 300, 16, seed=9).to(DEVICE)
    truth, ours = (
        torch.autograd.grad((output * weight).sum(), x)[0][..., :2].double().cumsum(dim=1)
        for output in (plain_attention(method, q, k, v, x=x), attend(method, q, k, v, x=x, backend="triton"))
    )
    assert (ours - truth).abs().max() < 0.01 * truth.abs().max()


def test_compiled_with_a_learned_function(small):
    """The plan is made once, as in training. The graph computes the tables anew in each pass."""
    torch._dynamo.reset()
    check_kernel(make_case("learned").to(DEVICE), 50, run=torch.compile(attend, fullgraph=True, dynamic=False))


def test_forward_and_backward_repeat_bit_by_bit():
    method, runs = make(scale_invariant, head_dim=32), []
    *inputs, _ = make_inputs(method, 140, device=DEVICE)
    for _ in range(2 if DEVICE == "cpu" else 20):
        output = attend(method, *inputs, backend="triton")
        runs.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    assert all(torch.equal(x, first) for run in runs for x, first in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("name", ["learned", "alibi"])
def test_the_operations_keep_torch_s_rules(name, small):
    method = make_case(name).to(DEVICE)
    *inputs, _ = make_inputs(method, 20, device=DEVICE)
    plan = make_plan(method, 20, 20, backend="triton", device=DEVICE)
    tables = triton.prepare(method.score_change, plan)
    extras = [random(*shape, seed=50).float().to(DEVICE).requires_grad_() for shape in ((2, 3, 20), (3,))]
    functions = tables.functions, tables.tangent, 7, 0
    torch.library.opcheck(flash.forward_op, (*inputs, tables.parameter, *extras, *functions))
    output, lse = flash.forward_op(*inputs, tables.parameter, *extras, *functions)
    arguments = [x.detach() for x in (torch.ones_like(output), *inputs, lse, torch.ones_like(lse), *extras)]
    torch.library.opcheck(flash.backward_op, (*arguments, *functions))


@pytest.mark.parametrize("device, dtype, head_dim", [
    ("cuda", torch.float64, 64), ("cuda", torch.int32, 64), ("cuda", torch.float32, 257), ("xpu", torch.float32, 64),
])
def test_devices_and_dtypes_that_it_cannot_run_are_named(device, dtype, head_dim, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert triton.unsupported(make(None, head_dim=head_dim), torch.device(device), dtype) is not None


COMPILE = """
import re, sys, torch
from model.methods import make_method
from tests.machine_code import compile_launch, count, flash_launches, innermost_loops

for case in sys.argv[1:]:
    arch, dtype, head_dim, name, options = eval(case, vars(torch))
    method = make_method(name, num_heads=2, head_dim=head_dim, train_length=64, **options)
    for kernel, launch in flash_launches(method, 304, head_dim, dtype).items():
        binary, listing = compile_launch(launch, arch)
        logits = launch.constants["QUERIES"] * launch.constants["KEYS"] / (32 * launch.options["num_warps"])
        spills = [count(loop, "LDL", "STL") / logits for loop in innermost_loops(listing, "MMA")]
        print(case, kernel, bool(re.search(r"\\b(atom|red)\\.", binary.asm["ptx"])), max(spills, default=0) < 1)
"""
CASES = [  # arch, dtype, head_dim, method, options
    "80, float32, 20, 'scale_invariant_nope', {'learn_tau': True}", "80, float16, 64, 'alibi', {}",
    "90, bfloat16, 128, 'scale_invariant_nope', {}", "90, bfloat16, 128, 'scale_invariant+forget', {}",
    "90, bfloat16, 128, 'rope+window', {'window': 130}",
]


def test_the_kernels_compile_for_gpus_without_atomics_or_spills():
    """Spills: less than one instruction a logit, of 10 to 25 of all kinds."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = subprocess.run([sys.executable, "-c", COMPILE, *CASES], cwd=ROOT, env=env, capture_output=True, text=True)
    expected = [f"{case} {role}_kernel False True" for case in CASES for role in ROLES]
    assert code.stdout.splitlines() == expected, code.stderr

"""Every backend against the formula in float64: values, gradients, awkward lengths and layouts; choice and refusals."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import reference
import torch
from attention_cases import CPU, CUDA, LAYOUTS, MECHANISMS, assert_near, backend_runs, check, make_case, make_inputs
from torch.nn.attention import SDPBackend
from torch.nn.attention import flex_attention as torch_flex

from model.attention import AUTOMATIC, BACKENDS, attend, blocks, choose_backend, flex, make_plan
from model.attention.base import MAX_LENGTH
from model.attention.sdpa import ORDER, chosen_kernel
from model.gpt import GPT
from model.methods import MECHANISMS as MECHANISMS_BY_NAME
from model.methods.base import ScoreChange

ROOT = Path(__file__).parents[1]
FAST = ("blocks", "cpu", "sdpa")  # the others are traced or interpreted
SLOW = ("flex", "flex_flash", "triton")


@pytest.fixture
def flex_with_gradients(monkeypatch):
    """FlexAttention's own formula with our score_mod and mask, whose gradients on a CPU torch refuses to give."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    traced = torch.compile(torch_flex.flex_attention, backend="eager", dynamic=False, fullgraph=True)

    def run(q, k, v, *, q_offset=0, prepared, key_bias=None, sink=None):
        arguments = {name: x for name, x in prepared.items() if name != "kernel_options"}
        output = traced(q, k, v, **flex.add_extras(arguments, key_bias, sink))
        return output if sink is None else flex.add_sink(*output, sink)

    for name in ("flex", "flex_flash"):
        monkeypatch.setitem(BACKENDS, name, SimpleNamespace(
            unsupported=lambda *_: None, prepare=BACKENDS[name].prepare, run=run,
        ))
    with torch._dynamo.config.patch(recompile_limit=1000):
        yield


@pytest.fixture
def small_tiles(monkeypatch):
    pytest.importorskip("triton")
    from model.attention.triton import flash

    tiles = {role: flash.Tiles(*shape, 4, 1) for role, shape in
             dict(forward=(32, 16), query_gradient=(16, 32), key_gradient=(32, 16)).items()}
    monkeypatch.setattr(flash, "choose_tiles", lambda *args: tiles)


def can_run(backend, name):
    """Whether it can by what it says, or, for those that are patched here, by what it says on a GPU."""
    method = make_case(name, head_dim=16)
    if backend == "flex_flash":  # it says so of a GPU with its package only
        return name in ("nope", "rope", "logn", "alibi", "scale_invariant", "by_head", "for_all_heads", "window")
    return backend == "flex" or backend_runs(backend, method)


CASES = [pytest.param(backend, name, marks=[pytest.mark.slow] if backend in SLOW else [])
         for backend in (*FAST, *SLOW) for name in MECHANISMS
         if (backend == "triton" and name != "learned_numbers") or (backend != "triton" and can_run(backend, name))]


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend, name", CASES)
def test_values_and_gradients_are_the_formula_s(backend, name, flex_with_gradients, small_tiles):
    if backend == "triton" and not backend_runs(backend, make_case(name)):
        pytest.skip("Triton's interpreter is off")
    lengths = dict(flex=(1, 140), flex_flash=(1, 140), triton=(1, 50)).get(backend, (1, 2, 127, 128, 129, 300))
    for length in lengths:
        check(backend, make_case(name), length, weigh_output=1.0)


@pytest.mark.parametrize("backend, name", CASES)
def test_the_last_queries_alone_are_the_formula_s(backend, name, flex_with_gradients, small_tiles):
    if make_case(name).needs_input:
        pytest.skip("all tokens are queries")
    for queries in (1, 17) if backend in SLOW else (1, 17, 130):
        check(backend, make_case(name), 60 if backend == "triton" else 300, queries=queries)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["blocks", "cpu", pytest.param("triton", marks=pytest.mark.slow)])
def test_any_layout_in_memory(backend, layout, small_tiles):
    method = make_case("scale_invariant")
    if not backend_runs(backend, method):
        pytest.skip("it cannot run here")
    check(backend, method, 33, layout=layout)


@pytest.mark.parametrize("name", MECHANISMS)
def test_gradients_of_recomputed_blocks(name, monkeypatch):
    monkeypatch.setattr(blocks, "RECOMPUTE_LENGTH", 1)
    check("blocks", make_case(name), 300)


@pytest.mark.parametrize("name, recompute_length", [("scale_invariant", 1), ("logn", 4096), ("all", 4096)])
def test_gradients_of_traced_blocks(name, recompute_length, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(blocks, "RECOMPUTE_LENGTH", recompute_length)
    check("blocks", make_case(name), 150, run=torch.compile(attend, backend="aot_eager", dynamic=False, fullgraph=True))


@pytest.mark.slow
def test_gradients_of_compiled_attention():
    """By the automatic choice: the C++ kernel, where it can run, is one operation of the graph."""
    torch._dynamo.reset()
    check("auto", make_case("all"), 150, run=torch.compile(attend, dynamic=False, fullgraph=True))


@pytest.mark.parametrize("name", ["nope", "scale_invariant", "all"])
def test_bfloat16_is_as_good_as_its_rounding(name):
    method = make_case(name)
    inputs = make_inputs(method, 129, dtype=torch.bfloat16)
    output = attend(method, *inputs[:3], x=inputs[3])
    expected = attend(method, *(y.double() for y in inputs[:3]), x=inputs[3].double())
    assert output.dtype == torch.bfloat16 and (output - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("backend", ["blocks", "cpu", "sdpa"])
def test_a_replacement_takes_the_softmax_of_any_backend(backend):
    """Infini-attention by this backend is the same in float64, which test_methods holds to reference.py."""
    method = make_case("infini")
    if not backend_runs(backend, method):
        pytest.skip("it cannot run here")
    q, k, v, _ = make_inputs(method, 170)
    output = attend(method, q, k, v, backend=backend)
    assert_near(output, attend(method, q.double(), k.double(), v.double()), 1e-5)


TRAIN_AT_4096 = """
import resource, sys, torch
from model.attention import attend
from model.methods import make_method

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

def train(length):
    method = make_method("scale_invariant_p_rope", num_heads=4, head_dim=16, train_length=4096)
    inputs = (torch.randn(1, 4, length, 16, requires_grad=True) for _ in range(3))
    attend(method, *inputs, backend=sys.argv[1]).sum().backward()

train(128)
before = peak()
train(4096)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "blocks"])
def test_training_at_4096_tokens_never_holds_all_pairs(backend):
    """4 heads x 4096 x 4096 float32 are 256 MiB; the causal half of them, 128 MiB."""
    env = os.environ | dict(MALLOC_MMAP_THRESHOLD_="65536")  # freed memory goes back at once
    mebibytes = float(subprocess.check_output([sys.executable, "-c", TRAIN_AT_4096, backend], cwd=ROOT, env=env))
    assert mebibytes < 80


# ---- which backend ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_auto_on_cuda_is_sdpa_where_the_logits_are_left_alone_and_flex_elsewhere(name, dtype):
    plain = name in ("nope", "rope", "logn")
    assert choose_backend(make_case(name), CUDA, dtype=dtype)[0] == ("sdpa" if plain else "flex")


@pytest.mark.parametrize("name", MECHANISMS)
def test_auto_on_a_cpu_is_its_kernel_where_that_can_run(name):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        expected = "cpu" if backend_runs("cpu", make_case(name), dtype=dtype) else "blocks"
        assert choose_backend(make_case(name), CPU, dtype=dtype)[0] == expected
        assert dtype == torch.float32 or expected == "blocks"


def test_auto_takes_the_next_one_where_a_check_fails(monkeypatch):
    """As without a C compiler, which Inductor needs: plain PyTorch runs, and the plan says why."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("model.attention.check.check_backend_once", lambda *_: "no C compiler")
    backend, why = choose_backend(make_case("alibi"), CUDA, dtype=torch.bfloat16)
    assert backend == "blocks" and "no C compiler" in why
    assert choose_backend(make_case("rope"), CUDA, dtype=torch.bfloat16)[0] == "sdpa"


@pytest.mark.parametrize("backend, name, field", [
    ("flash", "rope", "'flash'"), ("sdpa", "alibi", "sdpa"), ("sdpa", "window", "sdpa"), ("sdpa", "sink", "sdpa"),
    ("sdpa", "key_bias", "sdpa"), ("flex", "infini", "flex"), ("flex", "sink", "flex"), ("flex_flash", "nope", "cpu"),
])
def test_a_backend_that_cannot_run_is_refused(backend, name, field):
    with pytest.raises(ValueError, match=field):
        make_plan(make_case(name), 5, 5, backend=backend)


@pytest.mark.parametrize("queries, keys, options", [
    (0, 5, {}), (5, 5, dict(q_offset=1)), (5, 5, dict(q_offset=-1)), (5, 5, dict(target_length=4)),
    (1, 2**31 + 1, dict(q_offset=2**31)), (5, MAX_LENGTH + 1, dict(backend="cpu")),
    (5, 5, dict(softcap=3.0, backend="cpu")),
])
def test_lengths_and_options_that_do_not_fit_are_refused(queries, keys, options):
    with pytest.raises(ValueError):
        make_plan(make_case("scale_invariant"), queries, keys, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_has_the_same_three_functions(backend):
    """But for key biases and sinks where it refuses these."""
    for function in ("unsupported", "prepare", "run"):
        parameters = list(inspect.signature(getattr(BACKENDS[backend], function)).parameters)
        expected = list(inspect.signature(getattr(blocks, function)).parameters)
        missing = set(expected) - set(parameters)
        assert parameters == [p for p in expected if p not in missing]
        methods = [make_case(kind) for kind in missing]
        assert all(BACKENDS[backend].unsupported(method, CUDA, torch.bfloat16) for method in methods)
    assert {name for names in AUTOMATIC.values() for name in names} < BACKENDS.keys()


def test_the_formula_imports_nothing_of_what_is_held_to_it():
    tree = ast.parse(inspect.getsource(sys.modules["model.attention.reference"]))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"torch", "errors", "model.methods.base"}


@pytest.mark.parametrize("backend", ["blocks", "cpu"])
@pytest.mark.parametrize("name, times", [("scale_invariant", 1), ("learned", 4)])
def test_only_learned_functions_are_prepared_again_in_each_pass(backend, name, times, monkeypatch):
    method, prepared, prepare = make_case(name), [], BACKENDS[backend].prepare
    if not backend_runs(backend, method):
        pytest.skip("it cannot run here")
    monkeypatch.setattr(BACKENDS[backend], "prepare", lambda *args: prepared.append(prepare(*args)) or prepared[-1])
    plan = make_plan(method, 130, 130, backend=backend)
    q, k, v, _ = make_inputs(method, 130)
    outputs = [attend(method, q, k, v, plan=plan) for _ in range(3)]
    assert len(prepared) == times and torch.equal(outputs[0], outputs[2])


# ---- a mechanism of the user's own -----------------------------------------------------------------------------------


class Mine(ScoreChange):
    """a = 1 + h/2, m = -strength sqrt(t)/(h + 1)."""

    def __init__(self, num_heads, head_dim, train_length, strength: float = 0.5):
        super().__init__()
        self.strength = strength

    def coefficients(self, distance, head):
        return 1 + head / 2, -self.strength * distance.sqrt() / (head + 1)


def test_a_score_change_of_one_s_own_is_its_formula_and_trains_in_gpt(monkeypatch):
    monkeypatch.setitem(MECHANISMS_BY_NAME, "mine", Mine)
    torch.manual_seed(0)
    model = GPT(vocab_size=50, num_layers=2, num_heads=3, model_dim=48, train_length=64, method="rope+mine",
                method_options=dict(strength=2.0))
    method = model.blocks[0].attention.method
    q, k, v, _ = make_inputs(method, 150)
    t = (torch.arange(150)[:, None] - torch.arange(150)).double()
    head = torch.arange(3)[:, None, None]
    scores = reference.attention_logits("rope", q.double(), k.double(), train_length=64)
    logits = (1 + head / 2) * scores - 2.0 * t.clamp(min=0).sqrt() / (head + 1)
    assert_near(attend(method, q, k, v), logits.softmax(dim=-1) @ v.double(), 1e-5)
    tokens = torch.randint(50, (2, 151))
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(8):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_the_order_of_torch_s_kernels_stays_when_it_has_chosen_once():
    """On CUDA torch sets its own order at its first choice; ours is set after that (prefer_fast_sdpa)."""
    before = torch._C._get_sdp_priority_order()
    try:
        for order in (ORDER, ORDER[::-1]):
            torch._C._set_sdp_priority_order([int(kernel) for kernel in order])
            name = chosen_kernel(CPU, torch.float32, head_dim=64, length=128)
            assert name in SDPBackend.__members__ and name != "ERROR"
            assert torch._C._get_sdp_priority_order()[:4] == [int(kernel) for kernel in order]
    finally:
        torch._C._set_sdp_priority_order(before)

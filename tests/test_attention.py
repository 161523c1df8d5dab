"""Every backend against the formula in float64: values, gradients, awkward lengths and layouts; choice and refusals."""

import ast
import inspect

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    CPU,
    CUDA,
    LAYOUTS,
    MECHANISMS,
    assert_near,
    attend,
    cast,
    check,
    make_case,
    make_inputs,
    make_plan,
    random_documents,
    skip_unless_runs,
)
from commands import parametrize, refuses, slow, table
from torch.nn.attention import SDPBackend
from torch.nn.attention import flex_attention as torch_flex

from model.attention import attend as attention
from model.attention import blocks, flex, flex_compiled, reference
from model.attention.choose import BACKENDS, choose_backend
from model.attention.plan import MAX_LENGTH
from model.attention.sdpa import ORDER, chosen_kernel
from model.cpu import kernel_problem
from model.query_blocks import QUERY_BLOCK

FAST = ("blocks", "cpu", "sdpa")  # the others are traced
SLOW = ("flex", "flex_flash")


@pytest.fixture
def flex_with_gradients(monkeypatch):
    """FlexAttention's own formula with our score_mod and mask, whose gradients on a CPU torch refuses to give."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    traced = torch.compile(torch_flex.flex_attention, backend="eager", dynamic=False, fullgraph=True)

    def run_traced(q, k, v, prepared):
        return traced(q, k, v, **{name: x for name, x in prepared.items() if name != "kernel_options"})

    monkeypatch.setattr(flex_compiled, "run_alone", run_traced)
    monkeypatch.setattr(flex, "refuse_gradients_on_cpu", lambda *_: None)
    for backend in (flex.Flex, flex.FlexFlash):
        monkeypatch.setattr(backend, "unsupported", lambda *_: None)
    with torch._dynamo.config.patch(recompile_limit=1000):
        yield


def can_run(backend, name):
    """Return whether the backend takes the method. For the backends that this file patches: on a GPU."""
    if backend == "flex_flash":  # it needs a GPU and its package
        return name in "nope rope logn alibi scale_invariant by_head for_all_heads window".split()
    return backend == "flex" or BACKENDS[backend].unsupported(make_case(name), CPU, torch.float32) is None


CASES = [pytest.param(backend, name, marks=[slow] * (backend in SLOW))
         for backend in FAST + SLOW for name in MECHANISMS if can_run(backend, name)]


@parametrize("backend, name", CASES)
def test_values_and_gradients_are_the_formula_s(backend, name, flex_with_gradients):
    for length in (1, 140) if backend in SLOW else (1, 2, 127, 128, 129, 300):
        check(backend, make_case(name), length, weigh_output=1.0)


# A method that looks at the layer's input has its features of all tokens, so all tokens are queries.
WITHOUT_INPUT = [case for case in CASES if not make_case(case.values[1]).needs_input]


@parametrize("backend, name", WITHOUT_INPUT)
def test_the_last_queries_alone_are_the_formula_s(backend, name, flex_with_gradients):
    for queries in (1, 17) if backend in SLOW else (1, 17, 130):
        check(backend, make_case(name), 300, queries=queries)


@parametrize("backend, name", [
    case for case in CASES
    if BACKENDS[case.values[0]].masks_documents and not make_case(case.values[1]).skip_first
])
def test_attention_within_documents_is_the_formula_s(backend, name, flex_with_gradients):
    method = make_case(name)
    for length, queries in ((1, 1), (300, 300), (300, 17)):
        if queries == length or not method.needs_input:
            check(backend, method, length, queries=queries, starts=random_documents(length), weigh_output=1.0)


@parametrize("layout", LAYOUTS)
@parametrize("backend", ["blocks", "cpu"])
def test_any_layout_in_memory(backend, layout):
    method = make_case("scale_invariant")
    skip_unless_runs(backend, method)
    check(backend, method, 33, layout=layout)


@parametrize("name", MECHANISMS)
def test_gradients_of_recomputed_blocks(name, monkeypatch):
    method = make_case(name)
    monkeypatch.setattr(blocks, "RECOMPUTE_LENGTH", 1)
    for queries in (300,) if method.needs_input else (300, 150):
        check("blocks", method, 300, queries=queries)


@parametrize("name, recompute_length", [("scale_invariant", 1), ("logn", 4096), ("all", 4096)])
def test_gradients_of_traced_blocks(name, recompute_length, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(blocks, "RECOMPUTE_LENGTH", recompute_length)
    traced = torch.compile(attention.attend, backend="aot_eager", dynamic=False, fullgraph=True)
    check("blocks", make_case(name), 150, run=traced)


@slow
def test_gradients_of_compiled_attention():
    """The backend is chosen automatically. The C++ kernel, where it can run, is one operation of the graph."""
    torch._dynamo.reset()
    check("auto", make_case("all"), 150, run=torch.compile(attention.attend, dynamic=False, fullgraph=True))


@parametrize("backend", FAST)
def test_a_replacement_takes_the_softmax_of_any_backend(backend):
    """Infini-attention by this backend is the same in float64, which test_methods holds to reference.py."""
    method = make_case("rope | infini segment_length=50")
    skip_unless_runs(backend, method)
    *qkv, _ = make_inputs(method, 170)
    assert_near(attend(method, *qkv, backend=backend), attend(method, *cast(qkv, torch.float64)), 1e-5)


def test_recomputed_blocks_keep_no_weights_for_the_backward_pass(monkeypatch):
    method, sizes = make_case("scale_invariant"), []
    monkeypatch.setattr(blocks, "RECOMPUTE_LENGTH", 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        attend(method, *make_inputs(method, 300, batch=1), backend="blocks")
    assert max(sizes) <= QUERY_BLOCK * 300  # the weights of a block are 3 times as many, one of each head


@parametrize("name", MECHANISMS)
@parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_auto_on_cuda_is_sdpa_where_the_logits_are_left_alone_and_flex_elsewhere(name, dtype):
    plain = name in ("nope", "rope", "logn")
    assert choose_backend(make_case(name), CUDA, dtype)[0].name == ("sdpa" if plain else "flex")


@parametrize("name", MECHANISMS)
def test_auto_on_a_cpu_is_its_kernel_where_that_can_run(name):
    compiles = kernel_problem(CPU, torch.float32) is None
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        runs = compiles and dtype == torch.float32 and not name.startswith("skip_first")
        assert choose_backend(make_case(name), CPU, dtype)[0].name == ("cpu" if runs else "blocks")


def test_cudnn_takes_no_mask(monkeypatch):
    """Its gradient of q is wrong with one; without one it is the fastest kernel."""
    allowed, attention = [], F.scaled_dot_product_attention

    def record(*args, **options):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    for queries in (5, 9):
        check("sdpa", make_case("rope"), 9, queries=queries)
    assert allowed == [False, True]


@table("backend, name, field", """
    flash      | rope       | 'flash'
    sdpa       | alibi      | sdpa
    sdpa       | window     | sdpa.*window
    sdpa       | sink       | sdpa.*sink
    sdpa       | key_bias   | sdpa.*key
    flex       | infini     | flex
    flex       | sink       | flex
    flex_flash | nope       | cpu
    cpu        | skip_first | first key
""")
def test_a_backend_that_cannot_run_is_refused(backend, name, field):
    with refuses(field):
        make_plan(make_case(name), 5, 5, backend=backend)


@parametrize("queries, keys, options", [
    (0, 5, {}),
    (6, 5, {}),
    (5, 5, dict(target_length=4)),
    (5, MAX_LENGTH + 1, dict(backend="cpu")),
])
def test_lengths_and_options_that_do_not_fit_are_refused(queries, keys, options):
    with refuses():
        make_plan(make_case("scale_invariant"), queries, keys, **options)


def test_the_formula_imports_none_of_the_code_under_test():
    tree = ast.parse(inspect.getsource(reference))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"torch", "errors", "model.methods.base", "model.tensors"}


@parametrize("backend", ["blocks", "cpu"])
@parametrize("name, times", [("scale_invariant", 1), ("learned", 4)])
def test_only_learned_functions_are_prepared_again_in_each_pass(backend, name, times, monkeypatch):
    method, prepared, prepare = make_case(name), [], BACKENDS[backend].prepare
    skip_unless_runs(backend, method)
    monkeypatch.setattr(BACKENDS[backend], "prepare", lambda *args: prepared.append(prepare(*args)) or prepared[-1])
    plan, inputs = make_plan(method, 130, 130, backend=backend), make_inputs(method, 130)
    first, _, last = (attention.attend(method, *inputs, plan=plan) for _ in range(3))
    assert len(prepared) == times and torch.equal(first, last)


def test_the_order_of_torch_s_kernels_stays_when_it_has_chosen_once():
    """On CUDA torch sets an order at its first choice. We set ours after it (prefer_fast_sdpa)."""
    before = torch._C._get_sdp_priority_order()
    try:
        for order in (ORDER, ORDER[::-1]):
            numbers = [*map(int, order)]
            torch._C._set_sdp_priority_order(numbers)
            name = chosen_kernel(CPU, torch.float32, head_dim=64, length=128)
            assert name in SDPBackend.__members__ and name != "ERROR"
            assert torch._C._get_sdp_priority_order()[:4] == numbers
    finally:
        torch._C._set_sdp_priority_order(before)

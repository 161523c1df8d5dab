"""The backends of attention against its plain form in float64: values, gradients, memory, and what must be refused."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import reference
import torch
from test_methods import (
    NAMES,
    assert_near,
    assert_refused,
    assert_same_function,
    cast,
    make,
    make_learned,
    random,
    random_qkv,
)
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close

from model.attention import attend, choose_backend, make_plan
from model.backends import BACKENDS, blocks
from model.backends.sdpa import ORDER, chosen_kernel
from model.backends.triton import check_kernel
from model.gpt import GPT, norm
from model.kernels import flex
from model.kernels.cpu import find_problem
from model.kernels.flex import causal_block_mask
from model.methods import MECHANISMS, make_method
from model.methods.base import ScoreChange
from model.reference import plain_attention

SOFTMAX = [name for name in NAMES if not name.startswith("infini")]
CHANGED_SCORE = [name for name in NAMES if name.startswith(("alibi", "scale_invariant"))]
CUDA = torch.device("cuda")
PAIRS = [(backend, name) for backend, names in dict(
    blocks=NAMES,
    sdpa=[name for name in NAMES if name not in CHANGED_SCORE],
    flex=SOFTMAX,
).items() for name in names]
SHAPES = [(3, 1, 1), (2, 6, 2), (1, 8, 127), (2, 3, 128), (1, 6, 129), (2, 2, 300)]  # batch, num_heads, length

every_pair = pytest.mark.parametrize("backend, name", PAIRS)


@pytest.fixture
def nothing_compiled():
    torch._dynamo.reset()


@pytest.fixture
def traced_flex(monkeypatch):
    """FlexAttention compiled without Inductor, whose C++ takes seconds a case: score_mod and mask_mod are the same."""
    compiled = torch.compile(flex_attention, backend="eager", dynamic=False, fullgraph=True)
    monkeypatch.setattr(flex, "compiled_flex", compiled)
    with torch._dynamo.config.patch(recompile_limit=1000):
        yield


def make_case(name, num_heads, length, batch=2, head_dim=16):
    """A method with random parameters, q, k, v in float64, the plain form's output, and its parameter (or None)."""
    options = dict(segment_length=50) if name.startswith("infini") else {}
    method, learned = make_learned(name, num_heads, head_dim, options)
    exact = random_qkv(num_heads, head_dim, length, batch)
    if options:  # which has no plain form
        expected = reference.attend(name, *exact, train_length=method.train_length, learned=learned, **options)
        return method, exact, expected, learned
    return method, exact, plain_attention(method, *exact), next(method.parameters(), None)


def without_gradients(tensors, dtype):
    return [x.detach().to(dtype) for x in tensors]


# ---- values ----------------------------------------------------------------------------------------------------------


@every_pair
def test_backends_are_the_plain_form(backend, name, traced_flex):
    for batch, num_heads, length in SHAPES[1::2] if backend == "flex" else SHAPES:  # tracing takes its time
        method, exact, expected, _ = make_case(name, num_heads, length, batch)
        with torch.no_grad():
            output = attend(method, *without_gradients(exact, torch.float32), backend=backend)
        assert output.dtype == torch.float32
        assert_near(output, expected, 1e-5)


@every_pair
@pytest.mark.parametrize("rows", [1, 130])
def test_the_last_queries_alone_are_those_rows_of_the_plain_form(backend, name, rows, traced_flex):
    method, exact, expected, _ = make_case(name, 6, 300)
    q, k, v = without_gradients(exact, torch.float32)
    with torch.no_grad():
        output = attend(method, q[:, :, -rows:], k, v, q_offset=300 - rows, backend=backend)
    assert_near(output, expected[:, :, -rows:], 1e-5)


@pytest.mark.parametrize("name, rows", [("scale_invariant_p_rope", 129), ("alibi", 1)])
def test_compiled_flex_is_the_plain_form(name, rows, nothing_compiled):
    method, exact, expected, _ = make_case(name, 6, 129)
    q, k, v = without_gradients(exact, torch.float32)
    output = attend(method, q[:, :, -rows:], k, v, q_offset=129 - rows, backend="flex")
    assert_near(output, expected[:, :, -rows:], 1e-5)


@every_pair
def test_bfloat16_output_is_nearly_the_plain_form(backend, name, traced_flex):
    method, exact, _, _ = make_case(name, 6, 129)
    inputs = without_gradients(exact, torch.bfloat16)
    with torch.no_grad():
        output = attend(method, *inputs, backend=backend)
        expected = attend(method, *without_gradients(inputs, torch.float64))
    assert output.dtype == torch.bfloat16
    assert (output - expected).norm() < 0.02 * expected.norm()


# ---- gradients -------------------------------------------------------------------------------------------------------


def check_gradients(name, length, backend="blocks", run=attend):
    method, exact, expected, learned = make_case(name, 3, length)
    inputs = cast(exact, torch.float32)
    output = run(method, *inputs, backend=backend)
    assert_same_function(output, [*inputs, *method.parameters()], expected, [*exact, learned], 2e-5)


@pytest.mark.parametrize("length", [1, 129, 300])
@pytest.mark.parametrize("backend, name", [pair for pair in PAIRS if pair[0] != "flex"])
def test_gradients_are_those_of_the_plain_form(backend, name, length):
    check_gradients(name, length, backend)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_recomputed_blocks_are_those_of_the_plain_form(name, monkeypatch):
    monkeypatch.setattr(blocks, "RECOMPUTE_LENGTH", 1)
    check_gradients(name, 300)


@pytest.mark.parametrize("name, recompute_length", [("scale_invariant_p_rope", 1), ("logn_rope", 4096)])
def test_gradients_of_traced_blocks_are_those_of_the_plain_form(name, recompute_length, monkeypatch, nothing_compiled):
    monkeypatch.setattr(blocks, "RECOMPUTE_LENGTH", recompute_length)
    check_gradients(name, 150, run=torch.compile(attend, backend="aot_eager", dynamic=False, fullgraph=True))


@pytest.mark.slow
def test_gradients_of_compiled_blocks_are_those_of_the_plain_form(nothing_compiled):
    check_gradients("scale_invariant_p_rope", 150, run=torch.compile(attend, dynamic=False, fullgraph=True))


# ---- the causal block mask -------------------------------------------------------------------------------------------

NOTHING, PART, ALL = range(3)


def visible_part(dense, query_block):
    """Of each block of a mask, query_block x 128, the last ones padded with hidden keys: NOTHING, PART or ALL."""
    padded = torch.nn.functional.pad(dense, (0, -dense.shape[1] % 128))
    rows = padded.split(query_block)
    return torch.tensor([[int(block.any()) + int(block.all()) for block in row.split(128, dim=1)] for row in rows])


def stated_part(counts, indices, state):
    """The same from the lists of a BlockMask: block (i, indices[i, n]) has the state for n < counts[i]."""
    part = torch.zeros(indices.shape[-2:], dtype=torch.int64)
    for i, count in enumerate(counts.flatten()):
        part[i, indices[0, 0, i, :count].long()] = state
    return part


@pytest.mark.parametrize("queries, keys, q_offset", [
    (1, 1, 0), (1, 300, 299), (1, 256, 255), (1, 129, 128), (2, 129, 126), (127, 127, 0), (128, 128, 0),
    (129, 129, 0), (128, 256, 128), (128, 257, 129), (100, 400, 250), (300, 1000, 128), (300, 500, 100),
    (513, 640, 127), (640, 640, 0),
])
@pytest.mark.parametrize("query_block", [128, 256])
def test_the_block_mask_is_the_causal_mask(queries, keys, q_offset, query_block):
    mask = causal_block_mask(queries, keys, q_offset, "cpu", query_block)
    dense = torch.ones(queries, keys, dtype=torch.bool).tril(q_offset)
    assert mask.seq_lengths == (queries, keys)
    assert_close(mask.mask_mod(0, 0, torch.arange(queries)[:, None], torch.arange(keys)), dense)
    part = stated_part(mask.kv_num_blocks, mask.kv_indices, PART)
    full = stated_part(mask.full_kv_num_blocks, mask.full_kv_indices, ALL)
    assert_close(part + full, visible_part(dense, query_block))  # a block in both lists would add up to 3


@pytest.mark.parametrize("queries, keys, q_offset", [(300, 300, 0), (300, 500, 100), (1, 300, 299)])
def test_the_block_mask_of_the_backward_pass_is_the_transposed_one(queries, keys, q_offset):
    mask = causal_block_mask(queries, keys, q_offset, "cpu")
    for forward, backward, state in [
        ((mask.kv_num_blocks, mask.kv_indices), (mask.q_num_blocks, mask.q_indices), PART),
        ((mask.full_kv_num_blocks, mask.full_kv_indices), (mask.full_q_num_blocks, mask.full_q_indices), ALL),
    ]:
        assert_close(stated_part(*backward, state), stated_part(*forward, state).T)


# ---- memory ----------------------------------------------------------------------------------------------------------

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
    root = Path(__file__).parent.parent
    env = os.environ | dict(MALLOC_MMAP_THRESHOLD_="65536")  # freed memory goes back at once
    mebibytes = float(subprocess.check_output([sys.executable, "-c", TRAIN_AT_4096, backend], cwd=root, env=env))
    assert mebibytes < 80


# ---- which backend ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_auto_on_cuda_is_sdpa_unless_the_score_changes(name, dtype):
    backend, why = choose_backend(make(name), CUDA, dtype=dtype)
    expected = ("triton", f"sdpa cannot run: {name} changes") if name in CHANGED_SCORE else ("sdpa", "first choice")
    assert backend == expected[0] and expected[1] in why


@pytest.mark.parametrize("name", NAMES)
def test_auto_on_a_cpu_is_its_kernel_where_that_can_run(name):
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_backend(make(name), cpu, dtype=dtype)[0] == ("blocks" if find_problem(cpu, dtype) else "cpu")
    assert choose_backend(make(name), cpu, dtype=torch.float64)[0] == "blocks"


@pytest.mark.parametrize("head_dim, dtype, word", [(260, torch.bfloat16, "260"), (16, torch.float64, "float64")])
@pytest.mark.parametrize("name", CHANGED_SCORE)
def test_auto_on_cuda_is_flex_where_the_kernel_cannot_run(name, head_dim, dtype, word):
    backend, why = choose_backend(make(name, head_dim=head_dim), CUDA, dtype=dtype)
    assert (backend, word in why) == ("flex", True)


def test_auto_on_cuda_is_blocks_where_nothing_can_be_compiled(monkeypatch):
    """As without a C compiler, which Triton and Inductor need: both checks fail then, and plain PyTorch runs."""
    for backend in ("triton", "flex"):
        failed = f"it failed its check with RuntimeError: no C compiler for {backend}"
        monkeypatch.setattr(BACKENDS[backend], "check_on_this_machine", lambda *_, failed=failed: failed)
    backend, why = choose_backend(make("alibi"), CUDA, dtype=torch.bfloat16)
    assert backend == "blocks" and "no C compiler for triton" in why and "no C compiler for flex" in why
    assert choose_backend(make("rope"), CUDA, dtype=torch.bfloat16)[0] == "sdpa"


def test_flex_is_checked_before_its_first_use_on_a_gpu():
    """On a CPU it has no backward pass, and so fails the check that it has to pass on a GPU."""
    flex = BACKENDS["flex"]
    problem = check_kernel(make("alibi"), torch.device("cpu"), torch.float32, 130, flex.prepare, flex.run)
    assert "failed its check with ValueError: FlexAttention has no backward pass on a CPU" in problem


@pytest.mark.parametrize("backend", ["blocks", "cpu"])
def test_the_check_before_first_use_takes_any_backend(backend):
    if reason := BACKENDS[backend].find_problem(make("nope"), torch.device("cpu"), torch.float32):
        pytest.skip(reason)
    functions = BACKENDS[backend].prepare, BACKENDS[backend].run
    assert check_kernel(make("scale_invariant_p_rope"), torch.device("cpu"), torch.float32, 130, *functions) is None


@pytest.mark.parametrize("backend, word", [("auto", "float64"), ("blocks", "asked")])
def test_a_plan_says_why_it_has_its_backend(backend, word):
    plan = make_plan(make("alibi"), 5, 5, dtype=torch.float64, backend=backend)
    assert (plan.backend, word in plan.why) == ("blocks", True)


def test_an_unknown_backend_is_refused():
    with assert_refused("'flash'", "sdpa, triton, flex_flash, flex, cpu, blocks"):
        make_plan(make("rope"), 5, 5, backend="flash")


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_has_the_same_three_functions(backend):
    """But for biases of keys and sinks where it refuses these."""
    methods = dict(key_bias="fox", sink="p_rope+sink")
    problems = {kind: BACKENDS[backend].find_problem(make(name), CUDA, torch.float32) for kind, name in methods.items()}
    refused = {kind for kind, problem in problems.items() if "it has no" in str(problem)}
    for function in ("find_problem", "prepare", "run"):
        parameters = list(inspect.signature(getattr(BACKENDS[backend], function)).parameters)
        missing = set(inspect.signature(getattr(blocks, function)).parameters) - set(parameters)
        assert missing <= refused
        assert parameters == [p for p in inspect.signature(getattr(blocks, function)).parameters if p not in missing]


def test_the_formula_imports_nothing_of_what_is_held_to_it():
    tree = ast.parse(inspect.getsource(sys.modules["model.reference"]))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"torch", "errors", "model.methods.base"}


@pytest.mark.parametrize("backend", ["blocks", "cpu", "flex"])
@pytest.mark.parametrize("options, times", [({}, 1), (dict(learn_tau=True), 4)])
def test_only_what_is_learned_is_prepared_again_in_each_pass(backend, options, times, traced_flex, monkeypatch):
    if reason := BACKENDS[backend].find_problem(make("nope"), torch.device("cpu"), torch.float32):
        pytest.skip(reason)
    prepared, prepare = [], BACKENDS[backend].prepare
    monkeypatch.setattr(BACKENDS[backend], "prepare", lambda *args: prepared.append(prepare(*args)) or prepared[-1])
    method = make("scale_invariant_nope", **options)
    plan = make_plan(method, 130, 130, backend=backend)
    inputs = without_gradients(random_qkv(6, 16, 130), torch.float32)
    with torch.no_grad():
        outputs = [attend(method, *inputs, plan=plan) for _ in range(3)]
    assert len(prepared) == times
    assert torch.equal(outputs[0], outputs[2])
    if backend == "flex":
        assert all(x["block_mask"] is plan.prepared["block_mask"] for x in prepared)


@pytest.mark.parametrize("name", CHANGED_SCORE)
def test_sdpa_is_refused_for_a_changed_score(name):
    with assert_refused(name, "sdpa", "auto"):
        make_plan(make(name), 5, 5, backend="sdpa")


@pytest.mark.parametrize("name", ["infini_rope", "infini_p_rope"])
def test_flex_is_refused_for_infini_attention(name):
    with assert_refused(name, "FlexAttention", "auto"):
        make_plan(make(name), 5, 5, backend="flex")


@pytest.mark.parametrize("which", range(3))
def test_flex_with_gradients_is_refused_on_a_cpu(which):
    inputs = without_gradients(random_qkv(6, 16, 5), torch.float32)
    inputs[which].requires_grad_()
    with assert_refused("FlexAttention", "CPU", "blocks"):
        attend(make("rope"), *inputs, backend="flex")


# ---- flex is compiled, or it is an error -----------------------------------------------------------------------------


def run_flex(length):
    with torch.no_grad():
        attend(make("rope"), *without_gradients(random_qkv(6, 16, length), torch.float32), backend="flex")


switched_off = pytest.mark.parametrize("switch", [
    lambda: torch.compiler.set_stance("force_eager"),
    lambda: torch._dynamo.config.patch(disable=True),
], ids=["force_eager", "disable"])


@switched_off
def test_flex_that_is_not_compiled_is_an_error(switch):
    with switch(), pytest.raises((RuntimeError, UserWarning), match="compile"):
        run_flex(130)


@switched_off
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_that_is_not_compiled_is_an_error_after_someone_ran_it_eagerly(switch):
    """torch warns of it only once a process."""
    flex_attention(*(random(1, 1, 2, 16, seed=0) for _ in range(3)))
    with switch(), pytest.raises((RuntimeError, UserWarning), match="compile"):
        run_flex(130)


def test_flex_compiled_too_often_is_an_error(traced_flex, nothing_compiled):
    with torch._dynamo.config.patch(recompile_limit=1):
        run_flex(5)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            run_flex(6)


# ---- flex inside a larger compiled graph ----------------------------------------------------------------------------


def project(x, weight):
    """q, k, v (1, 2, 130, 16) as in GPT: one product, then QK-norm."""
    q, k, v = (x @ weight).view(1, 130, 3, 2, 16).transpose(1, 3).unbind(2)
    return norm(q), norm(k), v


def error_when_compiled(attention_of_qkv):
    """The largest, of the function compiled together with the projection of its q, k and v."""
    x, weight = random(1, 130, 32, seed=0).float(), random(32, 96, seed=1).float() / 6
    output = torch.compile(lambda x: attention_of_qkv(*project(x, weight)), dynamic=False)(x)
    return (output - plain_attention(make("nope", 2), *project(x, weight))).abs().max()


def test_flex_of_what_the_same_graph_computes_is_the_plain_form(nothing_compiled):
    method = make("nope", 2)
    plan = make_plan(method, 130, 130, backend="flex")
    assert error_when_compiled(lambda q, k, v: attend(method, q, k, v, plan=plan)) < 1e-5


@pytest.mark.slow
def test_torch_s_own_cpu_kernel_still_misreads_what_the_same_graph_computes(nothing_compiled):
    """When this fails, torch has been mended, and run_alone in model/kernels/flex.py is no longer needed."""
    plan = make_plan(make("nope", 2), 130, 130, backend="flex")
    assert error_when_compiled(lambda q, k, v: flex_attention(q, k, v, **plan.prepared)) > 0.1


# ---- a mechanism of the user's own -----------------------------------------------------------------------------------


class Mine(ScoreChange):
    """a = 1 + h/2, m = -strength sqrt(t)/(h + 1)."""

    def __init__(self, num_heads, head_dim, train_length, strength: float = 0.5):
        super().__init__()
        self.strength = strength

    def coefficients(self, distance, head):
        return 1 + head / 2, -self.strength * distance.sqrt() / (head + 1)


@pytest.fixture
def mine(monkeypatch):
    monkeypatch.setitem(MECHANISMS, "mine", Mine)


@pytest.mark.parametrize("options", [{}, dict(strength=2.0)])
@pytest.mark.parametrize("backend", ["blocks", "flex"])
def test_a_score_change_of_one_s_own_is_its_formula_on_every_backend(backend, options, mine, traced_flex):
    method = make_method("rope+mine", num_heads=3, head_dim=16, train_length=64, **options)
    q, k, v = (x.detach() for x in random_qkv(3, 16, 150))
    positions = torch.arange(150)
    t = (positions[:, None] - positions).double()
    head = torch.arange(3)[:, None, None]
    scores = reference.attention_logits("rope", q, k, train_length=64)
    logits = (1 + head / 2) * scores - options.get("strength", 0.5) * t.clamp(min=0).sqrt() / (head + 1)
    output = attend(method, q.float(), k.float(), v.float(), backend=backend)
    assert_near(output, logits.softmax(dim=-1) @ v, 1e-5)
    assert_near(plain_attention(method, q, k, v), logits.softmax(dim=-1) @ v, 1e-6)


def test_a_score_change_of_one_s_own_trains_in_gpt(mine):
    torch.manual_seed(0)
    model = GPT(vocab_size=50, num_layers=2, num_heads=3, model_dim=48, train_length=64, method="mine",
                method_options=dict(strength=2.0))
    tokens = torch.randint(50, (2, 151))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_the_order_of_torch_s_kernels_stays_when_it_has_chosen_once():
    """On CUDA torch sets an order of its own at its first choice; ours is set after that (prefer_fast_sdpa)."""
    before = torch._C._get_sdp_priority_order()
    try:
        for order in (ORDER, ORDER[::-1]):
            torch._C._set_sdp_priority_order([int(kernel) for kernel in order])
            name = chosen_kernel(torch.device("cpu"), torch.float32, head_dim=64, length=128)
            assert name in SDPBackend.__members__ and name != "ERROR"
            assert torch._C._get_sdp_priority_order()[:4] == [int(kernel) for kernel in order]
    finally:
        torch._C._set_sdp_priority_order(before)
    assert [kernel.name.split("_")[0] for kernel in ORDER] == ["CUDNN", "FLASH", "EFFICIENT", "MATH"]

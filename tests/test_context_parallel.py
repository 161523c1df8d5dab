"""Context parallelism on 2, 3 and 4 gloo processes: every method as in one process, and the bytes that it exchanges."""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from preloaded import start_method
from test_methods import CASES, assert_refused, random
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention import attend, make_plan
from model.backends import flex, flex_flash
from model.backends.base import Call
from model.context import check_context, context_bytes
from model.gpt import GPT
from model.kernels import cpu
from model.kernels.distance import learned_parameters
from model.methods import make_method

SLOW_FIXTURES = ("ranks",)

GROUPS = {2: [2, 3], 3: [0, 1, 2], 4: [0, 1, 2, 3]}  # size -> its ranks in the world of 4
SHAPE = {2: (6, 150), 3: (6, 150), 4: (4, 300)}  # size -> heads, length; no kernel's tiles divide a rank's 50 or 75
INTERPRETED = 4, 38  # heads, length for Triton's interpreter, which is slow
HEAD_DIM, TRAIN_LENGTH, VOCAB = 16, 64, 97

LEARNED = ("scale_invariant_p_rope", dict(learn_tau=True))
DELTA = ("infini_rope", dict(segment_length=37, delta=True))
CHANGED_SCORE = [("alibi", {}), ("scale_invariant_rope", {}), LEARNED, ("kerple_log", {})]
MEMORY = ("infini_p_rope", dict(segment_length=80))
EXTRAS = [("p_rope+forget", {}), ("p_rope+window", dict(window=13)), ("p_rope+scale_invariant+sink", {})]
MAIN = [*(case for case in CASES if not case[1]), LEARNED, DELTA]
RIVALS = [("kerple_log", {}), ("kerple_power", {}), ("nape", {}), ("log_beyond", {}), ("pope+scale_invariant", {})]
RIVALS += [("fire", {}), ("stick_breaking", {})]

# In float64 where the backend takes it, so that nothing hides behind rounding; the CPU's and Triton's take float32.
ATTENTION = [(3, "blocks", torch.float64, case) for case in [*CASES, DELTA]]
ATTENTION += [(size, "blocks", torch.float64, case) for size in (2, 4) for case in MAIN]
ATTENTION += [(size, "blocks", torch.float64, case) for size in GROUPS for case in RIVALS]
ATTENTION += [(2, "blocks", torch.float64, case) for case in EXTRAS]
ATTENTION += [(3, "sdpa", torch.float64, case) for case in (("logn_p_rope", {}), DELTA)]
if not cpu.find_problem(torch.device("cpu"), torch.float32):
    ATTENTION += [(size, "cpu", torch.float32, case) for size in GROUPS for case in (*CHANGED_SCORE, DELTA)]
    ATTENTION += [(2, "cpu", torch.float32, case) for case in EXTRAS]
if find_spec("triton") and not torch.cuda.is_available():  # in Triton's interpreter (conftest.py)
    ATTENTION += [(2, "triton", torch.float32, case) for case in (LEARNED, ("alibi", {}), *EXTRAS)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}

SCORE_MODS = [(size, case) for size in GROUPS for case in CHANGED_SCORE]
MODELS = [(2 + i % 2, case) for i, case in enumerate([*MAIN, *RIVALS[:2]])]
COMPILED = [(2, case, "aot_eager") for case in (MEMORY, LEARNED)]
INDUCTOR = [(2, LEARNED, "inductor")]
COUNTED = [
    (size, case, dtype) for size, dtype in [(2, torch.bfloat16), (3, torch.float32)] for case in (LEARNED, DELTA)
]
UNEVEN = [(2, 151), (3, 151)]


# ---- what one process does without a group, and each rank of a group does with its part ------------------------------


def own_tokens(x, dim, group):
    return x if group is None else x.chunk(group.size(), dim)[group.rank()]


def random_method(case, num_heads, dtype=torch.float32):
    name, options = case
    method = make_method(name, num_heads=num_heads, head_dim=HEAD_DIM, train_length=TRAIN_LENGTH, **options).to(dtype)
    for seed, parameter in enumerate(method.parameters(), start=1):
        scale = 0.5 if parameter.ndim == 1 else 0.5 * parameter.shape[-1] ** -0.5
        parameter.data += scale * random(*parameter.shape, seed=seed).to(dtype)
    return method


def attention(size, backend, dtype, case, group=None):
    """The output, and the gradients of q, k, v, of the layer's input and of what the method learns."""
    num_heads, length = INTERPRETED if backend == "triton" else SHAPE[size]
    method = random_method(case, num_heads, dtype)
    q, k, v, dout = own_tokens(random(4, 2, num_heads, length, HEAD_DIM, seed=0).to(dtype), 3, group)
    x = own_tokens(random(2, 1, length, num_heads * HEAD_DIM, seed=2).to(dtype), 2, group)  # tokens where q has them
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, x)]
    plan = make_plan(method, length, length, dtype=dtype, backend=backend, context=group)
    output = attend(method, q, k, v, x=x.squeeze(1), plan=plan)
    gradients = torch.autograd.grad(output, [*inputs, *method.parameters()], dout, materialize_grads=True)
    return [output.detach(), *gradients[:4]], list(gradients[4:])


def score_mod(size, case, group=None):
    """Logits of FlexAttention's score 1 at all distances, by its formulas and, with nothing learned, by tables too:
    (H/c, T or 2 T)."""
    num_heads, length = SHAPE[size]
    call = Call(num_heads, HEAD_DIM, length, length, context=group)
    change = random_method(case, num_heads).score_change
    backends = [flex] if learned_parameters(change) else [flex, flex_flash]
    head = torch.arange(num_heads if group is None else num_heads // size).unsqueeze(-1)
    arguments = torch.ones(()), 0, head, torch.arange(length), torch.tensor(0)
    logits = (backend.make_score_mod(change, call)(*arguments).detach() for backend in backends)
    return torch.cat([x.expand(len(head), length) for x in logits], dim=1)


def random_model(size, case, num_layers):
    num_heads, _ = SHAPE[size]
    torch.manual_seed(0)
    shape = dict(vocab_size=VOCAB, num_layers=num_layers, num_heads=num_heads, model_dim=num_heads * HEAD_DIM)
    model = GPT(**shape, train_length=TRAIN_LENGTH, method=case[0], method_options=case[1])
    for parameter in model.parameters():
        scale = 0.5 if parameter.ndim < 2 else 1.5 * parameter.shape[-1] ** -0.5
        torch.nn.init.normal_(parameter, std=scale)
    return model


def training_step(model, size, group=None, run=None):
    """The loss of each token, (2, T/c), and this process's part of the gradients of their mean."""
    _, length = SHAPE[size]
    tokens = torch.randint(VOCAB, (2, length + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = (own_tokens(x, 1, group) for x in (tokens[:, :-1], tokens[:, 1:]))
    plan, run = model.plan(length, context=group), model if run is None else run
    loss = run(tokens, targets, plan=plan) / (size if group else 1)
    gradients = torch.autograd.grad(loss, model.parameters())
    with torch.no_grad():
        return model(tokens, targets, plan=plan, per_token=True), loss.detach(), gradients


def model_step(size, case, group=None):
    return training_step(random_model(size, case, num_layers=2), size, group)


def compiled_step(size, case, compiler, group):
    """The loss and the gradients, compiled and not."""
    model = random_model(size, case, num_layers=1)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=compiler)
    return training_step(model, size, group, run=compiled)[1:], training_step(model, size, group)[1:]


class AllToAlls(TorchDispatchMode):
    """The bytes handed to each all-to-all."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            self.bytes.append(args[0].nbytes)
        return func(*args, **kwargs or {})

    def __enter__(self):
        self.bytes = []
        return super().__enter__()


def counted_layer(size, case, dtype, group):
    """The bytes of each all-to-all in one forward and backward pass of one layer, for 2 sequences."""
    num_heads, length = SHAPE[size]
    method = random_method(case, num_heads)
    vectors = [torch.ones(2, num_heads, length // size, HEAD_DIM, dtype=dtype, requires_grad=True) for _ in range(3)]
    plan = make_plan(method, length, length, dtype=dtype, backend="blocks", context=group)
    with AllToAlls() as all_to_alls:
        attend(method, *vectors, plan=plan).sum().backward()
    return all_to_alls.bytes


def uneven_plan(size, length, group):
    try:
        make_plan(random_method(("nope", {}), num_heads=6), length, length, context=group)
    except ValueError as error:
        return str(error)


JOBS = {attention: ATTENTION, score_mod: SCORE_MODS, model_step: MODELS, compiled_step: COMPILED,
        counted_layer: COUNTED, uneven_plan: UNEVEN}  # fmt: skip
SLOW_JOBS = {compiled_step: INDUCTOR}


def worker(rank, folder, jobs):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=4)
    groups = {size: dist.new_group(ranks) for size, ranks in GROUPS.items()}
    results = {
        function.__name__: [function(*job, group=groups[job[0]]) if rank in GROUPS[job[0]] else None for job in jobs]
        for function, jobs in jobs.items()
    }
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def spawn(jobs, folder):
    """A function that gives the results of all ranks of a job's group: ranks(function, *job)."""
    start_processes(worker, (folder, jobs), nprocs=4, start_method=start_method())
    results = [torch.load(folder / f"{rank}.pt") for rank in range(4)]

    def ranks(function, *job):
        return [results[rank][function.__name__][jobs[function].index(job)] for rank in GROUPS[job[0]]]

    return ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return spawn(JOBS, tmp_path_factory.mktemp("gloo"))


def sweep(jobs):
    def label(x):
        return "-".join([x[0], *(f"{key}={value}" for key, value in x[1].items())])
    names = ["-".join(label(x) if isinstance(x, tuple) else str(x) for x in job) for job in jobs]
    return pytest.mark.parametrize("job", jobs, ids=names)


def assert_same(actual, expected, tolerance):
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= tolerance * expected.norm()


# ---- tests -----------------------------------------------------------------------------------------------------------


@sweep(ATTENTION)
def test_attention_and_its_gradients_are_those_of_one_process(ranks, job):
    by_token, learned = attention(*job)
    parts = ranks(attention, *job)
    for whole, *part in zip(by_token, *(part[0] for part in parts), strict=True):
        assert_same(torch.cat(part, dim=2), whole, TOLERANCE[job[2]])
    for whole, *part in zip(learned, *(part[1] for part in parts), strict=True):
        assert_same(sum(part), whole, TOLERANCE[job[2]])


@sweep(SCORE_MODS)
def test_flex_attention_scores_of_each_rank_are_those_of_its_heads(ranks, job):
    assert torch.equal(torch.cat(ranks(score_mod, *job)), score_mod(*job))


@sweep(MODELS)
def test_losses_and_gradients_are_those_of_one_process(ranks, job):
    losses, mean, gradients = model_step(*job)
    parts = ranks(model_step, *job)
    torch.testing.assert_close(torch.cat([part[0] for part in parts], dim=1), losses, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(sum(part[1] for part in parts), mean, rtol=1e-6, atol=0)
    for whole, *part in zip(gradients, *(part[2] for part in parts), strict=True):
        assert_same(sum(part), whole, 5e-6)


def assert_compiled_is_eager(results, tolerance):
    for (loss, gradients), (eager_loss, eager_gradients) in results:
        torch.testing.assert_close(loss, eager_loss, rtol=tolerance, atol=0)
        for gradient, eager in zip(gradients, eager_gradients, strict=True):
            assert_same(gradient, eager, tolerance)


@sweep(COMPILED)
def test_the_whole_model_is_one_graph(ranks, job):
    assert_compiled_is_eager(ranks(compiled_step, *job), tolerance=2e-6)


@pytest.mark.slow
def test_compiled_by_inductor(tmp_path):
    import torch._inductor.compile_fx  # noqa: F401 (once, if the ranks are forked)

    ranks = spawn(SLOW_JOBS, tmp_path)
    assert_compiled_is_eager(ranks(compiled_step, *INDUCTOR[0]), tolerance=5e-6)


@sweep(COUNTED)
def test_bytes_handed_to_the_all_to_alls(ranks, job):
    """Four a layer: there, back, and the two of the gradients."""
    size, case, dtype = job
    num_heads, length = SHAPE[size]
    expected = context_bytes(2, length, num_heads * HEAD_DIM, size, dtype.itemsize)
    for count in ranks(counted_layer, *job):
        assert len(count) == 4
        assert sum(count) == (expected * 12 // 8 if case is DELTA else expected)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads, lengths, size, words", [
    (6, [4096, 16384], 4, "context_parallel 4 does not divide the 6 heads: use 1 or 2"),
    (6, [150], 4, "context_parallel 4 does not divide the 6 heads and the length 150: use 1, 2, 3 or 6"),
    (6, [4096, 150, 4096], 3, "context_parallel 3 does not divide the length 4096: use 1 or 2"),
    (5, [4096], 2, "context_parallel 2 does not divide the 5 heads: use 1"),
    (8, [4096], 0, "context_parallel 0 does not divide the 8 heads and the length 4096: use 1, 2, 4 or 8"),
    (8, [65536], 16, "context_parallel 16 does not divide the 8 heads: use 1, 2, 4 or 8"),
])  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(num_heads, lengths, size, words):
    with assert_refused(words):
        check_context(num_heads, lengths, size)


def test_sizes_that_divide_are_accepted():
    for size in (1, 2, 3, 6):
        check_context(6, [150, 4092], size)


@sweep(UNEVEN)
def test_a_plan_for_a_length_that_cannot_be_split_is_refused(ranks, job):
    size, length = job
    for message in ranks(uneven_plan, *job):
        assert message == f"context_parallel {size} does not divide the length {length}: use 1"

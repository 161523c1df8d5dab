"""Cross-entropy of the head against log_softmax in float64: values, gradients, chunks, and the kernels alone."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from attention_cases import CPU, assert_near, cast, gradients, half_precision, random
from commands import parametrize, slow
from torch.profiler import profile
from torch.testing import assert_close

from model import cpu, loss
from model.loss import loss_and_grads, mean_loss, plain_cross_entropy, token_losses

PROBLEM = cpu.kernel_problem(CPU, torch.float32)


def make(N, C, V, dtype=torch.float32, scale=1.0):
    """Return x (N, C), head (V, C) and targets (N,). x and targets are parts of larger tensors."""
    x = random(N, C + 2, seed=0).to(dtype)[:, 1:-1].requires_grad_()
    head = (scale * random(V, C, seed=1)).float().requires_grad_()
    targets = 7919 * torch.arange(2 * N) % V
    return x, head, targets[::2]


def exact_losses(x, head, targets):
    """Return the losses in float64, and the float64 copies of x and head."""
    x, head = cast([x, head], torch.float64)
    return F.cross_entropy(x @ head.T, targets, reduction="none"), [x, head]


def check(x, head, targets, tolerance=1e-5):
    """Compare each token's loss and the mean with the exact ones, and the gradients of both."""
    losses, inputs = exact_losses(x, head, targets)
    means = 0.3 * mean_loss(x, head, targets), 0.3 * losses.mean()
    for found, exact in ((token_losses(x, head, targets), losses), means):
        assert found.dtype == torch.float32
        assert_near(found, exact, tolerance)
        for gradient, truth in zip(gradients(found, [x, head]), gradients(exact, inputs)):
            assert (gradient - truth).norm() <= tolerance * truth.norm() + 1e-12


@pytest.fixture
def chunks(monkeypatch):
    """Let a chunk have 256 tokens or fewer. Return a function that changes this number."""
    monkeypatch.setattr(loss, "CPU_LOGITS", 1)
    change = functools.partial(monkeypatch.setattr, loss, "CPU_ROWS")
    change(256)
    return change


@parametrize("N", [1, 255, 256, 257, 700])
@parametrize("C, V", [(33, 1), (8, 7), (2, 2048)])
def test_losses_and_gradients(N, C, V, chunks):
    check(*make(N, C, V))


@parametrize("dtype", [torch.bfloat16, torch.float16])
@parametrize("N", [200, 1000])
def test_low_precision_is_as_near_as_autograd_through_float32_logits(dtype, N):
    x, head, targets = make(N, 64, 500, dtype, scale=0.3)
    losses, inputs = exact_losses(x, head, targets)

    def with_gradients(mean, inputs):
        return [mean, *torch.autograd.grad(mean * 1024, inputs)]  # as large as float16 wants them

    exact = with_gradients(losses.mean(), inputs)
    ours = with_gradients(mean_loss(x, head, targets), (x, head))
    plain = with_gradients(F.cross_entropy((x @ head.to(dtype).T).float(), targets), (x, head))
    assert [y.dtype for y in ours] == [torch.float32, dtype, torch.float32]
    for y, rough, true, more in zip(ours, plain, exact, (1e-6, 0, 0)):
        assert (y - true).norm() <= 1.1 * (rough - true).norm() + more * true.norm()


@parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_seen(bad):
    x, head, targets = make(300, 4, 9)
    x.data[299, 2] = bad
    assert not mean_loss(x, head, targets).isfinite()


@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
@parametrize("target", [-1, 50])
def test_targets_outside_the_vocabulary_are_refused(target):
    x, head, targets = make(300, 20, 50)
    targets[299] = target
    with pytest.raises(IndexError, match=rf"{target}\b.*\b49\b"):
        mean_loss(x, head, targets)


@parametrize("count", [1, 3])
def test_two_calls_give_the_same_bits(count, threads):
    threads(count)
    x, head, targets = make(700, 32, 3000)
    runs = [[*loss_and_grads(x, head, targets, None), token_losses(x, head, targets)] for _ in range(2)]
    assert all(map(torch.equal, *runs))


@half_precision
def test_no_tensor_is_larger_than_a_chunk_and_no_matmul_is_done_twice(dtype, chunks):
    x, head, targets = make(2000, 8, 90, dtype)  # 180,000 logits; 250 x 90 are a chunk
    with profile(record_shapes=True) as operations:
        mean_loss(x, head, targets).backward()
        token_losses(x, head, targets)  # of a validation
    shapes = [shape for event in operations.events() for shape in event.input_shapes]
    assert max(math.prod(shape) for shape in shapes if {int} == {*map(type, shape)}) == 250 * 90
    assert sum(event.name in ("aten::mm", "aten::addmm_") for event in operations.events()) == 4 * 8


@half_precision
def test_the_operators_match_their_declaration_to_torch(dtype):
    """Shapes and dtypes of the outputs; no input is written to, no output is one; autograd, also when compiled."""
    x, head, targets = make(20, 5, 11, dtype)
    weights = random(20, seed=9).float()
    tests = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"
    for operator, *more in ((loss_and_grads, None), (loss_and_grads, weights), (token_losses,)):
        torch.library.opcheck(operator, (x, head, targets, *more), test_utils=tests)


@parametrize("function", [mean_loss, lambda *args: token_losses(*args).square().sum()])
def test_compiled_in_one_graph_it_is_the_same(function):
    arguments = make(300, 20, 50)
    results = []
    for run in (torch.compile(function, fullgraph=True, backend="aot_eager"), function):
        loss = run(*arguments)
        with torch.no_grad():
            results.append([loss, *torch.autograd.grad(loss, arguments[:2]), run(*arguments)])
    assert_close(*results)


def cpu_cross_entropy(logits, targets, gradient):
    losses = torch.empty(len(logits))
    cpu.cross_entropy_(logits, targets, losses, gradient)
    return losses, logits


KERNELS = [(plain_cross_entropy, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
KERNELS += [(cpu_cross_entropy, torch.float32)] if PROBLEM is None else []

# Vocabulary, scale of the logits, shift.
LOGITS = [(V, 4, 0) for V in (1, 2, 7, 1025, 8192, 8193, 50304, 2**17)]
LOGITS += [(300, scale, shift) for scale in (1e-6, 4, 1e4) for shift in (0, 1e4, -1e4)]


def check_kernel(kernel, logits, targets):
    """Losses to 1e-5, or 1e-5 of themselves; gradients to that or the rounding to their dtype."""
    exact, rounding = logits.double().requires_grad_(), torch.finfo(logits.dtype).eps / 2
    expected = F.cross_entropy(exact, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    losses, _ = kernel(logits.clone(), targets, False)
    with_gradient, output = kernel(logits.clone(), targets, True)
    assert torch.equal(losses, with_gradient)
    assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    assert_close(output.double(), gradient, rtol=1e-5 + rounding, atol=1e-7)


@parametrize("kernel, dtype", KERNELS)
@parametrize("V, scale, shift", LOGITS)
def test_kernels(kernel, dtype, V, scale, shift):
    logits = (scale * random(3, V, seed=V) + shift).to(dtype)
    check_kernel(kernel, logits, torch.tensor([0, V - 1, V // 2]))


@slow
@parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_compiled_as_on_cuda_it_is_the_same_in_a_compiled_model_too(dtype, tolerance, chunks, monkeypatch):
    """Chunks of two sizes, of one vocabulary; the backward pass of each token's loss compiles as well."""
    torch._dynamo.reset()
    chunks(200)
    monkeypatch.setattr(loss, "cross_entropy", loss.compiled_cross_entropy(CPU))
    arguments = make(500, 20, 50, dtype)
    check(*arguments, tolerance)
    compiled = torch.compile(mean_loss, fullgraph=True)
    assert_close(compiled(*arguments), mean_loss(*arguments))


def test_where_torch_compile_fails_plain_pytorch_runs(monkeypatch):
    def fail(function):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setattr(loss, "compile_problem", loss.compile_problem.__wrapped__)
    compile_here = loss.compiled_cross_entropy.__wrapped__  # without the cache
    with pytest.warns(UserWarning, match="RuntimeError"):
        assert compile_here(CPU) is plain_cross_entropy

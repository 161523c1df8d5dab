"""Cross-entropy of the head against log_softmax in float64: values, gradients, chunks, and the kernels alone."""

import pytest
import torch
import torch.nn.functional as F
from attention_cases import CPU, assert_near, random
from torch.profiler import profile
from torch.testing import assert_close

from model import cpu, loss
from model.loss import mean_loss, plain_cross_entropy, token_losses

PROBLEM = cpu.kernel_problem(CPU, torch.float32)


def make(N, C, V, dtype=torch.float32, scale=1.0, seed=0):
    """x (N, C), head (V, C), targets (N,)."""
    x = random(N, C, seed=seed).to(dtype).requires_grad_()
    head = (scale * random(V, C, seed=seed + 1)).float().requires_grad_()
    return x, head, torch.randint(V, (N,), generator=torch.Generator().manual_seed(seed + 2))


def exact_losses(x, head, targets):
    x, head = (y.detach().double().requires_grad_() for y in (x, head))
    return -(x @ head.T).log_softmax(dim=1).gather(1, targets[:, None])[:, 0], x, head


def check(x, head, targets, weights=None, tolerance=1e-5):
    """Compare mean or weighted sum of the tokens' losses with the exact one, and the gradients of 0.3 times it."""
    losses, *exact = exact_losses(x, head, targets)
    ours = mean_loss(x, head, targets) if weights is None else (token_losses(x, head, targets) * weights).sum()
    true = losses.mean() if weights is None else (losses * weights).sum()
    assert ours.dtype == torch.float32
    assert_near(ours, true, tolerance)
    gradients = torch.autograd.grad(0.3 * ours, (x, head))
    for gradient, truth in zip(gradients, torch.autograd.grad(0.3 * true, exact)):
        assert (gradient - truth).norm() <= tolerance * truth.norm() + 1e-12


@pytest.mark.parametrize("N, C", [(1, 1), (1, 5), (255, 8), (256, 33), (257, 96), (700, 16)])
@pytest.mark.parametrize("V", [1, 7, 2048])
def test_the_mean_and_its_gradients(N, C, V):
    check(*make(N, C, V))


@pytest.mark.parametrize("N, V", [(1, 3), (300, 99), (513, 1025)])
def test_the_loss_of_each_token_and_gradients_of_a_weighted_sum(N, V):
    x, head, targets = make(N, 12, V)
    assert_near(token_losses(x, head, targets), exact_losses(x, head, targets)[0], 1e-5)
    check(x, head, targets, weights=random(N, seed=9).float())


def test_tensors_with_gaps():
    x, head, targets = make(300, 20, 50)
    check(x.detach().T.contiguous().T.requires_grad_(), head, targets)
    targets = torch.stack([targets, targets], dim=1)[:, 0]
    check(x, head, targets)
    wide, weights = torch.cat([x, x], dim=1).detach(), random(600, seed=9).float()
    check(wide[:, 5:25].requires_grad_(), head, targets, weights=weights[::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [200, 1000])
def test_low_precision_is_as_near_as_autograd_through_float32_logits(dtype, N):
    x, head, targets = make(N, 64, 500, dtype, scale=0.3)
    losses, *exact = exact_losses(x, head, targets)
    truth = [losses.mean(), *torch.autograd.grad(losses.mean() * 1024, exact)]
    plain = F.cross_entropy((x @ head.to(dtype).T).float(), targets)
    errors = []
    for mean in (mean_loss(x, head, targets), plain):
        gradients = torch.autograd.grad(mean * 1024, (x, head))  # as large as float16 wants them
        assert [mean.dtype, *(g.dtype for g in gradients)] == [torch.float32, dtype, torch.float32]
        errors.append([((y - true).norm() / true.norm()).item() for y, true in zip([mean, *gradients], truth)])
    assert abs(errors[0][0] - errors[1][0]) < 1e-6
    assert all(ours < 1.1 * plain for ours, plain in zip(errors[0][1:], errors[1][1:])), errors


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_seen(bad):
    x, head, targets = make(300, 4, 9)
    x.data[299, 2] = bad
    assert not mean_loss(x, head, targets).isfinite()


@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
@pytest.mark.parametrize("target", [-1, 50])
def test_targets_outside_the_vocabulary_are_refused(target):
    x, head, targets = make(300, 20, 50)
    targets[299] = target
    with pytest.raises(IndexError, match=rf"{target}\b.*\b49\b"):
        mean_loss(x, head, targets)


@pytest.mark.parametrize("count", [1, 3])
def test_two_calls_give_the_same_bits(count, threads):
    threads(count)
    x, head, targets = make(700, 32, 3000)
    runs = []
    for _ in range(2):
        mean = mean_loss(x, head, targets)
        runs.append([mean, *torch.autograd.grad(mean, (x, head)), token_losses(x, head, targets)])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("most, sizes", [(10, [10]), (9, [5, 5]), (4, [4, 4, 2]), (1, [1] * 10)])
def test_chunks_are_equal_and_share_their_memory(most, sizes, monkeypatch):
    monkeypatch.setattr(loss, "CPU_ROWS", most)
    monkeypatch.setattr(loss, "CPU_LOGITS", 1)
    x, head, _ = make(10, 3, 7)
    memory, start = set(), 0
    for (chunk, logits), size in zip(loss.logits_in_chunks(x.detach(), head.detach()), sizes, strict=True):
        assert (chunk.start, chunk.stop) == (start, start + size)
        assert_close(logits, (x @ head.T)[chunk])
        memory.add(logits.data_ptr())
        start += size
    assert len(memory) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_chunk_and_no_matmul_is_done_twice(dtype, monkeypatch):
    monkeypatch.setattr(loss, "CPU_LOGITS", 1)
    x, head, targets = make(2000, 8, 90, dtype)  # 180,000 logits; 250 x 90 are a chunk
    with profile(record_shapes=True) as operations:
        mean_loss(x, head, targets).backward()
        token_losses(x, head, targets)  # of a validation
    events = [(event.name, shape) for event in operations.events() for shape in event.input_shapes]
    assert max(torch.Size(s).numel() for _, s in events if all(isinstance(n, int) for n in s)) == 250 * 90
    assert sum(event.name in ("aten::mm", "aten::addmm_") for event in operations.events()) == 4 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_match_their_declaration_to_torch(dtype):
    """Shapes and dtypes of the outputs; no input is written to, no output is one; autograd, also when compiled."""
    x, head, targets = make(20, 5, 11, dtype)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    for weights in (None, random(20, seed=9).float()):
        torch.library.opcheck(loss.loss_and_grads, (x, head, targets, weights), test_utils=tests)
    torch.library.opcheck(loss.token_losses, (x, head, targets), test_utils=tests)


@pytest.mark.parametrize("function", [mean_loss, lambda *args: token_losses(*args).square().sum()])
def test_compiled_in_one_graph_it_is_the_same(function):
    x, head, targets = make(300, 20, 50)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert_close(compiled(x, head, targets), function(x, head, targets))
    gradients = [torch.autograd.grad(run(x, head, targets), (x, head)) for run in (compiled, function)]
    assert_close(*gradients)


def cpu_cross_entropy(logits, targets, gradient):
    losses = torch.empty(len(logits))
    cpu.cross_entropy_(logits, targets, losses, gradient)
    return losses, logits


KERNELS = {"plain": plain_cross_entropy, "cpu": cpu_cross_entropy}
CASES = [("plain", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
CASES += [("cpu", torch.float32)] if PROBLEM is None else []
every_kernel = pytest.mark.parametrize("kernel, dtype", CASES)


def check_kernel(kernel, logits, targets):
    """Losses to 1e-5, or 1e-5 of themselves; gradients to that or the rounding to their dtype."""
    log_p = logits.double().log_softmax(dim=1)
    gradient = log_p.exp()
    gradient[torch.arange(len(targets)), targets] -= 1
    for wanted in (True, False):
        losses, output = KERNELS[kernel](logits.clone(), targets, wanted)
        assert_close(losses.double(), -log_p.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)
        if wanted:
            assert_close(output.double(), gradient, rtol=1e-5 + torch.finfo(logits.dtype).eps / 2, atol=1e-7)


@every_kernel
@pytest.mark.parametrize("V", [1, 2, 7, 1000, 1025, 2048, 8192, 8193, 50304, 2**17])
def test_kernels(kernel, dtype, V):
    logits = (4 * random(3, V, seed=V)).to(dtype)
    check_kernel(kernel, logits, torch.tensor([0, V - 1, V // 2]))


@pytest.mark.slow
@every_kernel
@pytest.mark.parametrize("scale, shift", [(1e-6, 0), (1e2, 0), (1e4, 0), (4, 1e4), (4, -1e4)])
def test_small_and_large_logits(kernel, dtype, scale, shift):
    logits = (scale * random(50, 300, seed=0) + shift).to(dtype)
    check_kernel(kernel, logits, torch.randint(300, (50,), generator=torch.Generator().manual_seed(0)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_as_on_cuda_it_is_the_same_in_a_compiled_model_too(dtype, monkeypatch):
    """Chunks of two sizes, of one vocabulary; the backward pass of each token's loss compiles as well."""
    torch._dynamo.reset()
    monkeypatch.setattr(loss, "CPU_ROWS", 200)
    monkeypatch.setattr(loss, "CPU_LOGITS", 1)
    monkeypatch.setattr(loss, "cross_entropy", loss.compiled_cross_entropy(CPU))
    x, head, targets = make(500, 20, 50, dtype)
    for weights in (None, random(500, seed=9).float()):
        check(x, head, targets, weights=weights, tolerance=1e-5 if dtype == torch.float32 else 1e-2)
    compiled = torch.compile(mean_loss, fullgraph=True)
    assert_close(compiled(x, head, targets), mean_loss(x, head, targets))


def test_where_torch_compile_fails_plain_pytorch_runs(monkeypatch):
    def fail(function):
        raise RuntimeError("no compiler")
    monkeypatch.setattr(torch, "compile", fail)
    loss.compiled_cross_entropy.cache_clear()
    with pytest.warns(UserWarning, match="RuntimeError"):
        assert loss.compiled_cross_entropy(CPU) is plain_cross_entropy
    loss.compiled_cross_entropy.cache_clear()

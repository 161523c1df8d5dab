"""The head's matmuls in FP8: the products against float64 products of the same 8-bit numbers, the roundings against the
formats' own bounds, loss and gradients against both, and who is refused."""

import dataclasses
import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from test_loss import DEVICE, ROOT, exact_losses, make
from test_methods import random
from test_train import latest_checkpoint, make_data, read_json, train_here
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from configs.config import Config
from configs.presets import preset
from model import fp8, loss
from model.fp8 import E5M2, Scaled, product, to_e4m3, to_e5m2_
from model.gpt import GPT
from model.loss import mean_loss
from runtime.build import build_model, build_optimizers
from runtime.processes import World
from scripts.bench.memory import StorageCount, count_memory, fp8_loss_workspace

DTYPES = (torch.float32, torch.bfloat16)


def exact(x: Scaled):
    return x.values.double() * x.scale.double()


def relative_error(x, y):
    return ((x.double() - y).norm() / y.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M, K, N", [(1, 16, 16), (48, 128, 32), (37, 144, 272), (5, 7, 3)])
def test_a_product_is_that_of_the_rounded_matrices(M, K, N, dtype):
    """Also of gradients, in e5m2, and whichever way the two lie in memory."""
    a, b = random(M, K, seed=1), random(K, N, seed=2)
    for left in (to_e4m3(a.float()), to_e5m2_((a / a.abs().max()).float())[0]):
        for b_left in (to_e4m3(b.float()), to_e4m3(b.float().mT.contiguous()).mT):
            out = torch.empty(M, N, dtype=dtype)
            assert product(left, b_left, out) is out
            true = exact(left) @ exact(b_left)
            assert_close(out.double(), true, rtol=torch.finfo(dtype).eps, atol=2e-6 * true.abs().max().item())


@pytest.mark.parametrize("size", [1e-20, 1.0, 3e7])
def test_e4m3_keeps_3_bits_of_all_but_the_smallest_and_the_largest_entry_as_it_is(size):
    x = size * random(100, 90, seed=0).float() * torch.linspace(-8, 0, 90).exp2()
    rounded = exact(to_e4m3(x))
    largest = x.abs().max().item()
    assert rounded.abs().max().item() == pytest.approx(largest, rel=1e-6)
    error = (rounded - x.double()).abs()
    assert (error <= (2**-4 * x.abs().double()).clamp(min=2**-10 / 448 * largest) * (1 + 1e-5)).all()
    assert error.max() > 0.4 * 2**-4 * largest  # it is no better either


def test_e5m2_keeps_2_bits_of_what_is_at_least_2_to_the_minus_29():
    x = torch.cat([random(9000, seed=0).clamp(-1, 1), torch.linspace(-34, 0, 999).exp2(), torch.tensor([-1.0, 1.0])])
    x = x.float()
    x = x.view(-1, 1)
    (values, scale), transposed = to_e5m2_(x.clone())
    assert torch.equal(exact(transposed), exact(Scaled(values, scale)).mT) and transposed.values.is_contiguous()
    assert values.dtype == E5M2 and values.isfinite().all()
    error = (exact(Scaled(values, scale)) - x.double()).abs()
    assert (error <= (2**-3 * x.abs().double()).clamp(min=2**-32)).all()
    assert (values[-2:, 0].float() * scale).tolist() == [-1, 1]


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen():
    assert exact(to_e4m3(torch.zeros(3, 4))).count_nonzero() == 0
    for bad in (float("nan"), float("inf")):
        x = torch.ones(3, 4)
        x[1, 2] = bad
        assert not exact(to_e4m3(x)).isfinite().all()
        assert not mean_loss(*make_bad(bad), fp8_head=True).isfinite()


def make_bad(bad):
    x, head, targets = make(48, 16, 32)
    x.data[47, 2] = bad
    return x, head, targets


# ---- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, C, V", [(16, 16, 16), (272, 48, 1008), (656, 96, 2048)])
def test_the_loss_and_its_gradients_are_those_of_the_rounded_matrices(N, C, V, dtype):
    """The loss to the rounding of the logits; the gradients to that, and few roundings of e5m2 that fall otherwise."""
    x, head, targets = make(N, C, V, dtype, scale=0.3)
    ours = mean_loss(x, head, targets, fp8_head=True)
    gradients = torch.autograd.grad(1024 * ours, (x, head))
    assert [ours.dtype, *(g.dtype for g in gradients)] == [torch.float32, dtype, torch.float32]
    x8, head8 = (exact(to_e4m3(y.detach())) for y in (x, head))
    log_p = (x8 @ head8.mT).to(dtype).double().log_softmax(dim=1)
    dlogits = log_p.exp()
    dlogits[torch.arange(N), targets] -= 1
    dlogits = exact(to_e5m2_(dlogits.to(dtype))[0])
    assert ours.item() == pytest.approx(-log_p.gather(1, targets[:, None]).mean().item(), rel=2e-4)
    for gradient, truth in zip(gradients, (dlogits @ head8, dlogits.mT @ x8)):
        assert relative_error(gradient, 1024 / N * truth) < (0.004 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_next_to_the_exact_loss_the_errors_are_those_of_the_formats(dtype):
    """One rounding errs by at most 2^-4 (e4m3) and 2^-3 (e5m2), and by far less than that on the average."""
    x, head, targets = make(1008, 64, 512, dtype, scale=0.1)
    losses, *inputs = exact_losses(x, head, targets)
    truth = torch.autograd.grad(losses.mean(), inputs)
    ours = mean_loss(x, head, targets, fp8_head=True)
    assert ours.item() == pytest.approx(losses.mean().item(), rel=2e-3)
    for gradient, true in zip(torch.autograd.grad(ours, (x, head)), truth):
        assert 2**-7 < relative_error(gradient, true) < 2**-4


def test_the_head_starts_as_zeros():
    x, head, targets = make(32, 16, 48)
    head.data.zero_()
    ours = mean_loss(x, head, targets, fp8_head=True)
    assert ours.item() == pytest.approx(torch.tensor(48.0).log().item())
    dx, dhead = torch.autograd.grad(ours, (x, head))
    assert dx.count_nonzero() == 0 and dhead.count_nonzero() > 0


@pytest.mark.parametrize("most, sizes", [(100, [96]), (95, [48, 48]), (33, [32, 32, 32]), (40, [32, 32, 32])])
def test_chunks_are_of_multiples_of_16_tokens_and_change_nothing(most, sizes, monkeypatch):
    x, head, targets = make(96, 16, 64)
    whole = loss.fp8_loss_op(x, head, targets)
    monkeypatch.setattr(loss, "CPU_ROWS", most)
    monkeypatch.setattr(loss, "CPU_LOGITS", 1)
    assert [len(logits) for _, logits in loss.chunks(x, 64, multiple=fp8.MULTIPLE)] == sizes
    assert_close(loss.fp8_loss_op(x, head, targets), whole)


def test_without_gradients_it_is_the_loss_of_every_validation():
    x, head, targets = make(96, 16, 64)
    with torch.no_grad():
        assert torch.equal(mean_loss(x, head, targets, fp8_head=True), mean_loss(x, head, targets))
    assert not torch.equal(mean_loss(x, head, targets, fp8_head=True), mean_loss(x, head, targets))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_is_what_torch_is_told_of_it(dtype):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(loss.fp8_loss_op, make(32, 16, 48, dtype), test_utils=tests)


def test_compiled_in_one_graph_a_model_is_the_same():
    shape = dict(vocab_size=96, num_layers=1, num_heads=2, model_dim=32, train_length=16)
    model = GPT(**shape, method="p_rope")
    torch.nn.init.normal_(model.head, generator=torch.Generator().manual_seed(0))
    tokens, targets = torch.randint(96, (2, 3, 16), generator=torch.Generator().manual_seed(0))
    plain = model(tokens, targets).item()
    model.fp8_head = True
    runs = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        mean = function(tokens, targets)
        runs.append([mean, *torch.autograd.grad(mean, list(model.parameters()))])
    assert_close(*runs)
    assert 0 < abs(runs[0][0].item() - plain) < 0.02 * plain


# ---- the kernel ------------------------------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("R, V", [(1, 1), (16, 144), (64, 64), (80, 65), (144, 528)])
def test_the_kernel_puts_all_entries_where_they_belong(R, V, dtype):
    """Entries that e5m2 has: Triton's interpreter rounds others wrongly. What a GPU makes of them is below."""
    from model.kernels.e5m2 import round_to_e5m2

    numbers = torch.arange(256, dtype=torch.uint8).view(E5M2).float()
    numbers = numbers[(numbers.abs() <= 2**15) & ((numbers == 0) | (numbers.abs() >= 2**-14))]
    x = numbers[torch.randint(len(numbers), (R, V), generator=torch.Generator().manual_seed(0))].to(DEVICE) * 2**-15
    for rounded, true in zip(round_to_e5m2(x.to(dtype), 2.0**15), (x, x.mT), strict=True):
        assert rounded.is_contiguous() and torch.equal(rounded.float(), 2**15 * true)


COMPILE = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from model.kernels.e5m2 import round_kernel as kernel
for arch in (89, 90):
    signature = dict(x="*bf16", by_rows="*fp8e5", by_columns="*fp8e5", R="i32", V="i32")
    constants = dict(SCALE=2.0**15, BLOCK=64)
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(5)}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=4)).asm["ptx"]
    print(*(len(re.findall(word, ptx)) for word in WORDS))
"""


@pytest.mark.slow
@needs_triton
def test_for_gpus_it_rounds_to_nearest_and_moves_16_bytes_at_a_time():
    """A thread has 32 entries: it reads them in 4 loads, and writes them twice in 2 stores each."""
    words = ["ld.global", "ld.global.v4", "st.global", "st.global.v4", "cvt.rn.satfinite.e5m2x2"]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = f"WORDS = {words}\n{COMPILE}"
    code = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert code.stdout.splitlines() == ["4 4 4 4 16"] * 2, code.stderr


@needs_triton
def test_it_is_checked_before_its_first_use(monkeypatch):
    """In the interpreter it fails that, rightly: see above."""
    from model.kernels import e5m2

    problem = fp8.check_kernel(torch.device(DEVICE), torch.bfloat16)
    assert problem is None if DEVICE == "cuda" else "its numbers are wrong by" in problem
    monkeypatch.setattr(e5m2, "round_to_e5m2", lambda x, scale: fp8.plain_round_(x))
    assert fp8.check_kernel(torch.device(DEVICE), torch.bfloat16) is None


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, words", [
    (dict(vocab_size=50257), "vocab_size 50257"), (dict(model_dim=774), "model_dim 774"),
    (dict(train_length=4096 // 512, val_lengths=(8,)), "train_length / context_parallel = 8 / 1"),
    (dict(context_parallel=512), "train_length / context_parallel = 4096 / 512"),
])
def test_sizes_that_are_no_multiples_of_16_are_refused_with_it_alone(changes, words):
    Config(**changes)
    with pytest.raises(ValueError, match=f"{words}.*use --no_fp8_head") as refused:
        Config(**changes, fp8_head=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_a_gpu_older_than_ada_is_refused(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    world = dataclasses.replace(World.alone(torch.device("cpu")), device=torch.device("cuda"))
    for config in (preset("quickstart"), dataclasses.replace(preset("quickstart"), fp8_head=True)):
        model = build_model(config, torch.float32)
        if config.fp8_head and capability < (8, 9):
            with pytest.raises(ValueError, match=rf"this one has {capability[0]}\.{capability[1]}: use --no_fp8_head"):
                build_optimizers(config, model, False, world)
        else:
            build_optimizers(config, model, False, world)


def test_a_run_can_have_it_and_then_each_step_does():
    config = dataclasses.replace(preset("quickstart"), fp8_head=True)
    model, tokens = build_model(config, torch.float32), torch.zeros(2, 1, 256, dtype=torch.int64)
    with torch.profiler.profile() as operations:
        model(*tokens).backward()
    names = [event.name for event in operations.events()]
    assert names.count("aten::_scaled_mm") == 3 and "scale_invariant::loss_and_gradients" not in names


def test_a_run_learns_with_it_and_leaves_the_same_files(tmp_path):
    data = make_data(tmp_path / "data")
    losses, weights = [], []
    for name, changes in dict(off={}, on=dict(fp8_head=())).items():
        folder = train_here(data, tmp_path / name, method="rope", **changes)
        losses.append(read_json(folder / "summary.json")["val_loss"]["16"])
        state = torch.load(latest_checkpoint(folder / "checkpoints"))["model"]
        weights.append({name: (weight.shape, weight.dtype) for name, weight in state.items()})
    assert weights[0] == weights[1]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02) and losses[1] < 0.85 * math.log(64)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_memory_of_the_operator_is_what_is_counted_for_it(dtype, monkeypatch):
    monkeypatch.setattr(loss, "cross_entropy_", lambda *_: None)  # it works in place, and needs numbers
    monkeypatch.setattr(loss, "CPU_ROWS", 4096)  # one chunk, as on a GPU
    with FakeTensorMode(), StorageCount({}) as memory:
        x, head, targets = torch.empty(4096, 256, dtype=dtype), torch.empty(1024, 256), torch.zeros(4096).long()
        memory.start()
        before = memory.live
        mean, *gradients = loss.fp8_loss_op._init_fn(x, head, targets)
        own = memory.peak - before - loss.empty_losses(x).nbytes - sum(y.nbytes for y in gradients)
    assert own == pytest.approx(fp8_loss_workspace(x, head), rel=1e-3)


@pytest.mark.slow
def test_the_count_of_a_step_has_it():
    fields = dict(method="p_rope", dtype="bfloat16", num_layers=1, vocab_size=50304, val_lengths=(256,))
    small = dataclasses.replace(preset("quickstart"), **fields)
    rows = [count_memory(dataclasses.replace(small, fp8_head=on), torch.device("cpu")) for on in (False, True)]
    training, validation = ([each[i]["peak"] for each in rows] for i in (0, 1))
    assert 2 * 2048 * 50304 < training[1] - training[0] < 3 * 2048 * 50304  # softmax - onehot, by rows and by columns
    assert validation[0] == validation[1]

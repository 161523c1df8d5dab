"""Infini-attention's memory in bfloat16: its products are of bfloat16 numbers, and their errors are stated in units of
bfloat16's own, those of the exact result rounded to it. (The method itself: test_methods.py.)"""

import pytest
import reference
import torch
import torch.nn.functional as F
from test_methods import cast, make, random
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention import blocks, make_plan, transform
from model.methods.infini import recall

LOW = torch.bfloat16
SIZES = [(1, 9, 2, 4), (16, 300, 2, 32), (37, 250, 3, 64), (64, 513, 1, 128)]
every_size = pytest.mark.parametrize("N, T, H, D", SIZES)


def normalised(H, T, D, mean=0.0):
    """q, k, v as they come in a run in bfloat16, (2, H, T, D), after QK-norm; v with this mean and deviation 1."""
    q, k, v = (random(2, H, T, D, seed=i) for i in range(3))
    return cast([F.rms_norm(q, (D,)), F.rms_norm(k, (D,)), v + mean], LOW)


def assert_errors(ours, exact, most):
    """Relative errors (Frobenius) of at most so many times those of the exact results rounded to bfloat16."""
    for result, true in zip(ours, exact, strict=True):
        rounding = (true.to(LOW).double() - true).norm()
        assert (result.double() - true).norm() <= most * rounding + 1e-9 * true.norm()


def remember_and_recall(method, q, k, v, gradient):
    """What a memory of k and v, written twice, holds for q; and the gradients of q, k and v."""
    memory = method.write(method.write(None, k, v), k.flip(2), v)
    output = recall(q, *memory)
    return output, *torch.autograd.grad(output, (q, k, v), gradient.to(output.dtype))


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("T, H, D", [sizes[1:] for sizes in SIZES])
def test_what_is_recalled_errs_as_one_rounding_and_its_gradients_as_three(T, H, D, delta, mean):
    """Also where the values have much in common, which the gradients of q and k must not see."""
    method = make("infini_rope", H, D, delta=delta).replacement
    inputs, gradient = normalised(H, T, D, mean), random(2, H, T, D, seed=9).to(LOW)
    output, *gradients = remember_and_recall(method, *inputs, gradient)
    exact, *exact_gradients = remember_and_recall(method, *cast(inputs, torch.float64), gradient)
    assert output.dtype == torch.float32 and all(g.dtype == LOW for g in gradients)
    assert_errors([output], [exact], 1)
    assert_errors(gradients, exact_gradients, 3.5)


def exact_attention(q, k, v, q_offset):
    return blocks.run(q.double(), k.double(), v.double(), q_offset=q_offset)


@pytest.mark.parametrize("delta", [False, True])
@every_size
def test_the_whole_method_errs_as_a_few_roundings_to_bfloat16(N, T, H, D, delta):
    """With exact softmax attention in it: backends round by themselves, by more or less on different processors, and
    have tests of their own (test_attention.py, test_cpu_kernel.py)."""
    options = dict(segment_length=N, delta=delta)
    method, gate = make("infini_rope", H, D, **options), torch.full((H,), 0.5, dtype=torch.float64, requires_grad=True)
    torch.nn.init.constant_(method.replacement.gate, 0.5)
    inputs, gradient = normalised(H, T, D), random(2, H, T, D, seed=9).to(LOW)
    exact_inputs = cast(inputs, torch.float64)
    rotated = transform(method, *inputs[:2], make_plan(method, T, T, dtype=LOW))
    output = method.replacement.attend(*inputs, *rotated, 0, exact_attention)
    exact = reference.attend("infini_rope", *exact_inputs, train_length=64, learned=gate, **options)
    assert_errors([output], [exact], 1.6)
    gradients = torch.autograd.grad(output, inputs, gradient)
    assert_errors(gradients, torch.autograd.grad(exact, exact_inputs, gradient.double()), 3.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_float32_nothing_is_rounded(dtype):
    """To the last bit the formula itself."""
    method, (q, k, v) = make("infini_rope", 2, 32).replacement, cast(normalised(2, 50, 32), dtype)
    memory, normaliser = method.write(None, k, v)
    features, queries = F.elu(k) + 1, F.elu(q) + 1
    assert torch.equal(memory, features.mT @ v) and torch.equal(normaliser[..., 0], features.sum(dim=2))
    assert torch.equal(recall(q, memory, normaliser), (queries @ memory) / (queries @ normaliser))


class ProductDtypes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.seen |= {x.dtype for x in args}
        return func(*args, **(kwargs or {}))


EXPECTED = {LOW: LOW, torch.float16: torch.float32, torch.float32: torch.float32}


@pytest.mark.parametrize("dtype, expected", EXPECTED.items())
def test_all_its_products_are_in_the_dtype_of_the_run_forward_and_backward(dtype, expected):
    method, inputs = make("infini_rope", 2, 32, delta=True).replacement, cast(normalised(2, 50, 32), dtype)
    with ProductDtypes() as products:
        remember_and_recall(method, *inputs, torch.ones(2, 2, 50, 32))
    assert products.seen == {expected}

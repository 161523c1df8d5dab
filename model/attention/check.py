"""The one check of a kernel: its numbers against the formula in float64.

A kernel's error may be LIMIT times the error of the plain formula in the same dtype. It is taken twice, by the norm of
the whole tensor and by the worst row: a wrong tile hides in the norm of a long sequence, but not in its rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.base import Plan, Tensors, extra_logits, learned_parameters
from model.attention.reference import attention_logits, plain_attention, probabilities
from model.methods.base import KeyBias, Method, Sink, Window

LIMIT = 1.5  # times the error of the plain formula in the same dtype
ROW_LIMIT = 2.0  # the same for the worst row, which varies more
LEAST = 1e-5  # an error of this size is always allowed: float32's own, over a long sum
# Whole tiles; a last tile that is not whole; and few queries. Kernels compile different code for each.
LENGTHS = (1024, 1000, 100)
BATCH = 2


class Checked(NamedTuple):
    problem: str | None  # the error that the backend raised, or its wrong tensor; None where all are right
    result: str = ""  # the largest error, for the log


def worst_error(
    tensors: Tensors, exact: Tensors, plain: Tensors, rounding: float = 0.0, factor: float = 1.0
) -> tuple[str, float]:
    """Return the name of the error that is largest as a share of its limit, and this share; infinity for NaN.

    exact: the tensors in float64. plain: the same by the plain formula in the kernel's dtype. rounding: the dtype's
    relative rounding. Gradients of key biases, sinks and learned parameters may be wrong by 4 of it. They are sums over
    whole rows, so a rounded output shows in them, and the plain formula's own error varies. factor: multiplies all
    limits. `NAME by row` is the error of the worst row.
    """
    errors, plain_errors, shares = relative_errors(tensors, exact), relative_errors(plain, exact), {}
    for name, error in errors.items():
        is_sum = exact[name.removesuffix(" by row")].dim() < 4
        limit = ROW_LIMIT if name.endswith(" by row") else LIMIT
        limit = factor * max(limit * plain_errors[name], LEAST, 4 * rounding * is_sum)
        shares[name] = math.inf if math.isnan(error) else error / limit
    return max(shares.items(), key=lambda item: item[1])


def relative_errors(tensors: Tensors, exact: Tensors) -> dict[str, float]:
    errors = {}
    for name, y in exact.items():
        difference = tensors[name].double() - y
        errors[name] = (difference.norm() / y.norm()).item()
        if y.dim() > 1:  # the worst row, as a share of the root mean square of all rows
            rows, mean_row = difference.norm(dim=-1), y.norm() / (y.numel() / y.shape[-1]) ** 0.5
            errors[f"{name} by row"] = (rows.max() / mean_row).item()
    return errors


@torch.inference_mode(False)
@torch.enable_grad()
def check_backend(
    backend, method: Method, device: torch.device, dtype: torch.dtype, lengths: Sequence[int] = LENGTHS
) -> Checked:
    """Compare a backend with the formula in float64 on random inputs, forward and backward.

    backend: see model/attention/__init__.py.
    """
    largest = 0.0
    for length in lengths:
        try:
            name, share = compare(backend, only_changes(method, length, device), length, device, dtype)
        except Exception as error:  # Triton's, CUDA's and the compiler's errors are of many kinds
            message = " ".join(str(error).split())[:100]
            return Checked(f"it failed its check with {type(error).__name__}: {message} ({length} tokens)")
        if share > 1:
            return Checked(f"it failed its check: {name} has {share:.1f} times the allowed error ({length} tokens)")
        largest = max(largest, share)
    return Checked(None, f"error {largest:.2g} of the limit, checked at {' and '.join(map(str, lengths))} tokens")


def compare(backend, method: Method, length: int, device: torch.device, dtype: torch.dtype) -> tuple[str, float]:
    """Return worst_error of a backend's output and gradients."""
    inputs, dout = random_inputs(method, length, device, dtype)
    learned = learned_parameters(method.score_change)
    if method.sink is not None:
        learned["sink"] = method.sink.logit
    tensors = output_and_gradients(on_backend(backend, method, length, dtype), inputs, dout, learned)
    exact = output_and_gradients(formula(method), [x.double() for x in inputs], dout.double(), learned)
    plain = output_and_gradients(rounded_formula(method), inputs, dout, learned)
    return worst_error(tensors, exact, plain, torch.finfo(dtype).eps, getattr(backend, "ERROR_FACTOR", 1.0))


class GivenBias(KeyBias):
    """Key biases that take the place of the layer's input, (B, H, T)."""

    def token_features(self, x):
        return x

    def bias(self, token_features):
        return token_features


def only_changes(method: Method, length: int, device: torch.device) -> Method:
    """Return a method without rotation and query scale, whose logits are changed by the same kinds of mechanism.

    Its key biases and sinks leave no tile without weight in the result, and its window hides some keys at this length.
    """
    mechanisms = [] if method.score_change is None else [method.score_change]
    if method.key_bias is not None:
        mechanisms.append(GivenBias())
    if method.window is not None:
        mechanisms.append(Window())
        mechanisms[-1].window = min(method.window.window, length // 2)
    if method.sink is not None:
        mechanisms.append(Sink())
        mechanisms[-1].logit = nn.Parameter(torch.linspace(-1, 1, method.num_heads, device=device))
    return Method(method.name, method.num_heads, method.vector_dim, method.train_length, mechanisms)


def random_inputs(
    method: Method, length: int, device: torch.device, dtype: torch.dtype, batch: int = BATCH
) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, perhaps key biases, and the gradient of the output, laid out in memory as the model has them.

    q and k are normalised (B, T, H, D), v is a part of one tensor (B, T, 3, H, D), and the key biases are float32.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = batch, length, 3, method.num_heads, method.head_dim
    q, k, v = torch.randn(shape, device=device, generator=generator).to(dtype).unbind(2)
    q, k = (F.rms_norm(x, x.shape[-1:]) for x in (q, k))
    dout = torch.randn(q.shape, device=device, generator=generator).to(dtype)
    inputs = [x.transpose(1, 2) for x in (q, k, v)]
    if method.key_bias is not None:
        inputs.append(torch.randn(batch, method.num_heads, length, device=device, generator=generator))
    return inputs, dout.transpose(1, 2)


def output_and_gradients(
    attend: Callable[..., Tensor], inputs: Sequence[Tensor], dout: Tensor, learned: Tensors | None = None
) -> Tensors:
    """Return attend(*inputs), and the gradients of inputs (q, k, v, perhaps key biases) and of learned parameters."""
    inputs, learned = [x.detach().requires_grad_() for x in inputs], learned or {}
    output = attend(*inputs)
    gradients = torch.autograd.grad(output, [*inputs, *learned.values()], dout)
    names = [*("dq", "dk", "dv", "dkey_bias")[: len(inputs)], *(f"d{name}" for name in learned)]
    return dict(zip(["output", *names], [output.detach(), *gradients], strict=True))


def on_backend(backend, method: Method, length: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return attention by a backend, without the rotation of q and k and without the choice of a backend."""
    window = None if method.window is None else method.window.window

    def attend(q, k, v, key_bias=None):
        plan = Plan("", method.num_heads, method.head_dim, length, length, device=q.device, dtype=dtype, window=window)
        is_learned = bool(learned_parameters(method.score_change))
        prepared = backend.prepare(None if is_learned else method.score_change, plan)
        if is_learned:
            prepared = backend.prepare(method.score_change, plan, prepared)
        return backend.run(q, k, v, prepared=prepared, **extra_logits(method, key_bias))

    return attend


def formula(method: Method) -> Callable[..., Tensor]:
    return lambda q, k, v, key_bias=None: plain_attention(method, q, k, v, x=key_bias)


def rounded_formula(method: Method) -> Callable[..., Tensor]:
    """Return the formula with float32 logits. Probabilities and gradients of logits are rounded to v's dtype, since
    fast matrix products take them in it."""

    def attend(q, k, v, key_bias=None):
        logits = attention_logits(method, q, k, x=key_bias)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient.to(v.dtype).to(gradient.dtype))
        return probabilities(method, logits).to(v.dtype) @ v

    return attend

"""The one check of a kernel: its numbers against the formula in float64.

A kernel's error may be LIMIT times the error of the plain formula in the same dtype. The error is measured twice: by
the norm of the whole tensor, and by the worst row. A wrong tile hides in the norm of a long sequence, but not in a row.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.attend import attend
from model.attention.backend import Backend
from model.attention.plan import document_starts, plan_layer
from model.attention.reference import attention_logits, plain_attention, probabilities
from model.methods.base import KeyBias, Method, Sink, Window

LIMIT = 1.5  # times the error of the plain formula in the same dtype
ROW_LIMIT = 2.0  # the same for the worst row, which varies more
LEAST = 1e-5  # an error of this size is always allowed: float32's own, over a long sum
# Whole tiles; a last tile that is not whole; and few queries. Kernels compile different code for each.
LENGTHS = (1024, 1000, 100)
BATCH = 2
DOCUMENT = 300  # tokens; no multiple of a tile
Tensors = dict[str, Tensor]  # by name


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
    errors, plain_errors = relative_errors(tensors, exact), relative_errors(plain, exact)
    shares = {}
    for name, error in errors.items():
        is_sum = exact[name.removesuffix(" by row")].dim() < 4
        limit = ROW_LIMIT if name.endswith(" by row") else LIMIT
        allowed = max(limit * plain_errors[name], LEAST, 4 * rounding * is_sum)
        shares[name] = math.inf if math.isnan(error) else error / (factor * allowed)
    return max(shares.items(), key=lambda item: item[1])


def relative_errors(tensors: Tensors, exact: Tensors) -> dict[str, float]:
    errors = {}
    for name, y in exact.items():
        size = y.norm().item() or y.numel() ** 0.5  # zeros count as ones
        difference = tensors[name].double() - y
        errors[name] = difference.norm().item() / size
        if y.dim() > 1:  # the worst row, as a share of the root mean square of all rows
            worst_row = difference.norm(dim=-1).max().item()
            mean_row = size / (y.numel() / y.shape[-1]) ** 0.5
            errors[f"{name} by row"] = worst_row / mean_row
    return errors


@torch.inference_mode(False)
@torch.enable_grad()
def check_backend(
    backend: Backend,
    method: Method,
    device: torch.device,
    dtype: torch.dtype,
    lengths: Sequence[int] = LENGTHS,
    backward: bool = True,
    documents: bool = False,
) -> Checked:
    """Compare a backend with the formula in float64 on random inputs, forward and backward.

    backward: False for a backend without a backward pass. documents: the inputs are several documents.
    """
    largest = 0.0
    for length in lengths:
        try:
            changes = only_changes(method, length, device)
            name, share = compare(backend, changes, length, device, dtype, backward, documents)
        except Exception as error:  # Triton's, CUDA's and the compiler's errors are of many kinds
            message = " ".join(str(error).split())[:100]
            return Checked(f"it failed its check with {type(error).__name__}: {message} ({length} tokens)")
        if share > 1:
            return Checked(f"it failed its check: {name} has {share:.1f} times the allowed error ({length} tokens)")
        largest = max(largest, share)
    return Checked(None, f"error {largest:.2g} of the limit, checked at {' and '.join(map(str, lengths))} tokens")


def compare(
    backend: Backend,
    method: Method,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
    backward: bool,
    documents: bool,
) -> tuple[str, float]:
    """Return worst_error of a backend's output and gradients."""
    plan = plan_layer(method, backend, length, length, device=device)
    starts = None
    if documents:  # the sequences have other documents
        tokens = torch.arange(BATCH * length, device=device).view(BATCH, length)
        starts = document_starts(tokens % DOCUMENT, 0)
        plan = plan.within_documents(starts)
    inputs, dout = random_inputs(method, length, device, dtype)
    wide = {name: x.double() for name, x in inputs.items()}
    measure = functools.partial(output_and_gradients, method=method, backward=backward)
    found = measure(functools.partial(attend, plan=plan), inputs=inputs, dout=dout)
    exact = measure(functools.partial(plain_attention, starts=starts), inputs=wide, dout=dout.double())
    plain = measure(functools.partial(rounded_attention, starts=starts), inputs=inputs, dout=dout)
    return worst_error(found, exact, plain, torch.finfo(dtype).eps, backend.error_factor)


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
    mechanisms = []
    if method.score_change is not None:
        mechanisms.append(method.score_change)
    if method.key_bias is not None:
        mechanisms.append(GivenBias())
    if method.window is not None:
        window = Window()
        window.window = min(method.window.window, length // 2)
        mechanisms.append(window)
    if method.sink is not None:
        sink = Sink()
        sink.logit = nn.Parameter(torch.linspace(-1, 1, method.num_heads, device=device))
        mechanisms.append(sink)
    shape = dataclasses.replace(method.shape, head_dim=method.vector_dim)
    return Method(method.name, shape, mechanisms)


def random_inputs(
    method: Method, length: int, device: torch.device, dtype: torch.dtype, batch: int = BATCH
) -> tuple[Tensors, Tensor]:
    """Return q, k, v, perhaps key biases x, and the gradient of the output, laid out in memory as the model has them.

    q and k are normalised (B, T, H, D), v is a part of one tensor (B, T, 3, H, D), and the key biases are float32.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, device=device, generator=generator)

    q, k, v = draw(batch, length, 3, method.num_heads, method.head_dim).to(dtype).unbind(2)
    q = F.rms_norm(q, q.shape[-1:])
    k = F.rms_norm(k, k.shape[-1:])
    dout = draw(*q.shape).to(dtype)
    inputs = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
    if method.key_bias is not None:
        inputs["x"] = draw(batch, method.num_heads, length)
    return inputs, dout.transpose(1, 2)


def output_and_gradients(
    function: Callable[..., Tensor], method: Method, inputs: Tensors, dout: Tensor, backward: bool
) -> Tensors:
    """Return the output of function(method, **inputs), and the gradients of inputs and of learned parameters.

    backward: if False, only the output.
    """
    inputs = {name: x.detach().requires_grad_(backward) for name, x in inputs.items()}
    output = function(method, **inputs)
    if not backward:
        return {"output": output}
    leaves = inputs | dict(method.named_parameters())
    gradients = torch.autograd.grad(output, leaves.values(), dout, materialize_grads=True)
    return {"output": output.detach()} | {f"d{name}": gradient for name, gradient in zip(leaves, gradients)}


def rounded_attention(
    method: Method, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """Return attention by the formula with float32 logits.

    Probabilities and gradients of logits are rounded to v's dtype, since fast matrix products take them in it.
    """
    logits = attention_logits(method, q, k, x=x, starts=starts)
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient.to(v.dtype).to(gradient.dtype))
    return probabilities(method, logits).to(v.dtype) @ v

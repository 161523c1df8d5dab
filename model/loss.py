"""Cross-entropy of a linear head: three matmuls, and one chunk of logits in memory, in the dtype of x.

The gradient of a token's loss by its logits is softmax - onehot(target), known in the forward pass. So the forward pass
computes the mean loss and its gradients, a chunk of tokens at a time. For each chunk, two more matmuls compute the
gradients by x and head. The backward pass only scales these two.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from model import cpu
from model.tensors import upcast

CPU_ROWS, CPU_LOGITS = 256, 2**21  # a chunk on a CPU has at least 256 tokens, and up to 8 MiB of logits if it has more
LOGIT_BYTES = 2**30  # of a chunk on a GPU: 10,672 tokens with vocabulary 50,304 in bfloat16; its gradients take as many


def mean_loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of targets (N,) int64 under the logits x @ head.T: a float32 scalar.

    x (N, C) has the dtype of the matmuls, head (V, C) is a float32 parameter. With gradients enabled, the gradients of
    x and head are computed here and kept until the backward pass. There are no second derivatives.
    """
    if torch.is_grad_enabled():
        return loss_and_grads(x, head, targets, None)[0]
    return token_losses(x, head, targets).mean()


@torch.library.custom_op("scale_invariant::loss_and_gradients", mutates_args=())
def loss_and_grads(x: Tensor, head: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss, and the gradients of sum_i weights_i loss_i by x and head. weights (N,); None: all 1."""
    losses, dx, dhead = empty_losses(x), x.new_empty(x.shape), torch.zeros_like(head)
    head, targets = head.to(x.dtype), targets.contiguous()
    for chunk, logits in logits_in_chunks(x, head):
        losses[chunk], dlogits = cross_entropy(logits, targets[chunk], gradient=True)
        if weights is not None:
            dlogits *= weights[chunk, None]
        torch.mm(dlogits, head, out=dx[chunk])
        if x.dtype == dhead.dtype:
            dhead.addmm_(dlogits.mT, x[chunk])
        else:
            dhead += dlogits.mT @ x[chunk]
    return losses.mean(), dx, dhead


@torch.library.custom_op("scale_invariant::token_losses", mutates_args=())
def token_losses(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return each token's loss, (N,) float32. The backward pass recomputes the logits to weigh their gradients."""
    losses, targets = empty_losses(x), targets.contiguous()
    for chunk, logits in logits_in_chunks(x, head.to(x.dtype)):
        losses[chunk], _ = cross_entropy(logits, targets[chunk], gradient=False)
    return losses


def empty_losses(x: Tensor) -> Tensor:
    return x.new_empty(len(x), dtype=torch.float32)


def logits_in_chunks(x: Tensor, head: Tensor) -> Iterator[tuple]:
    """Yield the slice of tokens and the logits of each chunk. All chunks share one buffer. The last may be smaller."""
    N, V = len(x), len(head)
    on_cpu = x.device.type == "cpu"
    largest = max(CPU_ROWS, CPU_LOGITS // V) if on_cpu else max(1, LOGIT_BYTES // (V * x.element_size()))
    rows = math.ceil(N / math.ceil(N / largest))
    buffer = x.new_empty(rows, V)
    for start in range(0, N, rows):
        chunk = slice(start, min(start + rows, N))
        yield chunk, torch.mm(x[chunk], head.mT, out=buffer[: chunk.stop - start])


def cross_entropy(logits: Tensor, targets: Tensor, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Return the losses (R,) of logits (R, V) and, if gradient, softmax - onehot. The logits may be overwritten."""
    if cpu.kernel_problem(logits.device, logits.dtype) is None:
        losses = empty_losses(logits)
        cpu.cross_entropy_(logits, targets, losses, gradient)
        return losses, logits if gradient else None
    on_gpu = logits.device.type == "cuda"
    return (compiled_cross_entropy(logits.device) if on_gpu else plain_cross_entropy)(logits, targets, gradient)


def plain_cross_entropy(logits: Tensor, targets: Tensor, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Return the result of cross_entropy, in plain PyTorch that torch.compile turns into one kernel."""
    x = upcast(logits)
    top = x.amax(dim=1, keepdim=True)
    p = (x - top).exp()
    total = p.sum(dim=1, keepdim=True)
    losses = (total.log() - (x.gather(1, targets[:, None]) - top)).squeeze(1)
    if not gradient:
        return losses, None
    is_target = torch.arange(x.shape[1], device=x.device) == targets[:, None]
    return losses, (p / total - is_target.to(x.dtype)).to(logits.dtype)


@functools.cache
def compiled_cross_entropy(device: torch.device) -> Callable:
    """Return plain_cross_entropy, compiled so that it stores no float32 logits. Warn if torch.compile fails.

    The vocabulary size is a constant in the compiled code. The number of tokens is not.
    """
    if problem := compile_problem(device):
        warnings.warn(f"torch.compile fails ({problem}), so the loss needs more memory.")
        return plain_cross_entropy
    return torch.compile(plain_cross_entropy)


@functools.cache
def compile_problem(device: torch.device) -> str | None:
    """Return why torch.compile fails on this device, or None. It needs a C++ compiler and Python's headers on a CPU."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # anything from a missing compiler to an unsupported GPU
        first_line = str(error).strip().splitlines()[0]
        return f"{type(error).__name__}: {first_line[:200]}"
    return None


# ---- autograd --------------------------------------------------------------------------------------------------------


@loss_and_grads.register_fake
def _(x, head, targets, weights=None):
    return x.new_empty((), dtype=torch.float32), x.new_empty(x.shape), torch.empty_like(head)


@token_losses.register_fake
def _(x, head, targets):
    return empty_losses(x)


def save_gradients(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)  # else unused outputs get zeros as large as the gradients


def scale_gradients(ctx, dloss, *_):
    dx, dhead = ctx.saved_tensors
    scale = dloss / len(dx)
    dx = (dx.float() * scale).to(dx.dtype)  # rounded once: scale itself is not in bfloat16
    return dx, dhead * scale, *[None] * (len(ctx.needs_input_grad) - 2)  # None for targets and weights


def save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def weigh_gradients(ctx, dlosses):
    return *loss_and_grads(*ctx.saved_tensors, dlosses)[1:], None


loss_and_grads.register_autograd(scale_gradients, setup_context=save_gradients)
token_losses.register_autograd(weigh_gradients, setup_context=save_inputs)

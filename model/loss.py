"""Cross-entropy of a linear head: no float32 logits, one chunk of logits in memory, three matmuls in all.

The gradient of a token's loss by its logits is softmax - onehot(target), known as soon as the logits are. So the mean
loss is computed together with its gradients, a chunk of tokens at a time. The chunk's logits become that difference in
place, and are multiplied into the gradients of x and head. The backward pass only scales these.
"""

import functools
import math
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from model.attention import check, cpu
from model.methods.base import upcast

CPU_ROWS, CPU_LOGITS = 256, 2**21  # at least so many tokens a chunk on a CPU, and more while its logits are 8 MiB
LOGIT_BYTES = 2**31  # a chunk elsewhere: 21,345 tokens with a vocabulary of 50,304 in bfloat16


def mean_loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of targets (N,) int64 under the logits x @ head.T: a float32 scalar.

    x (N, C) has the dtype of the matmuls, head (V, C) is a float32 parameter. With gradients enabled, the gradients of
    x and head are computed here and kept until the backward pass. There are no second derivatives.
    """
    if torch.is_grad_enabled():
        return loss_op(x, head, targets, None)[0]
    return token_losses(x, head, targets).mean()


@torch.library.custom_op("scale_invariant::loss_and_gradients", mutates_args=())
def loss_op(x: Tensor, head: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss, and the gradients by x and head of the sum of the losses, each times its weight, (N,)."""
    losses, dx, dhead = empty_losses(x), x.new_empty(x.shape), torch.zeros_like(head)
    head, targets = head.to(x.dtype), targets.contiguous()
    for chunk, logits in logits_in_chunks(x, head):
        cross_entropy_(logits, targets[chunk], losses[chunk], True)
        if weights is not None:
            logits *= weights[chunk, None]
        torch.mm(logits, head, out=dx[chunk])
        if x.dtype == dhead.dtype:
            dhead.addmm_(logits.mT, x[chunk])
        else:
            dhead += logits.mT @ x[chunk]
    return losses.mean(), dx, dhead


@torch.library.custom_op("scale_invariant::token_losses", mutates_args=())
def token_losses(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return each token's loss, (N,) float32. Any sum may follow, so the backward pass makes the logits again."""
    losses, targets = empty_losses(x), targets.contiguous()
    for chunk, logits in logits_in_chunks(x, head.to(x.dtype)):
        cross_entropy_(logits, targets[chunk], losses[chunk], False)
    return losses


def empty_losses(x: Tensor) -> Tensor:
    return x.new_empty(len(x), dtype=torch.float32)


def logits_in_chunks(x: Tensor, head: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each chunk and their logits, which share one memory."""
    for chunk, memory in chunks(x, len(head)):
        yield chunk, torch.mm(x[chunk], head.mT, out=memory)


def chunks(x: Tensor, V: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each chunk, and memory for their logits that all chunks share. The last may be smaller."""
    N = len(x)
    on_cpu = x.device.type == "cpu"
    most = max(CPU_ROWS, CPU_LOGITS // V) if on_cpu else max(1, LOGIT_BYTES // (V * x.element_size()))
    rows = math.ceil(N / math.ceil(N / most))
    memory = x.new_empty(rows, V)
    for start in range(0, N, rows):
        chunk = slice(start, min(start + rows, N))
        yield chunk, memory[: chunk.stop - start]


def cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor, gradient: bool):
    """Set losses (R,) from logits (R, V). If gradient, set the logits to softmax - onehot; else they are lost."""
    if triton_runs(logits.device, logits.dtype, logits.shape[1]):
        from model.attention.triton import cross_entropy  # only now, as it needs Triton

        cross_entropy.cross_entropy_(logits, targets, losses, gradient)
    elif cpu.kernel_problem(logits.device, logits.dtype) is None:
        cpu.cross_entropy_(logits, targets, losses, gradient)
    else:
        plain_cross_entropy_(logits, targets, losses, gradient)


@functools.cache
def triton_runs(device: torch.device, dtype: torch.dtype, vocab_size: int) -> bool:
    """Return whether the Triton kernel runs there and passes its check for such logits; warn if it fails."""
    on_gpu = device.type == "cuda" and find_spec("triton") is not None
    if not on_gpu or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if problem := check_triton(device, dtype, vocab_size):
        warnings.warn(f"cross-entropy in plain PyTorch, which needs more memory: for the Triton kernel, {problem}")
    return problem is None


def check_triton(device: torch.device, dtype: torch.dtype, V: int) -> str | None:
    """Run the Triton kernel on logits (5, V); return how it fails or what is wrong, or None.

    Triton compiles different code for each dtype, and for a V that is a multiple of 16.
    """
    from model.attention.triton import cross_entropy

    generator = torch.Generator(device).manual_seed(0)
    logits = (4 * torch.randn(5, V, device=device, generator=generator)).to(dtype)
    targets = torch.tensor([0, 8191, 8192, V // 2, V - 1], device=device).clamp(max=V - 1)

    def run(function, logits):
        dlogits, losses, validation_losses = logits.clone(), *(upcast(logits.new_empty(5)) for _ in range(2))
        function(logits.clone(), targets, validation_losses, False)
        function(dlogits, targets, losses, True)
        return {"losses": losses, "losses without gradient": validation_losses, "gradient": dlogits}

    return check.find_problem(
        lambda: run(cross_entropy.cross_entropy_, logits),
        lambda: run(plain_cross_entropy_, logits.double()),
        lambda: run(plain_cross_entropy_, logits),
    )


def plain_cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor, gradient: bool):
    """Do what cross_entropy_ does in plain PyTorch, for a device or dtype without a kernel."""
    token = torch.arange(len(targets), device=targets.device)
    p = upcast(logits) - logits.amax(dim=1, keepdim=True)
    at_target = p[token, targets]
    total = p.exp_().sum(dim=1)
    losses.copy_(total.log() - at_target)
    if gradient:
        p /= total[:, None]
        p[token, targets] -= 1
        logits.copy_(p)


# ---- autograd --------------------------------------------------------------------------------------------------------


@loss_op.register_fake
def _(x, head, targets, weights=None):
    return x.new_empty((), dtype=torch.float32), x.new_empty(x.shape), torch.empty_like(head)


@token_losses.register_fake
def _(x, head, targets):
    return empty_losses(x)


def save_gradients(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)  # zeros as large as the gradients, for outputs that nobody differentiates


def scale_gradients(ctx, dloss, *_):
    dx, dhead = ctx.saved_tensors
    scale = dloss / len(dx)
    dx = (dx.float() * scale).to(dx.dtype)  # rounded once: scale itself is not in bfloat16
    return dx, dhead * scale, *[None] * (len(ctx.needs_input_grad) - 2)


def save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def weigh_gradients(ctx, dlosses):
    return *loss_op(*ctx.saved_tensors, dlosses)[1:], None


loss_op.register_autograd(scale_gradients, setup_context=save_gradients)
token_losses.register_autograd(weigh_gradients, setup_context=save_inputs)

"""Our Triton kernel (model/kernels/flash.py), for methods that change the score, on CUDA.

Triton is imported only when it is used: not every machine has it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from model.backends.base import EXTRAS, Call, bound_products, extra_logits, find_unsupported
from model.context import local_shard
from model.kernels import compare
from model.kernels.distance import Coefficients, learned_parameters, make_coefficients
from model.methods.base import KeyBias, Method, ScoreChange, Sink, Window
from model.reference import plain_attention

# A tile goes over the end of the first, as at odd lengths: that is other code. In bfloat16 both have tiles of every
# kind, lines (from 2,272 tokens on) too.
CHECKED_LENGTHS = (2500, 2560)
HEADS_AT = dict(table=1, polynomials=1, tangent=1, parameter=0)  # the dimension of heads in the fields of Coefficients


def find_problem(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    if not find_spec("triton"):
        return "Triton is not installed"
    from model.kernels import flash

    if [p.shape for p in learned_parameters(method.score_change).values()] not in ([], [(method.num_heads,)]):
        return f"it takes one learned number a head, {method.name} has others"
    unsupported = find_unsupported(method, tuple(EXTRAS))
    return unsupported or flash.find_problem(device, dtype, method.vector_dim)


def prepare(score_change: ScoreChange | None, call: Call, earlier: Coefficients | None = None) -> Coefficients:
    shape = call.num_heads, call.head_dim, call.key_length, call.q_offset
    coefficients = make_coefficients(score_change, *shape, call.dtype, call.device, call.product_bound)
    parts = {name: local_shard(getattr(coefficients, name), dim, call.context) for name, dim in HEADS_AT.items()}
    return dataclasses.replace(coefficients, window=call.window, **parts)


def run(
    q: Tensor, k: Tensor, v: Tensor, *,
    q_offset: int = 0, prepared: Coefficients | None = None, key_bias: Tensor | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from model.kernels.flash import flash_attention

    return flash_attention(q, k, v, prepared, q_offset=q_offset, key_bias=key_bias, sink=sink)


def check_on_this_machine(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return how the kernel fails the first time it is run here, or None; None too where it cannot be run now."""
    if not torch.cuda.is_available() or torch.compiler.is_compiling():
        return None
    problems = (check_kernel_once(method, device, dtype, length) for length in CHECKED_LENGTHS)
    return next(filter(None, problems), None)


@torch.inference_mode(False)
@torch.enable_grad()
def check_kernel(
    method: Method, device: torch.device, dtype: torch.dtype, length: int, prepare=prepare, run=run
) -> str | None:
    """Run the kernel once, forward and backward: return how it fails or differs from plain_attention, or None.

    prepare, run: those of this backend, or of another.

    Each version of Triton compiles it anew for each kind of GPU: this is to trust the numbers on all of them, with a
    running maximum and, where the logits of normalised q and k are bounded, without.
    """
    method = changes_alone(method, length, device)
    generator = torch.Generator(device).manual_seed(0)
    shape = 4, 1, method.num_heads, length, method.vector_dim
    q, k, *others = torch.randn(shape, device=device, generator=generator).unbind()
    q, k = (F.rms_norm(x, x.shape[-1:]) for x in (q, k))  # as in the model
    *inputs, dout = (x.to(dtype) for x in (q, k, *others))
    if method.key_bias is not None:
        inputs.append(torch.randn(1, method.num_heads, length, device=device, generator=generator))
    sink = [] if method.sink is None else [method.sink.logit]
    window = None if method.window is None else method.window.window
    call = Call(method.num_heads, method.head_dim, length, length, device=device, dtype=dtype, window=window)
    bounded = dataclasses.replace(call, product_bound=bound_products(method.head_dim, dtype))

    def attend(q, k, v, key_bias=None, *, prepared):
        return run(q, k, v, prepared=prepared, **extra_logits(method, key_bias))

    def formula(q, k, v, key_bias=None):
        return plain_attention(method, q, k, v, x=key_bias)

    def run_kernel():
        forms = [functools.partial(attend, prepared=prepare(method.score_change, c)) for c in (call, bounded)]
        return [x for form in forms for x in output_and_gradients(form, inputs, dout, sink)]

    def run_formula():
        return output_and_gradients(formula, [x.double() for x in inputs], dout.double(), sink) * 2

    reason = compare(run_kernel, run_formula, 4 * torch.finfo(dtype).eps + 1e-5)  # its rounding is about one eps
    return reason and f"it {reason}"


check_kernel_once = functools.lru_cache(maxsize=16)(check_kernel)  # not again for each length, or each prompt


class GivenBias(KeyBias):
    """Biases of keys as they are: in place of the layer's input, (B, H, T)."""

    def of_tokens(self, x):
        return x

    def bias(self, of_tokens):
        return of_tokens


def changes_alone(method: Method, length: int, device: torch.device) -> Method:
    """Return what a method does to the logits, to be checked at this length: of biases of keys, windows and sinks that
    it has, some by which no tile is without weight in the result, and that hide some."""
    mechanisms = [] if method.score_change is None else [method.score_change]
    if method.key_bias is not None:
        mechanisms.append(GivenBias())
    if method.window is not None:
        mechanisms.append(Window())
        mechanisms[-1].window = min(method.window.window, length // 2)
    if method.sink is not None:
        mechanisms.append(Sink())
        mechanisms[-1].logit = torch.nn.Parameter(torch.linspace(-1, 1, method.num_heads, device=device))
    return Method(method.name, method.num_heads, method.vector_dim, method.train_length, mechanisms)


def output_and_gradients(attend, inputs: list[Tensor], dout: Tensor, parameters: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return attend(*inputs), and the gradients of the inputs and parameters when dout is that of the output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = attend(*inputs)
    return [output.detach(), *torch.autograd.grad(output, [*inputs, *parameters], dout)]

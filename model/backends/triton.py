"""Our Triton kernel (model/kernels/flash.py), for methods that change the score, on CUDA.

Triton is imported only when it is used: not every machine has it.
"""

import dataclasses
import functools
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from model.backends.base import Call, bound_products, find_unsupported
from model.context import local_shard
from model.kernels import compare
from model.kernels.distance import Coefficients, learned_parameters, make_coefficients
from model.methods.base import Method, ScoreChange
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
    unsupported = find_unsupported(method, ("key_bias", "window", "sink"))
    return unsupported or flash.find_problem(device, dtype, method.head_dim)


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
    changes = [] if method.score_change is None else [method.score_change]
    method = Method(method.name, method.num_heads, method.head_dim, method.train_length, changes)  # without rotation
    generator = torch.Generator(device).manual_seed(0)
    shape = 4, 1, method.num_heads, length, method.head_dim
    q, k, *others = torch.randn(shape, device=device, generator=generator).unbind()
    q, k = (F.rms_norm(x, x.shape[-1:]) for x in (q, k))  # as in the model
    *inputs, dout = (x.to(dtype) for x in (q, k, *others))
    call = Call(method.num_heads, method.head_dim, length, length, device=device, dtype=dtype)
    bounded = dataclasses.replace(call, product_bound=bound_products(method.head_dim, dtype))

    def run_kernel():
        forms = [functools.partial(run, prepared=prepare(method.score_change, c)) for c in (call, bounded)]
        return [x for form in forms for x in output_and_gradients(form, inputs, dout)]

    def run_formula():
        doubles = [x.double() for x in inputs]
        return output_and_gradients(functools.partial(plain_attention, method), doubles, dout.double()) * 2

    reason = compare(run_kernel, run_formula, 4 * torch.finfo(dtype).eps + 1e-5)  # its rounding is about one eps
    return reason and f"it {reason}"


check_kernel_once = functools.lru_cache(maxsize=16)(check_kernel)  # not again for each length, or each prompt


def output_and_gradients(attend, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Return attend(*inputs), and the gradients of the inputs when dout is that of the output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = attend(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, dout)]

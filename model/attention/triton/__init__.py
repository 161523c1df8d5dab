"""Our Triton kernel (flash.py), for methods that change the score, on CUDA.

It reads A(t) and M(t) from tables. The logits are in bits: L log2(e) = A(t) q.k + M(t). If m = 1 - a^2, as in
scale-invariant attention, the softmax ignores the 1 and one table is enough:

    L log2(e) = b (q.k sqrt(log2(e) / d) - b) + constant,    b = a sqrt(log2(e))

Triton is imported on first use, because not every machine has it.
"""

import dataclasses
import os
from importlib.util import find_spec

import torch
from torch import Tensor

from model.attention.base import (
    EXTRAS,
    LOG2E,
    Plan,
    in_bits,
    learned_parameters,
    one_function_is_enough,
    score_functions,
    unsupported_extras,
)
from model.methods.base import Method, ScoreChange

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
PADDING = 128  # entries beyond the largest distance, because the last tile may extend beyond the last query


@dataclasses.dataclass(frozen=True)
class Tables:
    """a_t and m_t of one method. The dimension of heads is 1 if all heads agree."""

    functions: Tensor | None = None  # (n, H or 1, keys + PADDING) float32: A and M, or b alone; None for a = 1, m = 0
    tangent: Tensor | None = None  # the derivatives of A and M by each head's parameter
    parameter: Tensor | None = None  # (H,): the learned parameter
    window: int = 0  # keys at this distance, or further away, are hidden; 0 for no window


def unsupported(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    if not find_spec("triton"):
        return "Triton is not installed"
    if [p.shape for p in learned_parameters(method.score_change).values()] not in ([], [(method.num_heads,)]):
        return f"it takes one learned number per head, and {method.name} has others"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":  # the interpreter is for tests
        return f"it runs on CUDA, not on {device}"
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 (A100) or newer"
    if dtype not in DTYPES or method.vector_dim > MAX_HEAD_DIM:
        types = "float32, float16 and bfloat16"
        return f"it takes {types} and heads of up to {MAX_HEAD_DIM} numbers, not {dtype} and {method.vector_dim}"
    return unsupported_extras(method, tuple(EXTRAS))


def prepare(score_change: ScoreChange | None, plan: Plan, earlier: Tables | None = None) -> Tables:
    window = 0 if plan.window is None or plan.window >= plan.key_length else plan.window
    if score_change is None:
        return Tables(window=window)
    distance = torch.arange(plan.key_length + PADDING, device=plan.device).double()
    if learned := learned_parameters(score_change):
        ((name, parameter),) = learned.items()

        def functions(value):
            return in_bits(score_functions(score_change, plan.num_heads, distance, {name: value}), plan.head_dim)

        both, tangent = torch.func.jvp(functions, (parameter.detach(),), (torch.ones_like(parameter),))
        return Tables(both.float(), tangent.float(), parameter, window)
    both = score_functions(score_change, plan.num_heads, distance)
    one = one_function_is_enough(*both)
    functions = both[:1] * LOG2E**0.5 if one else in_bits(both, plan.head_dim)
    return Tables(functions.float().contiguous(), window=window)


def run(
    q: Tensor, k: Tensor, v: Tensor, *,
    q_offset: int = 0, prepared: Tables | None = None, key_bias: Tensor | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from model.attention.triton.flash import flash_attention

    return flash_attention(q, k, v, prepared or Tables(), q_offset, key_bias, sink)

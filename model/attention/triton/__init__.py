"""Our Triton kernel (flash.py), for methods that change the score, on CUDA.

Triton is imported at use only, because not every machine has it.
"""

import dataclasses
from importlib.util import find_spec

import torch
from torch import Tensor

from model.attention.base import EXTRAS, Plan, learned_parameters, unsupported_extras
from model.attention.triton.distance import Coefficients, make_coefficients
from model.methods.base import Method, ScoreChange


def unsupported(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    if not find_spec("triton"):
        return "Triton is not installed"
    from model.attention.triton.flash import kernel_problem

    if [p.shape for p in learned_parameters(method.score_change).values()] not in ([], [(method.num_heads,)]):
        return f"it takes one learned number a head, {method.name} has others"
    return unsupported_extras(method, tuple(EXTRAS)) or kernel_problem(device, dtype, method.vector_dim)


def prepare(score_change: ScoreChange | None, plan: Plan, earlier: Coefficients | None = None) -> Coefficients:
    shape = plan.num_heads, plan.head_dim, plan.key_length, plan.q_offset
    coefficients = make_coefficients(score_change, *shape, plan.dtype, plan.device, plan.product_bound)
    return dataclasses.replace(coefficients, window=plan.window)


def run(
    q: Tensor, k: Tensor, v: Tensor, *,
    q_offset: int = 0, prepared: Coefficients | None = None, key_bias: Tensor | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from model.attention.triton.flash import flash_attention

    return flash_attention(q, k, v, prepared, q_offset=q_offset, key_bias=key_bias, sink=sink)

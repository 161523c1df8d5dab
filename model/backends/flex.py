"""FlexAttention, compiled: methods that change the score, on CUDA where our kernel cannot run.

On a CPU it has no gradients, and it always is compiled: its eager form computes all pairs of queries and keys.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from model.backends.base import Call, find_unsupported
from model.backends.triton import check_kernel
from model.methods.base import Method, ScoreChange


def find_problem(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    if method.replacement is not None:
        return f"{method.name} is not a softmax over changed scores, and FlexAttention computes nothing else"
    if device.type == "cuda" and not find_spec("triton"):
        return "it is compiled by Triton, which is not installed"
    return find_unsupported(method)


def prepare(score_change: ScoreChange | None, call: Call, earlier: dict | None = None) -> dict:
    """Return the arguments score_mod and block_mask of flex_attention."""
    from model.kernels.flex import causal_block_mask

    if earlier:
        block_mask = earlier["block_mask"]
    else:
        block_mask = causal_block_mask(call.query_length, call.key_length, call.q_offset, call.device)
    return dict(score_mod=make_score_mod(score_change, call), block_mask=block_mask)


def make_score_mod(score_change: ScoreChange | None, call: Call) -> Callable | None:
    """Return a_t S + m_t as FlexAttention asks for it; None for S itself."""
    if score_change is None:
        return None
    q_offset = call.q_offset
    first_head = 0 if call.context is None else call.context.rank() * call.num_heads // call.context.size()

    def score_mod(score, batch, head, q_index, kv_index):
        # Clamped: diagonal tiles are evaluated above the diagonal too, where a NaN would survive in the gradient.
        distance = (q_index + q_offset - kv_index).clamp(min=0).float()
        scale, bias = score_change.coefficients(distance, head + first_head)
        return scale * score + bias

    return score_mod


def run(q: Tensor, k: Tensor, v: Tensor, *, q_offset: int = 0, prepared: dict) -> Tensor:
    from model.kernels.flex import flex_attention, run_alone

    if q.device.type == "cpu" and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("FlexAttention has no backward pass on a CPU: use attention_backend auto or blocks")
    if torch.compiler.is_compiling() and q.device.type != "cpu":  # the whole model is being compiled
        return flex_attention(q, k, v, **prepared)
    return run_alone(q, k, v, prepared)


def check_on_this_machine(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return how FlexAttention fails the first time it is run here, or None; None too where it cannot be run now.

    Without a C compiler, for one, neither our Triton kernel nor this can be compiled.
    """
    if not torch.cuda.is_available() or torch.compiler.is_compiling():
        return None
    return check_flex_once(method, device, dtype)


@functools.lru_cache(maxsize=8)
def check_flex_once(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    return check_kernel(method, device, dtype, 300, prepare, run)

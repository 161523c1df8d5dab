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
from model.methods.base import Method, ScoreChange, upcast


def find_problem(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    if method.replacement is not None:
        return f"{method.name} is not a softmax over changed scores, and FlexAttention computes nothing else"
    if device.type == "cuda" and not find_spec("triton"):
        return "it is compiled by Triton, which is not installed"
    sinks = ("sink",) if device.type != "cpu" else ()  # on a CPU, PyTorch gives no log-sum-exp
    return find_unsupported(method, ("key_bias", "window", *sinks))


def prepare(score_change: ScoreChange | None, call: Call, earlier: dict | None = None) -> dict:
    """Return the arguments score_mod and block_mask of flex_attention."""
    from model.kernels.flex import causal_block_mask

    if earlier:
        block_mask = earlier["block_mask"]
    else:
        shape = call.query_length, call.key_length, call.q_offset
        block_mask = causal_block_mask(*shape, call.device, window=call.window)
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


def add_extras(prepared: dict, key_bias: Tensor | None, sink: Tensor | None) -> dict:
    """Return the arguments of flex_attention with biases of keys (B, H, Tk) in score_mod, and with what add_sink needs
    returned where there is a sink."""
    from torch.nn.attention.flex_attention import AuxRequest

    if sink is not None:
        prepared = prepared | dict(return_aux=AuxRequest(lse=True))
    if key_bias is None:
        return prepared
    score_mod = prepared["score_mod"]

    def biased(score, batch, head, q_index, kv_index):
        if score_mod is not None:
            score = score_mod(score, batch, head, q_index, kv_index)
        return score + key_bias[batch, head, kv_index]

    return prepared | dict(score_mod=biased)


def run(
    q: Tensor, k: Tensor, v: Tensor, *,
    q_offset: int = 0, prepared: dict, key_bias: Tensor | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from model.kernels.flex import flex_attention, run_alone

    tensors = (x for x in (q, k, v, key_bias, sink) if x is not None)
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("FlexAttention has no backward pass on a CPU: use attention_backend auto or blocks")
    prepared = add_extras(prepared, key_bias, sink)
    if torch.compiler.is_compiling() and q.device.type != "cpu":  # the whole model is being compiled
        output = flex_attention(q, k, v, **prepared)
    else:
        output = run_alone(q, k, v, prepared)
    return output if sink is None else add_sink(*output, sink)


def add_sink(output: Tensor, aux, sink: Tensor) -> Tensor:
    """Return the output (B, H, Tq, D) of a softmax with one logit more, by the log-sum-exp of the others."""
    share = torch.sigmoid(aux.lse - sink.unsqueeze(-1))  # (B, H, Tq)
    return (upcast(output) * share.unsqueeze(-1)).to(output.dtype)


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

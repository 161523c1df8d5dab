"""FlexAttention: PyTorch's compiler writes a_t S + m_t into the code of an attention kernel.

`flex` evaluates a_t and m_t at each logit. On a CPU it has no gradients. It is always compiled: its eager form computes
all pairs of queries and keys.

`flex_flash` (FLASH) takes the kernels of FlashAttention-4 (package flash-attn-4) on Hopper and Blackwell. Logarithm and
root would be slow there, as they are compiled without the hardware's approximations. So a_t and m_t are tables, read
once a logit. It sums dq over blocks of keys in no fixed order, so its backward pass does not repeat bit for bit.
"""

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch import Tensor

from model.attention.base import Plan, learned_parameters, one_function_is_enough, unsupported_extras
from model.methods.base import Method, ScoreChange, upcast

FLASH_QUERY_BLOCK = {9: 128, 10: 256, 11: 256}  # by compute capability, queries of a tile and so of a mask's block
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIMS = range(16, 129, 8)  # up to 128, a tile of keys is a block of the mask, too


def unsupported(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    if method.replacement is not None:
        return f"{method.name} is not a softmax over changed scores, and FlexAttention computes nothing else"
    if device.type == "cuda" and not find_spec("triton"):
        return "it is compiled by Triton, which is not installed"
    sink = ("sink",) if device.type != "cpu" else ()  # on a CPU, PyTorch gives no log-sum-exp
    return unsupported_extras(method, ("key_bias", "window", *sink))


def prepare(score_change: ScoreChange | None, plan: Plan, earlier: dict | None = None) -> dict:
    """Return the arguments score_mod and block_mask of flex_attention."""
    from model.attention.flex_compiled import causal_block_mask

    if earlier:
        block_mask = earlier["block_mask"]
    else:
        shape = plan.query_length, plan.key_length, plan.q_offset
        block_mask = causal_block_mask(*shape, plan.device, window=plan.window)
    return dict(score_mod=make_score_mod(score_change, plan), block_mask=block_mask)


def make_score_mod(score_change: ScoreChange | None, plan: Plan) -> Callable | None:
    """Return a_t S + m_t as FlexAttention wants it; None for S itself."""
    if score_change is None:
        return None
    q_offset = plan.q_offset

    def score_mod(score, batch, head, q_index, kv_index):
        # Tiles on the diagonal are evaluated above it, too, where a NaN would survive in the gradient: so clamp.
        distance = (q_index + q_offset - kv_index).clamp(min=0).float()
        # `head` as it is: after any arithmetic with it, a learned parameter's gradient does not compile for CUDA.
        scale, bias = score_change.coefficients(distance, head)
        return scale * score + bias

    return score_mod


def run(
    q: Tensor, k: Tensor, v: Tensor, *,
    q_offset: int = 0, prepared: dict, key_bias: Tensor | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from model.attention.flex_compiled import flex_attention, run_alone

    tensors = (x for x in (q, k, v, key_bias, sink) if x is not None)
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("FlexAttention has no backward pass on a CPU: use attention_backend auto or blocks")
    prepared = add_extras(prepared, key_bias, sink)
    if torch.compiler.is_compiling() and q.device.type != "cpu":  # the whole model is being compiled
        output = flex_attention(q, k, v, **prepared)
    else:
        output = run_alone(q, k, v, prepared)
    return output if sink is None else add_sink(*output, sink)


def add_extras(prepared: dict, key_bias: Tensor | None, sink: Tensor | None) -> dict:
    """Return the arguments of flex_attention with key biases (B, H, Tk) in score_mod, and what add_sink needs."""
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


def add_sink(output: Tensor, aux, sink: Tensor) -> Tensor:
    """Return the output (B, H, Tq, D) of a softmax with one more logit, by the log-sum-exp of the others."""
    share = torch.sigmoid(aux.lse - sink.unsqueeze(-1))  # (B, H, Tq)
    return (upcast(output) * share.unsqueeze(-1)).to(output.dtype)


# ---- FlashAttention-4 ------------------------------------------------------------------------------------------------


def flash_unsupported(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    if reason := unsupported(method, device, dtype):
        return reason
    if reason := unsupported_extras(method, ("window",)):  # it has no gradient of a captured tensor, or of sums
        return reason
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] not in FLASH_QUERY_BLOCK:
        return "it needs a Hopper or Blackwell GPU of compute capability 9 to 11"
    if dtype not in FLASH_DTYPES:
        return f"it takes float16 and bfloat16, not {dtype}"
    if method.vector_dim not in FLASH_HEAD_DIMS:
        return f"it covers head dimensions from 16 to 128 that are multiples of 8, not {method.vector_dim}"
    if learned_parameters(method.score_change):
        return f"it has no gradient of a learned score change, and {method.name} learns one"
    return None if has_flash() else "the package flash-attn-4 is not installed (docs/kernels.md)"


def has_flash() -> bool:
    try:
        return find_spec("flash_attn.cute") is not None  # older packages of FlashAttention lack this part
    except ImportError:
        return False


def flash_prepare(score_change: ScoreChange | None, plan: Plan, earlier: dict | None = None) -> dict:
    """Return the arguments score_mod, block_mask and kernel_options of flex_attention."""
    from model.attention.flex_compiled import causal_block_mask

    shape = plan.query_length, plan.key_length, plan.q_offset
    block_mask = causal_block_mask(*shape, plan.device, flash_query_block(plan.device), plan.window)
    score_mod = make_table_score_mod(score_change, plan)
    return dict(score_mod=score_mod, block_mask=block_mask, kernel_options=dict(BACKEND="FLASH"))


def flash_query_block(device: torch.device) -> int:
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return FLASH_QUERY_BLOCK[torch.cuda.get_device_capability(device)[0] if on_gpu else 9]


def make_table_score_mod(score_change: ScoreChange | None, plan: Plan) -> Callable | None:
    """Return make_score_mod's function, read from tables. Where m = 1 - a^2 it is a (S - a), which takes one table."""
    if score_change is None:
        return None
    distance = torch.arange(plan.key_length, device=plan.device).double()
    a, m = score_change.coefficients(distance, torch.arange(plan.num_heads, device=plan.device).unsqueeze(-1))
    one_table = one_function_is_enough(a, m)
    a = make_table(a, distance) if isinstance(a, Tensor) else a  # a number is written into the kernel
    m = None if one_table else make_table(m, distance)
    q_offset = plan.q_offset

    def score_mod(score, batch, head, q_index, kv_index):
        t = (q_index + q_offset - kv_index).clamp(min=0)  # tiles reach above the diagonal and past the last query
        scale = look_up(a, head, t)
        return scale * (score - scale) if one_table else scale * score + look_up(m, head, t)

    return score_mod


def make_table(function: Tensor, distance: Tensor) -> Tensor:
    """Return a function by distance (T,), or by head and distance (H, T) where heads differ, in float32."""
    table = torch.broadcast_tensors(function, distance)[0].float()
    table = table[0] if table.dim() == 2 and table.shape[0] == 1 else table
    return table.clone()  # the compiler takes no view that starts within its memory


def look_up(table: Tensor | float, head: Tensor, t: Tensor) -> Tensor | float:
    if not isinstance(table, Tensor):
        return table
    return table[t] if table.dim() == 1 else table[head, t]


FLASH = SimpleNamespace(unsupported=flash_unsupported, prepare=flash_prepare, run=run)

"""FlexAttention by FlashAttention-4 (the package flash-attn-4), on Hopper and Blackwell, with a_t and m_t as tables.

PyTorch's compiler writes score_mod, its derivative and the causal mask into the kernels of FlashAttention-4, where a
logit pays for one load of each table: the logarithm and the square root would cost it more, as they are compiled
without the hardware's approximations. Without a score change it is plain causal attention. The sum of dq over blocks of
keys is in no fixed order, so the backward pass does not repeat bit for bit.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from model.backends import flex
from model.backends.base import Call, find_unsupported
from model.backends.triton import check_kernel
from model.context import local_shard
from model.kernels.distance import learned_parameters, one_function_is_enough
from model.methods.base import Method, ScoreChange

GPUS = {9: 128, 10: 256, 11: 256}  # by major compute capability, the queries of a block of the mask: what a tile takes
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = range(16, 129, 8)  # of which the tiles of keys, too, are blocks of the mask
CHECKED_LENGTHS = (1000, 1024)  # whole tiles, and not

run = flex.run


def find_problem(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    if reason := flex.find_problem(method, device, dtype):
        return reason
    if reason := find_unsupported(method, ("window",)):  # it has no gradients of what a score_mod captures, or of sums
        return reason
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] not in GPUS:
        return "it needs a Hopper or Blackwell GPU of compute capability 9 to 11"
    if dtype not in DTYPES:
        return f"it takes float16 and bfloat16, not {dtype}"
    if method.vector_dim not in HEAD_DIMS:
        return f"it covers head dimensions from 16 to 128 that are multiples of 8, not {method.vector_dim}"
    if learned_parameters(method.score_change):
        return f"it has no gradient of what changes the score, and {method.name} learns that"
    return None if is_installed() else "the package flash-attn-4 is not installed (docs/kernels.md)"


def is_installed() -> bool:
    try:
        return find_spec("flash_attn.cute") is not None  # older packages of FlashAttention have no such part
    except ImportError:
        return False


def prepare(score_change: ScoreChange | None, call: Call, earlier: dict | None = None) -> dict:
    """Return the arguments score_mod, block_mask and kernel_options of flex_attention."""
    from model.kernels.flex import causal_block_mask

    shape = call.query_length, call.key_length, call.q_offset
    block_mask = causal_block_mask(*shape, call.device, query_block(call.device), call.window)
    score_mod = make_score_mod(score_change, call)
    return dict(score_mod=score_mod, block_mask=block_mask, kernel_options=dict(BACKEND="FLASH"))


def query_block(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return GPUS[9]
    return GPUS[torch.cuda.get_device_capability(device)[0]]


def make_score_mod(score_change: ScoreChange | None, call: Call) -> Callable | None:
    """Return a_t S + m_t from tables, as FlexAttention asks for it, less what the softmax ignores; None for S itself.

    Where m = 1 - a^2, that is a (S - a), of one load.
    """
    if score_change is None:
        return None
    distance = torch.arange(call.key_length, device=call.device).double()
    a, m = score_change.coefficients(distance, torch.arange(call.num_heads, device=call.device).unsqueeze(-1))
    is_one = one_function_is_enough(a, m)
    a = make_table(a, distance, call) if isinstance(a, Tensor) else a  # a number is written into the kernel
    m = None if is_one else make_table(m, distance, call)
    q_offset = call.q_offset

    def score_mod(score, batch, head, q_index, kv_index):
        # Clamped: tiles are evaluated above the diagonal and past the last query, too.
        t = (q_index + q_offset - kv_index).clamp(min=0)
        scale = look_up(a, head, t)
        return scale * (score - scale) if is_one else scale * score + look_up(m, head, t)

    return score_mod


def make_table(function: Tensor, distance: Tensor, call: Call) -> Tensor:
    """Return a function by distance (T,), or by this rank's heads and distance (H, T), where they differ: float32."""
    table = torch.broadcast_tensors(function, distance)[0].float()
    if table.dim() == 2:
        table = local_shard(table, 0, call.context)
        table = table[0] if table.shape[0] == 1 else table
    return table.clone()  # the compiler takes no view that starts within its memory


def look_up(table: Tensor | float, head: Tensor, t: Tensor) -> Tensor | float:
    if not isinstance(table, Tensor):
        return table
    return table[t] if table.dim() == 1 else table[head, t]


def check_on_this_machine(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return how it fails the first time it is run here, or None; None too where it cannot be run now."""
    if not torch.cuda.is_available() or torch.compiler.is_compiling():
        return None
    problems = (check_once(method, device, dtype, length) for length in CHECKED_LENGTHS)
    return next(filter(None, problems), None)


@functools.lru_cache(maxsize=16)
def check_once(method: Method, device: torch.device, dtype: torch.dtype, length: int) -> str | None:
    return check_kernel(method, device, dtype, length, prepare, run)

"""Attention in plain PyTorch, one block of queries after the other, for every method on every device."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.attention.base import Plan
from model.methods.base import LONGEST_COMPILED, Method, ScoreChange, upcast

QUERY_BLOCK = 128  # queries a block; the fastest of 64, 128 and 256 on a CPU
ERROR_FACTOR = 3.0  # of the limits in check.py: scores are rounded to the dtype, unlike in a fused kernel
RECOMPUTE_LENGTH = 4096  # from this many keys on, the backward pass recomputes the probabilities


class Bands(NamedTuple):
    """a_t and m_t of one block of queries against all keys. m_t is -inf for hidden keys.

    Both are constant along diagonals, so one band serves all blocks. A block whose last query sees n keys uses the last
    n columns.
    """

    scale: Tensor | float  # a_t, (1 or H, block, Tk) or a number
    bias: Tensor  # m_t, (1 or H, block, Tk)
    window: int | None = None
    skip_first: bool = False  # True if a_t and m_t do not apply to key 0


def unsupported(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def prepare(score_change: ScoreChange | None, plan: Plan, earlier: Bands | None = None) -> Bands:
    block = min(QUERY_BLOCK, plan.query_length)
    rows = torch.arange(block, device=plan.device).unsqueeze(-1)  # (block, 1)
    distance = rows - (block - 1) + torch.arange(plan.key_length - 1, -1, -1, device=plan.device)  # (block, Tk)
    scale, bias = 1.0, torch.zeros(1, 1, 1, dtype=torch.float64, device=plan.device)
    if score_change is not None:
        head = torch.arange(plan.num_heads, device=plan.device).view(-1, 1, 1)  # (H, 1, 1)
        scale, bias = score_change.coefficients(distance.clamp(min=0).double(), head)
    if isinstance(scale, Tensor):
        scale = scale.float().expand(scale.shape[0] if scale.dim() == 3 else 1, *distance.shape)
    hidden = distance < 0 if plan.window is None else (distance < 0) | (distance >= plan.window)
    bias = torch.where(hidden, -torch.inf, bias).float()
    skip_first = score_change is not None and score_change.skip_first
    return Bands(scale, bias if bias.dim() == 3 else bias.unsqueeze(0), plan.window, skip_first)


def run(
    q: Tensor, k: Tensor, v: Tensor, *,
    q_offset: int = 0, prepared: Bands | None = None, key_bias: Tensor | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    in_blocks = uncompiled if q.shape[2] > LONGEST_COMPILED else run_in_blocks
    return in_blocks(attend_block, q, k, v, q_offset, prepared, key_bias, sink)


def run_in_blocks(
    compute: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, q_offset: int, prepared: Bands | None,
    key_bias: Tensor | None, sink: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the results of `compute` for all queries: attend_block's (B, H, Tq, D), largest_logits's (B, H, Tq, 1)."""
    Tq = q.shape[2]
    plan = Plan("blocks", 1, q.shape[3], Tq, q_offset + Tq, device=q.device)
    scale_band, bias_band, window, skip_first = prepared or prepare(None, plan)
    block = bias_band.shape[1]
    recompute = torch.is_grad_enabled() and k.shape[2] >= RECOMPUTE_LENGTH
    q = q * q.shape[-1] ** -0.5
    outputs = []
    for start in range(0, Tq, block):
        stop = min(start + block, Tq)
        end = q_offset + stop  # the block's last query sees the keys before this one
        first = 0 if window is None else max(0, q_offset + start - window + 1)
        columns = slice(bias_band.shape[2] - (end - first), None)
        band = (slice(None), slice(block - (stop - start), None), columns)  # the last rows and columns (see Bands)
        scale = scale_band[band] if isinstance(scale_band, Tensor) else scale_band
        bias = bias_band[band]
        if skip_first and first == 0:
            keys, rows = torch.arange(end, device=q.device), torch.arange(q_offset + start, end, device=q.device)
            unchanged = (keys == 0) & (True if window is None else rows.unsqueeze(-1) < window)
            scale, bias = torch.where(keys == 0, 1.0, scale), torch.where(unchanged, 0.0, bias)
        block_bias = None if key_bias is None else key_bias[:, :, None, first:end]
        vectors = q[:, :, start:stop], k[:, :, first:end], v[:, :, first:end]
        arguments = (*vectors, scale, bias, block_bias, sink)
        outputs.append(checkpoint(compute, *arguments, use_reentrant=False) if recompute else compute(*arguments))
    return torch.cat(outputs, dim=2)


uncompiled = torch.compiler.disable(run_in_blocks)


def attend_block(q, k, v, scale, bias, key_bias, sink):
    # q (B, H, block, D); k, v (B, H, keys, D); scale, bias (1 or H, block, keys); key_bias (B, H, 1, keys); sink (H,)
    logits = block_logits(q, k, scale, bias, key_bias)
    if sink is None:
        weights = logits.softmax(dim=-1)
    else:
        log_total = torch.logaddexp(logits.logsumexp(dim=-1, keepdim=True), upcast(sink).view(-1, 1, 1))
        weights = (logits - log_total).exp()
    return weights.to(v.dtype) @ v


def largest_logits(q, k, v, scale, bias, key_bias, sink):  # of visible keys; a sink is no key
    return block_logits(q, k, scale, bias, key_bias).amax(dim=-1, keepdim=True)


def block_logits(q, k, scale, bias, key_bias):  # (B, H, block, keys)
    scores = upcast(q @ k.mT)
    logits = torch.addcmul(bias, scale, scores) if isinstance(scale, Tensor) else scale * scores + bias
    return logits if key_bias is None else logits + key_bias

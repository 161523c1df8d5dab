"""The formula in plain PyTorch, in blocks of queries: every method on every device, where nothing faster runs."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.backends.base import Call
from model.context import local_shard
from model.methods.base import Method, ScoreChange, upcast

QUERY_BLOCK = 128  # queries a block; the fastest of 64, 128 and 256 on a CPU
RECOMPUTE_LENGTH = 4096  # from this many keys on, probabilities are recomputed in the backward pass


class Bands(NamedTuple):
    scale: Tensor | float  # a_t, (1 or H, block, Tk) or a number
    bias: Tensor  # m_t, (1 or H, block, Tk)
    window: int | None = None
    softcap: float | None = None


def find_problem(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def prepare(score_change: ScoreChange | None, call: Call, earlier: Bands | None = None) -> Bands:
    """Return a_t and m_t for one block of queries, m_t being -inf for keys in the future and beyond the window.

    Both are constant along diagonals, so one band serves all blocks: its last columns are the keys up to a block's
    last query, and a block whose last query sees n keys uses the last n columns.
    """
    block = min(QUERY_BLOCK, call.query_length)
    rows = torch.arange(block, device=call.device).unsqueeze(-1)  # (block, 1)
    distance = rows - (block - 1) + torch.arange(call.key_length - 1, -1, -1, device=call.device)  # (block, Tk)
    scale, bias = 1.0, torch.zeros(1, 1, 1, dtype=torch.float64, device=call.device)
    if score_change is not None:
        head = torch.arange(call.num_heads, device=call.device).view(-1, 1, 1)  # (H, 1, 1)
        scale, bias = score_change.coefficients(distance.clamp(min=0).double(), head)
    if isinstance(scale, Tensor):
        scale = scale.float().expand(scale.shape[0] if scale.dim() == 3 else 1, *distance.shape)
    hidden = distance < 0 if call.window is None else (distance < 0) | (distance >= call.window)
    bias = torch.where(hidden, -torch.inf, bias).float()
    bias = bias if bias.dim() == 3 else bias.unsqueeze(0)
    bands = (local_shard(band, 0, call.context) for band in (scale, bias))
    return Bands(*bands, call.window, call.softcap)


def run(
    q: Tensor, k: Tensor, v: Tensor, *,
    q_offset: int = 0, prepared: Bands | None = None, key_bias: Tensor | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    Tq = q.shape[2]
    scale_band, bias_band, window, softcap = prepared or prepare(
        None, Call(1, q.shape[3], Tq, q_offset + Tq, device=q.device)
    )
    block = bias_band.shape[1]
    recompute = torch.is_grad_enabled() and k.shape[2] >= RECOMPUTE_LENGTH
    q = q * q.shape[-1] ** -0.5
    outputs = []
    for start in range(0, Tq, block):
        stop = min(start + block, Tq)
        last = q_offset + stop  # the keys from first to before that are those that a query of the block sees
        first = 0 if window is None else max(0, q_offset + start - window + 1)
        columns = slice(bias_band.shape[2] - (last - first), None)
        part = (slice(None), slice(block - (stop - start), None), columns)
        scale = scale_band[part] if isinstance(scale_band, Tensor) else scale_band
        of_keys = None if key_bias is None else key_bias[:, :, None, first:last]
        vectors = q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last]
        arguments = (*vectors, scale, bias_band[part], of_keys, sink, softcap)
        outputs.append(
            checkpoint(attend_block, *arguments, use_reentrant=False) if recompute else attend_block(*arguments)
        )
    return torch.cat(outputs, dim=2)


def attend_block(q, k, v, scale, bias, key_bias, sink, softcap):
    # q (B, H, block, D); k, v (B, H, keys, D); scale, bias (1 or H, block, keys); key_bias (B, H, 1, keys); sink (H,)
    scores = upcast(q @ k.mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    logits = torch.addcmul(bias, scale, scores) if isinstance(scale, Tensor) else scale * scores + bias
    if key_bias is not None:
        logits = logits + key_bias
    if sink is None:
        weights = logits.softmax(dim=-1)
    else:
        log_total = torch.logaddexp(logits.logsumexp(dim=-1, keepdim=True), upcast(sink).view(-1, 1, 1))
        weights = (logits - log_total).exp()
    return weights.to(v.dtype) @ v

"""Attention in plain PyTorch, one block of queries after the other, for every method on every device."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from model.attention.backend import EXTRAS, Backend
from model.query_blocks import QUERY_BLOCK, in_query_blocks
from model.tensors import upcast

RECOMPUTE_LENGTH = 4096  # from this many keys on, the backward pass recomputes the probabilities


class Bands(NamedTuple):
    """a_t and m_t of one block of queries against all keys. m_t is -inf for hidden keys.

    Both are constant along diagonals, so one band serves all blocks. A block whose last query sees n keys uses the last
    n columns.
    """

    scale: Tensor | float  # a_t, (1 or H, block, Tk) or a number
    bias: Tensor  # m_t, (1 or H, block, Tk)

    def of_block(self, rows: int, columns: int) -> tuple[Tensor | float, Tensor]:
        """Return the last rows and columns of both."""
        scale = self.scale
        if isinstance(scale, Tensor):
            scale = scale[:, -rows:, -columns:]
        return scale, self.bias[:, -rows:, -columns:]


class Blocks(Backend):
    name = "blocks"
    supported = tuple(EXTRAS)
    masks_documents = True
    error_factor = 3.0  # scores are rounded to the dtype, unlike in a fused kernel

    def prepare(self, plan, score_change):
        # 1. The distance from each query of the last block to each key.
        block = min(QUERY_BLOCK, plan.query_length)
        rows = torch.arange(block, device=plan.device).unsqueeze(-1)
        keys_after = torch.arange(plan.key_length - 1, -1, -1, device=plan.device)
        distance = rows - (block - 1) + keys_after  # (block, Tk)

        # 2. a_t and m_t there.
        scale, bias = 1.0, torch.zeros(1, 1, 1, dtype=torch.float64, device=plan.device)
        if score_change is not None:
            head = torch.arange(plan.num_heads, device=plan.device).view(-1, 1, 1)
            scale, bias = score_change.coefficients(distance.clamp(min=0).double(), head)
        if isinstance(scale, Tensor):
            heads = scale.shape[0] if scale.dim() == 3 else 1
            scale = scale.float().expand(heads, *distance.shape)

        # 3. Keys that are hidden.
        hidden = distance < 0
        if plan.window is not None:
            hidden = hidden | (distance >= plan.window)
        bias = torch.where(hidden, -torch.inf, bias).float()
        return Bands(scale, bias if bias.dim() == 3 else bias.unsqueeze(0))

    def run(self, q, k, v, plan, *, score_change=None, key_bias=None, sink=None):
        bands = self.constants(plan, score_change)
        return in_bands(softmax_attention, q, k, v, plan, bands, score_change, key_bias, sink)

    def row_statistics(self, q: Tensor, k: Tensor, plan, score_change, key_bias: Tensor | None) -> Tensor:
        """Return each query's largest logit among the keys that it sees, and the entropy of its attention to them.

        (B, H, Tq, 2), the entropy in nats. A sink is no key.
        """
        bands = self.prepare(plan, score_change)
        return in_bands(maxima_and_entropies, q, k, k, plan, bands, score_change, key_bias, None)


def in_bands(compute: Callable[..., Tensor], q, k, v, plan, bands: Bands, score_change, key_bias, sink) -> Tensor:
    """Return the results of `compute`, with the arguments of softmax_attention, for all blocks of queries."""
    window = plan.window
    skip_first = score_change is not None and score_change.skip_first
    earlier = k.shape[2] - q.shape[2]  # keys before the first query
    if q.shape[2] == 1:  # a decoded token comes alone, so its scores may be float32
        q, k = upcast(q), upcast(k)

    def compute_block(queries, start, stop):
        first = 0 if window is None else max(0, earlier + start - window + 1)
        seen = slice(first, earlier + stop)
        scale, bias = bands.of_block(stop - start, earlier + stop - first)
        if skip_first and first == 0:
            distance = torch.arange(earlier + start, earlier + stop, device=q.device).unsqueeze(-1)
            scale, bias = without_first_key(scale, bias, distance, window)
        if plan.starts is not None:
            keys = torch.arange(first, earlier + stop, device=q.device)
            is_before = keys < plan.starts[:, None, earlier + start : earlier + stop, None]  # (B, 1, block, keys)
            bias = torch.where(is_before, -torch.inf, bias)
        seen_bias = None if key_bias is None else key_bias[:, :, None, seen]
        return compute(queries, k[:, :, seen], v[:, :, seen], scale, bias, seen_bias, sink)

    return in_query_blocks(compute_block, q * q.shape[-1] ** -0.5, recompute=k.shape[2] >= RECOMPUTE_LENGTH)


def without_first_key(
    scale: Tensor | float, bias: Tensor, distance: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return a_t and m_t with 1 and 0 for the first key. distance (block, 1): from each query back to this key."""
    is_first = torch.arange(bias.shape[-1], device=bias.device) == 0
    visible = is_first if window is None else is_first & (distance < window)
    return torch.where(is_first, 1.0, scale), torch.where(visible, 0.0, bias)


def softmax_attention(q, k, v, scale, bias, key_bias, sink) -> Tensor:
    # q (B, H, block, D), divided by sqrt(D); k, v (B, H, keys, D); scale, bias ([B,] 1 or H, block, keys);
    # key_bias (B, H, 1, keys); sink (H,)
    logits = block_logits(q, k, scale, bias, key_bias)
    if sink is None:
        weights = logits.softmax(dim=-1)
    else:
        log_total = logits.logsumexp(dim=-1, keepdim=True)
        log_total = torch.logaddexp(log_total, upcast(sink).view(-1, 1, 1))
        weights = (logits - log_total).exp()
    return weights.to(v.dtype) @ v


def maxima_and_entropies(q, k, v, scale, bias, key_bias, sink) -> Tensor:
    logits = block_logits(q, k, scale, bias, key_bias)
    entropies = torch.special.entr(logits.softmax(dim=-1)).sum(dim=-1)
    return torch.stack([logits.amax(dim=-1), entropies], dim=-1)


def block_logits(q, k, scale, bias, key_bias) -> Tensor:
    scores = upcast(q @ k.mT)  # (B, H, block, keys)
    logits = torch.addcmul(bias, scale, scores) if isinstance(scale, Tensor) else scale * scores + bias
    return logits if key_bias is None else logits + key_bias

"""PyTorch's own fused causal attention (F.scaled_dot_product_attention), for methods that leave the score alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.backends.base import Call
from model.methods.base import Method, ScoreChange


def find_problem(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    return f"{method.name} changes the attention score" if method.score_change is not None else None


def prepare(score_change: ScoreChange | None, call: Call, earlier: None = None) -> None:
    return None


def run(q: Tensor, k: Tensor, v: Tensor, *, q_offset: int = 0, prepared: None = None) -> Tensor:
    Tq, Tk = q.shape[2], k.shape[2]
    if q_offset == 0 and Tq == Tk:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    visible = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(q_offset)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def prefer_fast_sdpa(device: torch.device):
    """Leave FlashAttention-2, which torch takes first, to older GPUs: from Hopper on cuDNN's is about twice as fast."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        torch.backends.cuda.enable_flash_sdp(False)

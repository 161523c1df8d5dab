"""PyTorch's own fused causal attention (F.scaled_dot_product_attention), for methods that do not change the score."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.attention.base import Plan, unsupported_extras
from model.methods.base import Method, ScoreChange

ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def unsupported(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    if method.score_change is not None:
        return f"{method.name} changes the attention score"
    return unsupported_extras(method)


def prepare(score_change: ScoreChange | None, plan: Plan, earlier: None = None) -> None:
    return None


def run(q: Tensor, k: Tensor, v: Tensor, *, q_offset: int = 0, prepared: None = None) -> Tensor:
    Tq, Tk = q.shape[2], k.shape[2]
    if q_offset == 0 and Tq == Tk:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    visible = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(q_offset)
    # With a mask, cuDNN's gradient of q is NaN at some lengths (pytorch#196678), so calls with a mask exclude cuDNN.
    with sdpa_kernel([kernel for kernel in ORDER if kernel != SDPBackend.CUDNN_ATTENTION]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def prefer_fast_sdpa(device: torch.device):
    """Make PyTorch prefer cuDNN on Hopper and newer GPUs. There it is about twice as fast as FlashAttention-2.

    PyTorch's first choice of a kernel sets the default order, so we make that choice before we set our order.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        chosen_kernel(device, torch.bfloat16, head_dim=64, length=128)
        torch._C._set_sdp_priority_order([int(kernel) for kernel in ORDER])


def chosen_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, length: int) -> str:
    """Return the SDPBackend name of the kernel that PyTorch chooses for causal attention at this length."""
    q = torch.empty(1, 1, length, head_dim, device=device, dtype=dtype, requires_grad=True)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name

"""PyTorch's own fused causal attention (F.scaled_dot_product_attention), for methods that do not change the score."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.attention.backend import Backend

ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class SDPA(Backend):
    name = "sdpa"

    def unsupported(self, method, device, dtype):
        if method.score_change is not None:
            return f"{method.name} changes the attention score"
        return super().unsupported(method, device, dtype)

    def run(self, q, k, v, plan, *, score_change=None, key_bias=None, sink=None):
        Tq, Tk = q.shape[2], k.shape[2]
        if Tq == Tk:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        visible = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)
        # With a mask, cuDNN's gradient of q is NaN at some lengths (pytorch#196678), so these calls exclude cuDNN.
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

"""Attention by our C++ kernel (model/cpu), in float32 on a CPU. It reads a_t and m_t from tables."""

import math

import torch
from torch import Tensor

from model import cpu
from model.attention.backend import Backend, score_functions
from model.methods.base import ScoreChange

LOG2E = math.log2(math.e)


class CPU(Backend):
    name = "cpu"
    supported = ("key_bias", "window", "sink")
    masks_documents = True

    def unsupported(self, method, device, dtype):
        return super().unsupported(method, device, dtype) or cpu.kernel_problem(device, dtype)

    def prepare(self, plan, score_change):
        return make_tables(score_change, plan.num_heads, plan.head_dim, plan.key_length)

    def run(self, q, k, v, plan, *, score_change=None, key_bias=None, sink=None):
        Tk = k.shape[2]
        window = Tk if plan.window is None else min(plan.window, Tk)
        return cpu.attention(q, k, v, self.constants(plan, score_change), key_bias, sink, plan.starts, window)


def make_tables(change: ScoreChange | None, num_heads: int, head_dim: int, key_length: int) -> Tensor:
    """Return A and M of logits A q.k + M in bits: (2, H or 1, keys) float32, the largest distance first.

    They are differentiable in the learned parameters.
    """
    distance = torch.arange(key_length - 1, -1, -1).double()
    a, m = score_functions(change, num_heads, distance)
    return torch.stack((a * (LOG2E * head_dim**-0.5), m * LOG2E)).float().contiguous()

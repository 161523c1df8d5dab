"""Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143): causal softmax attention A_dot in segments of N tokens,
and a linear-attention memory A_mem of all earlier segments. Each head learns a gate beta that mixes both outputs:

    A_mem = sigma(Q) M / (sigma(Q) z),   sigma = ELU + 1,   output = sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot,
    M <- M + sigma(K)^T V,   z <- z + sum sigma(K).

As in that paper, the memory uses q and k without position encoding, and gradients flow through it. Anson et al. 2025
give no settings. Ours: N (see below), the linear update, softmax attention alone in the first segment, beta = 0 at the
start, and a memory in float32.
"""

import torch
import torch.nn.functional as F
from torch import nn

from errors import require
from model.methods.base import Replacement
from model.tensors import upcast


class Infini(Replacement):
    def __init__(self, shape, segment_length: int | None = None):
        """segment_length: N. None: a quarter of the training length (1024 at 4k), so that training uses the memory."""
        super().__init__()
        self.segment_length = max(1, shape.train_length // 4) if segment_length is None else segment_length
        require(self.segment_length >= 1, f"segment_length is {segment_length}. Use at least 1.")
        self.gate = nn.Parameter(torch.zeros(shape.num_heads))

    def attend(self, q, k, v, rotated_q, rotated_k, features, plan):
        gate = self.gate.to(upcast(q).dtype).sigmoid().view(-1, 1, 1)  # (H, 1, 1)
        Tk = k.shape[2]
        first_query = Tk - q.shape[2]
        memory = normaliser = 0  # M (B, H, D, D) and z (B, H, D, 1)
        outputs = []
        for start in range(0, Tk, self.segment_length):
            stop = min(start + self.segment_length, Tk)
            segment = slice(start, stop)

            # 1. The queries of the segment, if there are any.
            if stop > first_query:
                queries = slice(max(start - first_query, 0), stop - first_query)
                out = plan.causal_attention(rotated_q[:, :, queries], rotated_k[:, :, segment], v[:, :, segment])
                if start > 0:
                    out = gate * recall(q[:, :, queries], memory, normaliser) + (1 - gate) * out
                outputs.append(out.to(v.dtype))

            # 2. The segment enters the memory.
            if stop < Tk:
                sigma_k = F.elu(upcast(k[:, :, segment])) + 1  # (B, H, N, D)
                memory = memory + sigma_k.mT @ upcast(v[:, :, segment])
                normaliser = normaliser + sigma_k.sum(dim=2).unsqueeze(-1)
        return torch.cat(outputs, dim=2)


def recall(q, memory, normaliser):
    """Return A_mem (B, H, queries, D)."""
    sigma_q = F.elu(upcast(q)) + 1
    return (sigma_q @ memory) / (sigma_q @ normaliser)

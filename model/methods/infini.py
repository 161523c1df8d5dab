"""Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143): causal softmax attention inside segments of N tokens,
and a linear-attention memory of all earlier segments, mixed by a learned gate beta of each head:

    A_mem = sigma(Q) M / (sigma(Q) z),   sigma = ELU + 1,   output = sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot,
    M <- M + sigma(K)^T V   (delta rule: V minus what the memory already returns for K),   z <- z + sum sigma(K).

Open in both papers, and chosen here: the memory sees q and k without position encoding, the first segment, which has
no memory yet, is local attention alone, gradients flow through the memory, which is float32, and beta starts at 0.
"""

import torch
import torch.nn.functional as F
from torch import nn

from model.methods.base import Replacement


class Infini(Replacement):
    def __init__(
        self, num_heads, head_dim, train_length, segment_length: int = 1024, gate_init: float = 0.0, delta: bool = False
    ):
        super().__init__()
        if segment_length < 1:
            raise ValueError(f"segment_length must be at least 1, got {segment_length}")
        self.segment_length, self.delta = segment_length, delta
        self.gate = nn.Parameter(torch.full((num_heads,), float(gate_init)))

    def attend(self, q, k, v, rotated_q, rotated_k, q_offset, causal_attention):
        B, H, _, D = k.shape
        q_end = q_offset + q.shape[2]
        dtype = torch.promote_types(q.dtype, torch.float32)
        gate = self.gate.to(dtype).sigmoid().view(H, 1, 1)
        memory, normaliser = k.new_zeros(B, H, D, D, dtype=dtype), k.new_zeros(B, H, D, 1, dtype=dtype)
        outputs = []
        for start in range(0, q_end, self.segment_length):
            stop = min(start + self.segment_length, q_end)
            if stop > q_offset:  # the segment holds queries
                first = max(start, q_offset)
                mine = slice(first - q_offset, stop - q_offset)
                out = causal_attention(
                    rotated_q[:, :, mine], rotated_k[:, :, start:stop], v[:, :, start:stop], q_offset=first - start
                )
                if start > 0:
                    out = gate * recall(q[:, :, mine].to(dtype), memory, normaliser) + (1 - gate) * out
                outputs.append(out.to(v.dtype))
            if stop < q_end:
                keys, values = k[:, :, start:stop].to(dtype), v[:, :, start:stop].to(dtype)
                if self.delta and start > 0:
                    values = values - recall(keys, memory, normaliser)
                features = F.elu(keys) + 1  # (B, H, N, D)
                memory = memory + features.mT @ values
                normaliser = normaliser + features.sum(dim=2).unsqueeze(-1)
        return torch.cat(outputs, dim=2)


def recall(x, memory, normaliser):
    """What the memory returns for queries x (B, H, N, D): sigma(x) M / (sigma(x) z)."""
    features = F.elu(x) + 1
    return (features @ memory) / (features @ normaliser)

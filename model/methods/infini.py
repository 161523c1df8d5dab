"""Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143): causal softmax attention inside segments of N tokens,
and a linear-attention memory of all earlier segments, mixed by a learned gate beta of each head:

    A_mem = sigma(Q) M / (sigma(Q) z),   sigma = ELU + 1,   output = sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot,
    M <- M + sigma(K)^T V   (delta rule: V minus what the memory already returns for K),   z <- z + sum sigma(K).

Both papers leave open, and we chose: the memory sees q and k without position encoding; the first segment, which has no
memory yet, is local attention alone; gradients flow through the memory, which is float32; beta starts at 0.
"""

import torch
import torch.nn.functional as F
from torch import nn

from errors import require
from model.methods.base import Replacement, upcast


class Infini(Replacement):
    uses_softmax = True

    def __init__(self, num_heads, head_dim, train_length, segment_length: int | None = None, delta: bool = False):
        """segment_length: N; None: a quarter of the training length (1024 at 4k), so that training uses the memory."""
        super().__init__()
        if segment_length is None:
            segment_length = max(1, train_length // 4)
        require(segment_length >= 1, f"segment_length must be at least 1, got {segment_length}")
        self.segment_length, self.delta = segment_length, delta
        self.gate = nn.Parameter(torch.zeros(num_heads))

    def attend(self, q, k, v, rotated_q, rotated_k, q_offset, causal_attention, memory=None):
        """memory: the memory of the segments before key 0, which starts a segment."""
        q_end = q_offset + q.shape[2]
        gate = self.gate.to(torch.promote_types(q.dtype, torch.float32)).sigmoid().view(-1, 1, 1)  # (H, 1, 1)
        outputs = []
        for start in range(0, q_end, self.segment_length):
            stop = min(start + self.segment_length, q_end)
            if stop > q_offset:  # the segment holds queries
                first = max(start, q_offset)
                mine = slice(first - q_offset, stop - q_offset)
                out = causal_attention(
                    rotated_q[:, :, mine], rotated_k[:, :, start:stop], v[:, :, start:stop], q_offset=first - start
                )
                if memory is not None:
                    out = gate * recall(q[:, :, mine], *memory) + (1 - gate) * out
                outputs.append(out.to(v.dtype))
            if stop < q_end:
                memory = self.write(memory, k[:, :, start:stop], v[:, :, start:stop])
        return torch.cat(outputs, dim=2)

    def write(self, memory, k, v):
        """Return the memory after one more segment k, v (B, H, N, D): M (B, H, D, D) and z (B, H, D, 1).

        memory: the memory before this segment; None for the first segment.
        """
        values = v
        if self.delta and memory is not None:
            values = v - recall(k, *memory)
        features, values = F.elu(upcast(k)) + 1, upcast(values)  # (B, H, N, D)
        total = features.sum(dim=2).unsqueeze(-1)
        if k.dtype == torch.bfloat16:  # see recall
            mean, mean_features = values.mean(dim=2, keepdim=True), total.detach().mT / k.shape[2]
            varying = (features - mean_features).bfloat16(), (values - mean.detach()).bfloat16()
            new = varying[0].mT @ varying[1] + total * mean
        else:
            new = features.mT @ values
        return (new, total) if memory is None else (memory[0] + new, memory[1] + total)

    def start_decoding(self, k, v, rotated_k):
        return self.write_full_segments(None, k, v, rotated_k)

    def decode(self, state, q, k, v, rotated_q, rotated_k, causal_attention):
        memory, *segment = state
        segment = (torch.cat(parts, dim=2) for parts in zip(segment, (k, v, rotated_k)))
        memory, k, v, rotated_k = self.write_full_segments(memory, *segment)
        output = self.attend(q, k, v, rotated_q, rotated_k, k.shape[2] - 1, causal_attention, memory)
        return output, (memory, k, v, rotated_k)

    def write_full_segments(self, memory, k, v, rotated_k):
        """Return the state of decoding: the memory of the full segments; k, v and rotated_k of the last segment."""
        border = (k.shape[2] - 1) // self.segment_length * self.segment_length
        for start in range(0, border, self.segment_length):
            stop = start + self.segment_length
            memory = self.write(memory, k[:, :, start:stop], v[:, :, start:stop])
        return memory, k[:, :, border:], v[:, :, border:], rotated_k[:, :, border:]


def recall(x, memory, normaliser):
    """Return what the memory holds for queries x (B, H, N, D): sigma(x) M / (sigma(x) z).

    In a bfloat16 run the factors of the products here and in `write` are bfloat16 too: matrix units sum them up in
    float32, at 15 times the rate of float32 on an H100. The result is a mean of values, whose weights differ little
    between queries. Rounding would therefore hide the gradients, which depend on the small differences
    (tests/test_infini.py). So the mean of all values is subtracted before the product and added after it, and `write`
    multiplies the mean of all features in float32. Neither changes the exact result.
    """
    features = F.elu(upcast(x)) + 1
    if x.dtype != torch.bfloat16:
        return (features @ memory) / (features @ normaliser)
    common = (memory.sum(dim=-2, keepdim=True) / normaliser.sum(dim=-2, keepdim=True)).detach()  # (B, H, 1, D)
    total = (features * normaliser.mT).sum(dim=-1, keepdim=True)  # beside the ELU, instead of a product of one column
    return common + features.bfloat16() @ (memory - normaliser * common).bfloat16() / total

"""What an attention method is made of.

A method turns q, k (after QK-norm) into the logits of a causal softmax. With t = i - j >= 0 the distance from query i
back to key j, h the head and d the head dimension (paper, section 3):

    q, k <- rotated by their positions                  Rotation      (RoPE, p-RoPE, NTK, YaRN)
    q_i  <- c_h(i) q_i                                  QueryScale    (LogN)
    L    =  a_h(t) S + m_h(t),   S = q.k / sqrt(d)      ScoreChange   (scale-invariant, ALiBi)

Each of the three is optional. A Replacement (Infini-attention) computes the output itself instead of a softmax over L.
A new mechanism is one file with a subclass of one of these, and one line in the table METHODS of this folder.
"""

import torch
from torch import Tensor, nn


class Rotation(nn.Module):
    """Rotates pairs (x_k, x_{k + d/2}) of q and k by position * frequency_k."""

    def frequencies(self, target_length: int) -> tuple[Tensor, float]:
        """Angular frequencies (D/2,), float64, radians a token, and the factor that multiplies cos and sin."""
        raise NotImplementedError

    def tables(self, length: int, target_length: int, device) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles of positions 0..length-1: two float32 tensors (length, D/2).

        The angles are float64, so the tables are right to float32 rounding at any position: bfloat16 positions are
        exact only up to 256, and float32 angles lose 1e-3 radians at 65,535.
        """
        frequencies, amplitude = self.frequencies(target_length)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)  # (T, D/2)
        return tuple((amplitude * f(angles)).to(device, torch.float32) for f in (torch.cos, torch.sin))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x (B, H, T, D); cos, sin (T, D/2)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1)


class QueryScale(nn.Module):
    """Multiplies the query at position i by a number that depends on the head and on i."""

    def table(self, positions: Tensor, target_length: int) -> Tensor:
        """The part that is the same in all layers: (T,) float32 from positions (T,) int64."""
        raise NotImplementedError

    def multiplier(self, table: Tensor) -> Tensor:
        """The multiplier of this layer's queries, (H, T), from the table; differentiable in learned parameters."""
        raise NotImplementedError


class ScoreChange(nn.Module):
    """Changes the score S to a_h(t) S + m_h(t)."""

    def coefficients(self, distance: Tensor, head: Tensor) -> tuple[Tensor | float, Tensor]:
        """a and m at the given distances t >= 0 and heads, two tensors that broadcast together (a may be a number).

        Called with whole tensors that broadcast, such as distance (T,) and head (H, 1), in float64 for tables, and with
        float32 and int32 scalars inside FlexAttention: use elementwise torch operations and indexing only. What it
        learns must be one parameter, (H,): a number a head. Without one, all layers share what one layer's gives,
        computed once a length.
        """
        raise NotImplementedError

    def forward(self, distance, head):  # for torch.func, which calls modules with other values of their parameters
        return self.coefficients(distance, head)


class Replacement(nn.Module):
    """Replaces softmax attention. What it learns are parameters with one entry a head, (H, ...)."""

    def attend(self, q, k, v, rotated_q, rotated_k, q_offset: int, causal_attention) -> Tensor:
        """Output (B, H, Tq, D) of the queries at positions q_offset.. given all keys from position 0 on.

        q, k are the vectors without, rotated_q and rotated_k with position encoding; causal_attention(q, k, v,
        q_offset=) is ordinary softmax attention. All have as many heads as the parameters have entries: with context
        parallelism (model/context.py) that is a part of the H.
        """
        raise NotImplementedError

    def forward(self, *arguments):  # for torch.func, which calls modules with other values of their parameters
        return self.attend(*arguments)

    def start_decoding(self, k, v, rotated_k):
        """The state that decode starts from: what is kept of a prompt's keys and values, (B, H, T, D) each.

        These two keep everything, and attend to it again for each token; override both where less will do.
        """
        return k, v, rotated_k

    def decode(self, state, q, k, v, rotated_q, rotated_k, causal_attention):
        """attend for one more token, q, k, v (B, H, 1, D): the output (B, H, 1, D), and the state after it."""
        k, v, rotated_k = (torch.cat(parts, dim=2) for parts in zip(state, (k, v, rotated_k)))
        output = self.attend(q, k, v, rotated_q, rotated_k, k.shape[2] - 1, causal_attention)
        return output, (k, v, rotated_k)


class Method(nn.Module):
    """A named combination of mechanisms, for one layer: it holds that layer's learned parameters, if there are any."""

    def __init__(self, name: str, num_heads: int, head_dim: int, train_length: int, mechanisms: list[nn.Module]):
        super().__init__()
        self.name, self.num_heads, self.head_dim, self.train_length = name, num_heads, head_dim, train_length
        for role, kind in dict(
            rotation=Rotation, query_scale=QueryScale, score_change=ScoreChange, replacement=Replacement
        ).items():
            setattr(self, role, next((m for m in mechanisms if isinstance(m, kind)), None))

"""Dense causal attention without a kernel: the specification that every backend is compared with.

    L_ij = a_h(t) S_ij + m_h(t) + b_h(j),   S_ij = q_i . k_j / sqrt(d),   t = i - j, 0 <= t < window,
    output_i = sum_j softmax(L_i)_j v_j

Within documents, query i also sees no key before the first token of its document.

The method rotates q and k, and scales q (paper, section 3). A sink adds a logit without a value to the softmax. All
T x T logits are in memory, so this code is not for long sequences. tests/reference.py implements the methods again.
"""

import torch
from torch import Tensor

from errors import require
from model.methods.base import Method
from model.tensors import upcast


def plain_attention(
    method: Method, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """Return causal attention by `method`, (B, H, T, D) float64. All arguments have T tokens, as in attend.

    starts and errors: as in attention_logits.
    """
    logits = attention_logits(method, q.double(), k.double(), x=x, starts=starts)
    return probabilities(method, logits) @ v.double()


def probabilities(method: Method, logits: Tensor) -> Tensor:
    """Return the softmax of logits (B, H, T, T), with the method's sink in the denominator."""
    if method.sink is None:
        return logits.softmax(dim=-1)
    sink = method.sink.logit.to(logits.dtype).view(-1, 1, 1)
    sink = sink.expand(*logits.shape[:-1], 1)
    return torch.cat((logits, sink), dim=-1).softmax(dim=-1)[..., :-1]


def attention_logits(
    method: Method,
    q: Tensor,
    k: Tensor,
    target_length: int | None = None,
    x: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Return the logits of all pairs (paper, eq:def:L), -inf for hidden keys: (B, H, T, T), at least float32.

    q, k (B, H, T, D) come after QK-norm and before any rotation. target_length (default: T): the length of the whole
    sequence, as in plan_layer. x (B, T, C): the layer's input, for methods that need it. starts (B, T): the position of
    the first token of each token's document, for attention within documents.
    Raise ValueError for shapes and lengths that do not fit each other, and for a Replacement, which has no logits.
    """
    method.check_inputs(q, k, k, x)
    no_logits = f"{method.name} replaces softmax attention and has no logits. Use another method."
    require(method.replacement is None, no_logits)
    T = q.shape[2]
    target_length = T if target_length is None else target_length
    require(T == k.shape[2], f"there are {T} queries and {k.shape[2]} keys. Give equal numbers.")
    require(T <= target_length, f"{T} keys are more than the target length {target_length}. Use {T} or more.")
    q, k, positions = upcast(q), upcast(k), torch.arange(T, device=q.device)
    if method.rotation is not None:
        cos, sin = method.rotation.tables(T, target_length, q.device)
        q, k = method.rotation.rotate(q, cos, sin), method.rotation.rotate_keys(k, cos, sin)
    if method.query_scale is not None:
        table = method.query_scale.table(positions, target_length)
        if starts is not None:
            table = table[positions - starts]  # (B, T)
        q = q * method.query_scale.multiplier(table, x).unsqueeze(-1)
    logits = q @ k.mT / q.shape[-1] ** 0.5  # (B, H, T, T)
    distance = positions.unsqueeze(-1) - positions
    if method.score_change is not None:
        head = torch.arange(method.num_heads, device=q.device).view(-1, 1, 1)
        changed = method.score_change.change(logits, distance.clamp(min=0).double(), head)
        unchanged = (positions == 0) & method.score_change.skip_first
        logits = torch.where(unchanged, logits, changed.to(logits.dtype))
    if method.key_bias is not None:
        logits = logits + method.key_bias.bias(method.key_bias.token_features(x)).unsqueeze(-2)
    hidden = distance < 0
    if method.window is not None:
        hidden = hidden | (distance >= method.window.window)
    if starts is not None:
        hidden = hidden | (positions < starts[:, None, :, None])
    return logits.masked_fill(hidden, -torch.inf)

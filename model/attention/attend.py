"""Causal attention by any method: rotation, softmax over the changed scores, gate."""

import torch.nn.functional as F
from torch import Tensor

from model.attention.plan import LayerPlan
from model.methods.base import Method
from model.tensors import upcast


def attend(
    method: Method, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None = None, *, plan: LayerPlan, cache=None
) -> Tensor:
    """Return causal attention by `method`, (B, H, Tq, D), in v's dtype.

    q (B, H, Tq, D) has the last Tq tokens of k and v (B, H, Tk, D). q and k come after QK-norm and before any rotation.
    x (B, T, C): the layer's input, for methods that look at it. cache: keys and values of earlier tokens, to which k
    and v are appended (model/decoding.py). Raise ValueError for arguments that do not fit the method.
    """
    method.check_inputs(q, k, v, x)
    features = method.token_features(x)  # (B, H, T, ...), for a key bias or a replacement, else None

    # 1. Rotate q and k, and scale q: in float32, rounded once.
    rotated_q, rotated_k = rotate_and_scale(method, q, k, x, plan)
    if cache is not None:
        rotated_k, k, v, features = cache.append(rotated_k, k, v, features)

    # 2. The mean of v under the attention weights: a softmax on the plan's backend, or the method's own function.
    is_wide = method.vector_dim > method.head_dim  # PoPE doubles the width of q and k
    if method.replacement is not None:
        y = method.replacement.attend(q, k, v, rotated_q, rotated_k, features, plan)
    else:
        # The logits are a_t S + m_t plus the key bias, with S = q.k / sqrt(d). The plan holds a_t and m_t in the
        # backend's form. If they are learned, the backend takes them from score_change.
        y = plan.backend.run(
            rotated_q,
            rotated_k,
            F.pad(v, (0, method.vector_dim - method.head_dim)) if is_wide else v,
            plan,
            score_change=method.score_change,
            key_bias=None if method.key_bias is None else method.key_bias.bias(features),
            sink=None if method.sink is None else method.sink.logit,
        )
        y = y[..., : method.head_dim] if is_wide else y

    # 3. The gate.
    if method.output_gate is not None:
        y = method.output_gate.change(y, v[:, :, -q.shape[2] :], x)
    assert y.shape == q.shape, f"{method.name} returned {tuple(y.shape)}, not {tuple(q.shape)}"
    return y


def rotate_and_scale(method: Method, q: Tensor, k: Tensor, x: Tensor | None, plan: LayerPlan) -> tuple[Tensor, Tensor]:
    """Return q and k rotated, and q scaled as in LogN, in float32, rounded to their dtype once at the end.

    The factor 1 / sqrt(d) is the backend's.
    """
    rotated_q, rotated_k = rotate(method, q, k, plan)
    if method.query_scale is not None:
        factors = method.query_scale.multiplier(plan.query_table[..., -q.shape[2] :], x)  # ([B,] 1 or H, Tq)
        rotated_q = upcast(rotated_q)
        rotated_q = rotated_q * factors.to(rotated_q.dtype).unsqueeze(-1)
    return rotated_q.to(q.dtype), rotated_k.to(k.dtype)


def rotate(method: Method, q: Tensor, k: Tensor, plan: LayerPlan) -> tuple[Tensor, Tensor]:
    """Return q and k, whose last tokens are the plan's last tokens, rotated: in float32, or unchanged."""
    if method.rotation is None:
        return q, k
    of_q, of_k = slice(-q.shape[2], None), slice(-k.shape[2], None)
    rotated_q = method.rotation.rotate(upcast(q), plan.cos[of_q], plan.sin[of_q])
    rotated_k = method.rotation.rotate_keys(upcast(k), plan.cos[of_k], plan.sin[of_k])
    return rotated_q, rotated_k

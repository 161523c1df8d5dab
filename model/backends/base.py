"""What a backend is told about a call."""

import dataclasses
import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from model.context import local_shard
from model.methods.base import Method


@dataclasses.dataclass(frozen=True)
class Call:
    """The shape of one call of attention: queries at positions q_offset.. against keys at 0..key_length-1.

    Lengths are those of whole sequences. With a context group (model/context.py), each rank computes some of the heads.
    """

    num_heads: int  # of all ranks
    head_dim: int
    query_length: int
    key_length: int
    q_offset: int = 0
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32  # of q, k, v
    context: ProcessGroup | None = None
    product_bound: float = math.inf  # what no |q.k| exceeds, where that is known: see bound_products
    window: int | None = None  # keys at this distance from a query, or further away, are hidden
    softcap: float | None = None  # scores S become softcap tanh(S / softcap) before a_t and m_t; blocks alone has it


EXTRAS = dict(key_bias="biases of keys", window="windows", sink="sinks")  # of a method, beside a_t and m_t


def find_unsupported(method: Method, supported: tuple[str, ...] = ()) -> str | None:
    """Return a reason why a backend that has only these of EXTRAS cannot run a method, or None."""
    missing = [words for kind, words in EXTRAS.items() if getattr(method, kind) is not None and kind not in supported]
    return f"it has no {' and no '.join(missing)}" if missing else None


def extra_logits(method: Method, of_tokens: Tensor | None, context: ProcessGroup | None = None) -> dict[str, Tensor]:
    """Return what a backend's `run` takes of a method beside a_t and m_t: key_bias (B, H, Tk) and sink (H,).

    of_tokens: see KeyBias; with a context group, of this rank's heads.
    """
    more = {}
    if method.key_bias is not None:
        more["key_bias"] = method.key_bias.bias(of_tokens)
    if method.sink is not None:
        more["sink"] = local_shard(method.sink.logit, 0, context)
    return more


def bound_products(head_dim: int, dtype: torch.dtype, gain: float = 1.0) -> float:
    """Return what |q.k| does not exceed where both have the norm sqrt(head_dim), and then one is multiplied by gain.

    Each was rounded to the dtype twice on the way: as it was normalised, and as it was rotated.
    """
    return head_dim * gain * (1 + torch.finfo(dtype).eps) ** 4

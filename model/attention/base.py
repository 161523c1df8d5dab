"""The plan of an attention call, and functions that several backends use."""

import dataclasses

import torch
from torch import Tensor

from model.methods.base import Method, ScoreChange

MAX_LENGTH = 2**30  # positions and their differences are 32-bit integers in the kernels
EXTRAS = dict(key_bias="key biases", window="windows", sink="sinks")  # mechanisms that some backends lack
Tensors = dict[str, Tensor]  # by name


@dataclasses.dataclass(frozen=True)
class Plan:
    """The part of a call that depends on neither weights nor activations. All layers of a method share it.

    Queries stand at positions q_offset.., keys at positions 0..key_length-1.
    """

    backend: str
    num_heads: int
    head_dim: int  # of q and k in the backend
    query_length: int
    key_length: int
    q_offset: int = 0
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32  # of q, k, v
    window: int | None = None  # keys at this distance from a query, or further away, are hidden
    cos: Tensor | None = None  # (key_length, D/2); (key_length, D) for PoPE
    sin: Tensor | None = None  # of the same shape
    query_table: Tensor | None = None  # (query_length,)
    prepared: object = None  # result of the backend's `prepare`, without a_t and m_t if they are learned
    why: str = ""  # the reason for the choice of the backend


def unsupported_extras(method: Method, supported: tuple[str, ...] = ()) -> str | None:
    """Return why a backend cannot run a method, or None. supported: some of EXTRAS, and "skip_first"."""
    missing = [noun for kind, noun in EXTRAS.items() if getattr(method, kind) is not None and kind not in supported]
    if method.score_change is not None and method.score_change.skip_first and "skip_first" not in supported:
        missing.append("exception for the first key")
    return f"it has no {' and no '.join(missing)}" if missing else None


def extra_logits(method: Method, token_features: Tensor | None) -> Tensors:
    """Return the arguments key_bias (B, H, Tk) and sink (H,) of a backend's `run`, if the method has them.

    token_features: see KeyBias.
    """
    arguments = {}
    if method.key_bias is not None:
        arguments["key_bias"] = method.key_bias.bias(token_features)
    if method.sink is not None:
        arguments["sink"] = method.sink.logit
    return arguments


def learned_parameters(change: ScoreChange | None) -> Tensors:
    """Return the trainable parameters of a_t and m_t by name."""
    return {} if change is None else dict(change.named_parameters())


def score_functions(change: ScoreChange | None, num_heads: int, distance: Tensor) -> Tensor:
    """Return a_t and m_t at distances (T,) float64: a tensor (2, H, T), or (2, 1, T) if heads agree."""
    head = torch.arange(num_heads, device=distance.device).unsqueeze(-1)
    a, m = (1.0, 0.0) if change is None else change.coefficients(distance, head)
    a, m = (torch.as_tensor(x, dtype=distance.dtype, device=distance.device) for x in (a, m))
    functions = torch.stack(torch.broadcast_tensors(a, m, distance)[:2])
    return functions if functions.dim() == 3 else functions.unsqueeze(1)

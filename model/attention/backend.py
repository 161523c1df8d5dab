"""A backend computes the softmax over a_t S + m_t. A LayerPlan is what it can know before the first layer runs."""

import dataclasses

import torch
from torch import Tensor

from errors import UserError
from model.methods.base import Method, ScoreChange

MAX_LENGTH = 2**30  # positions and their differences are 32-bit integers in the kernels
EXTRAS = {  # attributes of Method that some backends do not support
    "key_bias": "key biases",
    "window": "windows",
    "sink": "sinks",
    "skip_first": "exception for the first key",
}


class Backend:
    """One implementation of softmax attention."""

    name: str
    supported: tuple[str, ...] = ()  # of EXTRAS
    error_factor = 1.0  # multiplies the limits of check.py

    def unsupported(self, method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the backend cannot run this method there, or None."""
        missing = [noun for extra, noun in EXTRAS.items() if getattr(method, extra) and extra not in self.supported]
        return f"it has no {' and no '.join(missing)}" if missing else None

    def prepare(self, plan: "LayerPlan", score_change: ScoreChange | None) -> object:
        """Return the constants of a plan, for `run`. score_change: None if the method has none, or learns it."""
        return None

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        plan: "LayerPlan | None" = None,
        score_change: ScoreChange | None = None,
        key_bias: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Return the output (B, H, Tq, D) of q (B, H, Tq, D), which has the last Tq tokens of k and v (B, H, Tk, D).

        Without a plan, this is plain causal attention. key_bias (B, H, Tk) is added to the logits. sink (H,) is one
        more logit of each query, without a value. If a_t and m_t are learned, the result is differentiable in them.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What one layer's attention needs beside weights and activations. All layers of a method share it.

    The queries are the last query_length of the key_length tokens.
    """

    backend: Backend
    num_heads: int
    head_dim: int  # of rotated q and k
    query_length: int
    key_length: int
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32  # of q, k, v
    window: int | None = None  # keys at this distance from a query, or further away, are hidden
    cos: Tensor | None = None  # of all tokens, (key_length, D/2); (key_length, D) for PoPE
    sin: Tensor | None = None  # of the same shape
    query_table: Tensor | None = None  # of all tokens, (key_length,)
    prepared: object = None  # the backend's constants
    why: str = ""  # the reason for the choice of the backend

    @classmethod
    def make(
        cls,
        backend: Backend,
        method: Method,
        query_length: int,
        key_length: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        target_length: int | None = None,
        why: str = "",
    ) -> "LayerPlan":
        """Return the plan of a method. For the arguments see plan_layer (plan.py)."""
        target_length = key_length if target_length is None else target_length
        check_lengths(query_length, key_length, target_length)
        cos = sin = query_table = constant = None
        if method.rotation is not None:
            cos, sin = method.rotation.tables(key_length, target_length, device)
        if method.query_scale is not None:
            query_table = method.query_scale.table(torch.arange(key_length), target_length).to(device)
        if method.score_change is not None and not method.score_change.is_learned:
            constant = method.score_change
        plan = cls(
            backend=backend,
            num_heads=method.num_heads,
            head_dim=method.vector_dim,
            query_length=query_length,
            key_length=key_length,
            device=device,
            dtype=dtype,
            window=None if method.window is None else method.window.window,
            cos=cos,
            sin=sin,
            query_table=query_table,
            why=why,
        )
        if method.replacement is not None:
            return plan
        return dataclasses.replace(plan, prepared=backend.prepare(plan, constant))

    def up_to(self, length: int) -> "LayerPlan":
        """Return the plan for the same queries at the end of the first `length` tokens.

        The backend must be `blocks`, whose constants serve any number of keys.
        """
        tables = [table if table is None else table[:length] for table in (self.cos, self.sin, self.query_table)]
        cos, sin, query_table = tables
        return dataclasses.replace(self, key_length=length, cos=cos, sin=sin, query_table=query_table)

    @property
    def q_offset(self) -> int:
        """Return the position of the first query."""
        return self.key_length - self.query_length


def check_lengths(query_length: int, key_length: int, target_length: int):
    """Raise ValueError for lengths that do not fit each other."""
    if not 1 <= query_length <= key_length:
        raise UserError(f"{query_length} queries do not fit {key_length} keys. Give 1 query or more, and as many keys.")
    if key_length > target_length:
        raise UserError(f"target_length {target_length} is below the text's {key_length} tokens. Raise it.")
    if key_length > MAX_LENGTH:
        raise UserError(f"The text has {key_length} tokens. Attention covers up to {MAX_LENGTH}.")


def score_functions(change: ScoreChange | None, num_heads: int, distance: Tensor) -> Tensor:
    """Return a_t and m_t at distances (T,) float64: a tensor (2, H, T), or (2, 1, T) if heads agree."""
    a, m = 1.0, 0.0
    if change is not None:
        head = torch.arange(num_heads, device=distance.device).unsqueeze(-1)
        a, m = change.coefficients(distance, head)
    a = torch.as_tensor(a, dtype=distance.dtype, device=distance.device)
    m = torch.as_tensor(m, dtype=distance.dtype, device=distance.device)
    a, m, _ = torch.broadcast_tensors(a, m, distance)
    functions = torch.stack((a, m))
    return functions if functions.dim() == 3 else functions.unsqueeze(1)

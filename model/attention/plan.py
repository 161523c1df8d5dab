"""Plans: what a forward pass at one length needs beside weights and tokens. A plan is made once a length."""

import dataclasses

import torch
from torch import Tensor

from errors import UserError
from model.attention.backend import Backend
from model.methods.base import Method

MAX_LENGTH = 2**30  # positions and their differences are 32-bit integers in the kernels


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
    window: int | None = None  # keys at this distance from a query, or further away, are hidden
    cos: Tensor | None = None  # of all tokens, (key_length, D/2); (key_length, D) for PoPE
    sin: Tensor | None = None  # of the same shape
    query_table: Tensor | None = None  # of all tokens, (key_length,); (B, key_length) within documents
    starts: Tensor | None = None  # within_documents: the first position of each token's document, (B, key_length) int64
    why: str = ""  # the reason for the choice of the backend
    prepared: object = None  # the backend's constants

    @property
    def q_offset(self) -> int:
        """Return the position of the first query."""
        return self.key_length - self.query_length

    def up_to(self, length: int) -> "LayerPlan":
        """Return the plan for the same queries at the end of the first `length` tokens.

        The backend must be `blocks`, whose constants serve any number of keys.
        """
        names = [name for name in ("cos", "sin", "query_table") if getattr(self, name) is not None]
        shorter = {name: getattr(self, name)[:length] for name in names}
        return dataclasses.replace(self, key_length=length, **shorter)

    def within_documents(self, starts: Tensor) -> "LayerPlan":
        """Return the plan of a batch whose tokens see their own documents alone. Positions count from their starts.

        starts (B, key_length) int64: the position of the first token of each token's document.
        """
        table = self.query_table
        if table is not None:
            table = table[torch.arange(self.key_length, device=self.device) - starts]
        plan = dataclasses.replace(self, starts=starts, query_table=table)
        return dataclasses.replace(plan, prepared=self.backend.within_documents(plan))

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return plain causal attention by the plan's backend. q has the last tokens of k and v."""
        Tq, D = q.shape[2:]
        plan = LayerPlan(self.backend, 1, D, Tq, k.shape[2], q.device)
        return self.backend.run(q, k, v, plan)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a model: a LayerPlan for each layer of the method's pattern `a,b,c`, which later layers repeat."""

    layers: tuple[LayerPlan, ...]
    document_token: int | None = None  # attention stays within documents, which begin with this token

    def for_layer(self, number: int) -> LayerPlan:
        return self.layers[number % len(self.layers)]

    def up_to(self, length: int) -> "Plan":
        """See LayerPlan.up_to."""
        return dataclasses.replace(self, layers=tuple(layer.up_to(length) for layer in self.layers))

    def for_tokens(self, tokens: Tensor) -> "Plan":
        """Return the plan of a batch (B, T): within its documents if there is a document_token, else this plan."""
        if self.document_token is None:
            return self
        starts = document_starts(tokens, self.document_token)
        return dataclasses.replace(self, layers=tuple(layer.within_documents(starts) for layer in self.layers))


def document_starts(tokens: Tensor, document_token: int) -> Tensor:
    """Return the position of the first token of each token's document, (B, T) int64.

    A document begins with document_token. The first token of a sequence begins a document, too.
    """
    positions = torch.arange(tokens.shape[-1], device=tokens.device)
    starts = torch.where(tokens == document_token, positions, 0)
    return starts.cummax(dim=-1).values


def plan_layer(
    method: Method,
    backend: Backend,
    query_length: int,
    key_length: int,
    *,
    target_length: int | None = None,
    device: torch.device = torch.device("cpu"),
    why: str = "",
) -> LayerPlan:
    """Return the plan for the last query_length of key_length tokens.

    target_length (default: key_length): the length of the whole sequence. NTK, YaRN and LogN's constant form scale
    with it. Raise ValueError for lengths that do not fit each other.
    """
    target_length = key_length if target_length is None else target_length
    check_lengths(query_length, key_length, target_length)

    # 1. Tables of the method: the angles of rotations, and factors of queries.
    cos = sin = query_table = None
    if method.rotation is not None:
        cos, sin = method.rotation.tables(key_length, target_length, device)
    if method.query_scale is not None:
        query_table = method.query_scale.table(torch.arange(key_length), target_length).to(device)
    plan = LayerPlan(
        backend=backend,
        num_heads=method.num_heads,
        head_dim=method.vector_dim,
        query_length=query_length,
        key_length=key_length,
        device=device,
        window=None if method.window is None else method.window.window,
        cos=cos,
        sin=sin,
        query_table=query_table,
        why=why,
    )

    # 2. Constants of the backend, such as tables of a_t and m_t, and block masks.
    if method.replacement is not None:
        return plan
    is_learned = method.score_change is not None and method.score_change.is_learned
    constant = None if is_learned else method.score_change
    return dataclasses.replace(plan, prepared=backend.prepare(plan, constant))


def check_lengths(query_length: int, key_length: int, target_length: int):
    """Raise ValueError for lengths that do not fit each other."""
    if not 1 <= query_length <= key_length:
        raise UserError(f"{query_length} queries do not fit {key_length} keys. Give 1 query or more, and as many keys.")
    if key_length > target_length:
        raise UserError(f"target_length {target_length} is below the text's {key_length} tokens. Raise it.")
    if key_length > MAX_LENGTH:
        raise UserError(f"The text has {key_length} tokens. Attention covers up to {MAX_LENGTH}.")

"""Plans: what a forward pass at one length needs beside weights and tokens. A plan is made once a length."""

import dataclasses

import torch

from model.attention.backend import LayerPlan
from model.attention.choose import choose_backend
from model.methods.base import Method


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a model: a LayerPlan for each layer of the method's pattern `a,b,c`, which later layers repeat."""

    layers: tuple[LayerPlan, ...]

    def for_layer(self, number: int) -> LayerPlan:
        return self.layers[number % len(self.layers)]

    def up_to(self, length: int) -> "Plan":
        """Return the plan for the same queries at the end of the first `length` tokens. See LayerPlan.up_to."""
        return Plan(tuple(layer.up_to(length) for layer in self.layers))


def plan_layer(
    method: Method,
    query_length: int,
    key_length: int,
    *,
    target_length: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> LayerPlan:
    """Return the plan for the last query_length of key_length tokens, with q, k and v of this dtype.

    target_length (default: key_length): the length of the whole sequence. NTK, YaRN and LogN's constant form scale
    with it. Raise ValueError for lengths that do not fit each other, and for a backend that cannot run.
    """
    device = torch.device(device)
    chosen, why = choose_backend(method, device, dtype, backend)
    return LayerPlan.make(
        chosen, method, query_length, key_length, target_length=target_length, device=device, dtype=dtype, why=why
    )

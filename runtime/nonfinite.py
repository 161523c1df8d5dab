"""What a step was made of whose loss or gradients are not finite, small enough to mail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn


def examine(
    losses: Callable[[Tensor, Tensor], Tensor],
    micro_batches: Iterable[tuple[Tensor, Tensor]],
    parameters: Iterable[tuple[str, nn.Parameter]],
) -> dict[str, Any]:
    """Repeats a step up to its gradients, which are dropped. losses(inputs, targets) is the loss of each token, (B, T).

    Returns {"sequence_losses": [of each sequence], "parameters": {name: [largest weight, weights that are not finite,
    largest gradient, gradients that are not finite]}}; what is not finite, as a word.
    """
    parameters, sequence_losses = dict(parameters), []
    for inputs, targets in micro_batches:
        per_token = losses(inputs, targets)
        per_token.mean().backward()
        sequence_losses += [in_json(x) for x in per_token.detach().mean(dim=1).tolist()]
    table = {}
    for name, p in parameters.items():
        table[name] = [*largest(p.detach()), *([None, None] if p.grad is None else largest(p.grad))]
        p.grad = None
    return dict(sequence_losses=sequence_losses, parameters=table)


def largest(x: Tensor) -> list[float | str | int]:
    return [in_json(x.abs().max().item()), x.numel() - int(x.isfinite().sum())]


def in_json(x: float) -> float | str:
    return float(f"{x:.6g}") if math.isfinite(x) else str(x)

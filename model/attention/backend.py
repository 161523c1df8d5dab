"""A backend is one implementation of softmax attention over a_t S + m_t."""

import torch
from torch import Tensor

from model.methods.base import Method, ScoreChange

EXTRAS = {  # attributes of Method that some backends do not support
    "key_bias": "key biases",
    "window": "windows",
    "sink": "sinks",
    "skip_first": "exception for the first key",
}


class Backend:
    name: str
    supported: tuple[str, ...] = ()  # of EXTRAS
    masks_documents = False  # True if `run` looks at plan.starts
    error_factor = 1.0  # multiplies the limits of check.py

    def unsupported(self, method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the backend cannot run this method there, or None."""
        missing = [noun for extra, noun in EXTRAS.items() if getattr(method, extra) and extra not in self.supported]
        return f"it has no {' and no '.join(missing)}" if missing else None

    def prepare(self, plan, score_change: ScoreChange | None) -> object:
        """Return the constants of a LayerPlan. If a_t and m_t are learned, score_change is None at first."""
        return None

    def within_documents(self, plan) -> object:
        """Return the constants of LayerPlan.within_documents, whose starts and former constants are in `plan`."""
        return plan.prepared

    def constants(self, plan, score_change: ScoreChange | None) -> object:
        """Return the constants of a LayerPlan, made now if there are none yet, or if a_t and m_t are learned."""
        if plan.prepared is None or (score_change is not None and score_change.is_learned):
            return self.prepare(plan, score_change)
        return plan.prepared

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan,
        *,
        score_change: ScoreChange | None = None,
        key_bias: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Return the output (B, H, Tq, D) of q (B, H, Tq, D), which has the last Tq tokens of k and v (B, H, Tk, D).

        key_bias (B, H, Tk) is added to the logits. sink (H,) is one more logit of each query, without a value. If a_t
        and m_t are learned, the result is differentiable in them.
        """
        raise NotImplementedError


def score_functions(change: ScoreChange | None, num_heads: int, distance: Tensor) -> Tensor:
    """Return a_t and m_t at distances (T,) float64: a tensor (2, H, T), or (2, 1, T) if heads agree."""
    a, m = 1.0, 0.0
    if change is not None:
        head = torch.arange(num_heads, device=distance.device).unsqueeze(-1)
        a, m = change.coefficients(distance, head)
    zeros = torch.zeros_like(distance)
    functions = torch.stack(torch.broadcast_tensors(a + zeros, m + zeros))
    return functions if functions.dim() == 3 else functions.unsqueeze(1)

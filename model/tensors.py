"""Functions of tensors that several rooms of the model share."""

import torch
import torch.nn.functional as F
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if that is its dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in the dtype of x. Weights are float32."""
    return F.linear(x, weight.to(x.dtype))


def sum_from_here(x: Tensor, dim: int = -1) -> Tensor:
    """Return the sum of each entry and all later entries along a dimension."""
    return x.flip(dim).cumsum(dim=dim).flip(dim)

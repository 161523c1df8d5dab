"""Computes the losses of a model on given sequences, divided among the ranks."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from model.attention.plan import Plan
from model.gpt import GPT
from runtime.processes import World

Losses = Callable[..., Tensor]  # losses_over_ranks with everything given but inputs, targets and positions


@torch.inference_mode()
def losses_over_ranks(
    model: GPT,
    plans: dict[int, Plan],
    inputs: np.ndarray,
    targets: np.ndarray,
    positions: Tensor | None = None,
    *,
    micro_batch_tokens: int,
    world: World,
    before_batch: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return the loss in nats of each target, (sequences, length) float64 on the CPU.

    plans: by length. inputs, targets: (sequences, length) integers, divided among the ranks.
    positions: (positions,) int64; the losses at these positions alone, (sequences, positions).
    before_batch: called equally often on all ranks. The loss of a sequence that no rank has computed is NaN.
    """
    # 1. Every rank takes each world_size-th sequence.
    count, length = inputs.shape
    rank_rows = [*range(world.rank, count, world.world_size)]
    most_rows = -(-count // world.world_size)  # of a rank
    micro_batch = max(1, micro_batch_tokens // length)

    # 2. Compute its losses, and zeros in place of the losses of other ranks.
    # So the sum over the ranks is exact.
    positions = torch.arange(length) if positions is None else positions
    positions = positions.to(world.device)
    losses = torch.zeros(count, len(positions), dtype=torch.float64, device=world.device)
    computed = torch.zeros(count, device=world.device)
    for first in range(0, most_rows, micro_batch):
        before_batch()
        rows = rank_rows[first : first + micro_batch]
        if rows:
            x = torch.from_numpy(inputs[rows].astype(np.int64)).to(world.device)
            y = torch.from_numpy(targets[rows].astype(np.int64)).to(world.device)
            by_token = model(x, y, plan=plans[length], per_token=True)  # (B, length)
            losses[rows] = by_token.double()[:, positions]
            computed[rows] = 1
    world.sum(losses)
    world.sum(computed)
    losses[computed == 0] = torch.nan
    return losses.cpu()

"""Computes the losses and the hits of a model on given sequences, divided among the ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.attention.plan import Plan
from model.gpt import GPT
from runtime.processes import World


@dataclass(frozen=True)
class Losses:
    """A function from sequences to their losses by a model.

    plans: by length. before_batch: called equally often on all ranks.
    """

    model: GPT
    plans: dict[int, Plan]
    micro_batch_tokens: int
    world: World
    before_batch: Callable = lambda: None

    def __call__(self, inputs: np.ndarray, targets: np.ndarray, positions: Tensor | None = None) -> Tensor:
        """Return the loss in nats of each target, (sequences, length) float64 on the CPU.

        inputs, targets: (sequences, length) integers. positions: (positions,) int64; the losses at these positions
        alone, (sequences, positions).
        """
        length = inputs.shape[1]
        positions = torch.arange(length) if positions is None else positions
        positions = positions.to(self.world.device)

        def losses(x: Tensor, y: Tensor) -> Tensor:
            return self.model(x, y, plan=self.plans[length], per_token=True)[:, positions]

        return self._over_ranks(losses, inputs, targets, len(positions))

    def hits(self, inputs: np.ndarray, targets: np.ndarray, last: int) -> Tensor:
        """Return 1 where the most likely token is the target, else 0, at the last positions, (sequences, last)."""
        plan = self.plans[inputs.shape[1]]

        def hits(x: Tensor, y: Tensor) -> Tensor:
            return self.model(x, plan=plan, last=last).argmax(dim=-1) == y[:, -last:]

        return self._over_ranks(hits, inputs, targets, last)

    @torch.inference_mode()
    def _over_ranks(self, compute: Callable[..., Tensor], inputs: np.ndarray, targets: np.ndarray, width: int):
        """Return compute(inputs, targets) of all sequences, (sequences, width) float64 on the CPU.

        The values of a sequence that no rank has computed are NaN.
        """
        # 1. Every rank takes each world_size-th sequence.
        count, length = inputs.shape
        rank_rows = [*range(self.world.rank, count, self.world.world_size)]
        most_rows = -(-count // self.world.world_size)  # of a rank
        micro_batch = max(1, self.micro_batch_tokens // length)

        # 2. Compute its values, and zeros in place of the values of other ranks.
        # So the sum over the ranks is exact.
        device = self.world.device
        values = torch.zeros(count, width, dtype=torch.float64, device=device)
        computed = torch.zeros(count, device=device)
        for first in range(0, most_rows, micro_batch):
            self.before_batch()
            rows = rank_rows[first : first + micro_batch]
            if rows:
                x = torch.from_numpy(inputs[rows].astype(np.int64)).to(device)
                y = torch.from_numpy(targets[rows].astype(np.int64)).to(device)
                values[rows] = compute(x, y).double()
                computed[rows] = 1
        self.world.sum(values)
        self.world.sum(computed)
        values[computed == 0] = torch.nan
        return values.cpu()

"""Muon: momentum whose update is orthogonalised by Newton-Schulz (Keller Jordan, kellerjordan.github.io/posts/muon)."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor

# Quintic of the Muon post: steepest at 0, so that five steps bring singular values from about 0.01 up to [0.7, 1.2].
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def newton_schulz(x: Tensor) -> Tensor:
    """Move the singular values of each matrix, at most 1 before, near 1. x: (N, rows, cols), rows <= cols."""
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT  # (N, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def muon_direction(grads: Tensor, momenta: Tensor, momentum: Tensor, dtype: torch.dtype) -> Tensor:
    """Orthogonalised Nesterov momentum of each matrix, computed and returned in `dtype`.

    grads, momenta: (N, rows, cols), float32, rows <= cols; momentum: 0-D
    """
    x = grads + momentum * momenta
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # Frobenius, so no singular value exceeds 1
    return newton_schulz(x.to(dtype))


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it fast; elsewhere float32, about ten times faster there."""
    cpu_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if device.type == "cuda" or cpu_bf16 else torch.float32


def as_matrices(x: Tensor) -> Tensor:
    """View a matrix, or a bank of them, as (n, rows, cols) with rows <= cols."""
    x = x if x.ndim == 3 else x[None]
    return x.mT if x.shape[-2] > x.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Muon for float32 matrices, without weight decay.

    A parameter of shape (rows, cols) is one matrix, (n, rows, cols) a bank of n matrices. For each matrix, with g its
    gradient and mu the momentum:

        buf = mu buf + g
        p  -= lr sqrt(max(1, rows / cols)) NewtonSchulz(g + mu buf)

    Matrices of one shape, up to transposition, are orthogonalised together. With torch.distributed initialised, each
    rank orthogonalises its share of them and gathers the rest; gradients must already be the same on all ranks. The
    momentum is whole on every rank, so a checkpoint continues on any number of processes.

    `lr` and `momentum` become 0-D CPU tensors in `param_groups`: change them in place (`schedule.set_lr`).

    compile: compile `muon_direction`, once for each shape of matrix
    dtype:   torch.dtype of Newton-Schulz and of the gathered updates; None for `fast_dtype`

    Raises ValueError for a parameter of another shape or dtype, and for lr or momentum out of range.
    """

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95, *, compile: bool = False, dtype=None):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.dtype = dtype or fast_dtype(self.param_groups[0]["params"][0].device)
        self.direction = torch.compile(muon_direction, dynamic=False) if compile else muon_direction

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if p.ndim not in (2, 3) or p.dtype != torch.float32:
                raise ValueError(
                    f"Muon takes float32 parameters of shape (rows, cols) or (n, rows, cols), not {p.dtype} of shape"
                    f" {tuple(p.shape)}: give it to another optimiser"
                )
        if not group["lr"] >= 0:
            raise ValueError(f"Muon's lr must be at least 0, got {group['lr']}")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"Muon's momentum must be in [0, 1), got {group['momentum']}")
        for name in ("lr", "momentum"):  # a tensor of its own for each group
            group[name] = torch.tensor(float(group[name]), dtype=torch.float32, device="cpu")

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            batches = defaultdict(list)  # (rows, cols), rows <= cols -> parameters
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                state["momentum_buffer"].mul_(group["momentum"]).add_(p.grad)
                batches[as_matrices(p).shape[1:]].append(p)

            # All batches are started before the first is applied: one is gathered while the next is computed.
            started = [(params, *self._start_directions(params, group["momentum"])) for params in batches.values()]
            for params, directions, gathering in started:
                if gathering:
                    gathering.wait()
                counts = [len(as_matrices(p)) for p in params]
                for p, x in zip(params, directions[: sum(counts)].float().split(counts)):
                    rows, cols = p.shape[-2:]
                    as_matrices(p).sub_(x * (group["lr"] * max(1, rows / cols) ** 0.5))

    def _start_directions(self, params: list[Tensor], momentum: Tensor) -> tuple[Tensor, "dist.Work | None"]:
        """Directions (N, rows, cols) of all matrices in `params`, in order; valid after waiting for the work, if any.

        N is rounded up to a multiple of the number of processes.
        """
        grads = [g for p in params for g in as_matrices(p.grad)]
        momenta = [m for p in params for m in as_matrices(self.state[p]["momentum_buffer"])]

        distributed = dist.is_available() and dist.is_initialized()
        world, rank = (dist.get_world_size(), dist.get_rank()) if distributed else (1, 0)
        share = -(-len(grads) // world)
        mine = [i % len(grads) for i in range(rank * share, (rank + 1) * share)]  # the last ranks may wrap around
        directions = self.direction(
            torch.stack([grads[i] for i in mine]), torch.stack([momenta[i] for i in mine]), momentum, self.dtype
        )
        if world == 1:
            return directions, None
        gathered = directions.new_empty(world * share, *directions.shape[1:])
        return gathered, dist.all_gather(list(gathered.chunk(world)), directions, async_op=True)

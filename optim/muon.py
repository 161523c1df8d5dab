"""Muon: momentum whose update is orthogonalised by Newton-Schulz (Keller Jordan, kellerjordan.github.io/posts/muon)."""

from collections import defaultdict

import torch
from torch import Tensor

# a, b, c of the Muon post's a x + b x^3 + c x^5. Five iterations move singular values above 0.01 to 0.7 to 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def newton_schulz(x: Tensor) -> Tensor:
    """Return x (N, rows, cols), rows <= cols, with its singular values moved from [0, 1] to near 1."""
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT  # (N, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def update(
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    scales: list[float | Tensor],
    lr: Tensor,
    momentum: float,
    found_inf: Tensor,
    dtype: torch.dtype,
):
    """Update matrices, or banks of matrices, in place and in one batch. All have one shape, up to transposition.

    scales: factors of the learning rate. lr and found_inf are 0-D.
    If found_inf is not 0, parameters and momenta do not change, whatever the gradients.
    """
    # 1. Add the gradients to the momenta, and look one step ahead (Nesterov).
    finite = found_inf == 0
    nesterov = []
    for m, g in zip(momenta, grads):
        m.copy_(torch.where(finite, momentum * m + g, m))
        nesterov.append(as_matrices(g + momentum * m))

    # 2. Orthogonalise all matrices in one batch.
    x = torch.cat(nesterov)  # (N, rows, cols)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # the Frobenius norm, so no singular value exceeds 1
    x = newton_schulz(x.to(dtype)).float()

    # 3. Move the parameters.
    directions = x.split([len(g) for g in nesterov])
    for p, direction, scale in zip(params, directions, scales):
        matrices = as_matrices(p)
        moved = matrices - direction * (lr * scale)
        matrices.copy_(torch.where(finite, moved, matrices))


def shape_scale(p: Tensor) -> float:
    """Return sqrt(max(1, rows / cols)) of a matrix, or of the matrices of a bank."""
    rows, cols = p.shape[-2:]
    return max(1, rows / cols) ** 0.5


def as_matrices(x: Tensor) -> Tensor:
    """View a matrix, or a bank of matrices, as (n, rows, cols) with rows <= cols."""
    x = x if x.ndim == 3 else x[None]
    return x.mT if x.shape[-2] > x.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Muon for float32 matrices, without weight decay.

    A parameter of shape (rows, cols) is one matrix, (n, rows, cols) a bank of n matrices. For each matrix, with g its
    gradient and mu the momentum:

        buf = mu buf + g
        p  -= lr sqrt(max(1, rows / cols)) NewtonSchulz(g + mu buf)

    Matrices of one shape, up to transposition, are orthogonalised together. If transposed matrices share a bank, its
    attribute `lr_scale` (n, 1, 1) holds the shape_scale of each matrix. A step changes nothing while the optimizer's
    `found_inf`, a 0-D tensor, is not 0, as with PyTorch's fused optimizers.

    compile: compile `update`, once for each shape of matrix
    dtype:   data type of the Newton-Schulz iteration
    """

    def __init__(
        self,
        params: list[Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        *,
        compile: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        # As a tensor, the learning rate can change without a new compilation of the update (schedule.set_lr).
        super().__init__(params, {"lr": torch.tensor(lr, dtype=torch.float32), "momentum": momentum})
        device = self.param_groups[0]["params"][0].device
        self.dtype = dtype
        self.found_inf = torch.zeros((), device=device)
        self.update = torch.compile(update, dynamic=False) if compile else update

    @torch.no_grad()
    def step(self):
        """Update every parameter. All must have gradients."""
        for group in self.param_groups:
            batches = defaultdict(list)  # (rows, cols), rows <= cols -> parameters
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                batches[as_matrices(p).shape[1:]].append(p)
            for params in batches.values():
                grads = [p.grad for p in params]
                momenta = [self.state[p]["momentum_buffer"] for p in params]
                scales = [getattr(p, "lr_scale", shape_scale(p)) for p in params]
                self.update(
                    params,
                    grads,
                    momenta,
                    scales,
                    lr=group["lr"],
                    momentum=group["momentum"],
                    found_inf=self.found_inf,
                    dtype=self.dtype,
                )

"""Learning-rate schedules: a factor in [0, 1] that multiplies all learning rates, as a function of the step."""

import math

import torch
from torch.optim import Optimizer


def lr_factor(step: int, *, steps: int, schedule: str, warmup_steps: int = 0, cooldown_steps: int = 0) -> float:
    """Return the factor of the learning rates in step `step`, counted from 0.

    constant_linear: 1, then (steps - step) / cooldown_steps over the last `cooldown_steps`. The paper's 162M runs use
                     it, as does record #8 of modded-nanogpt by Keller Jordan and others.
    cosine:          (1 + cos(pi step / steps)) / 2 (the paper's 304M runs)
    trapezoid:       (step + 1) / warmup_steps, then constant_linear (the paper's needle task)
    """
    if schedule == "cosine":
        return (1 + math.cos(math.pi * step / steps)) / 2
    warmup = (step + 1) / warmup_steps if warmup_steps else 1.0
    cooldown = (steps - step) / cooldown_steps if cooldown_steps else 1.0
    return min(1.0, warmup, cooldown)  # the two ramps never overlap


def set_lr(optimizer: Optimizer, lr: float):
    """Set the learning rate of every group. A tensor changes in place, so a compiled step does not recompile."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr

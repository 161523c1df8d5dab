"""Learning-rate schedules: a factor in [0, 1] that multiplies all learning rates, as a function of the step."""

import math

import torch
from torch.optim import Optimizer


def lr_factor(config, step: int) -> float:
    """Return the factor of all learning rates in step `step`, counted from 0.

    config: an object with steps, schedule, warmup_steps and cooldown_steps, such as configs.config.Config.

    constant_linear: 1, then (steps - step) / cooldown_steps over the last `cooldown_steps`. The paper's 162M runs use
                     it, as does record #8 of modded-nanogpt by Keller Jordan and others.
    cosine:          (1 + cos(pi step / steps)) / 2 (the paper's 304M runs)
    trapezoid:       (step + 1) / warmup_steps, then constant_linear (the paper's needle task)
    """
    if config.schedule == "cosine":
        return (1 + math.cos(math.pi * step / config.steps)) / 2
    warmup = (step + 1) / config.warmup_steps if config.warmup_steps else 1.0
    cooldown = (config.steps - step) / config.cooldown_steps if config.cooldown_steps else 1.0
    return min(1.0, warmup, cooldown)  # the two ramps never overlap


def set_lr(optimizer: Optimizer, lr: float):
    """Set the learning rate of every group. A tensor changes in place, so a compiled step does not recompile."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr

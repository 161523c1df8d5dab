"""Learning-rate schedules: a factor in [0, 1] that multiplies every learning rate alike, as a function of the step."""

import math

import torch
from torch.optim import Optimizer

from errors import did_you_mean, require

SCHEDULES = ("constant_linear", "cosine", "trapezoid")


def check_schedule(schedule: str, *, steps: int, warmup_steps: int = 0, cooldown_steps: int = 0) -> None:
    """Raise ValueError unless `lr_factor` can run this schedule and uses every number given."""
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; {did_you_mean(schedule, SCHEDULES)}")
    least = "steps must be at least 1, warmup_steps and cooldown_steps at least 0"
    given = f"got {steps}, {warmup_steps} and {cooldown_steps}"
    require(steps >= 1 and warmup_steps >= 0 and cooldown_steps >= 0, f"{least}: {given}")
    ramps = f"warmup_steps {warmup_steps} + cooldown_steps {cooldown_steps}"
    require(warmup_steps + cooldown_steps <= steps, f"{ramps} exceed steps {steps}: shorten them")
    advice = f"set warmup_steps {warmup_steps} to 0 or use trapezoid"
    require(not warmup_steps or schedule == "trapezoid", f"schedule {schedule} has no warm-up: {advice}")
    advice = f"set cooldown_steps {cooldown_steps} to 0"
    require(not cooldown_steps or schedule != "cosine", f"schedule cosine has no separate cooldown: {advice}")


def lr_factor(
    step: int, *, steps: int, schedule: str, warmup_steps: int = 0, cooldown_steps: int = 0, restart: int | None = None,
    restart_warmup_steps: int = 0,
) -> float:  # fmt: skip
    """Return the factor on the learning rate of update number `step`, counted from 0.

    constant_linear: 1, then (steps - step) / cooldown_steps over the last `cooldown_steps` (the paper's 162M runs, as
                     in record #8 of modded-nanogpt by Keller Jordan and others)
    cosine:          (1 + cos(pi step / steps)) / 2 (the paper's 304M runs)
    trapezoid:       (step + 1) / warmup_steps, then constant_linear (the paper's needle task)

    From step `restart` on, another one takes its place: up over restart_warmup_steps steps, and down as a cosine over
    all that are left.

    Raises ValueError as `check_schedule` does.
    """
    check_schedule(schedule, steps=steps, warmup_steps=warmup_steps, cooldown_steps=cooldown_steps)
    assert 0 <= step <= steps, f"step {step} of {steps}"
    if restart is not None and step >= restart:
        done, left = step - restart, steps - restart
        return min(1.0, (done + 1) / max(1, restart_warmup_steps)) * (1 + math.cos(math.pi * done / left)) / 2
    if schedule == "cosine":
        return (1 + math.cos(math.pi * step / steps)) / 2
    warmup = (step + 1) / warmup_steps if warmup_steps else 1.0
    cooldown = (steps - step) / cooldown_steps if cooldown_steps else 1.0
    return min(1.0, warmup, cooldown)  # the two ramps never overlap


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group; a tensor in place, so that a compiled step sees it without recompiling."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr

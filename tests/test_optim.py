"""Muon against a plain reference, and schedules. test_config.py has the presets' learning rates."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from attention_cases import half_precision, random
from commands import parametrize, table

from optim import muon
from optim.muon import Muon, shape_scale
from optim.schedule import lr_factor, set_lr

LR, MOMENTUM = 0.02, 0.95
SHAPES = "48x32 32x48 40x40 1x7 7x1 65x17 128x128 3x24x24 2x16x64 5x33x9"
ONE_BATCH = "24x40 3x24x40 40x24"  # the compiled tests share shapes, which take seconds each to compile


def make_parameters(shapes):
    """Return a parameter of each shape, such as 24x40."""
    sizes = [[*map(int, shape.split("x"))] for shape in shapes.split()]
    return [torch.nn.Parameter(random(*size, seed=seed).float()) for seed, size in enumerate(sizes)]


def train(optimizer, params, steps):
    for step in steps:
        for p in params:
            p.grad = gradient(p, step)
        optimizer.step()


def gradient(p, step):
    """Return a gradient as small as a real model's, so that the 1e-7 added to its norm counts."""
    return 1e-4 * random(*p.shape, seed=100 + step).float()


@torch.no_grad()
def reference_muon(p, g, buffer, lr=LR, momentum=MOMENTUM):
    """Update p and its buffer in place by the four lines of Muon (Keller Jordan), one matrix at a time."""
    buffer.mul_(momentum).add_(g)
    nesterov = g + momentum * buffer
    for i in range(len(p)) if p.ndim == 3 else [...]:
        x = nesterov[i] / (nesterov[i].norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
        rows, cols = x.shape
        p[i] -= lr * max(1, rows / cols) ** 0.5 * x


@parametrize("compile", [False, True])
def test_muon_matches_a_float64_reference(compile):
    params = make_parameters(ONE_BATCH if compile else SHAPES)
    start = [p.detach().clone() for p in params]
    train(Muon(params, LR, MOMENTUM, compile=compile), params, range(5))
    # Newton-Schulz multiplies the smallest singular values, and float32's rounding (6e-8) there, by 3.4445^5 = 485.
    for p, before in zip(params, start):
        want, buffer = before.double(), torch.zeros_like(p, dtype=torch.float64)
        for step in range(5):
            reference_muon(want, gradient(want, step), buffer)
        assert (p - want).norm() / (want - before).norm() < 5e-5, p.shape  # relative to how far it has moved


def test_matrices_of_one_shape_up_to_transposition_share_a_batch(monkeypatch):
    params = make_parameters("24x24 96x24 3x24x24 24x96 24x95")
    shapes = []
    monkeypatch.setattr(muon, "newton_schulz", lambda x: shapes.append(x.shape) or x)
    train(Muon(params), params, [0])
    assert sorted(shapes) == [(1, 24, 95), (2, 24, 96), (4, 24, 24)]


@half_precision
@parametrize("shape", ["64x64", "96x32", "32x96"])
def test_singular_values_of_the_update_are_near_one(shape, dtype):
    (p,) = make_parameters(shape)
    u, s, v = torch.linalg.svd(p.detach(), full_matrices=False)
    p.grad = 1e-3 * u * torch.logspace(-1, 0, len(s)) @ v
    p.data.zero_()
    Muon([p], LR, dtype=dtype).step()
    update = u.T @ (-p / (LR * shape_scale(p))) @ v.T  # in the gradient's singular vectors
    values = torch.linalg.svdvals(update)
    assert 0.65 < values.min() and values.max() < 1.25 and torch.trace(update) > 0.65 * len(s)


def test_compiled_step_does_not_recompile_when_the_learning_rate_changes():
    params = make_parameters(ONE_BATCH)
    optimizer = Muon(params, compile=True)
    train(optimizer, params, [0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for lr in (0.015, 0.01, 0.0):
            set_lr(optimizer, lr)
            train(optimizer, params, [1])


@table("schedule, steps, points", """
    constant_linear | 4578 0 1308 | 3271:1307/1308 4578:0
    constant_linear | 5 0 0       | 4:1
    cosine          | 10900 0 0   | 0:1 5450:1/2 10900:0
    trapezoid       | 300 100 100 | 0:1/100 49:1/2 99:1 200:1 201:99/100 300:0
    trapezoid       | 5 2 3       | 1:1
""")
def test_lr_factor_at_points_computed_by_hand(schedule, steps, points):
    """steps: all, of the warm-up and of the cool-down. The paper's 162M, 304M and needles are among them."""
    steps, warmup, cooldown = map(int, steps.split())
    config = SimpleNamespace(schedule=schedule, steps=steps, warmup_steps=warmup, cooldown_steps=cooldown)
    for point in points.split():
        step, factor = map(Fraction, point.split(":"))
        assert lr_factor(config, int(step)) == pytest.approx(float(factor), abs=1e-12)

"""Muon against a plain reference, parameter groups, schedules. test_config.py has the presets' learning rates."""

import math

import pytest
import torch

from optim.muon import Muon
from optim.schedule import lr_factor, set_lr

LR, MOMENTUM = 0.02, 0.95
MATRICES = [(48, 32), (32, 48), (40, 40), (1, 7), (7, 1), (65, 17), (128, 128)]
BANKS = [(3, 24, 24), (2, 16, 64), (5, 33, 9)]
ONE_BATCH = [(24, 40), (3, 24, 40), (40, 24)]  # the compiled tests share shapes, which take seconds each to compile


def random_tensors(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def parameters_of(tensors):
    return [torch.nn.Parameter(t.clone()) for t in tensors]


def gradients(params, step):
    """Return gradients as small as a real model's, so that the 1e-7 added to their norm counts."""
    return [1e-4 * g for g in random_tensors([p.shape for p in params], seed=100 + step)]


def train(optimizer, params, steps):
    for step in steps:
        for p, grad in zip(params, gradients(params, step)):
            p.grad = grad
        optimizer.step()


def reference_muon(tensors, steps):
    """The four lines of Muon (Keller Jordan), in float64, one matrix at a time."""
    params = [t.double() for t in tensors]
    bufs = [torch.zeros_like(p) for p in params]
    for step in steps:
        for p, buf, g in zip(params, bufs, gradients(params, step)):
            buf.copy_(MOMENTUM * buf + g)
            nesterov = g + MOMENTUM * buf
            for i in range(len(p)) if p.ndim == 3 else [...]:
                x = nesterov[i] / (nesterov[i].norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
                rows, cols = x.shape
                p[i] -= LR * max(1, rows / cols) ** 0.5 * x
    return params


@pytest.mark.parametrize("compile", [False, True])
def test_muon_matches_a_float64_reference(compile):
    start = random_tensors(ONE_BATCH if compile else MATRICES + BANKS, seed=1)
    params = parameters_of(start)
    train(Muon(params, LR, MOMENTUM, compile=compile, dtype=torch.float32), params, range(5))
    # Newton-Schulz multiplies the smallest singular values, and float32's rounding (6e-8) there, by 3.4445^5 = 485.
    for p, want, p0 in zip(params, reference_muon(start, range(5)), start):
        assert (p - want).norm() / (want - p0).norm() < 5e-5, tuple(p.shape)  # relative to how far it has moved


def test_bank_equals_separate_matrices():
    start = random_tensors([(3, 24, 40)], seed=3)[0]
    bank, separate = parameters_of([start]), parameters_of(start)
    optimizers = Muon(bank), Muon(separate)
    for step in range(3):
        bank[0].grad = random_tensors([start.shape], seed=step)[0]
        for p, grad in zip(separate, bank[0].grad):
            p.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(bank[0], torch.stack(separate))


def test_matrices_of_one_shape_up_to_transposition_share_a_batch(monkeypatch):
    params = parameters_of(random_tensors([(24, 24), (96, 24), (3, 24, 24), (24, 96), (24, 95)], seed=4))
    shapes, baddbmm = [], torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda x, *more, **kw: shapes.append(x.shape) or baddbmm(x, *more, **kw))
    train(Muon(params), params, range(1))
    # Newton-Schulz of a batch has five iterations of two calls: the first changes the gram matrix, the second x.
    assert sorted(shapes[1::10]) == [(1, 24, 95), (2, 24, 96), (4, 24, 24)] and len(shapes) == 30


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_of_the_update_are_near_one(shape, dtype):
    u, _, v = torch.linalg.svd(random_tensors([shape], seed=5)[0], full_matrices=False)
    p = torch.nn.Parameter(torch.zeros(shape))
    p.grad = 1e-3 * u @ torch.diag(torch.logspace(-1, 0, min(shape))) @ v
    Muon([p], LR, dtype=dtype).step()
    scale = LR * max(1, shape[0] / shape[1]) ** 0.5
    values = torch.linalg.svdvals(-p.detach() / scale)
    assert 0.65 < values.min() and values.max() < 1.25
    assert torch.trace(u.T @ -p.detach() @ v.T) > 0.65 * scale * min(shape)  # the singular vectors are the gradient's


def test_compiled_step_does_not_recompile_when_the_learning_rate_changes():
    params = parameters_of(random_tensors(ONE_BATCH, seed=12))
    optimizer = Muon(params, compile=True)
    train(optimizer, params, range(1))
    with torch.compiler.set_stance("fail_on_recompile"):
        for step, lr in enumerate([0.015, 0.01, 0.0], start=1):
            set_lr(optimizer, lr)
            train(optimizer, params, range(step, step + 1))


PAPER_162M = {"steps": 4578, "schedule": "constant_linear", "cooldown_steps": 1308}
PAPER_304M = {"steps": 10900, "schedule": "cosine"}
NEEDLE = {"steps": 300, "schedule": "trapezoid", "warmup_steps": 100, "cooldown_steps": 100}


@pytest.mark.parametrize("settings, step, factor", [
    (PAPER_162M, 3271, 1307 / 1308),
    (PAPER_162M, 4578, 0),
    (PAPER_304M, 2725, (1 + math.sqrt(0.5)) / 2),
    (NEEDLE, 0, 0.01),
    (NEEDLE, 49, 0.5),
    (NEEDLE, 99, 1),
    (NEEDLE, 150, 1),
    (NEEDLE, 200, 1),
    (NEEDLE, 201, 0.99),
    (NEEDLE, 299, 0.01),
    (NEEDLE, 300, 0),
    ({"steps": 5, "schedule": "trapezoid", "warmup_steps": 2, "cooldown_steps": 3}, 1, 1),
    ({"steps": 5, "schedule": "constant_linear"}, 4, 1),
])
def test_lr_factor_at_points_computed_by_hand(settings, step, factor):
    assert lr_factor(step, **settings) == pytest.approx(factor, abs=1e-12)


def test_set_lr_of_a_float_reaches_every_group():
    first, second = parameters_of([torch.zeros(3)] * 2)
    optimizer = torch.optim.Adam([{"params": [first]}, {"params": [second], "lr": 0.002}], lr=0.3)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]

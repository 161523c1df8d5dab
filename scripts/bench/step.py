"""Time whole training steps side by side.

    python -m scripts.bench step gpt_162m_4k p_rope scale_invariant_p_rope scale_invariant_p_rope:flex_flash
    python -m scripts.bench step quickstart p_rope p_rope/compile=off/micro_batch_tokens=1024 --train_length 1024

A variant is METHOD[:BACKEND][/FIELD=VALUE...], with fields of train_gpt.py. The first variant that runs is the
baseline. The gate compares gradients and losses of variants of the same model, which start from the same weights. A
variant that fails the gate is not timed, and the exit code is 1.
"""

import argparse
import functools
import statistics

import torch

from configs.config import Config, config_hash
from errors import require
from measure.flops import training_flops_per_token
from runtime.build import read_run
from runtime.device import peak_flops
from runtime.processes import start_processes
from scripts.bench import protocol
from scripts.bench.trainers import Trainer
from scripts.shared.arguments import Parser

DEFAULT_VARIANTS = ["p_rope", "scale_invariant_p_rope", "logn_p_rope", "alibi"]
GRADIENT_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # relative error of a parameter's gradient (Frobenius)
LOSS_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.02}  # nats


def add_arguments(parser: Parser):
    parser.add_argument("preset", help="one of configs/presets.py; fields of train_gpt.py may follow as options")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"default: {' '.join(DEFAULT_VARIANTS)}")
    parser.add_argument("--steps", type=int, default=10, help="steps of the gate (default: 10)")


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 1 if a variant fails the gate. Raise ValueError for a user's mistake."""
    require(args.steps >= 1, f"--steps {args.steps} measures nothing. Use at least 1.")
    variants = {name: read_variant(args.preset, args.fields, name) for name in args.variants or DEFAULT_VARIANTS}
    base = next(iter(variants.values()))
    for name, config in variants.items():
        require(config.batch_tokens == base.batch_tokens, f"{name} has other batch_tokens. Use the same for all.")
    device = start_processes(base.device).device
    report = protocol.Report(args.out, f"step_{args.preset}", device)
    makers = {name: functools.partial(Trainer, config, device) for name, config in variants.items()}
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        trainers, problems = protocol.build_variants(makers)
        refused = gate(trainers, args.steps)
        passed = {name: trainer for name, trainer in trainers.items() if name not in refused}
        report.record["gate"] = dict.fromkeys(passed, "passed") | refused | problems
        report.add(f"## Gate\n\nThese variants passed: {', '.join(passed) or 'none'}.", problems=refused | problems)
        if passed:
            times = protocol.measure({name: trainer.time_step for name, trainer in passed.items()}, args.rounds)
            add_times(report, passed, times)
    return int(bool(refused))


def read_variant(preset: str, fields: list[str], name: str) -> Config:
    """Return the configuration of a variant. Raise ValueError for a wrong name."""
    method_and_backend, *changes = name.split("/")
    method, _, backend = method_and_backend.partition(":")
    arguments = [preset, *fields, "--method", method, "--attention_backend", backend or "auto", "--length_schedule"]
    for change in changes:
        field, _, value = change.partition("=")
        arguments += [f"--{field}", *value.split()]
    return read_run(arguments)


def gate(trainers: dict, steps: int) -> dict:
    """Return the problems of variants that differ from the first variant of the same model in gradients or losses."""
    firsts, problems = {}, {}
    for name, trainer in trainers.items():
        gradients = trainer.gradients()
        losses = torch.stack([trainer.step(lr_factor=1.0) for _ in range(steps)])
        first = firsts.setdefault(config_hash(trainer.config), (name, gradients, losses))
        errors = []
        for key, exact in first[1].items():
            errors.append((gradients[key] - exact).norm() / (exact.norm() + 1e-30))
        gradient_error = torch.stack(errors).max().item()
        loss_error = (losses - first[2]).abs().max().item()
        dtypes = {trainer.dtype, trainers[first[0]].dtype}
        most, most_loss = (max(map(limits.get, dtypes)) for limits in (GRADIENT_LIMITS, LOSS_LIMITS))
        if not (gradient_error <= most and loss_error <= most_loss):  # NaN fails
            errors = f"its gradients by {gradient_error:.1e}, its losses by {loss_error:.1e}"
            problems[name] = f"refused: it differs from {first[0]}, {errors}"
    return problems


def add_times(report: protocol.Report, trainers: dict, times: dict):
    """Report time, tokens a second, share of the peak FLOP/s, and memory."""
    baseline, first = next(iter(trainers.items()))
    rows = [["variant", "attention", "tokens/s", "step ms", "of peak", "GiB", f"time to {baseline}"]]
    for name, seconds in times.items():
        trainer, median = trainers.get(name, first), statistics.median(seconds)
        rate, peak = trainer.config.batch_tokens / median, peak_flops(trainer.world.device, trainer.dtype)
        used = f"{rate * training_flops_per_token(trainer.config) / peak:.1%}" if peak else ""
        memory = f"{trainer.peak_bytes / 2**30:.2f}" if trainer.peak_bytes else ""
        ratio = protocol.ratio_cell(seconds, times[baseline])
        rows.append([name, trainer.backends, f"{rate:,.0f}", f"{median * 1e3:.2f}", used, memory, ratio])
    report.record["seconds"] = times
    report.add(f"## Times\n\nCompile {first.model.compile_note}.", rows)

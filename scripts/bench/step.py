"""Time whole training steps side by side.

    python -m scripts.bench step gpt_162m_4k p_rope scale_invariant_p_rope scale_invariant_p_rope:triton
    python -m scripts.bench step quickstart p_rope p_rope/compile=off/micro_batch_tokens=1024 --train_length 1024
    python -m scripts.bench step quickstart --checkouts . ../before    train_gpt.py of two checkouts

A variant is METHOD[:BACKEND][/FIELD=VALUE...]; the fields are those of train_gpt.py. The first variant that runs is the
baseline. First comes the gate: variants of the same model start from the same weights, and their gradients and losses
must agree. A variant that fails the gate gets no time, and the exit code is 1.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from configs.command_line import read_config
from configs.config import Config, config_hash
from errors import require
from model.attention.sdpa import prefer_fast_sdpa
from model.methods import check_options
from runtime.device import matmul_rate, peak_flops
from runtime.flops import training_flops_per_token
from runtime.metrics import read_metrics
from runtime.processes import start_processes
from scripts.bench import protocol
from scripts.bench.trainers import Trainer

DEFAULT_VARIANTS = ["p_rope", "scale_invariant_p_rope", "logn_p_rope", "alibi"]
SOAK_SECONDS = 20  # of steps before the first round on CUDA, because a cold chip is faster than a warm one
GRADIENT_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # relative error of a parameter's gradient (Frobenius)
LOSS_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.02}  # nats
WARM_UP_STEPS = 10  # of a checkout; these compile and allocate, and do not count
HOW_TO_READ = """\
- A step: all micro-batches, gradient norm, optimizer and loader; neither validation nor logging. The learning rate is
  zero, so the weights stay as they are.
- Of peak: model FLOPs (causal attention; no recomputation) a second, as a share of {peak:.4g} FLOP/s ({source}).
- GiB: the most memory held in a step, weights and optimizer state included (CUDA)."""


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("preset", help="one of configs/presets.py; fields of train_gpt.py may follow as options")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"default: {' '.join(DEFAULT_VARIANTS)}")
    parser.add_argument("--steps", type=int, default=10, help="of the gate, of a checkout (10)")
    parser.add_argument("--checkouts", type=Path, nargs="+", metavar="FOLDER", help="time these checkouts instead")


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 1 when a variant or a checkout fails the gate. Raise ValueError for users' mistakes."""
    require(min(args.rounds, args.steps) >= 1 and args.minutes > 0, "--rounds, --steps and --minutes must be positive")
    variants = {name: read_variant(args.preset, args.fields, name) for name in args.variants or DEFAULT_VARIANTS}
    base = next(iter(variants.values()))
    for name, config in variants.items():
        require(config.batch_tokens == base.batch_tokens, f"{name}: batch_tokens must be the same in all variants")
    device = start_processes(base.device).device
    prefer_fast_sdpa(device)
    if args.checkouts:
        report = protocol.Report(args.out, f"step_checkouts_{args.preset}", device, "Training steps of checkouts")
        return compare_checkouts(report, args.checkouts, args.preset, args.fields, args.steps, args.rounds)
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        return compare_variants(args, variants, device)


def read_variant(preset: str, fields: list[str], name: str) -> Config:
    """Return the configuration of a variant. Raise ValueError for a name that describes none."""
    method_and_backend, *changes = name.split("/")
    method, _, backend = method_and_backend.partition(":")
    arguments = [preset, *fields, "--method", method, "--attention_backend", backend or "auto"]
    for change in changes:
        field, _, value = change.partition("=")
        arguments += [f"--{field}", *value.split()]
    config = read_config(arguments)
    check_options(config.method, config.method_options)
    return config


def gate(trainers: dict[str, Trainer], steps: int) -> dict[str, dict]:
    """Return the errors of each variant against the first variant of the same model, and whether they are small."""
    firsts, results = {}, {}
    for name, trainer in trainers.items():
        gradients = trainer.gradients()
        losses = torch.stack([trainer.step(lr_factor=1.0) for _ in range(steps)])
        first = firsts.setdefault(config_hash(trainer.config), (name, trainer.dtype, gradients, losses))
        first_name, first_dtype, first_gradients, first_losses = first
        errors = [
            (gradients[parameter] - expected).norm() / (expected.norm() + 1e-30)
            for parameter, expected in first_gradients.items()
        ]
        gradient_error = torch.stack(errors).max().item()
        loss_error = (losses - first_losses).abs().max().item()
        dtypes = {trainer.dtype, first_dtype}
        passed = gradient_error <= max(GRADIENT_LIMITS[dtype] for dtype in dtypes)  # NaN fails
        passed &= loss_error <= max(LOSS_LIMITS[dtype] for dtype in dtypes)
        results[name] = dict(first=first_name, gradients=gradient_error, losses=loss_error, passed=passed)
    return results


def compare_variants(args: argparse.Namespace, variants: dict[str, Config], device: torch.device) -> int:
    """Build, check and time the variants, and report them. Return the exit code."""
    start, base = time.perf_counter(), next(iter(variants.values()))
    report = protocol.Report(args.out, f"step_{args.preset}_{base.train_length}", device, "A training step")
    makers = {name: functools.partial(Trainer, config, device) for name, config in variants.items()}
    trainers, problems = protocol.build_variants(makers, start + 30 * args.minutes)  # half of the time
    checked = gate(trainers, args.steps)
    rows = [["variant", "same model as", "gradients", "losses", ""]]
    for name, result in checked.items():
        errors = [f"{result[kind]:.1e}" if result["first"] != name else "" for kind in ("gradients", "losses")]
        rows.append([name, result["first"], *errors, "passed" if result["passed"] else "refused"])
        if not result["passed"]:
            problems[name] = "refused: wrong numbers, see the gate"
            trainers.pop(name).loader.close()
    report.record |= dict(config=base.to_dict(), gate=checked, problems=problems)
    report.add(f"## Gate, {args.steps} steps", rows, problems)
    if trainers:
        end = time.perf_counter() + (SOAK_SECONDS if device.type == "cuda" else 0)
        while time.perf_counter() < end:
            next(iter(trainers.values())).time_step()
        timers = {name: trainer.time_step for name, trainer in protocol.with_baseline_again(trainers).items()}
        times = protocol.measure(timers, args.rounds, start + 60 * args.minutes - time.perf_counter())
        report.record |= dict(seconds=times, gpu=protocol.gpu_state(device))
        add_times(report, trainers, times)
    for trainer in trainers.values():
        trainer.loader.close()
    return int(any(problem.startswith("refused") for problem in problems.values()))


def add_times(report: protocol.Report, trainers: dict[str, Trainer], times: dict[str, list[float]]):
    """Report times, tokens a second and use of the machine."""
    baseline, first = next(iter(trainers.items()))
    known, measured = peak_flops(first.device, first.dtype), "a product of two 1024 x 1024 matrices, measured"
    peak, source = known or (matmul_rate(first.device, first.dtype, n=1024, seconds=1.0), measured)
    rows = [["variant", "attention", "tokens/s", "step ms", "of peak", "GiB", f"time to {baseline}"]]
    for name, seconds in times.items():
        trainer, median = trainers.get(name, first), statistics.median(seconds)
        rate, memory = trainer.config.batch_tokens / median, trainer.peak_bytes
        used = rate * training_flops_per_token(trainer.config) / peak
        rows.append([
            name, trainer.backends, f"{rate:,.0f}", f"{median * 1e3:.2f}", f"{used:.1%}",
            f"{memory / 2**30:.2f}" if memory else "", protocol.ratio_cell(seconds, times[baseline]),
        ])  # fmt: skip
    run = f"Text: {first.text}; compile {first.compile_note}. {report.record['gpu']}"
    report.add(f"## Times, {len(times[baseline])} rounds\n\n{run}", rows)
    report.add(protocol.HOW_TO_READ + HOW_TO_READ.format(peak=peak, source=source))


def compare_checkouts(
    report: protocol.Report, checkouts: list[Path], preset: str, fields: list[str], steps: int, rounds: int
) -> int:
    """Report the times of a step of train_gpt.py. Return the exit code: 1 when the losses of two checkouts differ."""
    names = [*map(str, checkouts), f"{checkouts[0]} again"]
    require(len({*names}) == len(names), "--checkouts: a folder is named twice. Name each folder once.")
    runs = {name: [] for name in names}
    for number in range(rounds):
        for name in names[:: -1 if number % 2 else 1]:
            checkout = checkouts[0] if name.endswith(" again") else Path(name)
            runs[name].append(train(checkout, preset, fields, WARM_UP_STEPS + steps))
    times = {name: [statistics.median(seconds[WARM_UP_STEPS:]) for seconds, _ in runs[name]] for name in names}
    losses = {name: runs[name][0][1] for name in names}
    differences = {name: np.abs(np.subtract(losses[name], losses[names[0]])).max() for name in names}
    rows = [["checkout", "step ms", "loss", "largest difference", f"time to {names[0]}"]]
    for name in names:
        median, ratio = statistics.median(times[name]), protocol.ratio_cell(times[name], times[names[0]])
        rows.append([name, f"{median * 1e3:.2f}", f"{losses[name][-1]:.4f}", f"{differences[name]:.1e}", ratio])
    report.record |= dict(seconds=times, losses=losses)
    report.add(f"{rounds} rounds of {steps} steps of {preset} {' '.join(fields)}", rows)
    return int(not max(differences.values()) <= max(LOSS_LIMITS.values()))  # NaN fails


def train(checkout: Path, preset: str, fields: list[str], steps: int) -> tuple[list[float], list[float]]:
    """Run train_gpt.py of a checkout. Return the seconds and the loss of each step."""
    config = read_config([preset, *fields])
    with tempfile.TemporaryDirectory() as folder:
        changes = dict(
            name="run", runs_dir=folder, data_dir=Path(config.data_dir).resolve(), steps=steps, save_every=0,
            val_every=0, val_lengths=config.train_length, val_tokens=config.train_length,
        )  # fmt: skip
        options = [str(word) for field, value in changes.items() for word in (f"--{field}", value)]
        command = [sys.executable, "train_gpt.py", preset, *fields, *options]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
        message = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        require(done.returncode == 0, f"{checkout}: train_gpt.py ended with exit code {done.returncode}: {message}")
        records = [record for record in read_metrics(Path(folder) / "run/metrics.jsonl") if "train_loss" in record]
    seconds = [config.batch_tokens / record["tokens_per_second"] for record in records]
    return seconds, [record["train_loss"] for record in records]

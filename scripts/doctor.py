"""Check this machine for a training run. Print each problem with its remedy, and the hours of the run.

    python -m scripts.doctor                                     the quickstart
    python -m scripts.doctor gpt_162m_4k --dtype float32         any preset and fields of train_gpt.py

The checks: GPU, data, attention against float64, and the time of a training step. An error in one check does
not stop the others. Exit code: 1 if something is broken, 2 for a mistake in the command.
"""

import dataclasses
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from configs.config import Config
from data.loader import micro_batch_size
from errors import exit_on_user_error
from measure.flops import training_flops_per_token, validation_share
from measure.validation import check_text
from model.attention.choose import AUTOMATIC, BACKENDS
from model.attention.sdpa import chosen_kernel, prefer_fast_sdpa
from model.methods.base import Shape
from model.methods.make import layer_methods, make_method
from runtime.build import open_text, read_run
from runtime.device import choose_ptxas, compute_dtype, device_name, matmul_rate, peak_flops
from runtime.processes import World, start_processes
from scripts.bench.attention import check_variant
from scripts.bench.protocol import describe_machine
from scripts.bench.trainers import WARM_UP_STEPS, Trainer

METHODS = ("p_rope", "scale_invariant_p_rope", "alibi")  # checked in each backend, beside the run's own method
FIXED_PTXAS = 13, 3  # older versions make wrong code for Hopper: github.com/triton-lang/triton/issues/9433
STEPS = 5  # timed steps, after the steps that compile
LONGEST_MINUTES = 2  # for all steps of this check, estimated from the speed of a matrix product


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    message: str
    state: str = "ok"  # or "slow" (could be faster), "missing", "broken" (training fails, or its numbers are wrong)
    remedy: str = ""  # what to do


def main():
    arguments = sys.argv[1:]
    if not arguments or arguments[0].startswith("-"):
        arguments = ["quickstart", *arguments]
    with exit_on_user_error():
        config = read_run(arguments, __doc__)
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    print(f"{describe_machine(device)}, {platform.platform()}", flush=True)
    states = []
    for check in (check_gpus, check_data, check_kernels, check_step):
        for finding in run_check(check, config, device):
            states.append(finding.state)
            remedy = f"\n{'':8} -> {finding.remedy}" if finding.remedy else ""
            print(f"{finding.state:8} {finding.check}: {finding.message}{remedy}", flush=True)
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    sys.exit(int("broken" in states))


def run_check(check: Callable, config: Config, device: torch.device) -> Iterator[Finding]:
    """Yield the findings of a check. An error that the check raises becomes a finding."""
    try:
        yield from check(config, device)
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        yield Finding(check.__name__, message[:300], "broken")


def check_gpus(config: Config, device: torch.device) -> Iterator[Finding]:
    if device.type == "cpu":
        if config.device != "cpu":
            state = "broken" if config.device == "cuda" else "missing"
            yield Finding("GPU", "torch finds no GPU", state, "Train on the CPU with the presets quickstart and mini.")
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        yield Finding("GPU", "no bfloat16 in hardware", "slow", "Use an A100 or newer.")
    if ptxas := choose_ptxas(device):
        version, path = ptxas
        finding = Finding("ptxas", f"version {version}, {path}")
        remedy = "Kernels for Hopper can be wrong. Install the version in requirements.txt."
        is_wrong = capability[0] == 9 and version < FIXED_PTXAS
        yield finding._replace(state="missing", remedy=remedy) if is_wrong else finding


def check_data(config: Config, device: torch.device) -> Iterator[Finding]:
    try:
        train_text, val_text = open_text(config, World(0, 1, device))
        check_text(config, val_text)
        message = f"{len(train_text):,} tokens in {config.data_dir}, and {len(val_text):,} for validation; "
        message += "the run trains on "
        yield Finding("data", f"{message}{config.steps * config.batch_tokens:,}")
    except (ValueError, OSError) as error:
        yield Finding("data", str(error), "broken" if Path(config.data_dir).exists() else "missing")


def check_kernels(config: Config, device: torch.device) -> Iterator[Finding]:
    """Compare all backends with the formula in float64, forward and backward, with the run's heads and dtype."""
    dtype, shape = compute_dtype(config, device), Shape.of(config)
    prefer_fast_sdpa(device)
    if device.type == "cuda":
        yield Finding("PyTorch's attention", chosen_kernel(device, dtype, shape.head_dim, config.train_length))
    methods = {name: make_method(name, shape) for name in METHODS}
    methods |= {method.name: method for method in layer_methods(config)}
    for name in [*AUTOMATIC[device.type], "blocks"]:
        for method_name, method in methods.items():
            result = "no softmax over logits to compare; `bash scripts/test.sh -k decoding` checks it"
            if method.replacement is None:
                result = check_variant((BACKENDS[name], method.to(device)), device, dtype)
            state = "broken" if result.startswith("refused") else "ok"
            if result.startswith("not run") and name != "sdpa":  # which cannot compute most methods
                state = "slow"
            yield Finding(f"{name}, {method_name}", f"{result} ({dtype})", state)


def check_step(config: Config, device: torch.device) -> Iterator[Finding]:
    """Time a step of one micro-batch. The hours of the run follow from it."""
    device = start_processes(device.type).device  # sets threads and memory as in a run
    step = config.batch_tokens // config.train_length
    sequences = micro_batch_size(step, config.train_length, config.micro_batch_tokens)
    small = dataclasses.replace(config, batch_tokens=sequences * config.train_length, length_schedule=())
    dtype, flops = compute_dtype(config, device), training_flops_per_token(small)
    rate = matmul_rate(device, dtype, n=8192 if device.type == "cuda" else 1024)
    if flops * small.batch_tokens / rate * (STEPS + WARM_UP_STEPS) > 60 * LONGEST_MINUTES:
        message = f"more than {describe_run(config, rate / flops)}, estimated from the speed of a matrix product"
        yield Finding("run", message, "slow", "Use a GPU, or the preset quickstart.")
        return
    began = time.monotonic()
    trainer = Trainer(small, device)
    first_steps = time.monotonic() - began
    seconds = statistics.median(trainer.time_step() for _ in range(STEPS))
    tokens_per_second = small.batch_tokens / seconds
    peak = peak_flops(device, dtype) or rate  # an unknown device: the speed of a matrix product
    code = f"{trainer.backends}, compile {trainer.model.compile_note}"
    speed = f"{tokens_per_second:,.0f} tokens/s, {flops * tokens_per_second / peak:.0%} of {peak:.3g} FLOP/s"
    memory = f", {trainer.peak_bytes / 1e9:.2f} GB" if trainer.peak_bytes else ""
    yield Finding("step", f"{code}: {small.batch_tokens:,} tokens in {seconds:.3f} s, {speed}{memory}")
    yield Finding("run", f"{describe_run(config, tokens_per_second)} on one {device_name(device)}")
    if trainer.model.compile_note == "on":
        yield Finding("compile", f"{first_steps - WARM_UP_STEPS * seconds:.0f} s more for each training length")


def describe_run(config: Config, tokens_per_second: float) -> str:
    """Return the hours of a run with its validation losses."""
    hours = config.steps * config.batch_tokens / tokens_per_second / 3600 * (1 + validation_share(config))
    return f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


if __name__ == "__main__":
    main()

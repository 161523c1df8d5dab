"""What to expect: the time of a step, the hours and the cost of the paper's runs, and memory against its count."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from configs.config import Config
from configs.presets import preset
from model.attention.sdpa import prefer_fast_sdpa
from runtime.device import matmul_rate, published_peak
from runtime.flops import training_flops_per_token
from runtime.processes import start_processes
from scripts.bench.memory import count_memory
from scripts.bench.peers import with_data
from scripts.bench.project import PAPER, run_hours
from scripts.bench.protocol import build_variants, measure, paired_ratio, ratio_cell
from scripts.bench.step import matmul_shape
from scripts.bench.trainers import KINDS, StepBench, Trainer, read_variant
from scripts.doctor.findings import Finding, Settings

BASELINE = "p_rope"  # plain attention, by PyTorch's own kernel on a GPU
TIMED = 5  # of each kind, of which the median counts
ROUNDS, COMPARING = 5, 10  # at most, and about so many seconds, for two trainers that take turns
MFU = "MFU"
SLOW_STEP, LOW_MFU = 1.15, 0.30  # times the baseline's step; share of the published peak
ABOVE_COUNT = 1.10  # measured memory to the count, which has no workspace and no gaps in it
LARGE = 5e8  # FLOPs of a token, forward and backward: smaller models cannot fill a GPU
LONG = 24 * 7  # hours
TOO_LARGE = "if it is the memory, lower --micro_batch_tokens"
PROFILE = "where the time goes: python -m scripts.bench step {} {} --profile trace"


# ---- the step --------------------------------------------------------------------------------------------------------


def step(settings: Settings) -> Iterator[Finding]:
    """Yield the time of a step, what whole runs would take at that rate, and plain attention's step beside it."""
    config, device = settings.config, start_processes(settings.config.device).device
    prefer_fast_sdpa(device)
    _, config, _ = with_data([], config, Path(settings.folder))
    bench = StepBench(config, device)
    peak, of_what = peak_of(bench)
    trainer, problem = build(bench, config.method)
    if problem:
        yield Finding(f"step of {config.method}", "broken", problem, TOO_LARGE)
        return
    seconds = {kind: time_of(bench, trainer, kind) for kind in KINDS}
    flops = training_flops_per_token(config)
    rate = flops * config.batch_tokens / seconds["step"]
    numbers = dict(seconds=seconds, flops_per_token=flops, share=rate / peak, of_what=of_what)
    numbers |= dict(peak_bytes=bench.peak_bytes(trainer), compile=bench.compile_note, backend=trainer.backend)
    yield judge_step(settings.preset, config.method, config.batch_tokens, numbers)
    for name, run in {**{name: preset(name) for name in [settings.preset, *PAPER]}, settings.preset: config}.items():
        yield hours(name, run, rate / training_flops_per_token(run), "at this rate of FLOP/s", settings.price)
    if config.method != BASELINE:
        baseline, problem = build(bench, BASELINE)
        trainers = {BASELINE: baseline, config.method: trainer}
        if problem:
            yield Finding(f"step of {BASELINE}", "broken", problem, TOO_LARGE)
        else:
            yield compare_steps(bench, trainers, settings.preset)


def compare_steps(bench: StepBench, trainers: dict[str, Trainer], preset_name: str) -> Finding:
    """Return the ratio of the second trainer's step to the first's, in rounds in which they take turns."""
    cells = {name: functools.partial(bench.time, trainer, "step") for name, trainer in trainers.items()}
    seconds = measure(cells, ROUNDS, COMPARING, bench.device).seconds
    for trainer in trainers.values():
        trainer.loader.close()
    (first, base), (name, own) = seconds.items()
    return judge_ratio(first, name, paired_ratio(own, base), preset_name)


def build(bench: StepBench, variant: str) -> tuple[Trainer | None, str]:
    """Return the trainer of a variant of bench step, compiled, or None and why there is none."""
    made, problems = build_variants({variant: functools.partial(bench.build, read_variant(variant))}, math.inf)
    return made.get(variant), problems.get(variant, "")


def time_of(bench: StepBench, trainer: Trainer, kind: str) -> float:
    """Return the median of the seconds of a few steps, micro-batches or optimizer steps (`kind`, of KINDS)."""
    return statistics.median(bench.time(trainer, kind, 1) for _ in range(TIMED))


def peak_of(bench: StepBench) -> tuple[float, str]:
    """Return the FLOP/s that a step's are a share of: the published peak of a well-known GPU, or a matrix product's."""
    if bench.device.type == "cuda" and bench.dtype == torch.bfloat16:
        if published := published_peak(torch.cuda.get_device_name(bench.device)):
            return published, MFU
    return matmul_rate(bench.device, *matmul_shape(bench)), "of a large matrix product's rate"


def judge_step(preset_name: str, method: str, tokens: int, numbers: dict) -> Finding:
    """Return the finding of a step of so many tokens. numbers: see `step`."""
    seconds, share, of_what = numbers["seconds"]["step"], numbers["share"], numbers["of_what"]
    said = f"{numbers['backend']}, {seconds * 1e3:.1f} ms, {tokens / seconds:,.0f} tokens/s, {share:.1%} {of_what}"
    if numbers["peak_bytes"]:
        said += f", {numbers['peak_bytes'] / 2**30:.1f} GiB"
    said += f", compile {numbers['compile']}"
    if of_what == MFU and share < LOW_MFU and numbers["flops_per_token"] > LARGE:
        return Finding(f"step of {method}", "slow", said, PROFILE.format(preset_name, method), numbers)
    return Finding(f"step of {method}", "OK", said, numbers=numbers)


def judge_ratio(baseline: str, method: str, ratio: tuple[float, float, float], preset_name: str) -> Finding:
    """Return the finding of paired_ratio of a method's step to the baseline's."""
    said = f"{method} takes {ratio_cell(ratio)} times {baseline}'s step"
    slow = ratio[1] > SLOW_STEP  # the interval's lower end: noise is not slow
    advice = PROFILE.format(preset_name, method) if slow else ""
    return Finding(f"beside {baseline}", "slow" if slow else "OK", said, advice, dict(ratio=ratio))


def hours(name: str, config: Config, rate: float, how: str, price: float | None) -> Finding:
    """Return what a whole run would take at so many tokens/s. price: of an hour."""
    training, shares = run_hours(config, rate)
    both = [training * (1 + share) for share in shares]
    said = f"{duration(both[0])}, {duration(both[1])} with --val_profile fast, {duration(training)} without validation"
    said += f", {how}"
    if price is not None:
        said += f"; {both[0] * price:,.2f} and {both[1] * price:,.2f} at {price:g} an hour"
    numbers = dict(tokens_per_second=rate, hours=both, price=price)
    if both[0] > LONG:
        advice = "more or faster GPUs: python -m scripts.bench project"
        return Finding(f"run of {name}", "slow", said, advice, numbers)
    return Finding(f"run of {name}", "OK", said, "", numbers)


def duration(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


def runs(settings: Settings) -> Iterator[Finding]:
    """Yield, on a GPU, hours and cost of each of the paper's runs, from a step of its own model."""
    device = start_processes(settings.config.device).device
    if device.type == "cpu":
        yield Finding("paper's models", "not run", "a step of them takes minutes on a CPU: `step` has their hours")
        return
    prefer_fast_sdpa(device)
    for name in PAPER:
        config = dataclasses.replace(preset(name), method=settings.config.method, dtype=settings.config.dtype)
        _, config, _ = with_data([], config, Path(settings.folder) / name)
        yield run_of(config, name, device, settings.price)
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def run_of(config: Config, name: str, device: torch.device, price: float | None) -> Finding:
    """Return hours and cost of a run from its own micro-batches and optimizer, timed."""
    bench = StepBench(config, device)
    sequences = bench.sequences * config.train_length
    bench.config = dataclasses.replace(config, batch_tokens=sequences)  # the steps that compile it are of one
    trainer, problem = build(bench, config.method)
    if problem:
        return Finding(f"run of {name}", "broken", problem, TOO_LARGE)
    seconds = bench.accumulation * time_of(bench, trainer, "micro") + time_of(bench, trainer, "optimizer")
    trainer.loader.close()
    how = f"{seconds:.3f} s a step of {config.batch_tokens:,} tokens, measured"
    return hours(name, config, config.batch_tokens / seconds, how, price)


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(settings: Settings) -> Iterator[Finding]:
    """Yield the peak memory of training and validation at each of the validation lengths, counted and measured."""
    device = start_processes(settings.config.device).device
    room = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    for length in settings.config.val_lengths:
        tokens = max(settings.config.micro_batch_tokens, length)
        fields = dict(train_length=length, batch_tokens=length, micro_batch_tokens=tokens, val_lengths=(length,))
        fields |= dict(val_tokens=length, dtype="bfloat16", compile="off")  # the count is of eager execution
        config = dataclasses.replace(settings.config, **fields)
        counted = [row["peak"] for row in count_memory(config, torch.device("cpu"))]
        measured = None
        if device.type == "cuda":
            try:
                measured = [row["peak"] for row in count_memory(config, device)]
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
        yield judge_memory(length, tokens, counted, measured, room)


def judge_memory(length: int, tokens: int, counted: list[int], measured: list[int] | None, room: int | None) -> Finding:
    """Return the finding of bytes of training and validation. room: of the GPU, None on a CPU; measured: None where it
    ran out of memory, or on a CPU."""
    check = f"{tokens:,} tokens at {length:,}"
    said = "counted for a GPU: " + describe(counted)
    numbers = dict(length=length, tokens=tokens, counted=counted, measured=measured, room=room)
    if room is None:
        return Finding(check, "OK", said, numbers=numbers)
    if measured is None:
        said += f"; measured: more than the GPU's {room / 2**30:.1f} GiB"
        return Finding(check, "broken", said, "lower --micro_batch_tokens, or --context_parallel", numbers)
    said += "; measured: " + describe(measured)
    if max(m / c for m, c in zip(measured, counted)) > ABOVE_COUNT:
        return Finding(check, "slow", said, "more than the count says: attach doctor.json to a bug report", numbers)
    return Finding(check, "OK", said, numbers=numbers)


def describe(peaks: list[int]) -> str:
    return "training {:.2f} GiB, validation {:.2f}".format(*(peak / 2**30 for peak in peaks))

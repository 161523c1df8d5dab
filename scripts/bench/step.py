"""Time whole training steps, ours and others', side by side.

    python -m scripts.bench step gpt_162m_4k                          the variants below, as far as they run here
    python -m scripts.bench step quickstart record8 p_rope scale_invariant_p_rope:blocks --length 1024
    python -m scripts.bench step quickstart p_rope --profile trace    where the time goes (scripts/bench/profile.py)
    python -m scripts.bench step quickstart --peers ../nanoGPT        whole scripts (scripts/bench/peers.py)
    python -m scripts.bench step quickstart --processes 1 2

A variant is METHOD[:BACKEND], our step with an attention method; the same with -qkv, -muon or -loss: without merged
projections, batched Muon or fused cross-entropy; record8, record8+flex and nanogpt: see scripts/bench/baselines.py.

First the gate: variants that compute the same model get the same tokens from the same weights, and their gradients and
losses must agree; one that fails gets no time. Then rounds in which all take turns, in the order A B C and back. The
first variant that runs is the baseline, and runs once more at the end of each round (the A/A row, which shows the
noise).
"""

import argparse
import functools
import re
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from configs.command_line import read_config
from configs.config import Config
from errors import require
from model.attention.sdpa import prefer_fast_sdpa
from runtime.device import matmul_rate, published_peak
from runtime.flops import attention_flops_per_token, training_flops_per_token
from runtime.processes import start_processes
from scripts.bench import protocol
from scripts.bench.peers import WARM_UP, bench_peers, bench_processes, with_data
from scripts.bench.profile import profile
from scripts.bench.protocol import Report, build_variants, gpu_range, paired_ratio, ratio_cell, results_table
from scripts.bench.trainers import DEFAULT_VARIANTS, KINDS, StepBench, StepVariant, Trainer, read_variant
from scripts.shared.tables import markdown_table

SOAK_SECONDS = 20  # of work before the first round on CUDA: the chip is to be as warm as in a long run
LIMITS = dict(  # of the gate: relative errors, and nats
    gradients={torch.float32: 1e-4, torch.bfloat16: 0.1}, losses={torch.float32: 1e-4, torch.bfloat16: 0.02}
)
HOW_TO_READ = """\
- Step: all micro-batches, gradient norm, optimizer, zeroing and the loader; no validation and no logging. The rate is
  zero while steps are timed, so that all weights stay as they are. Micro: forward and backward pass of a micro-batch.
  Optimizer: gradient norm, update and zeroing alone; share: of the step. Sum: {accumulation} x micro + optimizer, to
  the step. All are medians over rounds in which the variants take turns; on a GPU, of CUDA events.
- Time to the baseline: in the same round, median over the rounds and bootstrap 95 % interval; below 1 is faster. The
  row "again" is the baseline once more (A/A).
- Model FLOPs of a token, forward and backward: 6 (12 d^2 L + d V) + 6 d (T + 1) L = {flops:,}. Attention counts for
  the causal half; recomputation, embedding and Muon do not count.
- MFU: the rate of these FLOPs, of {peak}.
- Of matmul: the same, of {matmul:.4g} FLOP/s: products of {matmul_size} x {matmul_size} random matrices in {dtype},
  measured in this run.
- HFU: of {peak_or_matmul}, attention's backward pass counted as 2.5 forward passes instead of 2, as it makes the
  logits again.
- PaLM: of {peak_or_matmul}, with the count that most tables use, 12 d T L for attention. It credits the half of the
  logits that causal attention never computes: not comparable with MFU.
- GiB: most memory held in a step, weights and optimizer state included, other variants' left out (CUDA)."""


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("preset", help="one of configs/presets.py; fields of train_gpt.py may follow as options")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="the first is the baseline (default: all)")
    parser.add_argument("--length", type=int, help="sequence length (default: the preset's training length)")
    parser.add_argument("--rounds", type=int, default=7, help="at most, as time allows")
    parser.add_argument("--minutes", type=float, default=8, help="for all variants, compilation included")
    parser.add_argument("--steps", type=int, help="of the gate (30), of a process (60) or of the profile (3)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/DEVICE_step....md and .json")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--peers", nargs="+", metavar="CHECKOUT", help="time the scripts of nanoGPT, modded-nanogpt")
    instead.add_argument("--processes", nargs="+", type=int, metavar="N", help="time train_gpt.py on so many processes")
    instead.add_argument("--profile", type=Path, metavar="FOLDER", help="profile the first variant, trace to there")


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 1 when a variant fails the gate or processes train differently.

    Raise ValueError or OSError for what cannot be.
    """
    arguments = [args.preset, *args.fields, *(["--train_length", str(args.length)] if args.length else [])]
    config = read_config(arguments)
    device = start_processes(config.device).device
    steps = args.steps or (60 if args.peers or args.processes else 3 if args.profile else 30)
    is_positive = min(args.rounds, steps, *(args.processes or [1])) >= 1 and args.minutes > 0
    require(is_positive, "rounds, steps, processes and minutes must be positive")
    args = argparse.Namespace(**vars(args) | dict(steps=steps))
    if args.peers or args.processes:
        require(steps > WARM_UP, f"--steps {steps}: the first {WARM_UP} of a process do not count, so it takes more")
    variants = {name: read_variant(name) for name in args.variants or DEFAULT_VARIANTS}
    one_code_a_variant = torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)
    with tempfile.TemporaryDirectory() as folder, one_code_a_variant:
        arguments, config, tokens = with_data(arguments, config, Path(folder))
        if args.peers or args.processes:
            bench_scripts = bench_peers if args.peers else bench_processes
            return bench_scripts(args, arguments, config, tokens, device, Path(folder))
        prefer_fast_sdpa(device)
        bench = StepBench(config, device)
        if args.profile:
            return profile(args, bench, *next(iter(variants.items())), tokens)
        return bench_variants(args, bench, variants, tokens)


# ---- the gate, and the rounds ----------------------------------------------------------------------------------------


def gate(
    bench: StepBench, trainers: dict[str, Trainer], variants: dict[str, StepVariant], steps: int
) -> dict[str, dict]:
    """Return how far variants that compute the same model are from the first of their kind, and whether that passes.

    First the gradients of one micro-batch, from the same weights: the largest relative error (Frobenius norm) of a
    parameter's. Then the losses of so many steps, on CUDA of one micro-batch each: the largest difference.
    """
    firsts, results = {}, {}
    micro_batches = 1 if bench.device.type == "cuda" else None
    for name, trainer in trainers.items():
        own = gradients(bench, trainer)
        losses = torch.stack([bench.step(trainer, rate=1.0, micro_batches=micro_batches)[0] for _ in range(steps)])
        first, reference, reference_losses = firsts.setdefault(variants[name].method, (name, own, losses))
        errors = torch.stack([(own[p] - reference[p]).norm() / (reference[p].norm() + 1e-30) for p in reference])
        distances = dict(gradients=float(errors.max()), losses=float((losses - reference_losses).abs().max()))
        passed = all(distances[key] <= limits[bench.dtype] for key, limits in LIMITS.items())  # not with NaN
        results[name] = dict(first=first, **distances, passed=passed, loss=losses.tolist())
    return results


def gradients(bench: StepBench, trainer: Trainer) -> dict[str, Tensor]:
    """Return the gradients of one micro-batch, those of q, k and v as one bank, as in our model."""
    bench.micro(trainer)
    banks = {}
    for name, p in trainer.model.named_parameters():
        banks.setdefault(re.sub(r"attention\.[qkv]$", "attention.qkv", name), []).append(p.grad.detach())
    trainer.model.zero_grad(set_to_none=True)
    return {name: torch.stack(bank) if len(bank) == 3 else bank[0] for name, bank in banks.items()}


def time_in_turns(bench: StepBench, trainers: dict[str, Trainer], rounds: int, seconds: float) -> tuple[dict, list]:
    """Return the seconds of each kind of each variant in each round, and the state of the GPU after each round."""
    rows = protocol.with_baseline_again(trainers)
    end = time.perf_counter() + (SOAK_SECONDS if bench.device.type == "cuda" else 0)
    while trainers and time.perf_counter() < end:
        bench.time(next(iter(trainers.values())), "step", 1)
    cells = {
        (row, kind): functools.partial(bench.time, trainer, kind) for row, trainer in rows.items() for kind in KINDS
    }
    measured = protocol.measure(cells, rounds, seconds, bench.device, longest=1.5)
    return {row: {kind: measured.seconds[row, kind] for kind in KINDS} for row in rows}, measured.gpu


def bench_variants(args: argparse.Namespace, bench: StepBench, variants: dict[str, StepVariant], tokens: str) -> int:
    """Build, check and time the variants and report them. Return the exit code: 1 when one fails the gate."""
    start = time.perf_counter()
    device, config = bench.device, bench.config
    rate_of_matmul = functools.partial(matmul_rate, device, *matmul_shape(bench), seconds=1.0)
    matmul_rates = [rate_of_matmul()]
    makers = {name: functools.partial(bench.build, variant) for name, variant in variants.items()}
    trainers, problems = build_variants(makers, start + 30 * args.minutes)  # half of the time
    checked = gate(bench, trainers, variants, args.steps)
    for name, result in checked.items():
        if not result["passed"]:
            problems[name] = "refused: its numbers differ, see the gate"
            trainers.pop(name).loader.close()
    times, states = time_in_turns(bench, trainers, args.rounds, start + 60 * args.minutes - time.perf_counter())
    peaks = {name: bench.peak_bytes(trainer) for name, trainer in trainers.items()}
    matmul_rates.append(rate_of_matmul())
    for trainer in trainers.values():
        trainer.loader.close()
    report = Report(
        args.out, f"step_{args.preset}_{config.train_length}", device, config=config.to_dict(), tokens=tokens,
        compile=bench.compile_note, backends={name: trainer.backend for name, trainer in trainers.items()},
        gate=checked, problems=problems, seconds=times, gpu=states, peak_bytes=peaks, matmul_rates=matmul_rates,
        published_peak=published_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None,
        flops_per_token=flops_per_token(config), micro_batches=bench.accumulation,
    )  # fmt: skip
    report.add(f"# A training step: {report.record['device']}\n\n{report.provenance}\n{bench.describe(tokens)}.")
    report.add(how_to_read(report.record, bench))
    report.add(gate_section(report.record, bench.dtype, args.steps))
    if times:
        for section in times_sections(report.record):
            report.add(section)
        if pairs := [(name, v.counterpart) for name, v in variants.items() if {name, v.counterpart} <= times.keys()]:
            report.add(counterparts_section(times, pairs))
    return int(any(reason.startswith("refused") for reason in problems.values()))


# ---- results, from the report's record -------------------------------------------------------------------------------


def flops_per_token(config: Config) -> dict[str, int]:
    """Return the FLOPs of a token, forward and backward, by three counts; see HOW_TO_READ."""
    d, L, T = config.model_dim, config.num_layers, config.train_length
    model = training_flops_per_token(config)
    attention = attention_flops_per_token(config, T)  # forward
    return dict(model=model, hardware=model + attention // 2, palm=model - 3 * attention + 12 * d * T * L)


def matmul_shape(bench: StepBench) -> tuple[torch.dtype, int]:
    """Return dtype and size of the matrices whose product is the machine's rate."""
    return (torch.bfloat16, 8192) if bench.device.type == "cuda" else (bench.dtype, 1024)


def how_to_read(record: dict, bench: StepBench) -> str:
    published, (dtype, size) = record["published_peak"], matmul_shape(bench)
    return HOW_TO_READ.format(
        accumulation=bench.accumulation,
        flops=record["flops_per_token"]["model"],
        peak=f"the published {published:.4g} FLOP/s" if published else "a published peak; none is known",
        peak_or_matmul="the published peak" if published else "the matmul rate",
        matmul=statistics.fmean(record["matmul_rates"]),
        matmul_size=size,
        dtype=str(dtype).removeprefix("torch."),
    )


def gate_section(record: dict, dtype: torch.dtype, steps: int) -> str:
    rows = [["variant", "same model as", "gradients", "losses", ""]]
    for name, result in record["gate"].items():
        alone = result["first"] == name
        errors = ["", "", ""] if alone else [result["first"], *(f"{result[key]:.1e}" for key in LIMITS)]
        rows.append([name, *errors, "refused" if not result["passed"] else "" if alone else "passed"])
    not_run = {name: why for name, why in record["problems"].items() if name not in record["gate"]}
    gradients, losses = (limits[dtype] for limits in LIMITS.values())
    return (
        f"## Gate\n\nFrom the same weights, of variants of the same model: largest relative error of a parameter's "
        f"gradient (limit {gradients:g}), and\nlargest difference of the losses of {steps} steps (limit {losses:g}"
        f" nats).\n\n{results_table(rows, not_run)}"
    )


def times_sections(record: dict) -> list[str]:
    """Return the times, and what share of the machine's FLOP/s they are."""
    times, published, matmul = record["seconds"], record["published_peak"], statistics.fmean(record["matmul_rates"])
    baseline, steps = next(iter(times)), next(iter(times.values()))["step"]
    columns = {  # the count of FLOPs, and of which FLOP/s of the machine its rate is a share
        "MFU": ("model", published),
        "of matmul": ("model", matmul),
        "HFU": ("hardware", published or matmul),
        "PaLM": ("palm", published or matmul),
    }
    head = ["variant", "attention", "tokens/s", "step ms", "micro ms", "optimizer ms", "share", "sum", "GiB"]
    rows, uses = [[*head, f"time to {baseline}"]], [["variant", *columns]]
    for name, seconds in times.items():
        median = {kind: statistics.median(seconds[kind]) for kind in KINDS}
        rate = record["config"]["batch_tokens"] / median["step"]
        parts = record["micro_batches"] * median["micro"] + median["optimizer"]
        peak = record["peak_bytes"].get(name)
        rows.append([
            name,
            record["backends"].get(name, ""),
            f"{rate:,.0f}",
            *(f"{median[kind] * 1e3:.2f}" for kind in KINDS),
            f"{median['optimizer'] / median['step']:.2%}",
            f"{parts / median['step']:.3f}",
            f"{peak / 2**30:.2f}" if peak else "",
            ratio_cell(paired_ratio(seconds["step"], steps)),
        ])  # fmt: skip
        used = {count: rate * flops for count, flops in record["flops_per_token"].items()}
        uses.append([name, *(f"{used[count] / limit:.1%}" if limit else "" for count, limit in columns.values())])
    times_table = f"## Times\n\n{len(steps)} rounds{gpu_range(record['gpu'])}\n\n{markdown_table(rows)}"
    return [times_table, f"## Use of the machine\n\n{markdown_table(uses)}"]


def counterparts_section(times: dict, pairs: list[tuple[str, str]]) -> str:
    rows = [["variant", "to", "time of a step", "times as fast"]]
    for name, other in pairs:
        a, b = times[name]["step"], times[other]["step"]
        rows.append([name, other, ratio_cell(paired_ratio(a, b)), ratio_cell(paired_ratio(b, a))])
    return f"## Against its counterpart\n\n{markdown_table(rows)}"

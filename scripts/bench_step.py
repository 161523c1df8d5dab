"""Times whole training steps, ours and others', side by side.

    python -m scripts.bench step gpt_162m_4k                          the variants below, as far as they run here
    python -m scripts.bench step quickstart record8 p_rope scale_invariant_p_rope:blocks --length 1024
    python -m scripts.bench step quickstart p_rope --profile trace    where the time goes (scripts/bench_profile.py)
    python -m scripts.bench step quickstart --peers ../nanoGPT        whole scripts (scripts/bench_peers.py)
    python -m scripts.bench step quickstart --processes 1 2

A variant is METHOD[:BACKEND], our step with an attention method; the same with -qkv, -muon or -loss: without merged
projections, batched Muon or fused cross-entropy; record8, record8+flex and nanogpt: see scripts/baselines.py.

First the gate: variants that compute the same model get the same tokens from the same weights, and their gradients and
losses must agree; one that fails gets no time. Then rounds in which all take turns, in the order A B C and back. The
first variant that runs is the baseline, and runs once more at the end of each round (the A/A row, which shows the
noise).
"""

import argparse
import dataclasses
import functools
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from configs.command_line import read_config, user_errors
from configs.config import Config
from data.loader import TrainLoader, micro_batch_size
from data.shards import open_split
from model.attention import Plan
from model.backends.sdpa import prefer_fast_sdpa
from model.methods import METHODS
from optim.sharded import Optimizers
from runtime.device import choose_compile, published_peak
from runtime.processes import World, start_processes
from scripts.baselines import MatrixMuon, NanoGPT, adamw, plain_loss, separate_projections, with_default_sdpa
from scripts.bench_peers import WARM_UP, bench_peers, bench_processes, with_data
from scripts.bench_protocol import (
    Report,
    again,
    gpu_range,
    gpu_state,
    in_one_line,
    in_turns,
    matmul_rate,
    paired_ratio,
    ratio_cell,
    schedule,
    time_calls,
)
from scripts.tables import markdown_table
from train_gpt import build_model, build_optimizers, compute_dtype, model_flops_per_token, train_step

OURS = "scale_invariant_p_rope"
MAIN = ["record8", "p_rope", OURS, "logn_p_rope", "alibi", "record8+flex", "nanogpt"]
PARTS = ["qkv", "muon", "loss"]
KINDS = ("step", "micro", "optimizer")
SOAK = 20  # seconds of work before the first round on CUDA: the chip is to be as warm as in a long run
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
- MFU: the rate of these FLOPs, of {peak_words}.
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
    """The exit code: 1 when a variant fails the gate."""
    with user_errors():
        arguments = [args.preset, *args.fields, *(["--train_length", str(args.length)] if args.length else [])]
        config = read_config(arguments)
        device = start_processes(config.device).device
        steps = args.steps or (60 if args.peers or args.processes else 3 if args.profile else 30)
        if min(args.rounds, steps, *(args.processes or [1])) < 1 or not args.minutes > 0:
            raise ValueError("rounds, steps, processes and minutes must be positive")
        if (args.peers or args.processes) and steps <= WARM_UP:
            raise ValueError(f"--steps {steps}: the first {WARM_UP} of a process do not count, so it takes more")
        args = argparse.Namespace(**vars(args) | dict(steps=steps))
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
        if args.peers:
            return bench_peers(args, arguments, config, device)
        if args.processes:
            return bench_processes(args, arguments, config, device)
        variants = {name: read_variant(name) for name in args.variants or default_variants(config)}
        with tempfile.TemporaryDirectory() as folder, torch._dynamo.config.patch(
            recompile_limit=64, fail_on_recompile_limit_hit=True  # one code, compiled once a variant
        ):  # fmt: skip
            _, config, tokens = with_data(arguments, config, Path(folder))
            prefer_fast_sdpa(device)
            bench = Bench(config, device)
            if args.profile:
                from scripts.bench_profile import profile  # only now, as only it needs the profiler

                return profile(args, bench, next(iter(variants.items())), tokens)
            return bench_variants(args, bench, variants, tokens)


# ---- variants --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Variant:
    method: str  # of our model; "" for nanoGPT's
    backend: str = "auto"
    replaced: frozenset[str] = frozenset()  # parts that are as in record 8: qkv, muon, loss, sdpa
    counterpart: str = ""  # the variant to compare with, besides the baseline


def read_variant(name: str) -> Variant:
    record8 = frozenset([*PARTS, "sdpa"])
    if name == "nanogpt":
        return Variant("")
    if name == "record8":
        return Variant("p_rope", "sdpa", record8)
    if name == "record8+flex":
        return Variant(OURS, "flex", record8)
    ours, *parts = name.split("-")
    method, _, backend = ours.partition(":")
    if method not in METHODS or not set(parts) <= set(PARTS):
        raise ValueError(
            f"unknown variant {name!r}: it is record8, record8+flex, nanogpt or METHOD[:BACKEND][-PART], METHOD one of "
            f"{', '.join(METHODS)}, PART one of {', '.join(PARTS)}"
        )
    counterpart = ours if parts else {"p_rope": "record8", OURS: "record8+flex"}.get(method, "p_rope")
    return Variant(method, backend or "auto", frozenset(parts), counterpart)


def default_variants(config: Config) -> list[str]:
    return [*MAIN, *(f"{OURS}-{part}" for part in PARTS)]


@dataclasses.dataclass
class Trainer:
    """A variant, built and compiled: what it takes for a step."""

    model: torch.nn.Module
    call: Callable  # (inputs, targets, plan=plan) -> mean loss
    plan: Plan | None
    optimizers: Optimizers
    loader: TrainLoader
    bytes: int = 0  # of weights and optimizer state

    @property
    def backend(self) -> str:
        return self.plan.backend if self.plan else "sdpa"


class Bench:
    """Builds, checks and times trainers of one configuration on one device."""

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device, self.world = config, device, World.alone(device)
        self.dtype = compute_dtype(config, device)
        compiled, self.compile_note = choose_compile(config.compile, device)
        self.compiled = compiled is not None
        self.stream = open_split(config.data_dir, "train", config.vocab_size)
        shape = config.batch_tokens, config.train_length
        self.sequences = micro_batch_size(*shape, config.micro_batch_tokens, 1)  # in a micro-batch
        self.accumulation = config.batch_tokens // config.train_length // self.sequences

    def build(self, variant: Variant) -> Trainer:
        """ValueError, or whatever it fails with, for a variant that cannot run here."""
        before = self.allocated()
        config = dataclasses.replace(self.config, method=variant.method or OURS, method_options={})
        if variant.method == self.config.method:
            config = self.config
        if variant.backend == "flex" and self.device.type == "cpu":
            raise ValueError("FlexAttention has no backward pass on a CPU")
        compile = functools.partial(torch.compile, dynamic=False) if self.compiled else lambda f: f
        torch.manual_seed(config.seed)
        if variant.method:
            model = build_model(config, self.dtype).to(self.device)
            fill_zeros(model)
            plan = model.plan(config.train_length, backend=variant.backend)
            if "qkv" in variant.replaced:
                separate_projections(model)
            optimizers = build_optimizers(config, model, self.compiled, self.world)
            if "muon" in variant.replaced:
                settings = dict(momentum=config.muon_momentum, compile=self.compiled, dtype=self.dtype)
                muon = functools.partial(MatrixMuon, **settings)
                matrices = dataclasses.replace(optimizers.groups["matrices"], make=muon)
                optimizers = Optimizers(optimizers.groups | dict(matrices=matrices))
        else:
            shape = config.vocab_size, config.num_layers, config.num_heads, config.model_dim, config.train_length
            model = NanoGPT(*shape, self.dtype).to(self.device)
            plan, optimizers = None, adamw(model)
        call = compile(plain_loss(model) if "loss" in variant.replaced else model)
        if "sdpa" in variant.replaced:
            call = with_default_sdpa(call)
        trainer = Trainer(model, call, plan, optimizers, self.loader())
        for _ in range(3):
            self.step(trainer, rate=0.0)
        trainer.bytes = self.allocated() - before
        return trainer

    def loader(self) -> TrainLoader:
        return TrainLoader(
            self.stream,
            batch_tokens=self.config.batch_tokens,
            length=self.config.train_length,
            micro_batch_size=self.sequences,
            vocab_size=self.config.vocab_size,
            device=self.device,
        )

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    # ---- what is timed -----------------------------------------------------------------------------------------------

    def step(self, trainer: Trainer, rate: float = 0.0, micro_batches: int | None = None) -> Tensor:
        batches = next(trainer.loader)[:micro_batches]
        return train_step(trainer.call, batches, trainer.plan, trainer.optimizers, rate, self.world)

    def micro(self, trainer: Trainer):
        inputs, targets = self.micro_batch
        trainer.call(inputs, targets, plan=trainer.plan).backward()

    def optimizer(self, trainer: Trainer):
        squared_norm = trainer.optimizers.finish()
        trainer.optimizers.step(0.0, squared_norm.isfinite())

    @functools.cached_property
    def micro_batch(self) -> tuple[Tensor, Tensor]:
        with self.loader() as loader:
            return next(loader)[0]

    def time(self, trainer: Trainer, kind: str, iterations: int) -> float:
        """Seconds of a step, a micro-batch or an optimizer step."""
        if kind == "step":
            return time_calls(lambda: self.step(trainer), iterations, self.device)
        if kind == "micro":
            seconds = time_calls(lambda: self.micro(trainer), iterations, self.device)
        else:
            seconds = 0.0
            for _ in range(iterations):
                self.micro(trainer)  # gradients, which the optimizer drops
                seconds += time_calls(lambda: self.optimizer(trainer), 1, self.device) / iterations
        trainer.model.zero_grad(set_to_none=True)
        return seconds

    def peak_bytes(self, trainer: Trainer) -> int | None:
        if self.device.type != "cuda":
            return None
        others = self.allocated() - trainer.bytes
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step(trainer)
        return torch.cuda.max_memory_allocated(self.device) - others


@torch.no_grad()
def fill_zeros(model: torch.nn.Module):
    """Weights that start at zero get N(0, 0.02), as products with zeros can be faster than others."""
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(0, 0.02)


# ---- the gate, and the rounds ----------------------------------------------------------------------------------------


def gate(bench: Bench, trainers: dict[str, Trainer], variants: dict[str, Variant], steps: int) -> dict[str, dict]:
    """How far variants that compute the same model are from the first of their kind, and whether that passes.

    First the gradients of one micro-batch, from the same weights: the largest relative error (Frobenius norm) of a
    parameter's. Then the losses of so many steps, on CUDA of one micro-batch each: the largest difference.
    """
    firsts, results = {}, {}
    some = 1 if bench.device.type == "cuda" else None
    for name, trainer in trainers.items():
        own = gradients(bench, trainer)
        losses = torch.stack([bench.step(trainer, rate=1.0, micro_batches=some)[0] for _ in range(steps)])
        first, reference, reference_losses = firsts.setdefault(variants[name].method, (name, own, losses))
        errors = torch.stack([(own[p] - reference[p]).norm() / (reference[p].norm() + 1e-30) for p in reference])
        found = dict(gradients=float(errors.max()), losses=float((losses - reference_losses).abs().max()))
        passed = all(found[key] <= limits[bench.dtype] for key, limits in LIMITS.items())  # not with NaN
        results[name] = dict(first=first, **found, passed=passed, loss=losses.tolist())
    return results


def gradients(bench: Bench, trainer: Trainer) -> dict[str, Tensor]:
    """Of one micro-batch, those of q, k and v as one bank, as in our model."""
    bench.micro(trainer)
    banks = {}
    for name, p in trainer.model.named_parameters():
        banks.setdefault(re.sub(r"attention\.[qkv]$", "attention.qkv", name), []).append(p.grad.detach())
    trainer.model.zero_grad(set_to_none=True)
    return {name: torch.stack(bank) if len(bank) == 3 else bank[0] for name, bank in banks.items()}


def measure(bench: Bench, trainers: dict[str, Trainer], rounds: int, seconds: float) -> tuple[dict, list]:
    """Seconds of each kind of each variant in each round, and the state of the GPU after each."""
    baseline = next(iter(trainers))
    rows = trainers | {again(baseline): trainers[baseline]}
    cells = [(row, kind) for row in rows for kind in KINDS]
    one_call = {cell: bench.time(rows[cell[0]], cell[1], 1) for cell in cells}
    # With each call of the optimizer alone comes a micro-batch that gives it gradients.
    costs = {(row, kind): t + one_call[row, "micro"] * (kind == "optimizer") for (row, kind), t in one_call.items()}
    rounds, iterations = schedule(costs, rounds, seconds, longest=1.5)
    times, states = {row: {kind: [] for kind in KINDS} for row in rows}, []
    end = time.perf_counter() + (SOAK if bench.device.type == "cuda" else 0)
    while time.perf_counter() < end:
        bench.time(rows[baseline], "step", 1)
    for round_number in range(rounds):
        for row, kind in in_turns(cells, round_number):
            times[row][kind].append(bench.time(rows[row], kind, iterations[row, kind]))
        states.append(gpu_state(bench.device))
    return times, states


def bench_variants(args, bench: Bench, variants: dict[str, Variant], tokens: str) -> int:
    deadline = time.perf_counter() + 60 * args.minutes
    left = lambda: deadline - time.perf_counter()
    size, matmul_dtype = (8192, torch.bfloat16) if bench.device.type == "cuda" else (1024, bench.dtype)
    rates = [matmul_rate(bench.device, matmul_dtype, size, 1.0)]
    trainers, problems = {}, {}
    for name, variant in variants.items():
        if left() < 30 * args.minutes:
            problems[name] = "not run: out of time (--minutes)"
            continue
        try:
            trainers[name] = bench.build(variant)
        except Exception as error:  # whatever stops a variant must not stop the others
            problems[name] = f"not run: {in_one_line(error)}"
    checked = gate(bench, trainers, variants, args.steps)
    for name, result in checked.items():
        if not result["passed"]:
            problems[name] = "refused: its numbers differ, see the gate"
            trainers.pop(name).loader.close()
    times, states = measure(bench, trainers, args.rounds, left()) if trainers else ({}, [])
    peaks = {name: bench.peak_bytes(trainer) for name, trainer in trainers.items()}
    rates.append(matmul_rate(bench.device, matmul_dtype, size, 1.0))
    for trainer in trainers.values():
        trainer.loader.close()
    backends = {name: trainer.backend for name, trainer in trainers.items()}
    write_report(args, bench, variants, tokens, checked, problems, times, states, peaks, rates, backends)
    return int(any(reason.startswith("refused") for reason in problems.values()))


# ---- results ---------------------------------------------------------------------------------------------------------


def flops_per_token(config: Config) -> dict[str, int]:
    """Forward and backward, by three counts; see HOW_TO_READ."""
    d, L, T = config.model_dim, config.num_layers, config.train_length
    model = model_flops_per_token(config)
    attention = 2 * d * (T + 1) * L  # forward
    return dict(model=model, hardware=model + attention // 2, palm=model - 3 * attention + 12 * d * T * L)


def describe(config: Config, bench: Bench, tokens: str) -> str:
    return (
        f"{config.num_layers} layers of width {config.model_dim}, {config.num_heads} heads, vocabulary "
        f"{config.vocab_size:,}; {bench.accumulation} x {bench.sequences} sequences of {config.train_length} tokens a "
        f"step; {tokens}; {str(bench.dtype).removeprefix('torch.')}, compile {bench.compile_note}"
    )


def write_report(args, bench, variants, tokens, checked, problems, times, states, peaks, rates, backends):
    config, device = bench.config, bench.device
    flops, matmul = flops_per_token(config), statistics.fmean(rates)
    published = published_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    size, dtype = (8192, "bfloat16") if device.type == "cuda" else (1024, str(bench.dtype).removeprefix("torch."))
    report = Report(
        args.out, f"step_{args.preset}_{config.train_length}", device,
        config=config.to_dict(), tokens=tokens, compile=bench.compile_note, backends=backends, gate=checked,
        problems=problems, seconds=times, gpu=states, peak_bytes=peaks, matmul_rates=rates, published_peak=published,
        flops_per_token=flops, micro_batches=bench.accumulation,
    )  # fmt: skip
    r = report.record
    report.add(
        f"# A training step: {r['device']}\n\n    {r['command']}\n\n{r['versions']}; {r['threads']} threads; commit "
        f"{r['commit']}.\n{describe(config, bench, tokens)}.\n\n"
        + HOW_TO_READ.format(
            accumulation=bench.accumulation,
            flops=flops["model"],
            peak_words=f"the published {published:.4g} FLOP/s" if published else "a published peak; none is known",
            peak_or_matmul="the published peak" if published else "the matmul rate",
            matmul=matmul,
            matmul_size=size,
            dtype=dtype,
        )
    )
    rows = [["variant", "same model as", "gradients", "losses", ""]]
    for name, result in checked.items():
        alone = result["first"] == name
        found = ["", "", ""] if alone else [result["first"], *(f"{result[key]:.1e}" for key in LIMITS)]
        rows.append([name, *found, "refused" if not result["passed"] else "" if alone else "passed"])
    rows += [[f"{name}: {why}", *[""] * 4] for name, why in problems.items() if name not in checked]
    gradients, losses = (limits[bench.dtype] for limits in LIMITS.values())
    report.add(
        f"## Gate\n\nFrom the same weights, of variants of the same model: largest relative error of a parameter's "
        f"gradient (limit {gradients:g}), and\nlargest difference of the losses of {args.steps} steps (limit {losses:g}"
        f" nats).\n\n{markdown_table(rows)}"
    )
    if not times:
        return
    baseline = next(iter(times))
    median = {name: {kind: statistics.median(times[name][kind]) for kind in KINDS} for name in times}
    head = ["variant", "attention", "tokens/s", "step ms", "micro ms", "optimizer ms", "share", "sum", "GiB"]
    rows = [[*head, f"time to {baseline}"]]
    use = [["variant", "MFU", "of matmul", "HFU", "PaLM"]]
    for name, m in median.items():
        rate = config.batch_tokens / m["step"]
        parts = bench.accumulation * m["micro"] + m["optimizer"]
        peak = peaks.get(name)
        rows.append([name, backends.get(name, ""), f"{rate:,.0f}", *(f"{m[kind] * 1e3:.2f}" for kind in KINDS)])
        rows[-1] += [f"{m['optimizer'] / m['step']:.2%}", f"{parts / m['step']:.3f}"]
        rows[-1] += [f"{peak / 2**30:.2f}" if peak else ""]
        rows[-1] += [ratio_cell(paired_ratio(times[name]["step"], times[baseline]["step"]))]
        share = lambda count, peak: f"{rate * flops[count] / peak:.1%}" if peak else ""
        use.append([name, share("model", published), share("model", matmul), share("hardware", published or matmul)])
        use[-1].append(share("palm", published or matmul))
    rounds = len(times[baseline]["step"])
    report.add(f"## Times\n\n{rounds} rounds{gpu_range(states)}\n\n{markdown_table(rows)}")
    report.add(f"## Use of the machine\n\n{markdown_table(use)}")
    pairs = [(name, v.counterpart) for name, v in variants.items() if {name, v.counterpart} <= times.keys()]
    if pairs:
        rows = [["variant", "to", "time of a step", "times as fast"]]
        for name, other in pairs:
            a, b = times[name]["step"], times[other]["step"]
            rows.append([name, other, ratio_cell(paired_ratio(a, b)), ratio_cell(paired_ratio(b, a))])
        report.add(f"## Against its counterpart\n\n{markdown_table(rows)}")

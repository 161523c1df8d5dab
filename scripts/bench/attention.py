"""Time attention alone: ours and others', forward and forward + backward, side by side.

    python -m scripts.bench attention

First the gate: output and gradients of each variant against float64, of which the errors are printed; a variant that
fails gets no time. Then, a length at a time, rounds in which the variants take turns, in the order A B C and back.
What counts is the ratio of a variant's time to the baseline's in the same round. The baseline, the first variant that
runs, runs once more at the end of each round (the A/A row, which shows the noise). scripts/bench/variants.py lists
the variants.
"""

import argparse
import dataclasses
import functools
import os
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import psutil
import torch
from torch import Tensor

from errors import require
from model.attention.reference import plain_attention
from runtime.processes import start_processes
from scripts.bench import protocol
from scripts.bench.protocol import Report, build_variants, gpu_range, paired_ratio, ratio_cell, results_table
from scripts.bench.variants import CPU, CUDA, VARIANTS, Attend, Case, Variant, dense, random_inputs

DEFAULTS = dict(
    cuda=dict(lengths=[4096, 16384, 65536], head_dim=128, heads=6, tokens=65536, dtype="bfloat16"),
    cpu=dict(lengths=[512, 1024, 4096], head_dim=64, heads=4, tokens=4096, dtype="float32"),
)
GATE_LENGTH = dict(cuda=4096, cpu=512)  # at most: the reference is dense
LIMIT = 1.5  # times the error of the dense formula in the same dtype
FLOAT32_LIMIT = 1e-5  # or this, where the dense formula's error is as good as none
PASSES = ("forward", "both")
HOW_TO_READ = """\
A variant's time is the median over rounds in which all take turns; its ratio is to the baseline's (the first row) in
the same round: median and bootstrap 95 % interval. The row "again" is the baseline once more (A/A). Forward is as in
training, keeping what the backward pass needs; both is forward + backward; TFLOP/s count causal attention (forward
4 B H T^2 D / 2, both 3.5 times that). To plain: both, against the same code without the transform, where there is one.
MiB: peak of both beyond the inputs, with output and gradients, by """


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 4096 16384 65536; on a CPU 512 1024 4096")
    parser.add_argument("--head-dim", type=int, help="default: 128; on a CPU 64")
    parser.add_argument("--heads", type=int, help="default: 6; on a CPU 4")
    parser.add_argument("--tokens", type=int, help="a pass, at least one sequence (default: 65536; on a CPU 4096)")
    dtypes = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", choices=dtypes, help="default: bfloat16, float32 on a CPU")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="the first is the baseline (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="at most, as time allows")
    parser.add_argument("--minutes", type=float, default=8, help="for everything, compilation included")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/DEVICE_attention.md and .json")
    parser.add_argument("--tune", action="store_true", help="time other tiles of the Triton kernels instead")


def run(args: argparse.Namespace, variants: dict[str, Variant] = VARIANTS) -> int:
    """Return the exit code: 1 when a variant fails the gate."""
    deadline = time.perf_counter() + 60 * args.minutes
    cases, names = read_arguments(args, variants)
    if args.tune:
        from scripts.bench.tiles import tune  # only now, as it needs Triton

        tune(cases, deadline)
        return 0
    variants = {name: variants[name] for name in names}
    report = start_report(args.out, cases[0], variants)
    gate_case = dataclasses.replace(cases[0], length=min(cases[0].length, GATE_LENGTH[cases[0].device.type]))
    excluded = {}  # by variant: why it cannot run, or is not allowed to
    for case in dict.fromkeys([gate_case, *cases]):
        torch._dynamo.reset()  # the graphs of the other lengths
        inputs = random_inputs(case)
        allowed = {name: variant for name, variant in variants.items() if name not in excluded}
        makers = {name: functools.partial(build, name, variant, case, inputs) for name, variant in allowed.items()}
        with torch._dynamo.config.patch(recompile_limit=64):  # FlexAttention's code is compiled once a variant
            built, problems = build_variants(makers, (time.perf_counter() + deadline) / 2)
            if case == gate_case:
                excluded = problems | gate(report, case, variants, built, inputs, problems)
                built = {name: calls for name, calls in built.items() if name not in excluded}
            if case in cases:
                lengths_to_come = len(cases) - 1 - cases.index(case)  # each needs time to compile and for its rounds
                seconds = (deadline - time.perf_counter()) / (2 * lengths_to_come + 1)
                time_in_turns(report, case, built, excluded | problems, args.rounds, seconds)
    return int(any(reason.startswith("refused") for reason in excluded.values()))


def read_arguments(args: argparse.Namespace, variants: dict[str, Variant]) -> tuple[list[Case], list[str]]:
    """Return a case for each length and the names of the variants. Raise ValueError for what cannot be."""
    device = start_processes(args.device).device
    given = {key: value for key, value in vars(args).items() if value is not None}
    given = argparse.Namespace(**DEFAULTS[device.type] | given)
    smallest = min(*given.lengths, given.head_dim, given.heads, given.tokens, args.rounds)
    words = "lengths, head dimension, heads, tokens, rounds and minutes must be positive"
    require(smallest >= 1 and args.minutes > 0, words)
    names = args.variants or [name for name in (CUDA if device.type == "cuda" else CPU) if name in variants]
    for name in names:
        require(name in variants, f"unknown variant {name!r}; valid: {', '.join(variants)}")
    shape = dict(heads=given.heads, head_dim=given.head_dim, dtype=getattr(torch, given.dtype), device=device)
    lengths = sorted(set(given.lengths))
    return [Case(batch=max(1, given.tokens // length), length=length, **shape) for length in lengths], names


# ---- a variant at one length -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BuiltVariant:
    """A variant at one length, compiled and warm."""

    attend: Attend
    passes: dict[str, Callable]  # by PASSES, what is timed
    extra_bytes: int | None  # of forward + backward; see extra_bytes


def build(name: str, variant: Variant, case: Case, inputs: list[Tensor]) -> BuiltVariant:
    """Return the variant. Raise whatever stops it."""
    if case.device.type == "cuda":
        torch.cuda.empty_cache()
    attend = variant.make(case)
    passes = make_passes(attend, inputs)
    for key in ("both", *PASSES):
        protocol.time_calls(passes[key], 1, case.device)
    return BuiltVariant(attend, passes, extra_bytes(name, variant, case, passes["both"]))


def make_passes(attend: Attend, inputs: list[Tensor]) -> dict[str, Callable]:
    *qkv, do = inputs
    return dict(forward=lambda: attend(*qkv), both=lambda: torch.autograd.grad(attend(*qkv), qkv, do))


def extra_bytes(name: str, variant: Variant, case: Case, both: Callable) -> int | None:
    """Return the peak memory of forward + backward beyond what is there before; None where it cannot be measured.

    In it are the output, the gradients and everything in between.
    """
    if case.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(case.device)
        before = torch.cuda.memory_allocated(case.device)
        both()
        return torch.cuda.max_memory_allocated(case.device) - before
    if VARIANTS.get(name) is not variant or not Path("/proc/self/clear_refs").exists():
        return None
    # A fresh process, in which freed memory goes back to the system at once.
    environment = dict(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(extra_resident_bytes, name, case, torch.get_num_threads()).result()


def extra_resident_bytes(name: str, case: Case, threads: int) -> int:
    """Return the peak resident memory of a warm forward + backward beyond what is resident before it."""
    torch.set_num_threads(threads)
    both = make_passes(VARIANTS[name].make(case), random_inputs(case))["both"]
    for _ in range(2):
        both()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = psutil.Process().memory_info().rss
    both()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) - before


# ---- the gate --------------------------------------------------------------------------------------------------------


def gate(
    report: Report,
    case: Case,
    variants: dict[str, Variant],
    built: dict[str, BuiltVariant],
    inputs: list[Tensor],
    problems: dict[str, str],
) -> dict[str, str]:
    """Report the errors of the variants that are built and their limits; return why those that fail are refused.

    An error is the Frobenius norm of the difference from float64 relative to float64's, of the last sequence's output
    and gradients of q, k, v. It may be LIMIT times that of the formula computed densely from the same inputs, with
    float32 accumulation and probabilities in their dtype.
    """
    one = dataclasses.replace(case, batch=1)

    def last_sequence(tensors: list[Tensor]) -> list[Tensor]:
        return [x.detach()[-1:] for x in tensors]

    @functools.cache
    def reference(formula: str) -> tuple[list[Tensor], list[Tensor]]:
        last = last_sequence(inputs)
        formula_itself = functools.partial(plain_attention, one.method(formula), x=one.layer_input())
        exact = output_and_gradients(formula_itself, last, exact=True)
        return exact, output_and_gradients(dense(one, formula), last)

    results = {}
    rows = [["variant", "output", "dq", "dk", "dv", "of the limit", ""]]
    for name, variant in built.items():
        own = last_sequence(output_and_gradients(variant.attend, inputs))
        results[name] = result = compare_errors(own, *reference(variants[name].formula))
        verdict = "passed" if result["passed"] else "refused"
        rows.append([name, *(f"{error:.2e}" for error in result["errors"]), f"{result['worst']:.2f}", verdict])
    refused = {name: "refused: wrong numbers, see the gate" for name in results if not results[name]["passed"]}
    report.record["gate"] = dict(length=case.length, results=results, problems=problems | refused)
    report.add(
        f"## Gate, length {case.length}\n\nRelative error (Frobenius) against float64; limit: {LIMIT} times that "
        f"of the dense formula from the\nsame inputs with float32 accumulation, or {FLOAT32_LIMIT:g}.\n\n"
        + results_table(rows, problems)
    )
    return refused


def compare_errors(tensors: list[Tensor], exact: list[Tensor], rounded: list[Tensor], least: float = FLOAT32_LIMIT):
    """Return the relative errors of tensors, their limits, the largest error as a share of its limit, and whether all
    are within them. rounded: the same by the plain formula, whose error times LIMIT is the limit, or `least`."""
    errors = relative_errors(tensors, exact)
    limits = [max(LIMIT * error, least) for error in relative_errors(rounded, exact)]
    worst = max(error / limit for error, limit in zip(errors, limits))
    passed = all(error <= limit for error, limit in zip(errors, limits))  # not with NaN
    return dict(errors=errors, limits=limits, worst=worst, passed=passed)


def output_and_gradients(attend: Attend, inputs: list[Tensor], exact: bool = False) -> list[Tensor]:
    """Return the output and the gradients of q, k and v; with `exact` in float64."""
    *qkv, do = [x.double() if exact else x for x in inputs]
    qkv = [x.detach().requires_grad_() for x in qkv]
    o = attend(*qkv)
    return [o.detach(), *torch.autograd.grad(o, qkv, do)]


def relative_errors(tensors: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(tensors, exact)]


# ---- times, and the report -------------------------------------------------------------------------------------------


def start_report(folder: Path | None, case: Case, variants: dict[str, Variant]) -> Report:
    dtype = str(case.dtype).removeprefix("torch.")
    what = {name: dict(formula=v.formula, what=v.what, off=plain_counterpart(name, v)) for name, v in variants.items()}
    shape = dict(dtype=dtype, heads=case.heads, head_dim=case.head_dim)
    report = Report(folder, "attention", case.device, **shape, variants=what, gate={}, lengths=[])
    memory = "torch's allocator" if case.device.type == "cuda" else "a fresh process each (VmHWM - VmRSS)"
    report.add(
        "# Attention alone: {device}\n\n    {command}\n\n{versions}; {dtype}, {heads} heads of {head_dim}; "
        "commit {commit}.\n\n".format(**report.record)
        + f"{HOW_TO_READ}{memory}.\n\n"
        + "\n".join(f"- `{name}`: {v.what} ({v.formula})" for name, v in variants.items())
    )
    return report


def plain_counterpart(name: str, variant: Variant) -> str:
    """Return the name of the variant that is the same without the transform; "" for one without a transform."""
    return "" if variant.formula == "plain" else name.split(":")[0] + ":plain"


def time_in_turns(
    report: Report, case: Case, built: dict[str, BuiltVariant], problems: dict[str, str], rounds: int, seconds: float
):
    """Time each pass of each variant in at most so many rounds and report it."""
    rows = protocol.with_baseline_again(built)
    calls = {
        f"{row} {key}": functools.partial(protocol.time_calls, rows[row].passes[key], device=case.device)
        for row in rows
        for key in PASSES
    }
    measured = protocol.measure(calls, rounds, seconds, case.device)
    times = {row: {key: measured.seconds[f"{row} {key}"] for key in PASSES} for row in rows}
    baseline = next(iter(times.values()), {"both": []})
    table = [["variant", "forward ms", "TFLOP/s", "ratio", "both ms", "TFLOP/s", "ratio", "to plain", "MiB"]]
    results = {}
    for name, own in times.items():
        plain = times.get(report.record["variants"].get(name, {}).get("off"), {})
        ratio, to_plain = ({key: paired_ratio(own[key], to[key]) for key in to} for to in (baseline, plain))
        memory = built[name].extra_bytes if name in built else None
        results[name] = dict(seconds=own, ratio=ratio, to_plain=to_plain, extra_bytes=memory)
        row = [name]
        for key in PASSES:
            median = statistics.median(own[key])
            row += [f"{median * 1e3:.3f}", f"{flops(case, key) / median / 1e12:.3g}", ratio_cell(ratio[key])]
        table.append([*row, ratio_cell(to_plain.get("both")), "" if memory is None else f"{memory / 2**20:.0f}"])
    rounds = len(baseline["both"])
    length = dict(length=case.length, batch=case.batch, rounds=rounds, calls=measured.calls, results=results)
    report.record["lengths"].append(length | dict(problems=problems, gpu=measured.gpu))
    report.add(
        f"## Length {case.length}, batch {case.batch}\n\n{rounds} rounds{gpu_range(measured.gpu)}\n\n"
        + results_table(table, problems)
    )


def flops(case: Case, key: str) -> float:
    """Return the FLOPs of causal attention, whatever a variant really does: 2 matrix products of T^2 / 2 logits
    forward, and 5 backward."""
    forward = 4 * case.batch * case.heads * case.length**2 * case.head_dim / 2
    return forward * (1 if key == "forward" else 3.5)

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
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from errors import exit_on_user_error
from model.reference import plain_attention
from runtime.processes import start_processes
from scripts.bench.protocol import (
    Report,
    again,
    gpu_range,
    gpu_state,
    in_one_line,
    in_turns,
    paired_ratio,
    ratio_cell,
    schedule,
    time_calls,
)
from scripts.bench.variants import VARIANTS, Attend, Case, Variant, default_variants, dense, random_inputs
from scripts.shared.tables import markdown_table

CUDA_DEFAULTS = dict(lengths=[4096, 16384, 65536], head_dim=128, heads=6, tokens=65536, dtype="bfloat16")
CPU_DEFAULTS = dict(lengths=[512, 1024, 4096], head_dim=64, heads=4, tokens=4096, dtype="float32")
GATE_LENGTH = {"cuda": 4096, "cpu": 512}  # at most: the reference is dense
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
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16, float32 on a CPU"
    )
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="the first is the baseline (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="at most, as time allows")
    parser.add_argument("--minutes", type=float, default=8, help="for everything, compilation included")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/DEVICE_attention.md and .json")
    parser.add_argument("--tune", action="store_true", help="time other tiles of the Triton kernels instead")


def run(args: argparse.Namespace, variants: dict[str, Variant] = VARIANTS) -> int:
    """Return the exit code: 1 when a variant fails the gate."""
    deadline = time.perf_counter() + 60 * args.minutes
    with exit_on_user_error():
        cases, names = read_arguments(args, variants)
        if args.tune:
            from scripts.bench.tiles import tune  # only now, as it needs Triton

            tune(cases, deadline)
            return 0
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
    variants = {name: variants[name] for name in names}
    report = AttentionReport(args.out, cases[0], variants)
    gate_length = min(cases[0].length, GATE_LENGTH.get(cases[0].device.type, 512))
    gate_case = dataclasses.replace(cases[0], length=gate_length)
    problems = {}  # by variant: why it cannot run, or is not allowed to

    def seconds_left() -> float:
        return deadline - time.perf_counter()

    for case in dict.fromkeys([gate_case, *cases]):
        torch._dynamo.reset()  # the graphs of the other lengths
        with torch._dynamo.config.patch(recompile_limit=64):  # FlexAttention's code is compiled once a variant
            allowed = {name: variant for name, variant in variants.items() if name not in problems}
            bench = AttentionBench(case, allowed, deadline - seconds_left() / 2)
            if case == gate_case:
                report.add_gate(case, gate(bench, variants), bench.problems)
                problems |= bench.problems
            if case in cases:
                to_come = len(cases) - 1 - cases.index(case)  # each needs time to compile and for its rounds
                times = bench.measure(args.rounds, seconds_left() / (2 * to_come + 1))
                report.add_length(bench, times, problems | bench.problems)
    return int(any(reason.startswith("refused") for reason in problems.values()))


def read_arguments(args: argparse.Namespace, variants: dict[str, Variant]) -> tuple[list[Case], list[str]]:
    """Return a case for each length and the names of the variants. Raise ValueError for what cannot be."""
    device = start_processes(args.device).device
    defaults = CUDA_DEFAULTS if device.type == "cuda" else CPU_DEFAULTS
    given = {key: getattr(args, key) if getattr(args, key) is not None else defaults[key] for key in defaults}
    numbers = [*given["lengths"], given["head_dim"], given["heads"], given["tokens"], args.rounds]
    if min(numbers) < 1 or not args.minutes > 0:
        raise ValueError("lengths, head dimension, heads, tokens, rounds and minutes must be positive")
    names = args.variants or [name for name in default_variants(device) if name in variants]
    if unknown := [name for name in names if name not in variants]:
        raise ValueError(f"unknown variant {unknown[0]!r}; valid: {', '.join(variants)}")
    dtype = getattr(torch, given["dtype"])
    cases = [
        Case(max(1, given["tokens"] // length), given["heads"], length, given["head_dim"], dtype, device)
        for length in sorted(set(given["lengths"]))
    ]
    return cases, names


# ---- one length ------------------------------------------------------------------------------------------------------


class AttentionBench:
    """The variants at one length, compiled and warm. `problems` says of the others why they do not run."""

    def __init__(self, case: Case, variants: dict[str, Variant], deadline: float):
        self.case, self.problems = case, {}
        self.inputs = random_inputs(case)
        self.attends: dict[str, Attend] = {}
        self.seconds: dict[str, dict[str, float]] = {}  # of one pass, roughly
        self.bytes: dict[str, int | None] = {}
        self.iterations: dict[str, int] = {}  # calls in a round, once measured
        self.gpu_states: list[dict[str, str] | None] = []  # after each round
        for name, variant in variants.items():
            if time.perf_counter() > deadline:
                self.problems[name] = "not run: out of time (--minutes)"
            else:
                self.add(name, variant)

    def add(self, name: str, variant: Variant):
        try:
            attend = variant.make(self.case)
            passes = self.passes(attend)
            for _ in range(2):
                time_calls(passes["both"], 1, self.case.device)
            self.seconds[name] = {key: time_calls(call, 1, self.case.device) for key, call in passes.items()}
            self.bytes[name] = extra_bytes(name, variant, self.case, passes["both"])
            self.attends[name] = attend
        except Exception as error:  # whatever stops a variant must not stop the others
            self.problems[name] = f"not run: {in_one_line(error)}"
        if self.case.device.type == "cuda":
            torch.cuda.empty_cache()

    def passes(self, attend: Attend) -> dict:
        *qkv, do = self.inputs
        return dict(forward=lambda: attend(*qkv), both=lambda: torch.autograd.grad(attend(*qkv), qkv, do))

    def measure(self, rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
        """Return the seconds a call of each pass of each variant in each round.

        There are at most so many rounds, and as many calls in each as the seconds allow.
        """
        if not self.attends:
            return {}
        baseline = next(iter(self.attends))
        row_names = dict.fromkeys(self.attends) | {again(baseline): baseline}
        cells = [(row, key) for row in row_names for key in PASSES]
        one_call = {(row, key): self.seconds[row_names[row] or row][key] for row, key in cells}
        rounds, iterations = schedule(one_call, rounds, seconds)
        calls = {row: self.passes(self.attends[source or row]) for row, source in row_names.items()}
        times = {row: {key: [] for key in PASSES} for row in row_names}
        for round_number in range(rounds):
            for row, key in in_turns(cells, round_number):
                times[row][key].append(time_calls(calls[row][key], iterations[row, key], self.case.device))
            self.gpu_states.append(gpu_state(self.case.device))
        self.iterations = {f"{row} {key}": n for (row, key), n in iterations.items()}
        return times


# ---- the gate --------------------------------------------------------------------------------------------------------


def gate(bench: AttentionBench, variants: dict[str, Variant]) -> dict[str, dict]:
    """Return the errors of the variants of `bench` and their limits; move those that fail to bench.problems.

    An error is the Frobenius norm of the difference from float64 relative to float64's, of the last sequence's output
    and gradients of q, k, v. It may be LIMIT times that of the formula computed densely from the same inputs, with
    float32 accumulation and probabilities in their dtype.
    """
    case = dataclasses.replace(bench.case, batch=1)

    def last_sequence(tensors: list[Tensor]) -> list[Tensor]:
        return [x.detach()[-1:] for x in tensors]

    @functools.cache
    def reference(formula: str) -> tuple[list[Tensor], list[float]]:
        inputs = last_sequence(bench.inputs)
        exact = output_and_gradients(functools.partial(plain_attention, case.method(formula)), inputs, exact=True)
        rounded = output_and_gradients(dense(formula)(case), inputs)
        return exact, [max(LIMIT * error, FLOAT32_LIMIT) for error in relative_errors(rounded, exact)]

    results = {}
    for name, attend in list(bench.attends.items()):
        exact, limits = reference(variants[name].formula)
        errors = relative_errors(last_sequence(output_and_gradients(attend, bench.inputs)), exact)
        passed = all(error <= limit for error, limit in zip(errors, limits))
        results[name] = dict(errors=errors, limits=limits, passed=passed)
        if not passed:
            bench.problems[name] = "refused: wrong numbers, see the gate"
            del bench.attends[name]
    return results


def output_and_gradients(attend: Attend, inputs: list[Tensor], exact: bool = False) -> list[Tensor]:
    """Return the output and the gradients of q, k and v; with `exact` in float64."""
    *qkv, do = [x.double() if exact else x for x in inputs]
    qkv = [x.detach().requires_grad_() for x in qkv]
    o = attend(*qkv)
    return [o.detach(), *torch.autograd.grad(o, qkv, do)]


def relative_errors(tensors: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(tensors, exact)]


# ---- memory and machine ----------------------------------------------------------------------------------------------


def extra_bytes(name: str, variant: Variant, case: Case, both) -> int | None:
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
    shape = (case.batch, case.heads, case.length, case.head_dim, str(case.dtype).removeprefix("torch."))
    # A fresh process, in which freed memory goes back to the system at once.
    child = subprocess.run(
        [sys.executable, "-m", "scripts.bench.attention", name, *map(str, shape), str(torch.get_num_threads())],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )  # fmt: skip
    if child.returncode:
        raise RuntimeError(f"its process for the memory failed: {child.stderr.strip().splitlines()[-1]}")
    return int(child.stdout.split()[-1])


def print_extra_bytes(name: str, batch: str, heads: str, length: str, head_dim: str, dtype: str, threads: str):
    """Print the peak resident memory of a warm call beyond what is resident before it: in the child of extra_bytes."""
    torch.set_num_threads(int(threads))
    shape = map(int, (batch, heads, length, head_dim))
    bench = AttentionBench(Case(*shape, getattr(torch, dtype), torch.device("cpu")), {}, deadline=0)
    both = bench.passes(VARIANTS[name].make(bench.case))["both"]
    for _ in range(2):
        both()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident_bytes("VmRSS")
    both()
    print(resident_bytes("VmHWM") - before)


def resident_bytes(field: str) -> int:
    return 1024 * int(re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


# ---- results ---------------------------------------------------------------------------------------------------------


def flops(case: Case, key: str) -> float:
    """Return the FLOPs of causal attention, whatever a variant really does: 2 matrix products of T^2 / 2 logits
    forward, and 5 backward."""
    forward = 4 * case.batch * case.heads * case.length**2 * case.head_dim / 2
    return forward * (1 if key == "forward" else 3.5)


class AttentionReport(Report):
    def __init__(self, folder: Path | None, case: Case, variants: dict[str, Variant]):
        super().__init__(
            folder,
            "attention",
            case.device,
            dtype=str(case.dtype).removeprefix("torch."),
            heads=case.heads,
            head_dim=case.head_dim,
            variants={name: dict(formula=v.formula, what=v.what, off=v.off) for name, v in variants.items()},
            gate={},
            lengths=[],
        )
        r = self.record
        memory = "torch's allocator" if case.device.type == "cuda" else "a fresh process each (VmHWM - VmRSS)"
        self.add(
            f"# Attention alone: {r['device']}\n\n    {r['command']}\n\n"
            f"{r['versions']}; {r['dtype']}, {case.heads} heads of {case.head_dim}; commit {r['commit']}.\n\n"
            f"{HOW_TO_READ}{memory}.\n\n"
            + "\n".join(f"- `{name}`: {v.what} ({v.formula})" for name, v in variants.items())
        )

    def add_gate(self, case: Case, results: dict[str, dict], problems: dict[str, str]):
        self.record["gate"] = dict(length=case.length, results=results, problems=dict(problems))
        rows = [["variant", "output", "dq", "dk", "dv", "of the limit", ""]]
        for name, result in results.items():
            worst = max(error / limit for error, limit in zip(result["errors"], result["limits"]))
            cells = [f"{error:.2e}" for error in result["errors"]]
            rows.append([name, *cells, f"{worst:.2f}", "passed" if result["passed"] else "refused"])
        rows += [[f"{name}: {why}", *[""] * 6] for name, why in problems.items() if name not in results]
        self.add(
            f"## Gate, length {case.length}\n\nRelative error (Frobenius) against float64; limit: {LIMIT} times that "
            f"of the dense formula from the\nsame inputs with float32 accumulation, or {FLOAT32_LIMIT:g}.\n\n"
            + markdown_table(rows)
        )

    def add_length(self, bench: AttentionBench, times: dict[str, dict[str, list[float]]], problems: dict[str, str]):
        case, offs = bench.case, {name: v["off"] for name, v in self.record["variants"].items()}
        baseline = next(iter(times), None)
        rows = [["variant", "forward ms", "TFLOP/s", "ratio", "both ms", "TFLOP/s", "ratio", "to plain", "MiB"]]
        summary = {}
        for name, seconds in times.items():
            ratios = {key: paired_ratio(seconds[key], times[baseline][key]) for key in PASSES}
            plain = times.get(offs.get(name))
            to_plain = {key: paired_ratio(seconds[key], plain[key]) for key in PASSES} if plain else {}
            memory = bench.bytes.get(name)
            summary[name] = dict(seconds=seconds, ratio=ratios, to_plain=to_plain, extra_bytes=memory)
            row = [name]
            for key in PASSES:
                median = statistics.median(seconds[key])
                row += [f"{median * 1e3:.3f}", f"{flops(case, key) / median / 1e12:.3g}", ratio_cell(ratios[key])]
            rows.append(row + [ratio_cell(to_plain.get("both")), "" if memory is None else f"{memory / 2**20:.0f}"])
        rows += [[f"{name}: {why}", *[""] * 8] for name, why in problems.items()]
        rounds = len(times[baseline]["both"]) if times else 0
        self.record["lengths"].append(
            dict(
                length=case.length,
                batch=case.batch,
                rounds=rounds,
                calls=bench.iterations,
                results=summary,
                problems=problems,
                gpu=bench.gpu_states,
            )
        )
        self.add(
            f"## Length {case.length}, batch {case.batch}\n\n{rounds} rounds{gpu_range(bench.gpu_states)}\n\n"
            + markdown_table(rows)
        )


if __name__ == "__main__":
    print_extra_bytes(*sys.argv[1:])

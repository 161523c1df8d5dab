"""Show where the time of a training step goes: a trace, and a table by plain categories.

    python -m scripts.bench step quickstart scale_invariant_p_rope --profile trace

The trace opens in chrome://tracing and ui.perfetto.dev. On CUDA the table counts kernels, and the time in which none
runs is idle; on a CPU it counts operations, and the rest, Python and PyTorch's own bookkeeping, is host.
"""

import argparse
import re
import statistics
import time
from collections import Counter

import torch
import torch._inductor.config
from torch.profiler import ProfilerActivity

from scripts.bench.protocol import Report, gpu_state
from scripts.bench.trainers import StepBench, StepVariant
from scripts.shared.tables import markdown_table

# In this order: an optimizer's matmuls are the optimizer's, those of the head are matmuls, whatever calls them.
OUTSIDE = {"optimizer": r"Optimizer\.step", "communication": r"nccl|gloo|c10d|reduce_scatter|all_gather|all_reduce"}
ITSELF = {"matmul": r"mm\b|addmm|gemm|nvjet|cutlass|mkldnn_linear|triton_tem_fused_\w*mm"}
ANYWHERE = {
    "cross-entropy": r"loss_and_gradients|token_losses|cross_entropy|nll_loss|log_softmax",
    "attention": r"attention|flash|fmha|sdpa|flex|scale_invariant::",
}
COMPUTES = r"^aten::|cpp_fused|triton_|void |Memcpy|Memset|elementwise|reduce"
REST = "elementwise, norms, copies"
CATEGORIES = ["matmul", "attention", "cross-entropy", REST, "optimizer", "communication"]


def category(names: list[str]) -> str | None:
    """Return the category of an operation or kernel; None for one that does no work itself.

    names: its own, then those of what it is part of, from the inside out.
    """
    all_names = " ".join(names)
    for text, patterns in ((all_names, OUTSIDE), (names[0], ITSELF), (all_names, ANYWHERE)):
        for name, pattern in patterns.items():
            if re.search(pattern, text):
                return name
    return REST if re.search(COMPUTES, names[0]) else None


def time_by_category(events, on_gpu: bool) -> tuple[Counter, dict[str, Counter]]:
    """Return the microseconds of each category, and in it of each operation or kernel."""
    parts = {name: Counter() for name in CATEGORIES}

    def add(names: list[str], microseconds: float):
        if kind := category(names):
            parts[kind][names[0]] += microseconds

    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue  # on CUDA the kernels are listed with the operation that launched them
        chain, outer = [event.name], event.cpu_parent
        while outer:
            chain.append(outer.name)
            outer = outer.cpu_parent
        if not on_gpu:
            add(chain, event.self_cpu_time_total)
        for kernel in event.kernels:
            is_matmul = category(chain[:1]) == "matmul"  # by its operation: kernels of libraries have any name
            add([chain[0] if is_matmul else kernel.name, *chain], kernel.duration)
    return Counter({kind: part.total() for kind, part in parts.items()}), parts


def profile(args: argparse.Namespace, bench: StepBench, name: str, variant: StepVariant, tokens: str) -> int:
    """Profile args.steps steps of a variant and write trace, table and numbers to the folder args.profile. Return 0."""
    args.profile.mkdir(parents=True, exist_ok=True)
    on_gpu = bench.device.type == "cuda"
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}):  # names for the fused loops of a CPU
        trainer = bench.build(variant)
        alone = [bench.time(trainer, "step", args.steps) for _ in range(3)]
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with torch.profiler.profile(activities=activities) as profiler:
            began = time.perf_counter()
            for _ in range(args.steps):
                bench.step(trainer)
            if on_gpu:
                torch.cuda.synchronize(bench.device)
            wall = time.perf_counter() - began
    trainer.loader.close()
    total, parts = time_by_category(profiler.events(), on_gpu)
    total["idle" if on_gpu else "host"] = max(0.0, 1e6 * wall - sum(total.values()))
    report = Report(
        args.profile, f"profile_{args.preset}_{bench.config.train_length}", bench.device,
        config=bench.config.to_dict(), variant=name, tokens=tokens, steps=args.steps, seconds=wall,
        seconds_a_step_without_profiler=alone, microseconds=total, parts=parts, gpu=gpu_state(bench.device),
    )  # fmt: skip
    trace = report.path.with_suffix(".trace.json")
    profiler.export_chrome_trace(str(trace))
    rows = [["where", "ms a step", "share", "most of it"]]
    for kind, microseconds in total.items():
        if microseconds:
            share, most = microseconds / wall / 1e6, parts.get(kind, Counter()).most_common(2)
            largest = ", ".join(f"{part[:60]} {own / microseconds:.0%}" for part, own in most)
            rows.append([kind, f"{microseconds / 1e3 / args.steps:.2f}", f"{share:.1%}", largest])
    report.add(
        f"# Where a step's time goes: {name}, {report.record['device']}\n\n{report.provenance}\n"
        f"{bench.describe(tokens)}; attention by {trainer.backend}.\n\n"
        f"{args.steps} steps took {wall * 1e3 / args.steps:.2f} ms each with the profiler, "
        f"{statistics.median(alone) * 1e3:.2f} ms without.\nThe optimizer's matmuls count for the optimizer, matmuls "
        f"of attention by `blocks` as matmuls. Trace: {trace.name}.\n\n{markdown_table(rows)}"
    )
    return 0

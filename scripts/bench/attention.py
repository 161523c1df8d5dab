"""Time attention alone, forward and forward + backward, side by side.

    python -m scripts.bench attention                                              this device's default variants
    python -m scripts.bench attention --lengths 4096 65536 --variants flex:plain flex:si flex_flash:si

A variant is BACKEND:FORMULA. BACKEND is a name of attention_backend. FORMULA is `plain` (softmax of S), `si`
(scale-invariant, tau 10) or `alibi`.

The first variant that runs is the baseline. The gate, model/attention/check.py, compares output and gradients of each
variant with float64. A variant that fails the gate is not timed, and the exit code is 1. On a CPU, `flex` has a forward
pass only.
"""

import argparse
import functools
import statistics

import torch
from torch import Tensor

from errors import require
from model.attention.attend import attend
from model.attention.backend import Backend
from model.attention.check import LENGTHS, check_backend, random_inputs
from model.attention.choose import BACKENDS
from model.attention.flex import Flex
from model.attention.plan import plan_layer
from model.attention.sdpa import chosen_kernel
from model.methods.base import Method, Shape
from model.methods.make import make_method
from runtime.processes import start_processes
from scripts.bench import protocol
from scripts.shared.arguments import Parser

FORMULAS = {"plain": "nope", "si": "scale_invariant_nope", "alibi": "alibi"}
CUDA = "sdpa:plain flex:plain flex:si flex:alibi flex_flash:plain flex_flash:si".split()
CPU = ["sdpa:plain", "cpu:plain", "cpu:si", "cpu:alibi", "blocks:plain", "blocks:si"]
DEFAULTS = {
    "cuda": {"lengths": [4096, 16384, 65536], "dtype": "bfloat16", "variants": CUDA},
    "cpu": {"lengths": [512, 1024, 4096], "dtype": "float32", "variants": CPU},
}
TOKENS = {"cuda": 65536, "cpu": 4096}  # batch * length of a pass; the batch is at least 1
Variant = tuple[Backend, Method]  # a backend and the method that it computes


def add_arguments(parser: Parser):
    add = parser.add_argument
    parser.add_device()
    add("--lengths", type=int, nargs="+", help="default: 4096 16384 65536; on a CPU 512 1024 4096")
    add("--head-dim", type=int, default=128, help="default: 128")
    add("--heads", type=int, default=6, help="default: 6")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16; CPU float32")
    add("--variants", nargs="+", metavar="NAME", help="default: a list that suits this device")


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 1 if a variant fails the gate. Raise ValueError for a user's mistake."""
    # 1. The variants.
    device = start_processes(args.device).device
    for name, value in DEFAULTS[device.type].items():
        setattr(args, name, getattr(args, name) or value)
    positive = min(*args.lengths, args.head_dim, args.heads) >= 1
    require(positive, "--lengths, --head-dim or --heads is below 1. Use at least 1.")
    dtype = getattr(torch, args.dtype)
    variants = {name: make_variant(name, args.heads, args.head_dim, device) for name in args.variants}

    # 2. The gate.
    kernel = chosen_kernel(device, dtype, args.head_dim, args.lengths[0])
    report = protocol.Report(args.out, "attention", device)
    report.add(f"{args.dtype}, {args.heads} heads of {args.head_dim}; sdpa runs {kernel}.")
    gate = {name: check_variant(variant, device, dtype) for name, variant in variants.items()}
    passed = {name: variant for name, variant in variants.items() if gate[name].startswith("passed")}
    report.record |= {"gate": gate, "times": []}
    report.add("## Gate\n\nOutput and gradients are compared with float64.", problems=gate)

    # 3. The times.
    method = variants[args.variants[0]][1]  # any method, because all have the same shapes
    for length in args.lengths:
        inputs, dout = random_inputs(method, length, device, dtype, batch=max(1, TOKENS[device.type] // length))
        time_length(report, passed, [*inputs.values(), dout], args.rounds)
    return int(any(result.startswith("refused") for result in gate.values()))


def make_variant(name: str, heads: int, head_dim: int, device: torch.device) -> Variant:
    """Return the variant with this name. Raise ValueError for an unknown name."""
    backend, _, formula = name.partition(":")
    remedy = f"Use BACKEND:FORMULA, BACKEND one of {', '.join(BACKENDS)}, FORMULA one of {', '.join(FORMULAS)}."
    require(backend in BACKENDS and formula in FORMULAS, f"unknown variant {name!r}. {remedy}")
    method = make_method(FORMULAS[formula], Shape(heads, head_dim, train_length=1024))
    return BACKENDS[backend], method.to(device)


def has_backward(backend: Backend, device: torch.device) -> bool:
    return device.type != "cpu" or not isinstance(backend, Flex)


def check_variant(variant: Variant, device: torch.device, dtype: torch.dtype) -> str:
    """Return "not run", "refused" or "passed", with the reason or the error."""
    backend, method = variant
    if reason := backend.unsupported(method, device, dtype):
        return f"not run: {reason}"
    backward = has_backward(backend, device)
    lengths = LENGTHS if backward else LENGTHS[:2]  # flex on a CPU needs more tokens than the last length
    problem, result = check_backend(backend, method, device, dtype, lengths, backward)
    result += "" if backward else ", forward pass alone"
    return f"refused: {problem}" if problem else f"passed: {result}"


def make_passes(variant: Variant, inputs: list[Tensor]) -> dict:
    """Return warmed-up functions to time: "forward", and "both" (forward and backward pass) if there are both."""
    backend, method = variant
    *qkv, dout = inputs
    length = dout.shape[2]
    plan = plan_layer(method, backend, length, length, device=dout.device)
    backward = has_backward(backend, dout.device)
    qkv = [x.detach().requires_grad_(backward) for x in qkv]
    forward = last = functools.partial(attend, method, *qkv, plan=plan)
    passes = {"forward": forward}  # also stores the tensors for the backward pass
    if backward:
        last = passes["both"] = lambda: torch.autograd.grad(forward(), qkv, dout)
    last()
    last()
    return passes


def time_length(report: protocol.Report, variants: dict, inputs: list[Tensor], rounds: int):
    """Time both passes of each variant on these inputs, and report them."""
    # 1. Compile the variants for this length.
    batch, heads, length, head_dim = inputs[0].shape
    torch._dynamo.reset()  # drops the code for other lengths
    makers = {name: functools.partial(make_passes, variant, inputs) for name, variant in variants.items()}
    passes, problems = protocol.build_variants(makers)
    report.add(f"## Length {length}, batch {batch}", problems=problems)

    # 2. Time each pass in turns.
    for kind, forward_passes in {"forward": 1.0, "both": 3.5}.items():
        timers = {}
        for name, calls in passes.items():
            if kind in calls:
                timers[name] = functools.partial(protocol.time_calls, calls[kind], device=inputs[0].device)
        if not timers:
            continue
        times = protocol.measure(timers, rounds)
        flops = forward_passes * 4 * batch * heads * length**2 * head_dim / 2  # causal: half of the scores
        rows = [["variant", "ms", "TFLOP/s", "ratio"]]
        for name, seconds in times.items():
            median, ratio = statistics.median(seconds), protocol.ratio_cell(seconds, next(iter(times.values())))
            rows.append([name, f"{median * 1e3:.3f}", f"{flops / median / 1e12:.3g}", ratio])
        report.record["times"].append({"length": length, "batch": batch, "kind": kind, "seconds": times})
        report.add(f"### {kind.capitalize()}", rows)

"""Time attention alone, forward and forward + backward, side by side.

    python -m scripts.bench attention                                              this device's default variants
    python -m scripts.bench attention --lengths 4096 65536 --variants flex:plain flex:si flex_flash:si
    python -m scripts.bench attention --lengths 16384 --variants flex:si --tiles   other tiles beside the default ones

A variant is BACKEND:FORMULA. BACKEND is a name of attention_backend, or a kernel of `sdpa`: `cudnn`, or `flash2`
(FlashAttention-2 on CUDA). FORMULA is `plain` (softmax of S), `si` (scale-invariant, tau 10) or `alibi`. `flex` also
takes `paper` (scale-invariant with log and sqrt in the score_mod) and `softcap` (20 tanh(S / 20)). flex:FORMULA:TILES
has other tiles, such as bwd-64-128-128-64-8-1: BLOCK_M1, N1, M2, N2, num_warps and num_stages of the backward pass.

The first variant that runs is the baseline. The gate, model/attention/check.py, compares output and gradients of each
variant with float64. A variant that fails the gate is not timed, and the exit code is 1. On a CPU, `flex` has a forward
pass only.
"""

import argparse
import functools
import statistics

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from errors import require
from model.attention.attend import attend
from model.attention.backend import Backend
from model.attention.check import LENGTHS, check_backend, random_inputs
from model.attention.choose import BACKENDS
from model.attention.flex import Flex, make_score_mod
from model.attention.plan import plan_layer
from model.attention.sdpa import SDPA, chosen_kernel
from model.methods.base import Method, ScoreChange, Shape
from model.methods.make import make_method
from runtime.processes import start_processes
from scripts.bench import protocol
from scripts.shared.arguments import Parser


class Paper(ScoreChange):
    """Computes a_t and m_t of scale-invariant attention as the paper writes them."""

    def coefficients(self, distance, head):
        growth = 2 * torch.log(1 + distance / 10)
        return torch.sqrt(1 + growth), -growth


class SoftCap(ScoreChange):
    """Bounds scores by a hyperbolic tangent, for which other projects have published speeds."""

    def change(self, score, distance, head):
        return 20 * torch.tanh(score / 20)


class FlexAsWritten(Flex):
    """FlexAttention that evaluates the formula at each logit and reads no table."""

    def prepare(self, plan, score_change):
        return super().prepare(plan, None) | {"score_mod": make_score_mod(score_change, plan)}


class OneKernel(SDPA):
    """PyTorch's attention by one of its kernels."""

    def __init__(self, kernel: SDPBackend):
        self.kernel = kernel

    def unsupported(self, method, device, dtype):
        with sdpa_kernel([self.kernel, SDPBackend.MATH], set_priority=True):
            chosen = chosen_kernel(device, dtype, method.head_dim, LENGTHS[0])
        missing = None if chosen == self.kernel.name else f"PyTorch cannot run {self.kernel.name} here"
        return super().unsupported(method, device, dtype) or missing

    def run(self, *arguments, **more):
        with sdpa_kernel(self.kernel):
            return super().run(*arguments, **more)


KERNELS = {"cudnn": OneKernel(SDPBackend.CUDNN_ATTENTION), "flash2": OneKernel(SDPBackend.FLASH_ATTENTION)}
FORMULAS = {"plain": "nope", "si": "scale_invariant_nope", "alibi": "alibi"}
WRITTEN = {"paper": Paper, "softcap": SoftCap}  # for FlexAsWritten
TILE_OPTIONS = {
    "fwd": "BLOCK_M BLOCK_N num_warps num_stages",
    "bwd": "BLOCK_M1 BLOCK_N1 BLOCK_M2 BLOCK_N2 num_warps num_stages",
}
TILES = (  # that --tiles tries: they compile for Hopper, and fit its shared memory in bfloat16 with head dimension 128
    "fwd-128-128-8-2 fwd-128-64-4-2 fwd-128-64-8-3 bwd-64-64-64-64-4-2 bwd-64-64-64-64-4-3 bwd-64-64-64-64-8-3 "
    "bwd-32-128-128-32-8-2 bwd-64-128-128-64-8-1 bwd-64-128-128-64-8-3"
).split()
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
    add("--tiles", action="store_true", help="time each flex variant with other tiles, too")


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 1 if a variant fails the gate. Raise ValueError for a user's mistake."""
    # 1. The variants.
    device = start_processes(args.device).device
    for name, value in DEFAULTS[device.type].items():
        setattr(args, name, getattr(args, name) or value)
    positive = min(*args.lengths, args.head_dim, args.heads) >= 1
    require(positive, "--lengths, --head-dim or --heads is below 1. Use at least 1.")
    names = list(args.variants)
    for name in args.variants if args.tiles else ():
        if name.startswith("flex:"):
            names += [f"{name}:{tiles}" for tiles in TILES]
    dtype = getattr(torch, args.dtype)
    variants = {name: make_variant(name, args.heads, args.head_dim, device) for name in names}

    # 2. The gate.
    kernel = chosen_kernel(device, dtype, args.head_dim, args.lengths[0])
    report = protocol.Report(args.out, "attention", device)
    report.add(f"{args.dtype}, {args.heads} heads of {args.head_dim}; sdpa runs {kernel}.")
    gate = {name: check_variant(variant, device, dtype) for name, variant in variants.items()}
    passed = {name: variant for name, variant in variants.items() if gate[name].startswith("passed")}
    report.record |= {"gate": gate, "times": []}
    report.add("## Gate\n\nOutput and gradients are compared with float64.", problems=gate)

    # 3. The times.
    method = variants[names[0]][1]  # any method, because all have the same shapes
    for length in args.lengths:
        inputs, dout = random_inputs(method, length, device, dtype, batch=max(1, TOKENS[device.type] // length))
        time_length(report, passed, [*inputs.values(), dout], args.rounds)
    return int(any(result.startswith("refused") for result in gate.values()))


def make_variant(name: str, heads: int, head_dim: int, device: torch.device) -> Variant:
    backend, _, formula = name.partition(":")
    formula, _, tiles = formula.partition(":")
    # 1. Refuse unknown names. Only flex has other formulas and tiles.
    backends, formulas, all_tiles = BACKENDS | KERNELS, FORMULAS, [""]
    if backend == "flex":
        formulas, all_tiles = FORMULAS | WRITTEN, ["", *TILES]
    remedy = f"Use BACKEND:FORMULA, BACKEND one of {', '.join(backends)}, FORMULA one of {', '.join(formulas)}."
    known = backend in backends and formula in formulas and tiles in all_tiles
    require(known, f"unknown variant {name!r}. {remedy}")
    # 2. Make the method, and a flex with these tiles.
    shape = Shape(heads, head_dim, train_length=1024)
    if formula in WRITTEN:
        method = Method(formula, shape, [WRITTEN[formula]()])
        backends["flex"] = FlexAsWritten()
    else:
        method = make_method(FORMULAS[formula], shape)
        backends["flex"] = Flex()
    kind, *sizes = tiles.split("-")
    options = [f"{kind}_{option}" for option in TILE_OPTIONS.get(kind, "").split()]
    backends["flex"].tiles = dict(zip(options, map(int, sizes), strict=True))
    return backends[backend], method.to(device)


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
    plan = plan_layer(method, backend, length, length, device=dout.device, dtype=dout.dtype)
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

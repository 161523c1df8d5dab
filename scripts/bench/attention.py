"""Time attention alone, forward and forward + backward, side by side.

    python -m scripts.bench attention                                              the defaults of this device
    python -m scripts.bench attention --lengths 4096 65536 --variants flex:plain flex:si triton:si

A variant is BACKEND:FORMULA, or flex:si:written, the paper's formula as it is written there. BACKEND is a name of
attention_backend, or `dense`. FORMULA is `plain` (softmax of S), `si` (scale-invariant, tau 10), `alibi`, or a method,
whose rotation is left out. The first variant that runs is the baseline. Output and gradients of each variant must first
agree with float64. A variant that fails this gate gets no time, and the exit code is 1.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from errors import require
from model.attention import attend, make_plan
from model.attention.check import Comparison, compare, formula, output_and_gradients, rounded_formula
from model.attention.sdpa import chosen_kernel, prefer_fast_sdpa
from model.methods import make_method
from model.methods.base import Method
from runtime.processes import start_processes
from scripts.bench import protocol

METHODS = {"plain": "nope", "si": "scale_invariant_nope", "alibi": "alibi"}
CUDA = "sdpa:plain flex:plain flex:si flex:si:written flex:alibi flex_flash:plain flex_flash:si".split()
CUDA += ["triton:plain", "triton:si", "triton:alibi"]  # when time runs out, the last ones are left out
CPU = ["sdpa:plain", "cpu:plain", "cpu:si", "cpu:alibi", "blocks:plain", "blocks:si", "dense:plain", "dense:si"]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v and output (B, H, T, D)
DEFAULTS = dict(
    cuda=dict(lengths=[4096, 16384, 65536], head_dim=128, heads=6, dtype="bfloat16"),
    cpu=dict(lengths=[512, 1024, 4096], head_dim=64, heads=4, dtype="float32"),
)
TOKENS = dict(cuda=65536, cpu=4096)  # in a pass, but at least one sequence
GATE_LENGTH = dict(cuda=4096, cpu=512)  # at most, because the reference is dense
PASSES = ("forward", "both")
HOW_TO_READ = """\
- Both: forward and backward pass. TFLOP/s: of both, counting the causal half: 3.5 times 4 B H T^2 D / 2."""


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def method(self, formula: str) -> Method:
        """Return the attention method of a formula, without rotation and without scaling of q."""
        name = METHODS.get(formula, formula)
        method = make_method(name, num_heads=self.heads, head_dim=self.head_dim, train_length=self.length)
        method.rotation = method.query_scale = None
        return method.to(self.device)

    def inputs(self) -> list[Tensor]:
        """Return q, k, v and the gradient of the output, (B, H, T, D), laid out in memory as in the model.

        q and k are normalised; v is a view of a tensor (B, T, 4, H, D).
        """
        generator = torch.Generator(self.device).manual_seed(0)
        shape = self.batch, self.length, 4, self.heads, self.head_dim
        q, k, v, dout = torch.randn(shape, device=self.device, generator=generator).to(self.dtype).unbind(2)
        q, k = (F.rms_norm(x, x.shape[-1:]) for x in (q, k))
        return [x.transpose(1, 2) for x in (q, k, v, dout)]


def formula_of(name: str) -> str:
    known = name in SPECIAL or name.count(":") == 1
    require(known, f"unknown variant {name!r}. A variant is BACKEND:FORMULA or {', '.join(SPECIAL)}.")
    return name.split(":")[1]


def make_attend(name: str, case: Case) -> Attend:
    """Return the function that computes attention. Raise ValueError for a variant that cannot run here."""
    if name in SPECIAL:
        return SPECIAL[name](case)
    backend, formula = name.split(":")
    method = case.method(formula)
    if backend == "dense":
        return rounded_formula(method)
    plan = make_plan(
        method, case.length, case.length, device=case.device, dtype=case.dtype, backend=backend, normalised=True
    )  # fmt: skip
    run = functools.partial(attend, method, plan=plan)
    # As in a compiled model. A Triton kernel of ours is one operation, and compiling would change nothing.
    return torch.compile(run, dynamic=False) if backend.startswith("flex") and case.device.type == "cuda" else run


def flex_as_written(case: Case) -> Attend:
    """Return FlexAttention with the paper's formulas (eq:gaussian_at, eq:gaussian_mt) as they are written there."""

    def score_mod(score, batch, head, q_index, kv_index):
        log = torch.log((q_index - kv_index).clamp(min=0) / 10.0 + 1)
        return torch.sqrt(2 * log + 1) * score - 2 * log

    plan = make_plan(case.method("si"), case.length, case.length, device=case.device, dtype=case.dtype, backend="flex")
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return functools.partial(compiled, score_mod=score_mod, block_mask=plan.prepared["block_mask"])


SPECIAL = {"flex:si:written": flex_as_written}


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 4096 16384 65536; on a CPU 512 1024 4096")
    parser.add_argument("--head-dim", type=int, help="default: 128; on a CPU 64")
    parser.add_argument("--heads", type=int, help="default: 6; on a CPU 4")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16; CPU float32")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="default: those of this device")


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 1 when a variant fails the gate. Raise ValueError for users' mistakes."""
    deadline = time.perf_counter() + 60 * args.minutes
    device = start_processes(args.device).device
    for name, value in DEFAULTS[device.type].items():
        setattr(args, name, getattr(args, name) or value)
    smallest = min(*args.lengths, args.head_dim, args.heads, args.rounds)
    require(smallest >= 1 and args.minutes > 0, "lengths, head dimension, heads, rounds and minutes must be positive")
    names, lengths = args.variants or (CUDA if device.type == "cuda" else CPU), sorted({*args.lengths})
    shape = functools.partial(
        Case, heads=args.heads, head_dim=args.head_dim, dtype=getattr(torch, args.dtype), device=device
    )
    for name in names:
        shape(batch=1, length=1).method(formula_of(name))  # ValueError for an unknown formula
    report = protocol.Report(args.out, "attention", device, "Attention alone")
    report.record |= dict(dtype=args.dtype, heads=args.heads, head_dim=args.head_dim, lengths=[])
    prefer_fast_sdpa(device)
    kernel = chosen_kernel(device, getattr(torch, args.dtype), args.head_dim, lengths[0])
    shapes = f"{args.dtype}, {args.heads} heads of {args.head_dim}; sdpa runs {kernel}"
    report.add(f"{shapes}.\n\n{protocol.HOW_TO_READ}{HOW_TO_READ}")
    gate_case = shape(batch=2, length=min(lengths[0], GATE_LENGTH[device.type]))
    problems = gate(report, gate_case, names, (time.perf_counter() + deadline) / 2)
    names = [name for name in names if name not in problems]
    for number, length in enumerate(lengths):
        case = shape(batch=max(1, TOKENS[device.type] // length), length=length)
        seconds = (deadline - time.perf_counter()) / (len(lengths) - number)
        time_length(report, case, names, args.rounds, seconds)
    return int(any(problem.startswith("refused") for problem in problems.values()))


def gate(report: protocol.Report, case: Case, names: list[str], deadline: float) -> dict[str, str]:
    """Report the errors of the variants against float64. Return why some of them cannot or must not run."""
    *qkv, dout = case.inputs()

    @functools.cache
    def references(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        method = case.method(name)
        exact = output_and_gradients(formula(method), [x.double() for x in qkv], dout.double())
        return exact, output_and_gradients(rounded_formula(method), qkv, dout)

    def check(name: str) -> Comparison:
        return compare(output_and_gradients(make_attend(name, case), qkv, dout), *references(formula_of(name)))

    comparisons, problems = build(check, names, deadline)
    rows = [["variant", "output", "dq", "dk", "dv", "worst, of its limit", ""]]
    for name, comparison in comparisons.items():
        errors = [f"{comparison.errors[key]:.1e}" for key in rows[0][1:5]]
        verdict = "passed" if comparison.passed else "refused"
        rows.append([name, *errors, f"{comparison.worst[0]} {comparison.worst[1]:.2f}", verdict])
        if not comparison.passed:
            problems[name] = "refused: wrong numbers, see the gate"
    report.record["gate"] = {name: dict(errors=c.errors, passed=c.passed) for name, c in comparisons.items()}
    report.add(f"## Gate: relative errors at {case.length} tokens", rows, problems)
    return problems


def build(make: Callable[[str], object], names: list[str], deadline: float) -> tuple[dict, dict[str, str]]:
    torch._dynamo.reset()  # drops what was compiled for other lengths
    with torch._dynamo.config.patch(recompile_limit=64):  # the compiler sees one function with many formulas
        return protocol.build_variants({name: functools.partial(make, name) for name in names}, deadline)


def make_passes(attend: Attend, inputs: list[Tensor]) -> dict[str, Callable[[], object]]:
    """Return what is timed of a variant, by PASSES. It is compiled and warm."""
    qkv, dout = [x.detach().requires_grad_() for x in inputs[:3]], inputs[3]
    passes = dict(
        forward=lambda: attend(*qkv),  # keeps what the backward pass needs
        both=lambda: torch.autograd.grad(attend(*qkv), qkv, dout),
    )
    for _ in range(2):
        passes["both"]()
    return passes


def time_length(report: protocol.Report, case: Case, names: list[str], rounds: int, seconds: float):
    """Time both passes of each variant at one length, and report them. Half of the seconds are for compilation."""
    start, inputs = time.perf_counter(), case.inputs()
    built, problems = build(lambda name: make_passes(make_attend(name, case), inputs), names, start + seconds / 2)
    variants = protocol.with_baseline_again(built)
    timers = {
        (name, kind): functools.partial(protocol.time_calls, passes[kind], device=case.device)
        for name, passes in variants.items()
        for kind in PASSES
    }
    times = protocol.measure(timers, rounds, start + seconds - time.perf_counter()) if timers else {}
    rows = [["variant", "forward ms", "both ms", "TFLOP/s", "forward, ratio", "both, ratio"]]
    flops = 3.5 * 4 * case.batch * case.heads * case.length**2 * case.head_dim / 2
    for name in variants:
        forward, both = (statistics.median(times[name, kind]) for kind in PASSES)
        ratios = [protocol.ratio_cell(times[name, kind], times[next(iter(built)), kind]) for kind in PASSES]
        rows.append([name, f"{forward * 1e3:.3f}", f"{both * 1e3:.3f}", f"{flops / both / 1e12:.3g}", *ratios])
    seconds = {name: {kind: times[name, kind] for kind in PASSES} for name in variants}
    report.record["lengths"].append(dict(length=case.length, batch=case.batch, seconds=seconds, problems=problems))
    report.add(f"## Length {case.length}, batch {case.batch}\n\n{protocol.gpu_state(case.device)}", rows, problems)

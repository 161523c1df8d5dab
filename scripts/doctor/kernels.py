"""Every kernel against the formula in float64, forward and backward, in the sizes and the dtype of the preset.

The rule is that of bench attention: an error may be 1.5 times that of the plain formula in the same dtype.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from model import loss
from model.attention import AUTOMATIC, BACKENDS, blocks, cpu
from model.attention.reference import plain_attention
from model.attention.sdpa import chosen_kernel, prefer_fast_sdpa
from runtime.device import compute_dtype
from runtime.processes import start_processes
from scripts.bench.attention import FLOAT32_LIMIT, GATE_LENGTH, compare_errors, output_and_gradients
from scripts.bench.variants import METHODS, VARIANTS, Attend, Case, dense, on_backend, random_inputs
from scripts.doctor.findings import Finding, Settings, one_line

LONGEST = dict(cuda=2**20, cpu=4096)  # tokens: a CPU would take minutes for more
LAST = 64  # queries, of a long sequence, that are held to float64: all the logits would not fit
ROWS = 1024  # tokens of the cross-entropy
DO_NOT_TRAIN = "do not train with it; doctor.json and the log belong into a bug report"


def kernels(settings: Settings) -> Iterator[Finding]:
    """Yield, for each kernel and length, how far its output and gradients are from float64."""
    config = settings.config
    device = start_processes(config.device).device
    prefer_fast_sdpa(device)
    dtype = compute_dtype(config, device)
    shape = dict(heads=config.num_heads, head_dim=config.model_dim // config.num_heads, dtype=dtype, device=device)
    short = min(config.train_length, GATE_LENGTH[device.type])
    cases = [Case(2, length=length, **shape) for length in (short, max(1, short - 37))]  # whole tiles, and not
    lengths = sorted({config.train_length, *config.val_lengths})
    cases += [Case(1, length=length, **shape) for length in lengths if short < length <= LONGEST[device.type]]
    if device.type == "cuda":
        yield find_sdpa(chosen_kernel(device, dtype, shape["head_dim"], short))
    yield check_cross_entropy(config.vocab_size, config.model_dim, dtype, device)
    for backend in [*AUTOMATIC[device.type], "blocks"]:
        method = cases[0].method("plain")
        if reason := BACKENDS[backend].unsupported(method, device, dtype):
            yield Finding(backend, "not run", one_line(reason))
            continue
        for case in cases:
            yield check_backend(backend, case)


# ---- attention -------------------------------------------------------------------------------------------------------


def check_backend(backend: str, case: Case) -> Finding:
    """Return how far a backend is from float64 with each formula that it computes."""
    inputs, results, failures = random_inputs(case), {}, []
    for name, (formula, make) in attentions(backend, case).items():
        try:
            results[name] = check_attention(case, formula, make(), inputs, backend)
        except Exception as error:  # a kernel may fail with anything
            failures.append(f"{name} fails with {type(error).__name__}: {one_line(error, 120)}")
    return judge(f"{backend}, {case.length} tokens", case.dtype, results, failures)


def attentions(backend: str, case: Case) -> dict[str, tuple[str, Callable[[], Attend]]]:
    """Return, by name, the formulas that a backend computes, and what makes the function that does."""
    methods = {formula: case.method(formula) for formula in METHODS}
    names = [name for name in METHODS if not BACKENDS[backend].unsupported(methods[name], case.device, case.dtype)]
    makers = {name: (name, functools.partial(on_backend, case, name, backend)) for name in names}
    if backend == "triton":
        makers["si, learned"] = "si", functools.partial(VARIANTS["triton:si:learned"].make, case)
    return makers


def check_attention(case: Case, formula: str, attend: Attend, inputs: list[Tensor], backend: str) -> dict:
    """Return compare_errors of output and gradients, of all queries or, in a long sequence, of the last."""
    if case.length <= GATE_LENGTH[case.device.type]:
        own = output_and_gradients(attend, inputs)
        exact = output_and_gradients(functools.partial(plain_attention, case.method(formula)), inputs, exact=True)
        rounded = output_and_gradients(dense(case, formula), inputs)
    else:
        own, exact, rounded = last_queries(case, formula, attend, inputs)
    # blocks rounds the scores as well, which the formula does not: for it, the limit of the check before first use.
    least = 4 * torch.finfo(case.dtype).eps if backend == "blocks" else 0
    return compare_errors(own, exact, rounded, max(least, FLOAT32_LIMIT))


def last_queries(case: Case, formula: str, attend: Attend, inputs: list[Tensor]) -> tuple[list[Tensor], ...]:
    """Return output and gradients of the last queries by attend, by plain PyTorch in float64, and by that in the dtype
    of the inputs. The gradient of the output is zero elsewhere, so keys and values get theirs from these queries."""
    q, k, v, do = (x.detach() for x in inputs)
    offset = case.length - LAST
    do = F.pad(do[:, :, offset:], (0, 0, offset, 0))
    o, *gradients = output_and_gradients(attend, [q, k, v, do])
    call = dataclasses.replace(case.call, query_length=LAST, q_offset=offset)
    bands = blocks.prepare(case.method(formula).score_change, call)
    plain = functools.partial(blocks.run, q_offset=offset, prepared=bands)
    last = [q[:, :, offset:], k, v, do[:, :, offset:]]
    exact, rounded = (output_and_gradients(plain, last, exact=exact) for exact in (True, False))
    for tensors in (exact, rounded):
        tensors[1] = F.pad(tensors[1], (0, 0, offset, 0))  # dq, which all other queries must have as zero
    return [o[:, :, offset:], *gradients], exact, rounded


def find_sdpa(chosen: str) -> Finding:
    """Return the finding of which of its kernels PyTorch's fused attention takes (of chosen_kernel)."""
    said = f"PyTorch's own attention runs {chosen}"
    if chosen in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        return Finding("sdpa", "OK", said)
    return Finding("sdpa", "slow", said, "its fast ones take bfloat16 and a head size that is a multiple of 8")


# ---- cross-entropy ---------------------------------------------------------------------------------------------------


def check_cross_entropy(vocab_size: int, model_dim: int, dtype: torch.dtype, device: torch.device) -> Finding:
    """Return how far the losses of tokens, and the gradients of their mean, are from float64."""
    generator = torch.Generator(device).manual_seed(0)
    draw = functools.partial(torch.randn, device=device, generator=generator)
    inputs = draw(ROWS, model_dim).to(dtype), 4 * model_dim**-0.5 * draw(vocab_size, model_dim)  # logits N(0, 16)
    targets = torch.randint(vocab_size, (ROWS,), device=device, generator=generator)

    def ours(x: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            losses = loss.token_losses(x, head, targets)
        return losses, loss.mean_loss(x, head, targets)

    def plain(x: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        logits = x @ head.to(x.dtype).mT
        losses = F.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), targets, reduction="none")
        return losses, losses.mean()

    def run(function: Callable, exact: bool = False) -> list[Tensor]:
        x, head = ((t.double() if exact else t.clone()).requires_grad_() for t in inputs)
        losses, mean = function(x, head)
        return [losses.detach(), *torch.autograd.grad(mean, (x, head))]

    kernel = "C++" if cpu.kernel_problem(device, dtype) is None else "plain PyTorch"
    if device.type == "cuda" and loss.triton_runs(device, dtype, vocab_size):
        kernel = "Triton"
    result = compare_errors(run(ours), run(plain, exact=True), run(plain))
    return judge(f"cross-entropy of {vocab_size}", dtype, {kernel: result}, [])


# ---- verdict ---------------------------------------------------------------------------------------------------------


def judge(check: str, dtype: torch.dtype, results: dict[str, dict], failures: list[str]) -> Finding:
    """Return the finding of these results of compare_errors, by what was run, and of what failed instead."""
    wrong = [name for name, result in results.items() if not result["passed"]]
    failures = failures + ([f"wrong numbers: {', '.join(wrong)}"] if wrong else [])
    said = []
    if results:
        error = max(error for result in results.values() for error in result["errors"])
        worst = max(result["worst"] for result in results.values())
        names, kind = ", ".join(results), str(dtype).removeprefix("torch.")
        said = [f"{names}: relative error at most {error:.1e} in {kind}, {worst:.2f} of what is allowed"]
    said = "; ".join(failures + said)
    return (
        Finding(check, "broken", said, DO_NOT_TRAIN, results) if failures else Finding(check, "OK", said, "", results)
    )

"""Check this machine for a training run: what works, what is wrong and what to do, how long the run takes.

    python -m scripts.doctor                                     the quickstart
    python -m scripts.doctor gpt_162m_4k --price 3.5             the run's hours, and their cost at 3.5 an hour
    python -m scripts.doctor gpt_162m_4k --dtype float32         any field of train_gpt.py

The checks: PyTorch, GPU and driver; compiler; disk; data; attention and cross-entropy against float64; a
training step, from which the hours follow. An error in one check does not stop the others. Exit code: 1 when something
is broken, 2 for a mistake in the command.
"""

import argparse
import dataclasses
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from configs.command_line import read_config
from configs.config import Config
from data.loader import micro_batch_size
from data.shards import open_split
from errors import exit_on_user_error, require
from model.attention import AUTOMATIC, BACKENDS
from model.attention.check import check_backend
from model.attention.sdpa import chosen_kernel, prefer_fast_sdpa
from model.loss import triton_runs
from model.methods import check_options, make_method
from model.methods.base import Method
from runtime.build import build_model, build_optimizers
from runtime.checkpoint import space_needed
from runtime.device import compile_problem, compute_dtype, count_gpus, device_name, matmul_rate, peak_flops
from runtime.flops import training_flops_per_token, validation_share
from runtime.processes import World, start_processes
from runtime.run import checkpoint_bytes
from scripts.bench.protocol import versions
from scripts.bench.trainers import WARM_UP_STEPS, Trainer

METHODS = ("p_rope", "scale_invariant_p_rope", "alibi")  # checked in each backend, beside the run's own method
STEPS = 5  # timed, after the steps that compile
LONGEST_MINUTES = 2  # of all steps here, by the rate of a matrix product
LOW_MFU = 0.30  # of the peak: less is slow, for models that can fill a GPU
LARGE_MODEL = 5e8  # FLOPs of a token, forward and backward: smaller models cannot fill a GPU
BUSY = 0.3  # of the cores


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check. Without advice (what to do), all is well."""

    check: str
    message: str
    advice: str = ""
    problem: str = "slow"  # could be faster; or "missing"; or "broken": training fails, or its numbers are wrong

    @property
    def state(self) -> str:
        return self.problem if self.advice else "ok"


def main(argv: list[str] | None = None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m scripts.doctor", description=__doc__, formatter_class=layout)
    parser.add_argument("preset", help="one of configs/presets.py (quickstart); fields of train_gpt.py may follow")
    parser.add_argument("--price", type=float, help="of an hour of one device, in any currency")
    argv = sys.argv[1:] if argv is None else argv
    args, fields = parser.parse_known_args(argv if argv and not argv[0].startswith("-") else ["quickstart", *argv])
    with exit_on_user_error():
        require(args.price is None or args.price >= 0, f"--price {args.price} is negative. Use a positive price.")
        config = read_config([args.preset, *fields])
        check_options(config.method, config.method_options)
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    print(f"{versions()}, {platform.platform()}", flush=True)
    states = []
    for check in (check_gpus, check_processor, check_compiler, check_space, check_data, check_kernels, check_step):
        for finding in run_check(check, config, device, args.price):
            states.append(finding.state)
            print(f"{finding.state:8} {finding.check}: {finding.message}", flush=True)
            if finding.advice:
                print(f"{'':8} -> {finding.advice}", flush=True)
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    sys.exit(int("broken" in states))


def run_check(check: Callable, config: Config, device: torch.device, price: float | None) -> Iterator[Finding]:
    """Yield what a check yields. An error that it raises is a finding, too."""
    try:
        yield from check(config, device, price)
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        advice = "Lower --micro_batch_tokens." if "memory" in message else "Attach this output to a bug report."
        yield Finding(check.__name__, message[:200], advice, "broken")


# ---- the machine -----------------------------------------------------------------------------------------------------


def check_gpus(config: Config, device: torch.device, price: float | None) -> Iterator[Finding]:
    try:
        count = 0 if config.device == "cpu" else count_gpus()
    except ValueError as error:  # there is a GPU, and torch cannot use it
        problem, _, advice = str(error).partition(": ")
        yield Finding("GPU", problem, advice, "broken")
        return
    for index in range(count):
        yield judge_gpu(torch.cuda.get_device_properties(index), torch.cuda.get_arch_list())
    if count:
        free, total = torch.cuda.mem_get_info()
        advice = "Other programs use this GPU: see nvidia-smi." if free < 0.9 * total else ""
        yield Finding("GPU memory", f"{free / 1e9:.2f} GB of {total / 1e9:.2f} GB are free", advice)
    elif config.device != "cpu":
        problem = "broken" if config.device == "cuda" else "missing"
        yield Finding("GPU", "torch sees none", "Train on the CPU with the presets quickstart and mini.", problem)


def judge_gpu(properties, codes: list[str]) -> Finding:
    """Return the finding about a GPU. codes: of torch.cuda.get_arch_list, such as sm_90 and compute_120.

    Machine code (sm_) runs on GPUs of its major version from its minor version on; PTX (compute_) on all later GPUs.
    """
    major, minor = properties.major, properties.minor
    built = [(code.startswith("compute"), divmod(int(code.rstrip("af").split("_")[1]), 10)) for code in codes]
    advice, problem = "", "slow"
    if not any(v <= (major, minor) and (is_ptx or v[0] == major) for is_ptx, v in built):
        advice, problem = f"torch has code for {', '.join(codes)}: install one built for this GPU.", "broken"
    elif major < 8:
        advice = "Use an A100 or newer: this GPU has no bfloat16 in hardware."
    message = f"{properties.name}, {properties.total_memory / 1e9:.2f} GB, capability {major}.{minor}"
    return Finding("GPU", f"{message}, driver {driver_version()}", advice, problem)


def driver_version() -> str:
    if not shutil.which("nvidia-smi"):
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return " ".join({*subprocess.run(command, capture_output=True, text=True).stdout.split()})


def check_processor(config: Config, device: torch.device, price: float | None) -> Iterator[Finding]:
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    advice = "End other programs: the times below are too long." if load > BUSY * cores else ""
    yield Finding("processor", f"{cores} cores; in the last minute {load:.1f} were busy", advice)


def check_compiler(config: Config, device: torch.device, price: float | None) -> Iterator[Finding]:
    compiler, problem = shutil.which(os.environ.get("CXX", "g++")), compile_problem(device)
    advice = "Runs go on without it. To have it: apt install g++ python3-dev, or name a compiler in CXX."
    message = f"C++ compiler {compiler or 'not found'}, {problem or 'it works'}"
    yield Finding("torch.compile", message, advice if problem else "")


def check_space(config: Config, device: torch.device, price: float | None) -> Iterator[Finding]:
    with torch.device("meta"):  # shapes without memory
        model = build_model(config, torch.float32)
        size = checkpoint_bytes(build_optimizers(config, model, False, World.alone(torch.device("meta"))))
    folder = Path(config.runs_dir) / config.name / "checkpoints"
    existing = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    needed, free = space_needed(folder, size, config.keep), shutil.disk_usage(existing).free
    advice = "" if free > needed else "Make room, choose another --runs_dir, or lower --keep."
    yield Finding("disk", f"{free / 1e9:.2f} GB are free, checkpoints need {needed / 1e9:.2f} GB", advice, "broken")


def check_data(config: Config, device: torch.device, price: float | None) -> Iterator[Finding]:
    needed = config.steps * config.batch_tokens
    for split in ("train", "val"):
        try:
            tokens = len(open_split(config.data_dir, split, config.vocab_size, needed))
            yield Finding(f"data, {split}", f"{tokens:,} tokens in {config.data_dir}; the run trains on {needed:,}")
        except (ValueError, OSError) as error:
            problem = "broken" if Path(config.data_dir).exists() else "missing"
            yield Finding(f"data, {split}", str(error), "A run needs this text.", problem)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def check_kernels(config: Config, device: torch.device, price: float | None) -> Iterator[Finding]:
    """Compare all backends with the formula in float64, forward and backward, in the heads and dtype of the run."""
    dtype, head_dim = compute_dtype(config, device), config.model_dim // config.num_heads
    prefer_fast_sdpa(device)
    if device.type == "cuda":
        kernel = chosen_kernel(device, dtype, head_dim, config.train_length)
        fast = kernel in ("CUDNN_ATTENTION", "FLASH_ATTENTION")
        advice = "" if fast else "Use bfloat16 and a head size that is a multiple of 8."
        yield Finding("PyTorch's attention", kernel, advice)
        runs = triton_runs(device, dtype, config.vocab_size)
        advice = "" if runs else "Plain PyTorch runs instead, and takes more memory."
        yield Finding("cross-entropy", f"Triton's kernel {'passed' if runs else 'did not pass'} its check", advice)
    for name in [*AUTOMATIC[device.type], "blocks"]:
        for method_name in dict.fromkeys([config.method.split(",")[0], *METHODS]):
            method = make_method(method_name, num_heads=config.num_heads, head_dim=head_dim, train_length=1024)
            if method.replacement is None:  # others compute no softmax over logits
                yield judge_backend(name, BACKENDS[name], method.to(device), device, dtype)


def judge_backend(name: str, backend, method: Method, device: torch.device, dtype: torch.dtype) -> Finding:
    """Return whether a backend computes a method right. backend: see model/attention."""
    check = f"{name}, {method.name}"
    if reason := backend.unsupported(method, device, dtype):
        return Finding(check, f"not used: {reason}")
    if problem := check_backend(backend, method, device, dtype):
        return Finding(check, problem, "Do not train with this backend.", "broken")
    return Finding(check, f"output and gradients agree with float64 ({dtype})")


# ---- speed -----------------------------------------------------------------------------------------------------------


def check_step(config: Config, device: torch.device, price: float | None) -> Iterator[Finding]:
    """Time a step of one micro-batch, and compute the hours of the run from it."""
    device = start_processes(device.type).device  # threads and memory as in a run
    sequences = micro_batch_size(config.batch_tokens, config.train_length, config.micro_batch_tokens, 1)
    small = dataclasses.replace(config, batch_tokens=sequences * config.train_length, length_schedule=())
    dtype, flops = compute_dtype(config, device), training_flops_per_token(small)
    rate = matmul_rate(device, dtype, n=8192 if device.type == "cuda" else 1024)
    if flops * small.batch_tokens / rate * (STEPS + WARM_UP_STEPS) > 60 * LONGEST_MINUTES:
        message = f"more than {describe_run(config, rate / flops, price)}, at the rate of a matrix product"
        yield Finding("run", message, "Use a GPU, or the preset quickstart.")
        return
    trainer = Trainer(small, device)
    with trainer.loader:
        seconds = statistics.median(trainer.time_step() for _ in range(STEPS))
    tokens_per_second = small.batch_tokens / seconds
    peak, source = peak_flops(device, dtype) or (rate, "a matrix product")
    used = flops * tokens_per_second / peak
    code = f"{trainer.backends}, compile {trainer.compile_note}"
    speed = f"{tokens_per_second:,.0f} tokens/s, {used:.0%} of {peak:.3g} FLOP/s ({source})"
    memory = f", {trainer.peak_bytes / 1e9:.2f} GB" if trainer.peak_bytes else ""
    slow = device.type == "cuda" and used < LOW_MFU and flops > LARGE_MODEL
    advice = "Try other settings: python -m scripts.bench step PRESET METHOD METHOD/FIELD=VALUE" if slow else ""
    yield Finding("step", f"{code}: {small.batch_tokens:,} tokens in {seconds:.3f} s, {speed}{memory}", advice)
    yield Finding("run", f"{describe_run(config, tokens_per_second, price)} on one {device_name(device)}")


def describe_run(config: Config, tokens_per_second: float, price: float | None) -> str:
    """Return the hours of a run with its validations, and its cost. price: of an hour."""
    training = config.steps * config.batch_tokens / tokens_per_second / 3600
    hours = training * (1 + validation_share(config))
    text = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
    return text + (f", cost {hours * price:,.2f}" if price is not None else "")


if __name__ == "__main__":
    main()

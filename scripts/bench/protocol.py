"""How all benchmarks measure: in turns, as ratios within a round, with the noise and the machine beside them."""

import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from runtime.device import device_name
from runtime.files import replace_file, to_json
from runtime.run_folder import git_commit

SHORTEST_ROUND, LONGEST_CELL = 3, 0.25  # rounds; seconds of one variant in one round

# ---- times -----------------------------------------------------------------------------------------------------------


def time_calls(call, iterations: int, device: torch.device) -> float:
    """Seconds a call."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(iterations):
            call()
        return (time.perf_counter() - began) / iterations
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(iterations):
        call()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / iterations


def schedule(one_call: dict, rounds: int, seconds: float, longest: float = LONGEST_CELL) -> tuple[int, dict]:
    """Rounds, and calls of each cell in one of them, so that all of it takes about so many seconds."""
    rounds = min(rounds, max(SHORTEST_ROUND, int(seconds / sum(one_call.values()))))
    cell = min(longest, seconds / rounds / len(one_call))
    return rounds, {key: max(1, int(cell / call)) for key, call in one_call.items()}


def in_turns(cells: list, round_number: int) -> list:
    """A B C, then C B A: what drifts slowly meets all alike."""
    return cells[:: 1 if round_number % 2 == 0 else -1]


def again(name: str) -> str:
    return f"{name} again"


def paired_ratio(times: list[float], baseline: list[float]) -> tuple[float, float, float]:
    """The median over the rounds of the ratio in one round, and its bootstrap 95 % interval."""
    ratios = np.divide(times, baseline)
    draws = np.random.default_rng(0).choice(ratios, (5000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def ratio_cell(ratio: tuple[float, float, float] | None) -> str:
    return "" if ratio is None else "{:.3f} ({:.3f} to {:.3f})".format(*ratio)


def in_one_line(error: Exception) -> str:
    text = " ".join(f"{error}".split()) or type(error).__name__
    return text if len(text) <= 80 else text[:77] + "..."


# ---- the machine -----------------------------------------------------------------------------------------------------


def matmul_rate(device: torch.device, dtype: torch.dtype, n: int, seconds: float) -> float:
    """FLOP/s of the product of two random (n, n) matrices: the median over so many seconds. (Products of zeros, which
    cost less power, run faster.)"""
    generator = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, n, n, device=device, dtype=dtype, generator=generator)
    time_calls(lambda: a @ b, 3, device)
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        times.append(time_calls(lambda: a @ b, 10, device))
    return 2 * n**3 / statistics.median(times)


def gpu_state(device: torch.device) -> dict[str, str] | None:
    """What nvidia-smi says now, in MHz, W and degrees Celsius; None without it."""
    if device.type != "cuda":
        return None
    fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
    gpu = "GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return dict(zip(fields, (value.strip() for value in line.split(","))))


def gpu_range(states: list[dict[str, str] | None]) -> str:
    """Lowest and highest clock and power after a round."""
    states = [state for state in states if state]
    if not states:
        return ""
    between = lambda field: " to ".join(dict.fromkeys([f(s[field] for s in states) for f in (min, max)]))
    reasons = ", ".join(sorted({state["clocks_throttle_reasons.active"] for state in states}))
    return f"; SM clock {between('clocks.sm')} MHz, {between('power.draw')} W, throttle reasons {reasons}"


def versions(device: torch.device) -> str:
    try:
        import triton

        with_triton = f", triton {triton.__version__}"
    except ImportError:
        with_triton = ""
    cuda = f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if device.type == "cuda" else ""
    return f"torch {torch.__version__}{with_triton}{cuda}, Python {platform.python_version()}"


# ---- results ---------------------------------------------------------------------------------------------------------


class Report:
    """Markdown on stdout as it comes and, with a folder, there in FOLDER/DEVICE_<name>.md, with `record` in .json."""

    def __init__(self, folder: Path | None, name: str, device: torch.device, **record):
        gpu_or_cpu = device_name(device).removeprefix("NVIDIA ") if device.type == "cuda" else "cpu"
        self.path = folder and folder / (re.sub(r"\W+", "_", gpu_or_cpu.lower()) + f"_{name}")
        self.text = ""
        self.record = dict(
            command=shlex.join(["python", "-m", "scripts.bench", *sys.argv[1:]]),
            device=device_name(device),
            versions=versions(device),
            threads=torch.get_num_threads(),
            commit=git_commit(Path(__file__).parent) or "unknown",
            gpu_at_start=gpu_state(device),
            **record,
        )

    def add(self, text: str):
        self.text += text + "\n\n"
        if self.path:
            replace_file(self.path.with_suffix(".md"), lambda file: file.write(self.text.rstrip().encode() + b"\n"))
            record = to_json(self.record, indent=1).encode()
            replace_file(self.path.with_suffix(".json"), lambda file: file.write(record))
        print(text + "\n", flush=True)

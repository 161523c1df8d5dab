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

from files import replace_file, to_json
from runtime.device import device_name
from runtime.run_folder import git_commit

SHORTEST_ROUND, LONGEST_CELL = 3, 0.25  # rounds; seconds of one variant in one round

# ---- times -----------------------------------------------------------------------------------------------------------


def time_calls(call, iterations: int, device: torch.device) -> float:
    """Return the seconds that a call takes, on a GPU by its own clock (CUDA events)."""
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
    """Return the number of rounds, and of calls of each cell in a round, so that all takes about so many seconds.

    one_call: the seconds that a call of each cell takes. longest: seconds of one cell in one round, at most.
    """
    rounds = min(rounds, max(SHORTEST_ROUND, int(seconds / sum(one_call.values()))))
    cell = min(longest, seconds / rounds / len(one_call))
    return rounds, {key: max(1, int(cell / call)) for key, call in one_call.items()}


def in_turns(cells: list, round_number: int) -> list:
    """Return the cells in their order (A B C) in even rounds and backwards (C B A) in odd ones.

    A machine that slowly gets hotter or busier then costs all of them alike.
    """
    return cells if round_number % 2 == 0 else cells[::-1]


def again(name: str) -> str:
    """Return the name of the row of the A/A comparison: the baseline, measured once more."""
    return f"{name} again"


def paired_ratio(times: list[float], baseline: list[float]) -> tuple[float, float, float]:
    """Return the median over the rounds of the ratio in one round, and its bootstrap 95 % interval."""
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
    """Return the FLOP/s of the product of two random (n, n) matrices, the median over so many seconds.

    Products of zeros would not do: they cost less power and run faster.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, n, n, device=device, dtype=dtype, generator=generator)
    time_calls(lambda: a @ b, 3, device)
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        times.append(time_calls(lambda: a @ b, 10, device))
    return 2 * n**3 / statistics.median(times)


def gpu_state(device: torch.device) -> dict[str, str] | None:
    """Return what nvidia-smi says now, in MHz, W and degrees Celsius; None on a CPU, and without nvidia-smi."""
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
    """Describe the lowest and highest clock and power after a round; "" where there are none."""
    states = [state for state in states if state]
    if not states:
        return ""

    def between(field: str) -> str:
        values = [state[field] for state in states]
        return " to ".join(dict.fromkeys([min(values), max(values)]))

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
    """A page of Markdown, printed part by part; with a folder also FOLDER/DEVICE_<name>.md, and `record` in .json."""

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

    @property
    def provenance(self) -> str:
        r = self.record
        return f"    {r['command']}\n\n{r['versions']}; {r['threads']} threads; commit {r['commit']}."

    def add(self, text: str):
        self.text += text + "\n\n"
        if self.path:
            replace_file(self.path.with_suffix(".md"), lambda file: file.write(self.text.rstrip().encode() + b"\n"))
            record = to_json(self.record, indent=1).encode()
            replace_file(self.path.with_suffix(".json"), lambda file: file.write(record))
        print(text + "\n", flush=True)

"""The protocol of all benchmarks.

Variants take turns in rounds, in the order A B C in one round and C B A in the next, so that a machine that slowly gets
hotter or busier costs all of them alike. Times are compared within a round. The baseline runs a second time in each
round (the A/A row): its ratio to itself shows the noise.
"""

import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from files import replace_text, to_json
from runtime.device import device_name
from runtime.run_folder import git_commit
from scripts.shared.tables import markdown_table

FEWEST_ROUNDS = 3
LIMIT_SECONDS = 1.5  # most seconds of one variant in one round
HOW_TO_READ = """\
- Times are medians over the rounds. Ratios are within a round: median and bootstrap 95 % interval; below 1 is faster.
  The row "again" is the baseline a second time (A/A).
"""


def time_calls(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the seconds of one call, the mean over `count` calls. On a GPU, its own clock counts (CUDA events)."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - began) / count
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(count):
        call()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / count


def schedule(call_seconds: dict, rounds: int, seconds: float) -> tuple[int, dict]:
    """Return the number of rounds, and the calls of each variant in a round, that fit into `seconds`."""
    rounds = min(rounds, max(FEWEST_ROUNDS, int(seconds / sum(call_seconds.values()))))
    share = min(LIMIT_SECONDS, seconds / rounds / len(call_seconds))
    return rounds, {name: max(1, int(share / call)) for name, call in call_seconds.items()}


def measure(timers: dict[object, Callable[[int], float]], rounds: int, seconds: float) -> dict[object, list[float]]:
    """Return the seconds of one call of each variant in each round. timers: see time_calls, without call and device."""
    call_seconds = {}
    for name, timer in timers.items():
        began = time.perf_counter()
        timer(1)
        call_seconds[name] = time.perf_counter() - began
    rounds, counts = schedule(call_seconds, rounds, seconds)
    times = {name: [] for name in timers}
    for number in range(rounds):
        for name in list(timers)[:: -1 if number % 2 else 1]:
            times[name].append(timers[name](counts[name]))
    return times


def with_baseline_again(rows: dict) -> dict:
    """Return the rows, whose first is the baseline, and the baseline a second time (A/A)."""
    return rows | {f"{name} again": row for name, row in list(rows.items())[:1]}


def build_variants(makers: dict[str, Callable], deadline: float) -> tuple[dict, dict[str, str]]:
    """Return the results of `makers` by variant, and the problems of variants that fail or come after the deadline."""
    made, problems = {}, {}
    for name, make in makers.items():
        try:
            if time.perf_counter() > deadline:
                raise TimeoutError("no time is left; use a larger --minutes")
            made[name] = make()
        except Exception as error:  # one variant that fails must not stop the others
            message = " ".join(str(error).split()) or type(error).__name__
            problems[name] = f"not run: {message[:100]}"
    return made, problems


def paired_ratio(times: list[float], baseline: list[float]) -> tuple[float, float, float]:
    """Return the median over rounds of the ratio within a round, and its bootstrap 95 % interval."""
    ratios = np.divide(times, baseline)
    draws = np.random.default_rng(0).choice(ratios, (5000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def ratio_cell(times: list[float], baseline: list[float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*paired_ratio(times, baseline))


def versions() -> str:
    packages = [f"{name} {version(name)}" for name in ("torch", "triton") if find_spec(name)]
    cuda = [f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"] if torch.cuda.is_available() else []
    return ", ".join([*packages, *cuda, f"Python {platform.python_version()}"])


def gpu_state(device: torch.device) -> str:
    """Return clock, power, temperature and throttle reasons of the GPU; "" on a CPU or without nvidia-smi."""
    if device.type != "cuda" or not shutil.which("nvidia-smi"):
        return ""
    gpu = "GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    fields = "clocks.sm,power.draw,temperature.gpu,clocks_throttle_reasons.active"
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


class Report:
    """A Markdown page, printed part by part, and a record of all numbers. In a folder: DEVICE_NAME.md and .json."""

    def __init__(self, folder: Path | None, name: str, device: torch.device, title: str):
        short = device_name(device).removeprefix("NVIDIA ") if device.type == "cuda" else "cpu"
        self.path = folder and folder / (re.sub(r"\W+", "_", short.lower()) + f"_{name}")
        self.record = dict(
            command=shlex.join(["python", "-m", "scripts.bench", *sys.argv[1:]]),
            device=device_name(device),
            versions=versions(),
            commit=git_commit(Path(__file__).parent) or "unknown",
        )
        self.text = f"# {title}\n\n"
        self.add("{device}; {versions}; commit {commit}.\n\n    {command}".format(**self.record))

    def add(self, text: str, rows: list[list[str]] | None = None, problems: dict[str, str] | None = None):
        """Add a text, then a table, then the variants that are missing in it and why."""
        text += f"\n\n{markdown_table(rows)}" if rows else ""
        text += "".join(f"\n\n- `{name}` {problem}" for name, problem in (problems or {}).items())
        print(text + "\n", flush=True)
        self.text += text + "\n\n"
        if self.path:
            replace_text(self.path.with_suffix(".md"), self.text.rstrip() + "\n")
            replace_text(self.path.with_suffix(".json"), to_json(self.record, indent=1))

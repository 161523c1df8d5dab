"""Measures variants side by side: the protocol of all benchmarks.

Variants take turns in rounds, in the order A B C in one round and C B A in the next. So a machine that slowly gets
hotter or busier slows all variants alike. Times are compared within a round. The first variant is the baseline. It runs
twice in each round, and the ratio of its two times (the A/A row) shows the noise.
"""

import platform
import re
import shlex
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

ROUND_SECONDS = 0.5  # target for the time of a variant in a round


def time_calls(call: Callable, count: int, device: torch.device) -> float:
    """Return the mean seconds of a call over `count` calls."""
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    wait()
    began = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return (time.perf_counter() - began) / count


def measure(timers: dict, rounds: int) -> dict:
    """Return the mean seconds of a call by variant, one number a round. The first variant is measured twice.

    timers: functions that take a number of calls and return the mean seconds of a call.
    """
    baseline = next(iter(timers))
    timers = timers | {f"{baseline} again": timers[baseline]}
    counts = {name: max(1, int(ROUND_SECONDS / timer(1))) for name, timer in timers.items()}
    times = {name: [] for name in timers}
    for round_number in range(rounds):
        for name in list(timers)[:: -1 if round_number % 2 else 1]:
            times[name].append(timers[name](counts[name]))
    return times


def build_variants(makers: dict) -> tuple[dict, dict]:
    """Return the results of `makers` by variant, and the problems of the variants that fail."""
    results, problems = {}, {}
    for name, make in makers.items():
        try:
            results[name] = make()
        except Exception as error:  # a variant that fails must not stop the others
            problems[name] = f"not run: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return results, problems


def ratio_cell(times: list[float], baseline: list[float]) -> str:
    """Return the ratio to the baseline, as median over rounds with its bootstrap 95 % interval."""
    ratios = np.divide(times, baseline)
    draws = np.random.default_rng(0).choice(ratios, (5000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return f"{np.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def describe_machine(device: torch.device) -> str:
    """Return the device and the versions of packages."""
    parts = [device_name(device), *(f"{name} {version(name)}" for name in ("torch", "triton") if find_spec(name))]
    if device.type == "cuda":
        parts.append(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    return ", ".join([*parts, f"Python {platform.python_version()}"])


class Report:
    """Prints a page part by part, and records all numbers. With a folder, writes <device>_<name>.md and .json there."""

    def __init__(self, folder: Path | None, name: str, device: torch.device):
        short_device = device_name(device).removeprefix("NVIDIA ") if device.type == "cuda" else "cpu"
        self.path = folder and folder / (re.sub(r"\W+", "_", short_device.lower()) + f"_{name}")
        command = shlex.join(["python", "-m", "scripts.bench", *sys.argv[1:]])
        commit = git_commit(Path(__file__).parent) or "unknown"
        self.text, self.record = "", {"command": command, "commit": commit, "machine": describe_machine(device)}
        self.add(f"    {command}\n\nCommit {commit}. {self.record['machine']}. docs/kernels.md explains the tables.")

    def add(
        self,
        text: str,
        rows: list | None = None,
        problems: dict | None = None,
    ):
        """Add a text, then a table, then a list. problems: a problem or another result by variant."""
        text += f"\n\n{markdown_table(rows)}" if rows else ""
        text += "".join(f"\n\n- `{name}` {problem}" for name, problem in (problems or {}).items())
        print(text + "\n", flush=True)
        self.text += text + "\n\n"
        if self.path:
            replace_text(self.path.with_suffix(".md"), self.text.rstrip() + "\n")
            replace_text(self.path.with_suffix(".json"), to_json(self.record, indent=1))

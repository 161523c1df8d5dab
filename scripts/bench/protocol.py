"""How all benchmarks measure: in turns, as ratios within a round, with the noise and the machine beside them."""

import dataclasses
import math
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from files import replace_file, to_json
from runtime.device import device_name
from runtime.run_folder import git_commit
from scripts.shared.tables import markdown_table

SHORTEST_ROUND, LONGEST_CELL = 3, 0.25  # rounds; seconds of one variant in one round

# ---- times -----------------------------------------------------------------------------------------------------------


def time_calls(call, iterations: int, device: torch.device) -> float:
    """Return the seconds that a call takes: on a GPU by its own clock (CUDA events)."""
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


def in_turns(cells: Iterable, round_number: int) -> list:
    """Return the cells in their order (A B C) in even rounds and backwards (C B A) in odd ones.

    A machine that slowly gets hotter or busier then costs all of them alike.
    """
    return list(cells)[:: -1 if round_number % 2 else 1]


@dataclasses.dataclass(frozen=True)
class Measurement:
    seconds: dict  # of a call of each cell, in each round
    calls: dict  # of each cell in a round
    gpu: list  # the state of the GPU after each round


def measure(
    cells: dict, rounds: int, seconds: float, device: torch.device, longest: float = LONGEST_CELL
) -> Measurement:
    """Time all cells in turns, in at most so many rounds, with as many calls in each as the seconds allow.

    cells: for each a function that takes a number of calls, makes them and returns the seconds of one.
    """
    if not cells:
        return Measurement({}, {}, [])
    one_call = {}
    for cell, time_cell in cells.items():
        began = time.perf_counter()
        time_cell(1)
        one_call[cell] = time.perf_counter() - began  # with what the cell prepares and does not count
    rounds, calls = schedule(one_call, rounds, seconds, longest)
    result = Measurement({cell: [] for cell in cells}, calls, [])
    for round_number in range(rounds):
        for cell in in_turns(cells, round_number):
            result.seconds[cell].append(cells[cell](calls[cell]))
        result.gpu.append(gpu_state(device))
    return result


def build_variants(makers: dict, deadline: float) -> tuple[dict, dict[str, str]]:
    """Return what the functions `makers` make, by name; and of those that fail, or have to wait until after the
    deadline (by time.perf_counter), why they are not run."""
    made, problems = {}, {}
    for name, make in makers.items():
        try:
            if time.perf_counter() > deadline:
                raise TimeoutError("out of time (--minutes)")
            made[name] = make()
        except Exception as error:  # whatever stops a variant must not stop the others
            text = " ".join(f"{error}".split()) or type(error).__name__
            problems[name] = "not run: " + (text if len(text) <= 80 else text[:77] + "...")
    return made, problems


def with_baseline_again(rows: dict) -> dict:
    """Return the rows by name, the first of which is the baseline, and the baseline once more (A/A)."""
    return rows | {f"{name} again": row for name, row in list(rows.items())[:1]}


def paired_ratio(times: list[float], baseline: list[float]) -> tuple[float, float, float]:
    """Return the median over the rounds of the ratio in one round, and its bootstrap 95 % interval."""
    ratios = np.divide(times, baseline)
    draws = np.random.default_rng(0).choice(ratios, (5000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def ratio_cell(ratio: tuple[float, float, float] | None) -> str:
    return "" if ratio is None else "{:.3f} ({:.3f} to {:.3f})".format(*ratio)


def results_table(rows: list[list[str]], problems: dict[str, str]) -> str:
    """Return the rows as a table, with a row below for each variant that has a problem instead of results."""
    empty = [""] * (len(rows[0]) - 1)
    return markdown_table(rows + [[f"{name}: {problem}", *empty] for name, problem in problems.items()])


# ---- the machine -----------------------------------------------------------------------------------------------------


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
        values = sorted({state[field] for state in states}, key=as_number)
        return " to ".join(dict.fromkeys([values[0], values[-1]]))

    reasons = ", ".join(sorted({state["clocks_throttle_reasons.active"] for state in states}))
    return f"; SM clock {between('clocks.sm')} MHz, {between('power.draw')} W, throttle reasons {reasons}"


def as_number(text: str) -> float:
    """Return the number; infinity for nvidia-smi's "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return math.inf


def versions(device: torch.device) -> str:
    triton = f", triton {import_module('triton').__version__}" if find_spec("triton") else ""
    cuda = f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if device.type == "cuda" else ""
    return f"torch {torch.__version__}{triton}{cuda}, Python {platform.python_version()}"


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
        return "    {command}\n\n{versions}; {threads} threads; commit {commit}.".format(**self.record)

    def add(self, text: str):
        self.text += text + "\n\n"
        if self.path:
            texts = {".md": self.text.rstrip() + "\n", ".json": to_json(self.record, indent=1)}
            for suffix, content in texts.items():
                replace_file(self.path.with_suffix(suffix), lambda file: file.write(content.encode()))
        print(text + "\n", flush=True)

"""Training on this machine: ten steps of each attention method, and a run that is killed and resumed."""

import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from configs.config import Config
from data.loader import micro_batch_size
from model.attention.sdpa import prefer_fast_sdpa
from model.methods import METHODS
from runtime.checkpoint import latest_checkpoint
from runtime.device import compute_dtype
from runtime.metrics import read_metrics
from runtime.processes import start_processes
from scripts.bench.peers import ROOT, our_script, with_data
from scripts.bench.protocol import build_variants
from scripts.bench.step import LIMITS, gate
from scripts.bench.trainers import StepBench, StepVariant
from scripts.doctor.findings import Finding, Settings, one_line

STEPS = 10  # of each method
LONGEST_BLOCKS = 4096  # tokens: attention in blocks takes minutes for longer sequences
RESUME_STEPS, SAVED_AT = 24, 12  # of the run that is killed, and where its first checkpoint is
SLOW_BACKENDS = ("blocks", "flex")  # the last resorts
DO_NOT_TRAIN = "do not train with it; doctor.json and the log belong into a bug report"


# ---- methods ---------------------------------------------------------------------------------------------------------


def methods(settings: Settings) -> Iterator[Finding]:
    """Yield, for each method, whether ten steps lower the loss and agree with the same ten in plain PyTorch.

    Without torch.compile, which would take a minute a method; a step has one micro-batch.
    """
    device = start_processes(settings.config.device).device
    prefer_fast_sdpa(device)
    config = dataclasses.replace(one_micro_batch(settings.config), compile="off")
    _, config, _ = with_data([], config, Path(settings.folder))
    bench = StepBench(config, device)
    for name in dict.fromkeys([config.method, *METHODS]):
        yield train_method(bench, name)


def one_micro_batch(config: Config) -> Config:
    """Return the config with as few tokens a step as a device computes at once."""
    sequences = micro_batch_size(config.batch_tokens, config.train_length, config.micro_batch_tokens, 1)
    return dataclasses.replace(config, batch_tokens=sequences * config.train_length)


def train_method(bench: StepBench, method: str) -> Finding:
    """Return the finding of ten steps of a method, with the backend that it gets here and in blocks."""
    variants = {method: StepVariant(method), "blocks": StepVariant(method, "blocks")}
    makers = {name: functools.partial(bench.build, variant) for name, variant in variants.items()}
    blocks = dict(blocks=makers.pop("blocks"))
    trainers, problems = build_variants(makers, deadline=math.inf)
    if method in trainers and trainers[method].backend != "blocks" and bench.config.train_length <= LONGEST_BLOCKS:
        trainers |= build_variants(blocks, deadline=math.inf)[0]
    try:
        checked = gate(bench, trainers, variants, STEPS)
        plan = trainers[method].plan[0] if method in trainers else None
    finally:
        for trainer in trainers.values():
            trainer.loader.close()
    return judge_method(method, plan and (plan.backend, plan.why), checked, problems, LIMITS["losses"][bench.dtype])


def judge_method(
    method: str, how: tuple[str, str] | None, checked: dict[str, dict], problems: dict[str, str], limit: float
) -> Finding:
    """Return the finding of what gate found. how: the backend of the method and why; problems: why a variant failed."""
    if method in problems:
        advice = "lower --micro_batch_tokens" if "memory" in problems[method] else DO_NOT_TRAIN
        return Finding(method, "broken", problems[method], advice)
    (backend, why), losses = how, checked[method]["loss"]
    said = f"{backend}, loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
    if not losses[-1] < losses[0]:  # nor NaN
        return Finding(method, "broken", f"{said}: it does not fall", DO_NOT_TRAIN, checked)
    if other := checked.get("blocks"):
        said += f", at most {other['losses']:.1e} nats (of {limit:g}) from plain PyTorch's"
        if not other["passed"]:
            said += f", gradients {other['gradients']:.1e}"
            return Finding(method, "broken", f"{said}: they differ", DO_NOT_TRAIN, checked)
    if backend in SLOW_BACKENDS:
        return Finding(method, "slow", said, f"nothing faster runs: {one_line(why)}", checked)
    return Finding(method, "OK", said, numbers=checked)


# ---- resume ----------------------------------------------------------------------------------------------------------


def resume(settings: Settings) -> Iterator[Finding]:
    """Yield whether a run that is killed with SIGKILL goes on from its checkpoint as if nothing had been."""
    device = start_processes(settings.config.device).device
    limit = 0.0 if device.type == "cpu" else LIMITS["losses"][compute_dtype(settings.config, device)]
    config, folder = one_micro_batch(settings.config), Path(settings.folder)
    arguments = [*settings.arguments, "--batch_tokens", str(config.batch_tokens), "--compile", "off"]
    arguments, config, _ = with_data(arguments, config, folder)
    script = our_script(arguments, config, RESUME_STEPS, device=device.type)
    losses, saved_at = [], None
    for kill in (False, True):
        runs = folder / ("killed" if kill else "whole")
        words = [*script.command(runs), "--save_every", SAVED_AT, "--keep", 1, "--resume", "auto"]
        command = [sys.executable, *map(str, words)]
        began = time.monotonic()
        if kill:
            saved_at = kill_once_saved(command, runs / "run")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(done.stdout, done.stderr, flush=True)
        if done.returncode:
            said = f"{'resumed, ' if kill else ''}it ended with {done.returncode}: {last_line(done.stderr)}"
            yield Finding("train_gpt.py", "broken", said, "see resume.log")
            return
        losses.append(read_losses(runs / "run"))
        if not kill:
            said = f"{RESUME_STEPS} steps and a validation in {time.monotonic() - began:.0f} s, start included"
            yield Finding("train_gpt.py", "OK", said)
    yield judge_resume(saved_at, *losses, limit)


def kill_once_saved(command: list[str], run: Path) -> int | None:
    """Start a run and kill it once a checkpoint is there. Return the step of its last; None if it ended before."""
    with subprocess.Popen(command, cwd=ROOT, stdout=sys.stdout, stderr=sys.stderr) as process:
        while process.poll() is None and latest_checkpoint(run / "checkpoints") is None:
            time.sleep(0.005)
        if process.poll() is not None:
            return None
        os.kill(process.pid, signal.SIGKILL)
    return int(latest_checkpoint(run / "checkpoints").stem.removeprefix("step_"))


def read_losses(run: Path) -> list[float]:
    """Return the training loss of each step, and the last validation's losses."""
    losses = [record["train_loss"] for record in read_metrics(run / "metrics.jsonl") if "train_loss" in record]
    return losses + list(json.loads((run / "summary.json").read_text())["val_loss"].values())


def judge_resume(saved_at: int | None, whole: list[float], resumed: list[float], limit: float) -> Finding:
    """Return the finding of two runs' losses, one of which was killed after the checkpoint of step saved_at."""
    if saved_at is None or saved_at >= RESUME_STEPS:
        return Finding(
            "kill and resume", "not run", "the run ended before it was killed", "run it again: --only resume"
        )
    said = f"killed after step {saved_at}, resumed, {len(resumed) - 1} of {len(whole) - 1} steps recorded"
    differences = [abs(a - b) for a, b in zip(whole, resumed)]
    said += f"; losses at most {max(differences):.1e} from those of a run that was not ({limit:g} allowed)"
    if len(whole) == len(resumed) and all(difference <= limit for difference in differences):  # not with NaN
        return Finding("kill and resume", "OK", said)
    return Finding(
        "kill and resume", "broken", said, "the run goes on as another one: attach resume.log to a bug report"
    )


def last_line(text: str) -> str:
    return one_line(next((line for line in reversed(text.splitlines()) if line.strip()), "without a word"))

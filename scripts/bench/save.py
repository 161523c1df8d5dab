"""Measure what checkpoints cost: saved on this machine at their full size, against the steps between two of them.

    python -m scripts.bench save                                   mini and the paper's presets
    python -m scripts.bench save gpt_304m_4k --folder /scratch

What is saved has the shapes of the preset's parameters and optimizer state, and random numbers in it. The seconds of a
step are those of `python -m scripts.bench project` for so many GPUs, which are computed.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from configs.config import Config
from configs.presets import preset
from errors import require
from runtime.build import checkpoint_bytes
from runtime.checkpoint import BackgroundSaver, load_checkpoint
from runtime.device import PEAK_BF16_FLOPS
from runtime.flops import training_flops_per_token
from runtime.replicas import checksum
from runtime.run_folder import check_space
from scripts.bench.project import build_optimizers_of
from scripts.bench.protocol import Report
from scripts.shared.tables import markdown_table

HOW_TO_READ = """\
copy: of all that is saved, in the machine's memory, for which the run waits (a GPU's comes at some 10 GB/s); save: from
then on until the disk has it, with its checksum, in a thread while the run goes on, and the seconds of CPU of both;
load: with the checksum compared, the file still in the machine's memory; compare: the checksum of all parameters, which
is made before each checkpoint and at each validation. Medians of {rounds}, {low} to {high} of the median in all. The
machine had a load of {load:.1f} on {cores} cores, which all but the seconds of CPU feel. Step: computed, {gpus} {gpu}
at {mfu:.0%} of their peak. Share: of the time of save_every steps that a copy and a comparison here would take, all
GPUs waiting for them; and if they waited for the disk, too. Not in it: what the GPUs send each other, at some 100 GB/s,
and what the thread takes from a run whose processes need all cores."""


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("presets", nargs="*", default=["mini", "gpt_162m_4k", "gpt_304m_4k"], metavar="PRESET")
    parser.add_argument("--folder", type=Path, default=None, help="the disk to measure (the one of temporary files)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="saves of each (3)")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="that train (8)")
    parser.add_argument("--gpu", default="H200", choices=PEAK_BF16_FLOPS, metavar="NAME", help="whose peak (H200)")
    parser.add_argument("--mfu", type=float, default=0.45, help="assumed share of that peak (0.45)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/cpu_save.md and .json")


def run(args: argparse.Namespace) -> int:
    """Report the table and return 0. Raise ValueError or OSError for what cannot be."""
    require(args.rounds > 0 and args.gpus > 0 and 0 < args.mfu <= 1, "rounds and gpus must be positive, mfu in (0, 1]")
    configs = {name: preset(name) for name in args.presets}
    report = Report(args.out, "save", torch.device("cpu"), rows=[])
    head = ["preset", "GB", "copy s", "save s", "CPU s", "load s", "compare s", "step s", "steps between"]
    head += ["share", "if they waited"]
    table, spread = [head], []
    for name, config in configs.items():
        seconds = measure(config, args.folder, args.rounds)
        medians = {key: sorted(values)[len(values) // 2] for key, values in seconds.items()}
        spread += [value / medians[key] for key, values in seconds.items() for value in values]
        step = config.batch_tokens * training_flops_per_token(config) / PEAK_BF16_FLOPS[args.gpu] / args.mfu / args.gpus
        every, between = config.save_every or "only at the end", config.save_every * step
        cost = medians["copy"] + medians["compare"]
        shares = [waited / between if between else 0 for waited in (cost, cost + medians["save"])]
        row = dict(preset=name, bytes=size_of(config), step=step, share=shares[0], share_waiting=shares[1])
        report.record["rows"].append(row | seconds)
        times = [f"{medians[key]:.3f}" for key in ("copy", "save", "cpu", "load", "compare")]
        size = f"{size_of(config) / 1e9:.3f}"
        table.append([name, size, *times, f"{step:.4f}", str(every), *(f"{share:.2%}" for share in shares)])
    words = HOW_TO_READ.format(
        low=f"{min(spread):.2f}",
        high=f"{max(spread):.2f} times",
        load=os.getloadavg()[1],
        cores=len(os.sched_getaffinity(0)),
        **vars(args),
    )
    report.add(f"# What a checkpoint costs\n\n{report.provenance}\n\n{words}")
    report.add(markdown_table(table))
    return 0


def size_of(config: Config) -> int:
    """Return the bytes of parameters and optimizer state."""
    return checkpoint_bytes(build_optimizers_of(config, 1))


def measure(config: Config, folder: Path | None, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each copy, save, load and comparison."""
    optimizers = build_optimizers_of(config, 1)
    parameters, state = [], {}
    for name, group in optimizers.groups.items():
        shapes = [(p.shape, p.dtype) for p in group.params]
        parameters += [torch.rand(shape).to(dtype) for shape, dtype in shapes]
        moments = 1 if name == "matrices" else 2
        state[name] = [torch.rand(shape).to(dtype) for shape, dtype in shapes for _ in range(moments)]
    seconds, saver = dict(copy=[], save=[], cpu=[], load=[], compare=[]), BackgroundSaver()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        check_space(Path(place), 2 * size_of(config))
        for step in range(rounds):
            began, cpu = time.perf_counter(), time.process_time()
            saver.save(Path(place), step, dict(model=parameters, optimizers=state), keep=1)
            copied = time.perf_counter()
            path = saver.finish()
            saved = time.perf_counter()
            seconds["cpu"].append(time.process_time() - cpu)
            load_checkpoint(path)
            loaded = time.perf_counter()
            for parameter in parameters:
                checksum(parameter).item()
            for key, start, end in (("copy", began, copied), ("save", copied, saved), ("load", saved, loaded)):
                seconds[key].append(end - start)
            seconds["compare"].append(time.perf_counter() - loaded)
    return seconds

"""Project what runs would take on other numbers of GPUs: hours, communication, validation; computed, not measured.

    python -m scripts.bench project                                         the paper's presets on 1, 8, 64 and 512 GPUs
    python -m scripts.bench project gpt_162m_64k --gpus 8 16 --mfu 0.5
    python -m scripts.bench project --results results/speed/h200_step_gpt_162m_4k_4096.json      from measured steps

The bytes are those of the code that trains: its optimizers are built for so many processes, without their memory.
"""

import argparse
import dataclasses
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from configs.config import Config
from configs.presets import preset
from errors import require
from model.context import context_bytes
from optim.sharded import MOST_SHARES, Optimizers
from runtime.build import build_model, build_optimizers
from runtime.device import PEAK_BF16_FLOPS
from runtime.flops import training_flops_per_token, validation_share
from runtime.processes import World
from scripts.bench.protocol import Report
from scripts.shared.tables import markdown_table

PAPER = ["gpt_162m_4k", "gpt_162m_16k", "gpt_162m_64k", "gpt_304m_4k"]
PAPER_HOURS = {  # its appendix on compute, "roughly"
    "gpt_162m_4k": "4 to 8 of an A100",
    "gpt_162m_16k": "8 to 16 of an A100",
    "gpt_162m_64k": "22 to 44 of an A100",
    "gpt_304m_4k": "36 of a node of 4 H100",
}
NODE = MOST_SHARES  # GPUs
USEFUL = 0.9  # efficiency
HOW_TO_READ = """\
Computed, not measured. Compute: model FLOPs (causal count) of a step over the rate of all GPUs, {rate}.
Small shares of a batch run at a lower rate than large ones: below some 64k tokens a GPU the times are too good.

- batch: tokens a step; where a number of GPUs cannot share the preset's batch, one sequence each, marked *: that is
  other mathematics than the paper's. context: GPUs that share each sequence (Ulysses), no more than are needed.
- reduce-scatter, all-reduce, all-gather: MB that a rank hands to each in a step, from the optimizers themselves
  (float32, padding included). all-to-all: MB of context parallelism in {itemsize} bytes a number.
- communication: of these bytes, at {nvlink:g} GB/s a GPU within a node of {node} and, for the all-reduce, as a ring
  at {network:g} GB/s a GPU between nodes, and {latency:g} us more a collective; nothing overlapped. Efficiency: compute
  of compute and communication.
- hours: of all the run's tokens, without validation. Below, with it too, in the profiles `paper` and `fast`
  (configs/validation.py), at the same rate; validation share: of the FLOPs of training."""
CAVEATS = """\
The paper's hours stand beside ours for orientation only: its GPUs are others (A100: {slower:.2f} times less peak than
{gpu}), its hours are "roughly", and whether they include validation is not said. The lower is without FlexAttention."""


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("presets", nargs="*", default=PAPER, metavar="PRESET", help="default: the paper's")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64, 512], metavar="N")
    parser.add_argument("--gpu", default="H200", choices=PEAK_BF16_FLOPS, metavar="NAME", help="whose peak (H200)")
    parser.add_argument("--mfu", type=float, default=0.45, help="assumed share of that peak (0.45)")
    parser.add_argument("--results", type=Path, nargs="+", default=[], metavar="JSON", help="of bench step: its rates")
    parser.add_argument("--variant", default="scale_invariant_p_rope", help="whose rate to take from --results")
    parser.add_argument("--nvlink", type=float, default=370, help="GB/s of a GPU within a node (370)")
    parser.add_argument("--network", type=float, default=50, help="GB/s of a GPU between nodes (50)")
    parser.add_argument("--latency", type=float, default=50, help="microseconds of a collective besides (50)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/cpu_project.md and .json")


def run(args: argparse.Namespace) -> int:
    """Report the tables and return 0. Raise ValueError or OSError for what cannot be."""
    is_valid = min(*args.gpus, args.mfu, args.nvlink, args.network) > 0 and args.mfu <= 1 and args.latency >= 0
    require(is_valid, "gpus and bandwidths must be positive, mfu in (0, 1] and latency not negative")
    configs = {name: preset(name) for name in args.presets}
    measured = [json.loads(path.read_text()) for path in args.results]
    peak = PEAK_BF16_FLOPS[args.gpu]
    rate_of_all = f"{args.mfu:.0%} of an {args.gpu}'s {peak:.4g} FLOP/s each (assumed)"
    if measured:
        rate_of_all += f", or as measured with {args.variant} where --results has the preset"
    report = Report(args.out, "project", torch.device("cpu"), rows=[], runs=[])
    report.add(
        "# Hours and communication, projected\n\n    {command}\n\ncommit {commit}.\n\n".format(**report.record)
        + HOW_TO_READ.format(rate=rate_of_all, itemsize=2, node=NODE, **vars(args))
    )
    speeds = dict(nvlink=args.nvlink * 1e9, network=args.network * 1e9, latency=args.latency / 1e6)
    runs = [["preset", "PFLOP", "rate", "validation share", "hours, 1 GPU", "with paper", "with fast", "paper's hours"]]
    for name, config in configs.items():
        rate, source = tokens_per_second(config, measured, args.variant) or (
            args.mfu * peak / training_flops_per_token(config), "assumed"
        )  # fmt: skip
        project = functools.partial(project_run, config, rate=rate, **speeds)
        rows = [project(gpus) for gpus in args.gpus]
        report.record["rows"] += [dict(preset=name, **row) for row in rows]
        report.add(f"## {name}\n\n{gpu_table(rows)}\n\n{describe_most_gpus(config, project)}")
        runs.append([name, *run_cells(config, rate, source), PAPER_HOURS.get(name, "")])
        report.record["runs"].append(dict(zip(runs[0], runs[-1])))
    slower = peak / PEAK_BF16_FLOPS["A100"]
    report.add(f"## Runs\n\n{markdown_table(runs)}\n\n{CAVEATS.format(slower=slower, gpu=args.gpu)}")
    return 0


# ---- how a batch is shared -------------------------------------------------------------------------------------------


def split_batch(config: Config, gpus: int) -> tuple[int, int] | None:
    """Return GPUs a sequence and sequences a GPU (or group of GPUs) in a step; None where so many cannot share it."""
    sequences = config.batch_tokens // config.train_length
    for context in range(1, config.num_heads + 1):
        divides = config.num_heads % context == config.train_length % context == gpus % context == 0
        if divides and sequences % (gpus // context) == 0:
            return context, sequences // (gpus // context)
    return None


def build_optimizers_of(config: Config, gpus: int) -> Optimizers:
    """Return the optimizers of the first of so many processes, without memory."""
    with torch.device("meta"):  # shapes without memory
        model = build_model(config, torch.bfloat16)
        return build_optimizers(config, model, False, World(0, 0, gpus, torch.device("meta")))


def project_run(config: Config, gpus: int, rate: float, *, nvlink: float, network: float, latency: float) -> dict:
    """Return one row of the tables.

    rate: tokens/s of a GPU; nvlink and network: bytes/s of a GPU; latency: seconds of a collective.
    """
    context, sequences = split_batch(config, gpus) or (1, 1)
    batch = gpus // context * sequences * config.train_length
    optimizers = build_optimizers_of(config, gpus)
    sent = optimizers.bytes_a_step() | dict(all_to_all=0)
    shares, copies, buckets = optimizers.shares, optimizers.copies, len(optimizers.all_buckets())
    collectives = 2 * buckets * (shares > 1) + buckets * (copies > 1)  # reduce-scatter, all-gather; all-reduce
    if context > 1:
        shape = sequences, config.train_length, config.model_dim, context, 2
        sent["all_to_all"] = config.num_layers * context_bytes(*shape)
        collectives += 4 * config.num_layers
    in_node = sent["reduce_scatter"] * (shares - 1) / shares + sent["all_gather"] * (shares - 1)
    in_node += sent["all_to_all"] * (context - 1) / context
    between_nodes = 2 * sent["all_reduce"] * (copies - 1) / copies  # a ring's
    communication = in_node / nvlink + between_nodes / network + collectives * latency
    compute = batch / rate / gpus
    return dict(
        gpus=gpus,
        context=context,
        batch=batch,
        same_batch=batch == config.batch_tokens,
        compute=compute,
        communication=communication,
        efficiency=compute / (compute + communication),
        hours=config.steps * (compute + communication) * config.batch_tokens / batch / 3600,  # of the same tokens
        **sent,
    )


def gpu_table(rows: list[dict]) -> str:
    sent = ["reduce_scatter", "all_reduce", "all_gather", "all_to_all"]
    head = ["GPUs", "context", "batch", "tokens a GPU", "compute ms", *(f"{x.replace('_', '-')} MB" for x in sent)]
    table = [[*head, "communication ms", "efficiency", "hours"]]
    for row in rows:
        batch = f"{row['batch']:,}{'' if row['same_batch'] else '*'}"
        shape = [str(row["gpus"]), str(row["context"]), batch, f"{row['batch'] // row['gpus']:,}"]
        megabytes = [f"{row[name] / 1e6:.1f}" for name in sent]
        times = [f"{row['communication'] * 1e3:.1f}", f"{row['efficiency']:.1%}", f"{row['hours']:.2f}"]
        table.append([*shape, f"{row['compute'] * 1e3:.1f}", *megabytes, *times])
    return markdown_table(table)


def describe_most_gpus(config: Config, project: Callable[[int], dict]) -> str:
    """Describe the largest numbers of GPUs that can share the preset's batch, and that are of use."""
    sequences = config.batch_tokens // config.train_length
    possible = [n for n in range(1, sequences * config.num_heads + 1) if split_batch(config, n)]
    useful = max(n for n in possible if n == 1 or project(n)["efficiency"] >= USEFUL)
    alone = max(n for n in possible if split_batch(config, n)[0] == 1)
    return (
        f"Most GPUs that can share the preset's batch: {alone}, with context parallelism {max(possible)}; the largest "
        f"useful number, at an efficiency of {USEFUL:.0%} or more: {useful}."
    )


# ---- runs ------------------------------------------------------------------------------------------------------------


def tokens_per_second(config: Config, measured: list[dict], variant: str) -> tuple[float, str] | None:
    """Return the tokens/s of a GPU and its name, from a record of bench step at the same shape; None without one."""
    shape = "vocab_size num_layers num_heads model_dim train_length".split()
    for record in measured:
        theirs = record["config"]
        if variant in record["seconds"] and all(theirs[field] == getattr(config, field) for field in shape):
            return theirs["batch_tokens"] / statistics.median(record["seconds"][variant]["step"]), record["device"]
    return None


def run_hours(config: Config, rate: float) -> tuple[float, list[float]]:
    """Return the hours of a run's training at so many tokens/s, and the share of them that validation adds in each of
    the profiles paper and fast."""
    shares = [validation_share(dataclasses.replace(config, val_profile=name)) for name in ("paper", "fast")]
    return config.steps * config.batch_tokens / rate / 3600, shares


def run_cells(config: Config, rate: float, source: str) -> list[str]:
    hours, shares = run_hours(config, rate)
    return [
        f"{config.steps * config.batch_tokens * training_flops_per_token(config) / 1e15:,.0f}",
        f"{rate:,.0f} tokens/s, {source}",
        " / ".join(f"{share:.1%}" for share in shares),
        f"{hours:.2f}",
        *(f"{hours * (1 + share):.2f}" for share in shares),
    ]

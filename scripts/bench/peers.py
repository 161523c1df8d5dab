"""Time whole training scripts, each as a process of its own: ours, others', and ours on several processes.

    python -m scripts.bench step quickstart --peers ../nanoGPT
    python -m scripts.bench step quickstart --processes 1 2

One script runs at a time; rounds alternate the order. All get the same tokens, tokens a step and threads, and nothing
of others is changed: their script runs in a temporary copy of its folder, given options that its own command line has.
"""

import dataclasses
import functools
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from configs.config import Config
from data.loader import micro_batch_size
from data.shard_writer import ShardWriter
from data.shards import open_split
from errors import require
from runtime.device import compute_dtype
from runtime.metrics import read_metrics
from scripts.bench.protocol import Report, gpu_state, in_turns, paired_ratio, ratio_cell, with_baseline_again
from scripts.shared.tables import markdown_table

ROOT = Path(__file__).parents[2]
WARM_UP = 10  # steps that do not count: compilation, allocation, caches
MOST_TOKENS = 20_000_000  # that nanoGPT gets of ours
LOSS_LIMIT = 1e-3  # nats, between the same steps of one process and of several

IN_BFLOAT16 = """\
import runpy, torch
with torch.autocast("cpu", torch.bfloat16):
    runpy.run_path("train.py", run_name="__main__")
"""

HOW_TO_READ = """\
Each script reports the time of its own steps: all micro-batches, optimizer and loader, without validation and
compilation. ms: median over the rounds of a process's median step, the first {warm_up} of {steps} steps left out.
Speed: tokens/s of our script (the first row) to this one's in the same round, median over the rounds and bootstrap
95 % interval. The row "again" is our script once more (A/A). Loss: of the last step, in nats."""


@dataclasses.dataclass(frozen=True)
class Script:
    """A training script. `command` and `read` are given an empty folder that the process may fill."""

    what: str
    command: Callable[[Path], list]
    read: Callable[[Path, str], tuple[list[float], list[float]]]  # of the output: seconds and loss of each step
    folder: Path = ROOT
    tokens: int | None = None  # a step; None: at its own shape, which no ratio compares
    threads: int | None = None  # of each process, if not all


# ---- ours ------------------------------------------------------------------------------------------------------------


def our_script(arguments: list[str], config: Config, steps: int, processes: int = 1, **fields) -> Script:
    """Return train_gpt.py with the command-line `arguments` that gave `config`; `fields` are changed beyond that."""
    fields |= dict(name="run", steps=steps, schedule="constant_linear", warmup_steps=0, cooldown_steps=0)
    fields |= dict(val_lengths=config.train_length, val_tokens=config.train_length, val_every=0, save_every=0)
    fields |= dict(resume="never", wandb="off")
    options = [word for field, value in fields.items() for word in (f"--{field}", value)]
    launcher = torchrun(processes) if processes > 1 else []
    dtype = f", dtype {fields['dtype']}" if "dtype" in fields else ""

    def read(folder: Path, output: str) -> tuple[list[float], list[float]]:
        records = [r for r in read_metrics(folder / "run" / "metrics.jsonl") if "train_loss" in r]
        return [config.batch_tokens / r["tokens_per_second"] for r in records], [r["train_loss"] for r in records]

    return Script(
        f"train_gpt.py, {config.method}{dtype}",
        lambda folder: [*launcher, "train_gpt.py", *arguments, *options, "--runs_dir", folder],
        read,
        tokens=config.batch_tokens,
        threads=max(1, torch.get_num_threads() // processes),
    )


def torchrun(processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def zipf_shards(folder: Path, config: Config) -> Path:
    """Write shards for a run without data: independent tokens, the r-th most frequent in proportion to 1 / r."""
    share = 1 / np.arange(1, config.vocab_size + 1)
    count = min(MOST_TOKENS, 8 * config.batch_tokens) + 1
    tokens = np.random.default_rng(0).choice(config.vocab_size, 2 * count, p=share / share.sum())
    with ShardWriter(folder, "zipf", tokenizer="none", vocab_size=config.vocab_size) as writer:
        writer.write("train", tokens[:count])
        writer.write("val", tokens[count:])
        writer.close()
    return folder


# ---- others' ---------------------------------------------------------------------------------------------------------


def peer_script(checkout: Path, config: Config, steps: int, device: torch.device, copies: Path, dtype: str) -> Script:
    """Return the training script of a checkout, which its files tell. Raise ValueError where none is known or can
    run."""
    if all((checkout / name).is_file() for name in ("train.py", "model.py", "configurator.py")):
        return nanogpt_script(checkout, config, steps, device, copies, dtype)
    if all((checkout / name).is_file() for name in ("train_gpt.py", "triton_kernels.py")):
        return modded_nanogpt_script(checkout, device, copies)
    raise ValueError(
        f"{checkout} is no checkout of nanoGPT (train.py, model.py, configurator.py) or modded-nanogpt (train_gpt.py, "
        "triton_kernels.py)"
    )


def copy_code(checkout: Path, copies: Path) -> Path:
    """Return a new folder in `copies` with the checkout's Python files."""
    copy = Path(tempfile.mkdtemp(prefix=f"{checkout.resolve().name}-", dir=copies))
    for file in checkout.glob("*.py"):
        shutil.copy(file, copy)
    return copy


def nanogpt_script(
    checkout: Path, config: Config, steps: int, device: torch.device, copies: Path, dtype: str
) -> Script:
    """Return karpathy/nanoGPT at the shape of `config`, compiled. On a CPU it knows no bfloat16, and is run as it is
    within torch.autocast."""
    copy = copy_code(checkout, copies)
    data = copy / "data" / "bench"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        stream = open_split(config.data_dir, split, config.vocab_size)
        stream.read(0, min(len(stream), MOST_TOKENS)).tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=config.vocab_size)))
    sequences = micro_batch_size(config.batch_tokens, config.train_length, config.micro_batch_tokens, 1)
    accumulation = config.batch_tokens // config.train_length // sequences
    options = dict(
        dataset="bench", device=device.type, dtype=dtype, compile=config.compile != "off",
        n_layer=config.num_layers, n_head=config.num_heads, n_embd=config.model_dim, block_size=config.train_length,
        batch_size=sequences, gradient_accumulation_steps=accumulation, dropout=0.0, bias=False,
        max_iters=steps - 1,  # it counts from 0 to this
        eval_interval=steps + 1, eval_iters=1, log_interval=1,
    )  # fmt: skip
    script = ["-c", IN_BFLOAT16] if device.type == "cpu" and dtype == "bfloat16" else ["train.py"]
    return Script(
        f"nanoGPT's train.py, {dtype}",
        lambda folder: [*script, *(f"--{name}={value}" for name, value in options.items()), f"--out_dir={folder}"],
        lambda folder, output: nanogpt_steps(output),
        copy,
        tokens=config.batch_tokens,
    )


def nanogpt_steps(output: str) -> tuple[list[float], list[float]]:
    lines = re.findall(r"^iter \d+: loss ([\d.]+|nan), time ([\d.]+)ms", output, re.M)
    return [float(ms) / 1e3 for _, ms in lines], [float(loss) for loss, _ in lines]


def modded_nanogpt_script(checkout: Path, device: torch.device, copies: Path) -> Script:
    """Return KellerJordan/modded-nanogpt as it is, whole, on all GPUs: its shape is in its code.

    Raise ValueError without CUDA and without its training shards.
    """
    words = "modded-nanogpt needs CUDA GPUs and cannot run here: leave it out of --peers"
    require(device.type == "cuda", f"{checkout}: {words}")
    has_shards = any((checkout / "data").glob("*/*_train_*.bin"))
    require(has_shards, f"{checkout}: no training shards in its data folder: get them as its README says")
    copy = copy_code(checkout, copies)
    (copy / "data").symlink_to((checkout / "data").resolve())
    gpus = torch.cuda.device_count()
    return Script(
        f"modded-nanogpt's train_gpt.py, its own model, batch and length, {gpus} GPUs",
        lambda folder: [*torchrun(gpus), "train_gpt.py"],
        lambda folder, output: modded_nanogpt_steps(output),
        copy,
    )


def modded_nanogpt_steps(output: str) -> tuple[list[float], list[float]]:
    """Return the seconds of its steps, and no losses: it prints those of the validation only.

    Its lines give the mean time of all steps so far; a step's own is the difference of two sums.
    """
    lines = re.findall(r"^step:(\d+)/\d+ train_time:\d+ms step_avg:([\d.]+)ms", output, re.M)
    sums = [int(step) * float(average) / 1e3 for step, average in lines]
    return [after - before for before, after in zip([0.0, *sums], sums)], []


# ---- rounds ----------------------------------------------------------------------------------------------------------


def run_script(script: Script) -> dict:
    """Run it once and return the seconds of the steps that count, and all losses. Raise ValueError when it fails."""
    environment = os.environ | dict(OMP_NUM_THREADS=str(script.threads or torch.get_num_threads()))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *map(str, script.command(Path(folder)))]
        done = subprocess.run(command, cwd=script.folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise ValueError(f"{script.what} failed with exit code {done.returncode}: {last}")
        seconds, losses = script.read(Path(folder), done.stdout)
    words = f"{script.what} reported {len(seconds)} steps, of which {WARM_UP} do not count"
    require(len(seconds) > WARM_UP, words)
    return dict(seconds=seconds[WARM_UP:], losses=losses)


def compare_scripts(scripts: dict[str, Script], rounds: int, report: Report) -> dict[str, list[dict]]:
    """Run all in turns, the first, ours, once more at the end of each round; add results and table to the report."""
    ours, scripts = next(iter(scripts)), with_baseline_again(scripts)
    results, gpu_states = {name: [] for name in scripts}, []
    for round_number in range(rounds):
        for name in in_turns(scripts, round_number):
            results[name].append(run_script(scripts[name]))
            median = statistics.median(results[name][-1]["seconds"])
            print(f"round {round_number + 1}: {name} {median * 1e3:.2f} ms a step", file=sys.stderr, flush=True)
        gpu_states.append(gpu_state(torch.device("cuda")) if torch.cuda.is_available() else None)
    medians = {name: [statistics.median(r["seconds"]) for r in results[name]] for name in results}
    rates = {name: [s.tokens / m for m in medians[name]] for name, s in scripts.items() if s.tokens}
    rows = [["script", "ms a step", "lowest", "highest", "tokens/s", "speed of ours to it", "loss"]]
    for name, runs in results.items():
        numbers = [f"{f(medians[name]) * 1e3:.2f}" for f in (statistics.median, min, max)]
        ratio = paired_ratio(rates[ours], rates[name]) if name in rates else None
        rate = f"{statistics.median(rates[name]):,.0f}" if name in rates else "own shape"
        loss = f"{runs[-1]['losses'][-1]:.4f}" if runs[-1]["losses"] else ""
        rows.append([name, *numbers, rate, ratio_cell(ratio), loss])
    report.record |= dict(results=results, what={name: s.what for name, s in scripts.items()}, gpu=gpu_states)
    report.add("\n".join(f"- `{name}`: {s.what}" for name, s in scripts.items()))
    report.add(f"Rounds: {rounds}.\n\n{markdown_table(rows)}")
    return results


def start_report(kind: str, args, config: Config, tokens: str, device: torch.device) -> Report:
    sequences = config.batch_tokens // config.train_length
    report = Report(args.out, f"step_{kind}", device, config=config.to_dict(), tokens=tokens, rounds=args.rounds)
    report.add(
        f"# A step, script against script: {report.record['device']}\n\n{report.provenance}\n"
        f"{config.num_layers} layers of width {config.model_dim}, {config.num_heads} heads, vocabulary "
        f"{config.vocab_size:,}; {sequences} sequences of {config.train_length} tokens a step; {tokens}.\n\n"
        + HOW_TO_READ.format(warm_up=WARM_UP, steps=args.steps)
    )
    return report


def with_data(arguments: list[str], config: Config, folder: Path) -> tuple[list[str], Config, str]:
    """Return arguments and configuration with data that is there, and a description of its tokens."""
    if Path(config.data_dir).is_dir():
        return [*arguments, "--data_dir", str(Path(config.data_dir).resolve())], config, f"tokens of {config.data_dir}"
    data = zipf_shards(folder / "zipf", config)
    tokens = f"random tokens (Zipf), as there is no {config.data_dir}"
    return [*arguments, "--data_dir", str(data)], dataclasses.replace(config, data_dir=str(data)), tokens


def bench_peers(args, arguments: list[str], config: Config, tokens: str, device: torch.device, folder: Path) -> int:
    """Report the table of --peers and return 0. Raise ValueError for a checkout that cannot run, or a script that
    fails."""
    fastest = str(compute_dtype(config, device)).removeprefix("torch.")
    ours = functools.partial(our_script, arguments, config, args.steps, device=device.type)
    scripts = {"ours": ours(dtype=fastest)}
    for dtype in [fastest] if device.type == "cuda" else sorted({fastest, "float32"}):
        if dtype != fastest:
            scripts[f"ours, {dtype}"] = ours(dtype=dtype)
        for path in args.peers:
            peer = peer_script(Path(path), config, args.steps, device, folder, dtype)
            scripts[f"{Path(path).resolve().name}, {dtype}"] = peer
    report = start_report("peers", args, config, tokens, device)
    compare_scripts(scripts, args.rounds, report)
    if device.type == "cpu" and fastest == "float32":
        report.add("bfloat16: not run, as this CPU does not multiply it in hardware.")
    return 0


def bench_processes(args, arguments: list[str], config: Config, tokens: str, device: torch.device, _: Path) -> int:
    """Report the table of --processes: the same run on so many processes, with the same threads in all.

    Return the exit code: 1 when their losses differ. Raise ValueError when so many cannot share a step.
    """
    scripts = {}
    for count in args.processes:
        micro_batch_size(config.batch_tokens, config.train_length, config.micro_batch_tokens, count)  # or ValueError
        script = our_script(arguments, config, args.steps, count, device=device.type)
        threads = "" if device.type == "cuda" else f", threads of each: {script.threads}"
        scripts[f"processes: {count}{threads}"] = script
    report = start_report("processes", args, config, tokens, device)
    results = compare_scripts(scripts, args.rounds, report)
    first, *others = (results[name][0]["losses"] for name in scripts)
    differences = [float(np.abs(np.subtract(first, losses)).max()) for losses in others]
    report.record["largest_loss_difference"] = differences
    reference, *names = scripts
    for name, difference in zip(names, differences):
        verdict = "the same" if difference <= LOSS_LIMIT else "NOT the same"
        report.add(
            f"{name}: losses {verdict}, at most {difference:.1e} nats from {reference} in any of "
            f"{args.steps} steps (limit {LOSS_LIMIT:g})."
        )
    return int(not all(difference <= LOSS_LIMIT for difference in differences))  # NaN too

"""Speed, side by side: a training step's forward and backward pass, or attention alone (scripts/bench_attention.py).

    python -m scripts.bench step quickstart p_rope:sdpa p_rope:blocks scale_invariant_p_rope:blocks --length 256
    python -m scripts.bench attention

step times several attention methods and backends. The first variant is the baseline and runs twice (the A/A row, which
shows the noise). The model is the preset's with one micro-batch of its tokens, compiled; the variants are interleaved
in alternating order, and what counts is the ratio of a variant's time to the baseline's in the same round: its median
and quartiles over the rounds.
"""

import argparse
import dataclasses
import statistics
import sys
import time

import torch

from configs.presets import preset
from optim.muon import fast_dtype
from runtime.device import device_name
from runtime.processes import start_processes
from scripts import bench_attention
from scripts.tables import markdown_table
from train_gpt import build_model, user_errors


def make_step(config, backend: str, device: torch.device):
    """A function that runs one forward and backward pass on random tokens, already compiled."""
    torch.manual_seed(0)
    model = build_model(config, fast_dtype(device)).to(device)
    with torch.no_grad():  # products with zeros can be faster than others
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.02)
    shape = max(1, config.micro_batch_tokens // config.train_length), config.train_length
    inputs, targets = torch.randint(config.vocab_size, (2, *shape), device=device)
    plan = model.plan(config.train_length, backend=backend)
    compiled = torch.compile(model, dynamic=False)

    def step():
        compiled(inputs, targets, plan=plan).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        step()
    return step, plan.backend


def add_step_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("preset", help="model and micro-batch, from configs/presets.py")
    parser.add_argument("variants", nargs="+", metavar="METHOD[:BACKEND]", help="the first is the baseline")
    parser.add_argument("--length", type=int, help="sequence length (default: the preset's training length)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=4, help="steps a round")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])


def run_steps(args: argparse.Namespace):
    with user_errors():
        device = start_processes(args.device).device
        base = preset(args.preset)
        length = args.length or base.train_length
        steps, backends = {}, {}
        for variant in args.variants:
            method, _, backend = variant.partition(":")
            config = dataclasses.replace(base, method=method, train_length=length)
            steps[variant], backends[variant] = make_step(config, backend or "auto", device)
        again = f"{args.variants[0]} again"
        steps[again], backends[again] = steps[args.variants[0]], backends[args.variants[0]]

    seconds = {name: [] for name in steps}
    for round_number in range(args.rounds):
        for name in list(steps)[:: 1 if round_number % 2 else -1]:
            began = time.perf_counter()
            for _ in range(args.steps):
                steps[name]()
            seconds[name].append((time.perf_counter() - began) / args.steps)

    tokens = max(length, base.micro_batch_tokens // length * length)
    rows = [["variant", "backend", "ms", "tokens/s", "ratio", "quartiles"]]
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[args.variants[0]])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(times)
        rows.append([name, backends[name], f"{median * 1e3:.1f}", f"{tokens / median:,.0f}", f"{middle:.3f}"])
        rows[-1].append(f"{low:.3f} to {high:.3f}")
    dtype = str(fast_dtype(device)).removeprefix("torch.")
    print(f"{args.preset}, {tokens // length} x {length} tokens, {dtype}, compiled;")
    print(f"{device_name(device)}, torch {torch.__version__}; {args.rounds} rounds of {args.steps} steps\n")
    print(markdown_table(rows))


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(metavar="step | attention", required=True)
    step = commands.add_parser("step", help="a model's forward and backward pass")
    add_step_arguments(step)
    step.set_defaults(run=run_steps)
    attention = commands.add_parser(
        "attention", help="attention alone", description=bench_attention.__doc__.split("\n")[0]
    )
    bench_attention.add_arguments(attention)
    attention.set_defaults(run=bench_attention.run)
    args = parser.parse_args()
    sys.exit(args.run(args))


if __name__ == "__main__":
    main()

"""Measures recall without fine-tuning: a pair of a key and a value stands in the context, and the key comes again.

    python -m results.far.recall RUNS

A key is 4 random tokens, and its value is 1. A value is recalled if it is the most likely token after the second
occurrence of its key. There are two tasks. spread: 8 pairs stand at equal distances in validation text, and their keys
come again at its end, in random order. dense: half of the sequence is pairs alone, and the other half is the same pairs
in another order (multi-query associative recall, Arora et al., 2023, arXiv 2312.04927). All runs read the same
sequences.

A line of recall.jsonl has the share of values recalled, by task and length. It replaces the line of the same run.
"""

import functools
import json
import sys
from pathlib import Path

import numpy as np

from data.shards import TokenStream
from errors import exit_on_user_error
from measure.losses import Losses
from runtime.processes import start_processes
from scripts.keep import write_lines
from scripts.shared.runs import load_run, open_validation_text, read_run

FILE = Path(__file__).with_suffix(".jsonl")
LENGTHS = (512, 1024, 2048, 4096, 8192)  # tokens
PAIR = 5  # tokens of a key and its value
SPREAD = 8  # pairs in a text
SEQUENCES = {"spread": 32, "dense": 8}  # of each length
SEED = 20261129


def draw_pairs(stream: TokenStream, count: int, vocab_size: int, generator: np.random.Generator) -> np.ndarray:
    """Return pairs of tokens from random positions of the text, (count, 5)."""
    places = generator.integers(len(stream), size=count * PAIR)
    tokens = [stream.read(place, 1, vocab_size)[0] for place in places.tolist()]
    return np.reshape(tokens, (count, PAIR)).astype(np.int64)


def spread(stream: TokenStream, length: int, vocab_size: int, generator: np.random.Generator) -> tuple:
    """Return a sequence of `length` tokens whose last 40 are the queries, and the positions of the values in these."""
    pairs = draw_pairs(stream, SPREAD, vocab_size, generator)
    room = (length - SPREAD * PAIR) // SPREAD - PAIR  # text before each pair
    start = int(generator.integers(len(stream) - length))
    text = stream.read(start, length, vocab_size).astype(np.int64)
    parts = []
    for index, pair in enumerate(pairs):
        parts += [text[index * room : (index + 1) * room], pair]
    queries = generator.permutation(pairs).flatten()
    missing = length - len(queries) - sum(map(len, parts))
    return np.concatenate([text[len(text) - missing :], *parts, queries]), np.arange(PAIR - 1, len(queries), PAIR)


def dense(stream: TokenStream, length: int, vocab_size: int, generator: np.random.Generator) -> tuple:
    """Return a sequence of `length` tokens whose second half are the queries, and the positions of the values there."""
    count = length // 2 // PAIR
    pairs = draw_pairs(stream, count, vocab_size, generator)
    queries = generator.permutation(pairs).flatten()
    first = stream.read(0, length - 2 * count * PAIR, vocab_size).astype(np.int64)  # fills up the length
    return np.concatenate([first, pairs.flatten(), queries]), np.arange(PAIR - 1, len(queries), PAIR)


TASKS = {"spread": spread, "dense": dense}


def measure_recall(losses: Losses, stream: TokenStream, vocab_size: int) -> dict:
    """Return the share of values recalled, by task, then by length. losses: with a plan for LENGTHS."""
    found = {}
    for task, make in TASKS.items():
        found[task] = {}
        for length in LENGTHS:
            generator = np.random.default_rng([SEED, length])
            made = [make(stream, length, vocab_size, generator) for _ in range(SEQUENCES[task])]
            sequences, values = np.stack([sequence for sequence, _ in made]), made[0][1]
            # The token at position p is the target of position p - 1, so `last` counts targets.
            last = values[-1] + 1
            hits = losses.hits(sequences[:, :-1], sequences[:, 1:], last=last)
            found[task][str(length)] = round(hits[:, values].mean().item(), 4)
    return found


@functools.cache
def read_lines() -> dict[str, dict]:
    """Return the kept lines by run."""
    lines = map(json.loads, FILE.read_text().splitlines()) if FILE.exists() else ()
    return {line["name"]: line for line in lines}


def recalled(name: str) -> dict[str, float]:
    """Return the shares that a run recalled, by task and length, such as "spread 8192"."""
    line = read_lines().get(name, {})
    return {f"{task} {length}": share for task in TASKS for length, share in line.get(task, {}).items()}


@exit_on_user_error()
def main():
    lines, world = read_lines(), start_processes("cpu")
    for folder in map(Path, sys.argv[1:]):
        config, model = load_run(folder, world.device)
        plans = {length - 1: model.plan(length - 1) for length in LENGTHS}
        losses = Losses(model, plans, LENGTHS[-1], world)
        line = {"name": folder.name} | measure_recall(losses, open_validation_text(read_run(folder)), config.vocab_size)
        lines[folder.name] = line
        print(json.dumps(line), flush=True)
        write_lines(FILE, [lines[name] for name in sorted(lines)])


if __name__ == "__main__":
    main()

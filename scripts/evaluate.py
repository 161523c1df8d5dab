"""Validation losses of trained runs at any lengths, from their latest checkpoints.

    python -m scripts.evaluate runs/quickstart-*
    python -m scripts.evaluate runs/a runs/b --lengths 4096 16384 65536 --val-tokens 10485760

Prints one Markdown table. All lengths see the same tokens, by default those that the run itself was validated on.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

from configs.config import Config
from data.loader import check_validation
from data.shards import open_split
from runtime.checkpoint import latest_checkpoint, load_checkpoint
from runtime.processes import start_processes
from scripts.tables import loss_table
from train_gpt import build_model, compute_dtype, user_errors, validate


def load_run(folder: Path, device: torch.device) -> tuple[Config, torch.nn.Module]:
    """The configuration of a run and its model, with the weights of the latest checkpoint, computing as in the run."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} is not a run folder: it has no config.json")
    known = {field.name for field in dataclasses.fields(Config)}
    stored = json.loads((folder / "config.json").read_text())
    config = Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known})
    checkpoint = latest_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        raise ValueError(f"{folder} has no checkpoint yet")
    model = build_model(config, compute_dtype(config, device)).to(device)
    model.load_state_dict(load_checkpoint(checkpoint)["model"])
    return config, model


def evaluate(folder: Path, lengths: list[int] | None, val_tokens: int | None, device: torch.device, world) -> dict:
    """Name, method and train_length of one run, with what train_gpt.validate returns (losses in nats)."""
    config, model = load_run(folder, device)
    config = dataclasses.replace(
        config, val_lengths=tuple(lengths or config.val_lengths), val_tokens=val_tokens or config.val_tokens
    )
    stream = open_split(config.data_dir, "val", config.vocab_size)
    check_validation(stream, config.val_lengths, config.val_tokens)
    plans = {length: model.plan(length, backend=config.attention_backend) for length in config.val_lengths}
    result = validate(model, plans, config, stream, world)
    return dict(name=folder.name, method=config.method, train_length=config.train_length, **result)


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--lengths", nargs="+", type=int, help="sequence lengths (default: those of the run)")
    parser.add_argument("--val-tokens", type=int, help="tokens at each length (default: as many as the run used)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    with user_errors():
        world = start_processes(args.device)
        results = []
        for folder in args.runs:
            print(f"evaluating {folder}", file=sys.stderr)
            results.append(evaluate(folder, args.lengths, args.val_tokens, world.device, world))
        print(loss_table(results))


if __name__ == "__main__":
    main()

"""Validation losses of trained runs at any lengths, and by position, from their latest checkpoints.

    python -m scripts.evaluate runs/quickstart-*/
    python -m scripts.evaluate runs/a runs/b --lengths 4096 16384 65536 262144 --val-tokens 10485760

Prints two Markdown tables and leaves the numbers in RUN/evaluation.json, where reproduce and report find them. All
lengths see the same tokens, by default those that the run itself was validated on.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from configs.command_line import user_errors
from configs.config import Config, require
from data.loader import check_validation
from data.shards import open_split
from runtime.checkpoint import fits, latest_checkpoint, load_checkpoint
from runtime.files import replace_file, to_json
from runtime.processes import start_processes
from scripts.runs import stored_config, val_tokens
from scripts.tables import loss_table, markdown_table
from train_gpt import build_model, compute_dtype, validate

EVALUATION = "evaluation.json"


def load_run(folder: Path, device: torch.device) -> tuple[Config, torch.nn.Module]:
    """The configuration of a run and its model, with the weights of the latest checkpoint, computing as in the run."""
    config = stored_config(folder)
    checkpoint = latest_checkpoint(folder / "checkpoints") if (folder / "checkpoints").is_dir() else None
    if checkpoint is None:
        raise ValueError(f"{folder} has no checkpoint yet")
    model = build_model(config, compute_dtype(config, device)).to(device)
    state = load_checkpoint(checkpoint)
    with fits(checkpoint):
        model.load_state_dict(state["model"])
    return config, model


def evaluate(folder: Path, lengths: list[int] | None, tokens: int | None, device: torch.device, world) -> dict:
    """Name, method and train_length of one run, with what train_gpt.validate returns (losses in nats)."""
    config, model = load_run(folder, device)
    lengths, tokens = lengths or config.val_lengths, tokens or config.val_tokens
    require(all(n >= 1 for n in lengths), f"--lengths must be at least 1, got {min(lengths)}")
    stream = open_split(config.data_dir, "val", config.vocab_size)
    check_validation(stream, lengths, tokens)
    plans = {length: model.plan(length, backend=config.attention_backend) for length in lengths}
    result = validate(model, plans, config, stream, world, dict.fromkeys(lengths, tokens))
    return dict(name=folder.name, method=config.method, train_length=config.train_length, **result)


def keep(folder: Path, result: dict):
    """Adds the result to the folder's evaluation.json; lengths evaluated on other tokens or another checkpoint go."""
    path, result = folder / EVALUATION, {"step": latest_checkpoint(folder / "checkpoints").stem, **result}
    what = lambda evaluation: (evaluation.get("step"), {*val_tokens(evaluation).values()})
    if path.exists() and what(old := json.loads(path.read_text())) == what(result):
        old["val_tokens"] = val_tokens(old)
        for key in ("val_loss", "val_tokens", "val_loss_by_position"):
            result[key] = {**old[key], **result[key]}
    replace_file(path, lambda file: file.write((to_json(result) + "\n").encode()))


def position_table(results: list[dict]) -> str:
    """One row a range of positions, one column a run: the mean loss there in sequences of the longest length."""
    longest = max((length for r in results for length in r["val_loss_by_position"]), key=int)
    columns = [r["val_loss_by_position"].get(longest, []) for r in results]
    rows = [["positions", *(r["name"] for r in results)]]
    for k in range(max(map(len, columns))):
        first, last = (2 ** (k - 1) if k else 0), min(2**k, int(longest)) - 1
        cells = [f"{column[k]:.3f}" if column else "" for column in columns]
        rows.append([f"{first}-{last}" if last > first else str(first), *cells])
    return markdown_table(rows)


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--lengths", nargs="+", type=int, help="sequence lengths (default: those of the run)")
    parser.add_argument("--val-tokens", type=int, help="tokens at each length (default: as many as the run used)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    with user_errors():
        world = start_processes(args.device)
    results, failed = [], False
    for folder in args.runs:
        print(f"evaluating {folder}", file=sys.stderr)
        try:
            results.append(evaluate(folder, args.lengths, args.val_tokens, world.device, world))
            keep(folder, results[-1])
        except (ValueError, OSError) as error:  # the other runs still get their row
            print(f"error: {error}", file=sys.stderr)
            failed = True
    if results:
        print(loss_table(results))
        print(f"\nLoss by position, in sequences of the longest length:\n\n{position_table(results)}")
    if failed:
        sys.exit(2)


if __name__ == "__main__":
    main()

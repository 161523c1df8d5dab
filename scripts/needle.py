"""The needle-in-a-haystack task (paper, section 5 and appendix): fine-tunes trained runs on it, and scores them.

    python -m scripts.needle runs/a runs/b
    python -m scripts.needle runs/mini-*/ --lengths 256 1024 4096 --examples 200

A run is fine-tuned at its training length with its own optimisers and peak learning rates: 100 steps of warm-up, 100
constant, 100 down to zero, 64 sequences a step, loss on the response alone. Then it is scored at each length: the share
of needles of which city and number are both right, by greedy decoding and by teacher forcing. Everything is left in
RUN/needle/, a run folder of its own; what was interrupted goes on from there. The seed is that of the run.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from configs.command_line import user_errors
from configs.config import Config, config_hash
from data.loader import micro_batch_size
from data.needle import Haystack, NeedleTask, oracle_accuracy, score
from data.text import Tokenizer, load_tokenizer
from model.decoding import greedy_decode
from model.gpt import GPT
from optim.schedule import lr_factor
from runtime.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from runtime.device import choose_compile
from runtime.metrics import Metrics
from runtime.processes import World, start_processes
from runtime.run_folder import RunFolder
from scripts.evaluate import load_run
from scripts.tables import markdown_table
from train_gpt import build_optimizers, compile_model

ROOT = Path(__file__).parents[1]
SAVE_EVERY = 50  # steps
TEST_SEED = 1_000_000  # of the scored examples, the same for all runs; no run is fine-tuned with it


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.needle", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens a prompt (default: 1, 4, 16 x training length)")
    parser.add_argument("--steps", type=int, default=300, help="of fine-tuning, a third each of the schedule's parts")
    parser.add_argument("--sequences", type=int, default=64, help="in a step (default 64, the paper's 8 x 8)")
    parser.add_argument("--examples", type=int, default=500, help="prompts scored at each length (default 500)")
    parser.add_argument(
        "--haystack", default="shards",
        help="shards: the run's own data (default); c4: the paper's, kept in data/c4; or a file or folder of text",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--compile", default="auto", choices=["auto", "model", "blocks", "off"])
    args = parser.parse_args()
    with user_errors():
        for option in ("steps", "sequences", "examples"):
            if getattr(args, option) < 1:
                raise ValueError(f"--{option} must be at least 1, got {getattr(args, option)}")
        device = start_processes(args.device).device
        compiled, _ = choose_compile(args.compile, device)
    results, failed = [], False
    for path in args.runs:
        print(f"fine-tuning {path}", file=sys.stderr)
        try:
            results.append(run(path, args, device, compiled))
        except (ValueError, OSError) as error:  # the other runs still get their row
            print(f"error: {error}", file=sys.stderr)
            failed = True
    if results:
        print(f"\nNeedles found of 3 a prompt, by greedy decoding (by teacher forcing):\n\n{accuracy_table(results)}")
    if failed:
        sys.exit(2)


def run(path: Path, args: argparse.Namespace, device: torch.device, compiled: str | None) -> dict:
    """Fine-tunes and scores one run, or what is left of that to do; returns the summary that it leaves behind."""
    config, model = load_run(path, device)
    lengths = args.lengths or [factor * config.train_length for factor in (1, 4, 16)]
    tokenizer = load_tokenizer(config.data_dir)
    texts = {split: haystack(args.haystack, split, config, tokenizer) for split in ("train", "val")}
    tuning = NeedleTask(tokenizer, texts["train"], config.train_length, seed=config.seed)
    tests = {length: NeedleTask(tokenizer, texts["val"], length, seed=TEST_SEED) for length in lengths}
    for test in (tuning, *tests.values()):
        test.example(0)  # what cannot be made is said before anything is computed
    folder = RunFolder.create(path, "needle", resume="auto")
    settings = dict(method=config.method, train_length=config.train_length, seed=config.seed, haystack=args.haystack)
    settings |= dict(steps=args.steps, sequences=args.sequences)
    settings |= dict(pretrained=latest_checkpoint(path / "checkpoints").stem, config_hash=config_hash(config))
    check_same(folder.path / "settings.json", settings)
    folder.write_json("settings.json", settings)
    fine_tune(config, model, tuning, folder, compiled, args.steps, args.sequences)

    scores = folder.path / "scores.json"
    known = json.loads(scores.read_text()) if scores.exists() else {}
    for length, test in tests.items():
        if known.get(str(length), {}).get("examples") != args.examples:
            greedy, forced = accuracy(config, model, test, args.examples)
            oracle = oracle_accuracy(test, args.examples)
            known[str(length)] = dict(examples=args.examples, greedy=greedy, teacher_forcing=forced, oracle=oracle)
            folder.write_json("scores.json", known)
        print(f"{path.name}: {known[str(length)]['greedy']:.3f} of the needles at {length}", file=sys.stderr)
    summary = dict(name=path.name, **settings, examples=args.examples)
    for key in ("greedy", "teacher_forcing", "oracle"):
        summary[key] = {length: known[length][key] for length in known if known[length]["examples"] == args.examples}
    folder.write_json("summary.json", summary)
    folder.close()
    return summary


def haystack(source: str, split: str, config: Config, tokenizer: Tokenizer) -> Haystack:
    if source == "shards":
        return Haystack.from_shards(Path(config.data_dir), split, tokenizer)
    if source == "c4":
        return Haystack.from_c4(ROOT / "data" / "c4", split, tokenizer)
    return Haystack.from_text([Path(source)], split, tokenizer)


def check_same(path: Path, settings: dict):
    if path.exists() and (old := json.loads(path.read_text())) != settings:
        changed = ", ".join(f"{k} {old.get(k)} -> {settings[k]}" for k in settings if old.get(k) != settings[k])
        raise ValueError(f"{path.parent} is of another fine-tuning ({changed}): delete it to start again")


def fine_tune(
    config: Config, model: GPT, task: NeedleTask, folder: RunFolder, compiled: str | None, steps: int, sequences: int
) -> None:
    """Trains the model in place on examples 0, 1, 2 ... of the task, resuming from the folder's latest checkpoint."""
    device = model.head.device
    schedule = dict(schedule="trapezoid", steps=steps, warmup_steps=steps // 3, cooldown_steps=steps // 3)
    optimizers = build_optimizers(config, model, bool(compiled), World.alone(device))
    start = 0
    if checkpoint := latest_checkpoint(folder.checkpoints):
        state = load_checkpoint(checkpoint)
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        start = state["step"]
    metrics = Metrics(folder.metrics)
    metrics.truncate(start, validated=-1)
    plan = model.plan(config.train_length, backend=config.attention_backend)
    training_model = compile_model(model, compiled)
    size = micro_batch_size(sequences * task.length, task.length, config.micro_batch_tokens, world_size=1)
    for step in tqdm(range(start, steps), "fine-tuning", initial=start, total=steps, unit="step", disable=None):
        batch = task.batch(range(step * sequences, (step + 1) * sequences))
        inputs, targets, mask = (torch.from_numpy(x).contiguous().to(device) for x in batch)  # (sequences, T)
        weights = mask / mask.sum()  # the mean over the response tokens of the whole step
        loss = torch.zeros((), device=device)
        for part in zip(inputs.split(size), targets.split(size), weights.split(size)):
            losses = training_model(part[0], part[1], plan=plan, per_token=True)  # (B, T)
            weighted = (losses * part[2]).sum()
            weighted.backward()
            loss += weighted.detach()
        optimizers.step(lr_factor(step, **schedule), loss.isfinite())
        metrics.write(dict(step=step + 1, tokens=(step + 1) * sequences * task.length, train_loss=loss.item()))
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            state = dict(step=step + 1, model=model.state_dict(), optimizers=optimizers.state_dict())
            save_checkpoint(folder.checkpoints, step + 1, state, keep=1)


@torch.inference_mode()
def accuracy(config: Config, model: GPT, task: NeedleTask, examples: int) -> tuple[float, float]:
    """Share of needles found by greedy decoding and by teacher forcing, in examples 0, 1, ... of the task."""
    device, greedy, forced = model.head.device, [], []
    by_prompt = defaultdict(list)  # a batch of prompts has one length
    for index in range(examples):
        example = task.example(index)
        by_prompt[example.response_start].append(example)
    size = max(1, config.micro_batch_tokens // task.length)
    plan = model.plan(task.length, backend=config.attention_backend)
    for start, group in by_prompt.items():
        for first in range(0, len(group), size):
            batch = group[first : first + size]
            tokens = torch.from_numpy(np.stack([example.tokens for example in batch])).to(device)  # (B, length + 1)
            response = task.length + 1 - start
            decoded = greedy_decode(
                model, tokens[:, :start], response, target_length=task.length, stop=task.tokenizer.eot
            )
            predicted = model(tokens[:, :-1], plan=plan, last=response).argmax(dim=-1)  # (B, response)
            for example, ours, given in zip(batch, decoded.tolist(), predicted.tolist()):
                greedy += score(task.tokenizer.decode(ours), example)
                forced += score(task.tokenizer.decode(given), example)
    return sum(greedy) / len(greedy), sum(forced) / len(forced)


def accuracy_table(results: list[dict]) -> str:
    lengths = sorted({int(length) for r in results for length in r["greedy"]})
    rows = [["run", *(str(length) for length in lengths), "copier"]]
    for r in results:
        cells = {int(n): f"{r['greedy'][n]:.3f} ({r['teacher_forcing'][n]:.3f})" for n in r["greedy"]}
        rows.append([r["name"], *(cells.get(n, "") for n in lengths), f"{min(r['oracle'].values()):.3f}"])
    return markdown_table(rows)


if __name__ == "__main__":
    main()

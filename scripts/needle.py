"""Fine-tune trained runs on the needle-in-a-haystack task (paper, section 5 and appendix), and score them.

    python -m scripts.needle runs/a runs/b                       the paper's settings: C4, 300 steps of 64 sequences
    python -m scripts.needle runs/mini-*-s?/ --scale mini        the settings of another scale (configs/sweeps.py)
    python -m scripts.needle runs/a --haystack shards --lengths 4096 16384 --examples 200

The settings are --haystack (c4 or shards, the run's own text), --steps and --sequences of fine-tuning, --curriculum and
--examples (scored prompts a length).

Fine-tuning uses the run's training length, optimizers and peak learning rates. The learning rate warms up for a third
of the steps, stays constant for a third, and falls to zero. The loss is on the response alone. --curriculum shortens
the prompts in the first half of the steps, because small models learn short prompts first. The paper does not use it.

A score is the share of needles whose city and number are both right, by greedy decoding or by teacher forcing. All
files are in RUN/needle/. The same command continues an interrupted fine-tuning or scoring.
"""

import dataclasses
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from configs.command_line import read_fields
from configs.config import Config, config_hash
from configs.sweeps import SCALES, Needle
from data.loader import micro_batch_size
from data.needle import C4, Haystack, NeedleTask, score
from errors import exit_on_user_error, require
from measure.validation import uncompiled
from model.decoding import greedy_decode
from model.gpt import GPT
from model.methods.base import Method
from model.methods.make import alternative_methods
from optim.schedule import lr_factor
from runtime.build import accumulate, build_optimizers, compile_model
from runtime.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from runtime.metrics import Metrics, read_record
from runtime.processes import World, start_processes
from runtime.run_folder import RunFolder
from scripts.shared.arguments import Parser
from scripts.shared.runs import check_tokenizer, load_run, read_run, tokenizer_of_run

SAVE_EVERY = 50  # steps
KINDS = ("greedy", "teacher_forcing", "by_distance")  # kinds of scores, keys of summary.json
TEST_SEED = 1_000_000  # of the scored examples: the same for all runs, and unlike any run's seed for fine-tuning


@exit_on_user_error()
def main():
    parser = Parser("python -m scripts.needle", __doc__)
    add = parser.add_argument
    parser.add_runs()
    add("--lengths", nargs="+", type=int, help="tokens per prompt (default: 1, 4, 16 x train_length)")
    add("--scale", default="paper", choices=SCALES, help="gives the defaults of the other settings")
    parser.add_device()
    add("--compile", default="auto", choices=["auto", "on", "off"])
    args, settings = parser.parse_known_args()
    needle = dataclasses.replace(SCALES[args.scale].needle, **read_fields(settings, Needle()))
    device = start_processes(args.device).device
    for path in args.runs:
        run(path, needle, args.lengths, device, args.compile)


def run(path: Path, needle: Needle, lengths: list[int] | None, device: torch.device, compile: str):
    """Fine-tune and score one run, or finish an interrupted one. Raise ValueError or OSError for the user's mistakes.

    lengths: tokens per scored prompt. None: the default of --lengths.
    """
    # ---- setup: every mistake of the user is reported here, before a folder exists ----
    config, model = load_run(path, device)
    config = dataclasses.replace(config, compile=compile)
    compiled = compile_model(model, config, World(0, 1, device))
    stored_run = read_run(path)
    tokenizer = tokenizer_of_run(stored_run)
    read, folder = Haystack.from_shards, Path(config.data_dir)
    if needle.haystack == "c4":
        read, folder = Haystack.from_c4, C4
    else:
        check_tokenizer(stored_run, folder)
    train_text, val_text = (read(folder, split, tokenizer) for split in ("train", "val"))
    tuning_lengths = (needle.curriculum or config.train_length, config.train_length)  # one for each half of the steps
    tuning_tasks = [NeedleTask(tokenizer, train_text, length, seed=config.seed) for length in tuning_lengths]
    lengths = lengths or Needle.lengths(config.train_length)
    test_tasks = {length: NeedleTask(tokenizer, val_text, length, seed=TEST_SEED) for length in lengths}
    for task in (*tuning_tasks, *test_tasks.values()):
        task.example(0)  # raises ValueError for a length that is too short or too long

    # ---- fine-tuning ----
    folder = RunFolder(path, "needle", resume="auto")
    settings = {field: getattr(config, field) for field in ("method", "train_length", "seed")}
    settings |= vars(needle)
    settings |= {"pretrained": latest_checkpoint(path / "checkpoints").stem, "config_hash": config_hash(config)}
    stored = settings | (read_record(folder.path / "settings.json") or {})
    changed = ", ".join(key for key in settings if stored[key] != settings[key])
    require(not changed, f"{folder.path} has other settings ({changed}). Delete it to start again.")
    folder.write_json("settings.json", settings)
    fine_tune(config, model, compiled, tuning_tasks, folder, needle)

    # ---- scoring ----
    summary = {"name": path.name, **settings} | (read_record(folder.path / "summary.json") or {})
    add_scores(summary, config, uncompiled(model), test_tasks, folder)
    folder.close()


def fine_tune(
    config: Config, model: GPT, compiled: nn.Module, tasks: list[NeedleTask], folder: RunFolder, needle: Needle
):
    """Train the model in place. Continue from the folder's latest checkpoint.

    compiled: the model as compile_model returns it. tasks: one for each half of the steps. Steps of both halves have
    about as many tokens.
    """
    # 1. The state at the latest checkpoint.
    device, steps = model.head.device, needle.steps
    optimizers = build_optimizers(config, model, World(0, 1, device))
    start = 0
    if checkpoint := latest_checkpoint(folder.checkpoints):
        state = load_checkpoint(checkpoint)
        start = state["step"]
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
    metrics = Metrics(folder.metrics)
    metrics.truncate(start)

    # 2. The steps.
    schedule = dataclasses.replace(
        config,
        steps=steps,
        schedule="trapezoid",
        warmup_steps=steps // 3,
        cooldown_steps=steps // 3,
        length_schedule=(),
    )
    plans = [model.plan(task.length, backend=config.attention_backend) for task in tasks]
    for step in tqdm(range(start, steps), "fine-tuning", initial=start, total=steps, unit="step", disable=None):
        task, plan = tasks[step >= steps // 2], plans[step >= steps // 2]
        count = needle.sequences * config.train_length // task.length
        size = micro_batch_size(count, task.length, config.micro_batch_tokens)
        batch = task.batch(range(step * count, (step + 1) * count))
        inputs, targets, mask = (torch.from_numpy(x).contiguous().to(device) for x in batch)  # (count, T)
        weights = mask / mask.sum()  # mean over the response tokens of the whole step
        losses = (
            (compiled(x, y, plan=plan, per_token=True) * w).sum()
            for x, y, w in zip(inputs.split(size), targets.split(size), weights.split(size))
        )
        loss, grad_norm = optimizers.reduce(accumulate(losses))
        is_finite = torch.isfinite(loss + grad_norm)
        optimizers.step(lr_factor(schedule, step), is_finite)
        require(is_finite, f"step {step + 1} has a non-finite gradient. Train {folder.path.parent} again.")
        metrics.write({"step": step + 1, "train_loss": loss.item()})
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            state = {"step": step + 1, "model": model.state_dict(), "optimizers": optimizers.state_dict()}
            save_checkpoint(folder.checkpoints, step + 1, state, keep=1)


def add_scores(summary: dict, config: Config, model: GPT, tasks: dict, folder: RunFolder):
    """Add the missing scores to the summary: {kind: {length: share}}. Scores of validate_as go into summary["as"].

    tasks: by length. summary.json is written after each length, so an interrupted scoring continues.
    """
    for name, method in {config.method: None, **alternative_methods(config)}.items():  # all that can run these weights
        shares = summary.setdefault("as", {}).setdefault(name, {}) if method else summary
        for length, task in tasks.items():
            key = str(length)
            if key in shares.get("greedy", {}):
                continue
            scores = measure_accuracy(config, model, task, summary["examples"], method)
            for kind in KINDS:
                shares.setdefault(kind, {})[key] = scores[kind]
            folder.write_json("summary.json", summary)
            greedy, forced = scores["greedy"], scores["teacher_forcing"]
            print(f"{summary['name']} as {name}, {length} tokens: score {greedy:.3f} (teacher forcing {forced:.3f})")


@torch.inference_mode()
def measure_accuracy(config: Config, model: GPT, task: NeedleTask, examples: int, method: Method | None = None) -> dict:
    """Return the scores of KINDS on a task's first examples.

    greedy, teacher_forcing: shares of needles. by_distance: {d: [found, all]} of greedy decoding, for d = 1, 2, 4, ...,
    counts the needles that start d to 2d - 1 tokens before the response.
    """
    # 1. The examples by length of the prompt, because a batch needs prompts of equal length.
    device, tokenizer = model.head.device, task.tokenizer
    size = max(1, config.micro_batch_tokens // task.length)
    plan = model.plan(task.length, backend=config.attention_backend, method=method)
    by_start = defaultdict(list)
    for example in map(task.example, range(examples)):
        by_start[example.response_start].append(example)

    # 2. Two scores of each needle, and its distance.
    found = []
    for start, group in by_start.items():
        response = task.length + 1 - start
        for first in range(0, len(group), size):
            batch = group[first : first + size]
            tokens = torch.from_numpy(np.stack([example.tokens for example in batch])).to(device)  # (B, length + 1)
            decoded = greedy_decode(  # (B, response) at most
                model, tokens[:, :start], response, target_length=task.length, stop=tokenizer.eot, method=method
            )
            predicted = model(tokens[:, :-1], plan=plan, last=response).argmax(dim=-1)  # (B, response)
            for example, *answers in zip(batch, decoded.tolist(), predicted.tolist()):
                scores = [score(tokenizer.decode(ids), tokenizer.eot_text, example) for ids in answers]
                found += zip((start - position for position in example.positions), *scores, strict=True)

    # 3. Their means.
    by_distance = defaultdict(lambda: [0, 0])
    for distance, right, _ in sorted(found):
        counts = by_distance[str(2 ** (distance.bit_length() - 1))]  # the largest power of 2 <= distance
        counts[0] += right
        counts[1] += 1
    _, greedy, forced = (sum(column) / len(found) for column in zip(*found))
    return {"greedy": greedy, "teacher_forcing": forced, "by_distance": by_distance}


if __name__ == "__main__":
    main()

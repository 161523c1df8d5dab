"""The needle-in-a-haystack task (paper, section 5 and appendix): fine-tunes trained runs on it, and scores them.

    python -m scripts.needle runs/a runs/b                       as in the paper: C4, 300 steps of 64 sequences
    python -m scripts.needle runs/mini-*-s?/ --scale mini        with the settings of another scale (configs/sweeps.py)
    python -m scripts.needle runs/a --haystack shards --lengths 4096 16384 --examples 200

A run is fine-tuned at its training length with its own optimizers and peak learning rates: a third of the steps of
warm-up, a third constant, a third down to zero. The loss is on the response alone. With --curriculum, which the paper
does not have, prompts are shorter in the first half of the steps: small models learn to retrieve nearby first.

The score at a length is the share of needles with the right city and number, by greedy decoding and by teacher forcing.
RUN/needle/ holds everything. The same command continues an interrupted fine-tuning or scoring.
"""

import argparse
import dataclasses
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from configs.config import Config, config_hash
from configs.sweeps import SCALES, Needle
from data.loader import micro_batch_size
from data.needle import C4, NEEDLES, Haystack, NeedleTask, score
from data.tokenizer import load_tokenizer
from errors import exit_on_user_error, require
from model.decoding import greedy_decode
from model.gpt import GPT
from model.methods.base import Method
from optim.schedule import lr_factor
from runtime.build import build_optimizers, compile_model, train_step, uncompiled
from runtime.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from runtime.device import choose_compile
from runtime.metrics import Metrics
from runtime.processes import World, start_processes
from runtime.run_folder import RunFolder
from runtime.validation import build_alternatives
from scripts.evaluate import load_run

SAVE_EVERY = 50  # steps
KINDS = ("greedy", "teacher_forcing", "by_distance")  # of scores
TEST_SEED = 1_000_000  # of the scored examples, the same for all runs; no fine-tuning has this seed


@exit_on_user_error()
def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m scripts.needle", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens a prompt (default: 1, 4, 16 x training length)")
    parser.add_argument("--scale", default="paper", choices=SCALES, help="settings that the next five options change")
    parser.add_argument("--haystack", choices=["c4", "shards"], help=f"c4 (kept in {C4}), or the run's own shards")
    parser.add_argument("--steps", type=int, help="steps of fine-tuning, a third for each part of the schedule")
    parser.add_argument("--sequences", type=int, help="sequences in a step (the paper: 8 x 8)")
    parser.add_argument("--curriculum", type=int, help="tokens a prompt in the first half of the steps (0: as later)")
    parser.add_argument("--examples", type=int, help="prompts scored at each length")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--compile", default="auto", choices=["auto", "on", "off"])
    args = parser.parse_args(argv)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Needle)}
    given = {name: value for name, value in given.items() if value is not None}
    needle = dataclasses.replace(SCALES[args.scale].needle, **given)
    device = start_processes(args.device).device
    compiled, _ = choose_compile(args.compile, device)
    for path in args.runs:
        run(path, needle, args.lengths, device, compiled)


def run(path: Path, needle: Needle, lengths: list[int] | None, device: torch.device, compiled: bool):
    """Fine-tune and score one run, or do the rest of it. lengths: None for the paper's.

    Raise ValueError or OSError for the user's mistakes.
    """
    # ---- setup: every mistake of the user is reported here, before a folder exists ----
    config, model = load_run(path, device)
    tokenizer = load_tokenizer(Path(config.data_dir))
    train_text, val_text = (
        Haystack.from_c4(C4, split, tokenizer) if needle.haystack == "c4"
        else Haystack.from_shards(Path(config.data_dir), split, tokenizer)
        for split in ("train", "val")
    )  # fmt: skip
    halves = (needle.curriculum or config.train_length, config.train_length)
    tuning = [NeedleTask(tokenizer, train_text, length, seed=config.seed) for length in halves]
    lengths = lengths or Needle.lengths(config.train_length)
    tests = {length: NeedleTask(tokenizer, val_text, length, seed=TEST_SEED) for length in lengths}
    for task in (*tuning, *tests.values()):
        task.example(0)  # may raise

    # ---- fine-tuning ----
    folder = RunFolder(path, "needle", resume="auto")
    settings = {
        "method": config.method, "train_length": config.train_length, "seed": config.seed, **dataclasses.asdict(needle),
        "pretrained": latest_checkpoint(path / "checkpoints").stem, "config_hash": config_hash(config),
    }  # fmt: skip
    stored = settings | read_json(folder.path / "settings.json")
    changed = ", ".join(key for key in settings if stored[key] != settings[key])
    require(not changed, f"{folder.path} is another fine-tuning ({changed} differ). Delete it to start again.")
    folder.write_json("settings.json", settings)
    fine_tune(config, model, tuning, folder, compiled, needle)

    # ---- scoring ----
    no_scores = {kind: {} for kind in KINDS}
    summary = {"name": path.name, **settings, **no_scores} | read_json(folder.path / "summary.json")
    add_scores(summary, config, uncompiled(model), tests, folder)
    folder.close()


def read_json(path: Path) -> dict:
    """Return the content of a file, or {} if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else {}


def fine_tune(config: Config, model: GPT, tasks: list[NeedleTask], folder: RunFolder, compiled: bool, needle: Needle):
    """Train the model in place, from the folder's latest checkpoint on.

    tasks: one for each half of the steps. A step has about as many tokens of either.
    """
    device, steps, world = model.head.device, needle.steps, World(0, 1, model.head.device)
    optimizers = build_optimizers(config, model, compiled, world)
    start = 0
    if checkpoint := latest_checkpoint(folder.checkpoints):
        state = load_checkpoint(checkpoint)
        start = state["step"]
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
    metrics = Metrics(folder.metrics)
    metrics.truncate(start)
    plans = [model.plan(task.length, backend=config.attention_backend) for task in tasks]
    training_model = compile_model(model) if compiled else model
    for step in tqdm(range(start, steps), "fine-tuning", initial=start, total=steps, unit="step", disable=None):
        task, plan = tasks[step >= steps // 2], plans[step >= steps // 2]
        count = needle.sequences * config.train_length // task.length
        size = micro_batch_size(count * task.length, task.length, config.micro_batch_tokens, world_size=1)
        batch = task.batch(range(step * count, (step + 1) * count))
        inputs, targets, mask = (torch.from_numpy(x).contiguous().to(device) for x in batch)  # (count, T)
        weights = mask / mask.sum()  # mean over the response tokens of the whole step
        micro_batches = list(zip(inputs.split(size), zip(targets.split(size), weights.split(size))))
        factor = lr_factor(step, steps=steps, schedule="trapezoid", warmup_steps=steps // 3, cooldown_steps=steps // 3)

        def step_loss(inputs, targets, plan):
            tokens, weights = targets
            losses = training_model(inputs, tokens, plan=plan, per_token=True)  # (B, T)
            return (losses * weights).sum() * (count / len(inputs))  # train_step divides by this

        loss, _ = train_step(step_loss, micro_batches, plan, optimizers, factor, world)
        metrics.write({"step": step + 1, "train_loss": loss.item()})
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            state = {"step": step + 1, "model": model.state_dict(), "optimizers": optimizers.state_dict()}
            save_checkpoint(folder.checkpoints, step + 1, state, keep=1)


def add_scores(summary: dict, config: Config, model: GPT, tests: dict[int, NeedleTask], folder: RunFolder):
    """Add the scores that the summary lacks: {kind: {length: share}}, and below "as" those of each validate_as.

    summary.json is written after each length, so an interrupted scoring continues.
    """
    others = build_alternatives(config)  # methods that run the same weights
    if others:
        summary["as"] = {name: {kind: {} for kind in KINDS} for name in others} | summary.get("as", {})
    for name, method in {config.method: None, **others}.items():
        shares = summary["as"][name] if method else summary
        for length in (n for n in tests if str(n) not in shares["greedy"]):
            if method and length <= config.train_length:  # the rotations are the same up to here
                scores = {kind: summary[kind][str(length)] for kind in KINDS}
            else:
                scores = measure_accuracy(config, model, tests[length], summary["examples"], method)
            for kind in KINDS:
                shares[kind][str(length)] = scores[kind]
            folder.write_json("summary.json", summary)
            found, forced = scores["greedy"], scores["teacher_forcing"]
            print(f"{summary['name']} as {name} at {length}: {found:.3f} of the needles ({forced:.3f} teacher-forced)")


@torch.inference_mode()
def measure_accuracy(config: Config, model: GPT, task: NeedleTask, examples: int, method: Method | None = None) -> dict:
    """Return the scores of KINDS on a task's first examples: shares of needles, and by_distance.

    by_distance: [found, all] by greedy decoding, of needles that start d to 2d - 1 tokens before the response, for
    d = 1, 2, 4 and so on.
    """
    device, greedy, forced, by_distance = model.head.device, [], [], defaultdict(lambda: [0, 0])
    size = max(1, config.micro_batch_tokens // task.length)
    plan = model.plan(task.length, backend=config.attention_backend, method=method)
    by_prompt = defaultdict(list)  # a batch of prompts has one length
    for example in map(task.example, range(examples)):
        by_prompt[example.response_start].append(example)
    batches = [(n, group[i : i + size]) for n, group in by_prompt.items() for i in range(0, len(group), size)]
    for start, batch in batches:
        tokens = torch.from_numpy(np.stack([example.tokens for example in batch])).to(device)  # (B, length + 1)
        response, eot = task.length + 1 - start, task.tokenizer.eot
        decoded = greedy_decode(  # (B, response) at most
            model, tokens[:, :start], response, target_length=task.length, stop=eot, method=method
        )
        predicted = model(tokens[:, :-1], plan=plan, last=response).argmax(dim=-1)  # (B, response)
        for example, ids, forced_ids in zip(batch, decoded.tolist(), predicted.tolist()):
            greedy += score(task.tokenizer.decode(ids), example)
            forced += score(task.tokenizer.decode(forced_ids), example)
            for right, position in zip(greedy[-NEEDLES:], example.positions, strict=True):
                distance = start - position  # in tokens, from the response back to the needle
                by_distance[2 ** (distance.bit_length() - 1)][0] += right
                by_distance[2 ** (distance.bit_length() - 1)][1] += 1
    return {
        "greedy": sum(greedy) / len(greedy),
        "teacher_forcing": sum(forced) / len(forced),
        "by_distance": {str(distance): by_distance[distance] for distance in sorted(by_distance)},
    }


if __name__ == "__main__":
    main()

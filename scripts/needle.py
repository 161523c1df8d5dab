"""The needle-in-a-haystack task (paper, section 5 and appendix): fine-tunes trained runs on it, and scores them.

    python -m scripts.needle runs/a runs/b                       as in the paper: C4, 300 steps of 64 sequences
    python -m scripts.needle runs/mini-*-s?/ --scale mini        with the settings of another scale (configs/sweeps.py)
    python -m scripts.needle runs/a --haystack shards --lengths 4096 16384 --examples 200

A run is fine-tuned at its training length with its own optimizers and peak learning rates: a third of the steps of
warm-up, a third constant, a third down to zero. The loss is on the response alone. With --curriculum, which the paper
does not have, prompts are shorter in the first half of the steps: small models learn to retrieve nearby first.

The score at a length is the share of needles with the right city and number, by greedy decoding and by teacher forcing.
RUN/needle/ holds everything. The same command continues an interrupted fine-tuning (exit code 75 after a signal).
"""

import argparse
import dataclasses
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from configs.config import Config, config_hash
from configs.sweeps import SCALES, Needle
from data.loader import micro_batch_size
from data.needle import C4, NEEDLES, Haystack, NeedleTask, oracle_accuracy, score
from data.tokenizer import Tokenizer, load_tokenizer
from errors import UserError, exit_on_user_error, require
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
from runtime.signals import StopRequest, exit_code
from runtime.validation import build_alternatives
from scripts.evaluate import load_run
from scripts.shared.tables import markdown_table

SAVE_EVERY = 50  # steps
KINDS = ("greedy", "teacher_forcing", "oracle", "by_distance")  # of scores
TEST_SEED = 1_000_000  # of the scored examples, the same for all runs; no fine-tuning has this seed


def main():
    with exit_on_user_error():
        args, needle = read_arguments()
        device = start_processes(args.device).device
        compiled, _ = choose_compile(args.compile, device)
    results = []
    for path in args.runs:
        print(f"fine-tuning {path}", file=sys.stderr)
        try:
            with StopRequest() as stop:
                results.append(run(path, needle, args.lengths, device, compiled, stop))
        except (ValueError, OSError) as error:  # the other runs still get their row
            print(f"error: {error}", file=sys.stderr)
    if results:
        print(f"\nNeedles found of 3 a prompt, by greedy decoding (by teacher forcing):\n\n{accuracy_table(results)}")
    if len(results) < len(args.runs):
        sys.exit(2)


def read_arguments() -> tuple[argparse.Namespace, Needle]:
    """Return the command line, and the settings: those of a scale with the changes of the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.needle", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens a prompt (default: 1, 4, 16 x training length)")
    parser.add_argument("--scale", default="paper", choices=SCALES, help="settings that the next five options change")
    parser.add_argument("--haystack", help=f"c4 (the paper's; kept in {C4}), shards (the run's own data), or a path")
    parser.add_argument("--steps", type=int, help="steps of fine-tuning, a third for each part of the schedule")
    parser.add_argument("--sequences", type=int, help="sequences in a step (the paper: 8 x 8)")
    parser.add_argument("--curriculum", type=int, help="tokens a prompt in the first half of the steps (0: as later)")
    parser.add_argument("--examples", type=int, help="prompts scored at each length")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--compile", default="auto", choices=["auto", "model", "blocks", "off"])
    args = parser.parse_args()
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Needle)}
    given = {name: value for name, value in given.items() if value is not None}
    return args, dataclasses.replace(SCALES[args.scale].needle, **given)


def run(
    path: Path, needle: Needle, lengths: list[int] | None, device: torch.device, compiled: str | None, stop: StopRequest
) -> dict:
    """Fine-tune and score one run, or do the rest of it; return the summary. lengths: None for the paper's.

    A signal ends the process with everything saved. Raise ValueError or OSError for the user's mistakes.
    """
    # ---- setup: every mistake of the user is reported here, before a folder exists ----
    config, model = load_run(path, device)
    most, short = config.train_length, needle.curriculum or config.train_length
    require(short <= most, f"--curriculum {short}: longer than the training length. Use at most {most}.")
    tokenizer = load_tokenizer(Path(config.data_dir))
    train_text, val_text = (find_haystack(needle.haystack, split, config, tokenizer) for split in ("train", "val"))
    tuning = [NeedleTask(tokenizer, train_text, length, seed=config.seed) for length in (short, most)]
    lengths = lengths or Needle.lengths(most)
    tests = {length: NeedleTask(tokenizer, val_text, length, seed=TEST_SEED) for length in lengths}
    for task in (*tuning, *tests.values()):
        task.example(0)  # may raise

    # ---- fine-tuning ----
    folder = RunFolder.create(path, "needle", resume="auto")
    stop.mark = folder.mark_interrupted
    settings = {
        "method": config.method, "train_length": most, "seed": config.seed, "haystack": needle.haystack,
        "steps": needle.steps, "sequences": needle.sequences, "curriculum": needle.curriculum,
        "pretrained": latest_checkpoint(path / "checkpoints").stem, "config_hash": config_hash(config),
    }  # fmt: skip
    stored = read_json(folder.path / "settings.json", default=settings)
    changed = ", ".join(f"{k} {stored.get(k)} -> {settings[k]}" for k in settings if stored.get(k) != settings[k])
    require(not changed, f"{folder.path} is another fine-tuning ({changed}). Delete it to start again.")
    folder.write_json("settings.json", settings)
    fine_tune(config, model, tuning, folder, compiled, needle, stop)
    if stop.signal_name:
        print(f"{path}: {stop.signal_name}: stopped. The same command continues.", file=sys.stderr)
        folder.mark_interrupted(stop.signal_name)
        folder.close()
        sys.exit(exit_code())

    # ---- scoring ----
    shares = score_methods(config, uncompiled(model), tests, needle.examples, folder)
    summary = {"name": path.name, **settings, "examples": needle.examples, **shares.pop(config.method)}
    summary |= {"as": shares} if shares else {}
    folder.write_json("summary.json", summary)
    folder.close()
    return summary


def find_haystack(source: str, split: str, config: Config, tokenizer: Tokenizer) -> Haystack:
    if source == "shards":
        return Haystack.from_shards(Path(config.data_dir), split, tokenizer)
    if source == "c4":
        return Haystack.from_c4(C4, split, tokenizer)
    return Haystack.from_text([Path(source)], split, tokenizer)


def read_json(path: Path, default: dict) -> dict:
    """Return the content of a file, or the default if it does not exist. Raise ValueError for a damaged file."""
    try:
        return json.loads(path.read_text()) if path.exists() else default
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}). Delete {path.parent} to start again.") from error


def fine_tune(
    config: Config, model: GPT, tasks: list[NeedleTask], folder: RunFolder, compiled: str | None, needle: Needle,
    stop: StopRequest,
):  # fmt: skip
    """Train the model in place, from the folder's latest checkpoint on. After a signal, save the current step.

    tasks: one for each half of the steps. A step has about as many tokens of either.
    """
    device, steps, world = model.head.device, needle.steps, World.alone(model.head.device)
    optimizers = build_optimizers(config, model, bool(compiled), world)
    start = 0
    if checkpoint := latest_checkpoint(folder.checkpoints):
        state = load_checkpoint(checkpoint)
        start = state["step"]
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
    metrics = Metrics(folder.metrics)
    metrics.truncate(start, validated=-1)
    plans = [model.plan(task.length, backend=config.attention_backend) for task in tasks]
    training_model = compile_model(model, compiled)
    for step in tqdm(range(start, steps), "fine-tuning", initial=start, total=steps, unit="step", disable=None):
        half = 0 if step < steps // 2 else 1
        task, plan = tasks[half], plans[half]
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
        stopping = stop.signal_name is not None
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps or stopping:
            state = {"step": step + 1, "model": model.state_dict(), "optimizers": optimizers.state_dict()}
            save_checkpoint(folder.checkpoints, step + 1, state, keep=1)
        if stopping:
            break
        stop.can_save = True
    stop.can_save = False  # everything is saved: a signal may end the process at once


def score_methods(
    config: Config, model: GPT, tests: dict[int, NeedleTask], examples: int, folder: RunFolder
) -> dict[str, dict[str, dict]]:
    """Return {method: {kind: {length: share}}} of the run's method and of its validate_as, which have its weights.

    scores.json keeps the scores length by length, so an interrupted scoring continues.
    """
    known = read_json(folder.path / "scores.json", default={})  # {method: {length: scores}}
    for name, method in {config.method: None, **build_alternatives(config)}.items():
        scores = known.setdefault(name, {})
        for length, test in tests.items():
            if method and length <= config.train_length:  # the rotations are the same up to here
                scores[str(length)] = known[config.method][str(length)]
            elif scores.get(str(length), {}).get("examples") != examples:
                accuracy = measure_accuracy(config, model, test, examples, method)
                scores[str(length)] = {"examples": examples, **accuracy, "oracle": oracle_accuracy(test, examples)}
                folder.write_json("scores.json", known)
            share = scores[str(length)]["greedy"]
            print(f"{folder.path.parent.name} as {name}: {share:.3f} of the needles at {length}", file=sys.stderr)
    shares = {}
    for name, by_length in known.items():
        whole = {length: scores for length, scores in by_length.items() if scores["examples"] == examples}
        shares[name] = {kind: {length: scores[kind] for length, scores in whole.items()} for kind in KINDS}
    return shares


@torch.inference_mode()
def measure_accuracy(config: Config, model: GPT, task: NeedleTask, examples: int, method: Method | None = None) -> dict:
    """Return the shares of needles found in a task's first examples: "greedy", "teacher_forcing" and "by_distance".

    by_distance: [found, all] by greedy decoding, of needles that start d to 2d - 1 tokens before the response, for
    d = 1, 2, 4 and so on.
    """
    device, greedy, forced, by_distance = model.head.device, [], [], {}
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
                counts = by_distance.setdefault(2 ** (distance.bit_length() - 1), [0, 0])
                counts[0] += right
                counts[1] += 1
    return {
        "greedy": sum(greedy) / len(greedy),
        "teacher_forcing": sum(forced) / len(forced),
        "by_distance": {str(distance): by_distance[distance] for distance in sorted(by_distance)},
    }


def accuracy_table(summaries: list[dict]) -> str:
    """Return a table with one row a run, and one for its weights run as each other method."""
    lengths = sorted({int(length) for summary in summaries for length in summary["greedy"]})
    rows = [["run", *map(str, lengths), "copier"]]
    for summary in summaries:
        name = summary["name"]
        others = {f"{name} as {method}": shares for method, shares in summary.get("as", {}).items()}
        for label, shares in {name: summary, **others}.items():
            forced = shares["teacher_forcing"]
            cells = {int(n): f"{share:.3f} ({forced[n]:.3f})" for n, share in shares["greedy"].items()}
            rows.append([label, *(cells.get(n, "") for n in lengths), f"{min(shares['oracle'].values()):.3f}"])
    return markdown_table(rows)


if __name__ == "__main__":
    main()

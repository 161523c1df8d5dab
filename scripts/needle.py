"""The needle-in-a-haystack task (paper, section 5 and appendix): fine-tunes trained runs on it, and scores them.

    python -m scripts.needle runs/a runs/b                       as in the paper: C4, 300 steps of 64 sequences
    python -m scripts.needle runs/mini-*-s?/ --scale mini        with the settings of another scale (configs/sweeps.py)
    python -m scripts.needle runs/a --haystack shards --lengths 4096 16384 --examples 200

`python -m scripts.sweep table_needle` does this for every run of the paper's table, in parallel, and trains those that
are missing. A run is fine-tuned at its training length with its own optimisers and peak learning rates: a third of the
steps of warm-up, a third constant, a third down to zero, loss on the response alone. With --curriculum, which the paper
has not, the prompts of the first half of the steps are shorter: small models learn to retrieve from near by first. Then
it is scored at each length: the share of needles of which city and number are both right, by greedy decoding and by
teacher forcing. Everything is left in RUN/needle/, a run folder of its own; what was interrupted goes on from there
(exit code 75, as of training, when a signal ended it). The seed is that of the run.
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
from configs.interrupt import exit_code
from configs.sweeps import SCALES, Needle
from data.loader import micro_batch_size
from data.needle import C4, NEEDLES, Haystack, NeedleTask, oracle_accuracy, score
from data.tokenizer import Tokenizer, load_tokenizer
from errors import exit_on_user_error, require
from files import refuse_link
from model.decoding import greedy_decode
from model.gpt import GPT
from model.methods.base import Method
from optim.schedule import lr_factor
from runtime.build import build_optimizers, compile_model
from runtime.checkpoint import checkpoint_errors, latest_checkpoint, load_checkpoint, save_checkpoint
from runtime.device import choose_compile
from runtime.metrics import Metrics
from runtime.processes import World, exit_on_failure, start_processes
from runtime.progress import Progress
from runtime.run_folder import RunFolder
from runtime.signals import StopRequest
from runtime.validation import build_alternatives
from scripts.evaluate import load_run
from scripts.shared.tables import markdown_table

SAVE_EVERY = 50  # steps
TEST_SEED = 1_000_000  # of the scored examples, the same for all runs; no run is fine-tuned with it


@exit_on_failure("lower --sequences or --lengths")
def main():
    with exit_on_user_error():
        args, settings = read_arguments()
        device = start_processes(args.device).device
        compiled, _ = choose_compile(args.compile, device)
    results, failed = [], False
    for path in args.runs:
        print(f"fine-tuning {path}", file=sys.stderr)
        try:
            with StopRequest() as stop:
                results.append(run(path, settings, args.lengths, device, compiled, stop))
        except (ValueError, OSError) as error:  # the other runs still get their row
            print(f"error: {error}", file=sys.stderr)
            failed = True
    if results:
        print(f"\nNeedles found of 3 a prompt, by greedy decoding (by teacher forcing):\n\n{accuracy_table(results)}")
    if failed:
        sys.exit(2)


def read_arguments() -> tuple[argparse.Namespace, Needle]:
    """Return the command line, and the settings that it asks for: those of a scale, and what replaces them."""
    parser = argparse.ArgumentParser(prog="python -m scripts.needle", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens a prompt (default: 1, 4, 16 x training length)")
    parser.add_argument("--scale", default="paper", choices=SCALES, help="whose settings the next five replace")
    parser.add_argument("--haystack", help=f"c4 (the paper's; kept in {C4}), shards (the run's own data), or a path")
    parser.add_argument("--steps", type=int, help="of fine-tuning, a third each of the schedule's parts")
    parser.add_argument("--sequences", type=int, help="in a step (the paper: 8 x 8)")
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
    """Fine-tune and score one run, or what is left of that to do; return the summary that it leaves behind.

    lengths: None for those of the paper's table. Ends the process, with all that is done saved, when `stop` receives a
    signal. Raise ValueError or OSError for what cannot be done, also when another process does it.
    """
    config, model = load_run(path, device)
    lengths = lengths or Needle.lengths(config.train_length)
    most, short = config.train_length, needle.curriculum or config.train_length
    require(short <= most, f"curriculum of the needle task: {short} tokens are more than the training length, {most}")
    tokenizer = load_tokenizer(Path(config.data_dir))
    texts = {split: haystack(needle.haystack, split, config, tokenizer) for split in ("train", "val")}
    tuning = [NeedleTask(tokenizer, texts["train"], length, seed=config.seed) for length in (short, most)]
    tests = {length: NeedleTask(tokenizer, texts["val"], length, seed=TEST_SEED) for length in lengths}
    for test in (*tuning, *tests.values()):
        test.example(0)  # what cannot be made is said before anything is computed
    refuse_link(path / "needle")
    folder = RunFolder.create(path, "needle", resume="auto")
    stop.mark = folder.mark_interrupted
    settings = dict(method=config.method, train_length=config.train_length, seed=config.seed)
    settings |= dict(haystack=needle.haystack, steps=needle.steps)
    settings |= dict(sequences=needle.sequences, curriculum=needle.curriculum)
    settings |= dict(pretrained=latest_checkpoint(path / "checkpoints").stem, config_hash=config_hash(config))
    check_same(folder.path / "settings.json", settings)
    folder.write_json("settings.json", settings)
    fine_tune(config, model, tuning, folder, compiled, needle, stop)
    if stop.signal_name:
        print(f"{path}: {stop.signal_name}: stopped; the same command goes on from there", file=sys.stderr)
        folder.mark_interrupted(stop.signal_name)
        folder.close()
        sys.exit(exit_code())
    summary = dict(name=path.name, **settings, examples=needle.examples)
    known = score_lengths(config, model, tests, needle.examples, folder, "scores.json")
    summary |= shares_by_kind(known, needle.examples)
    as_others = {}
    for name, method in build_alternatives(config).items():
        # Up to the training length they are the same.
        same = {length: score for length, score in known.items() if int(length) <= config.train_length}
        beyond = {length: test for length, test in tests.items() if length > config.train_length}
        theirs = score_lengths(config, model, beyond, needle.examples, folder, f"scores_{name}.json", method)
        as_others[name] = shares_by_kind(same | theirs, needle.examples)
    summary |= {"as": as_others} if as_others else {}
    folder.write_json("summary.json", summary)
    folder.close()
    return summary


def shares_by_kind(known: dict[str, dict], examples: int) -> dict[str, dict]:
    """Return the shares of needles by kind and length, of those lengths that were scored on this many examples."""
    whole = {length: score for length, score in known.items() if score["examples"] == examples}
    kinds = ("greedy", "teacher_forcing", "oracle", "by_distance")
    return {kind: {length: score[kind] for length, score in whole.items() if kind in score} for kind in kinds}


def score_lengths(
    config: Config, model: GPT, tests: dict, examples: int, folder: RunFolder, name: str, method: Method | None = None
) -> dict[str, dict]:
    """Score the model, with the weights that it has, on the test of each length, run as `method` (default: its own).
    Return by length the number of examples, what measure_accuracy returns, and what a perfect copier gets.

    They are kept in the folder's file `name`, length by length; what is known there is not computed again.
    """
    known = read_json(folder.path / name) or {}
    for length, test in tests.items():
        if known.get(str(length), {}).get("examples") != examples:
            found = measure_accuracy(config, model, test, examples, method)
            known[str(length)] = dict(examples=examples, **found, oracle=oracle_accuracy(test, examples))
            folder.write_json(name, known)
        share = known[str(length)]["greedy"]
        label = folder.path.parent.name + (f" as {method.name}" if method else "")
        print(f"{label}: {share:.3f} of the needles at {length}", file=sys.stderr)
    return known


def haystack(source: str, split: str, config: Config, tokenizer: Tokenizer) -> Haystack:
    """Return the text that needles are hidden in. source: shards (the run's own data), c4, or a path."""
    if source == "shards":
        return Haystack.from_shards(Path(config.data_dir), split, tokenizer)
    if source == "c4":
        return Haystack.from_c4(C4, split, tokenizer)
    return Haystack.from_text([Path(source)], split, tokenizer)


def check_same(path: Path, settings: dict):
    """Raise ValueError if the fine-tuning that was begun has other settings."""
    stored = read_json(path)
    old = settings if stored is None else stored
    changed = ", ".join(f"{k} {old.get(k)} -> {settings[k]}" for k in settings if old.get(k) != settings[k])
    require(old == settings, f"{path.parent} is of another fine-tuning ({changed}): delete it to start again")


def read_json(path: Path) -> dict | None:
    """Return what the file holds, None where there is none. Raise ValueError if it is damaged."""
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete {path.parent} to start again") from error


def fine_tune(
    config: Config,
    model: GPT,
    tasks: list[NeedleTask],
    folder: RunFolder,
    compiled: str | None,
    needle: Needle,
    stop: StopRequest,
):
    """Train the model in place, resuming from the folder's latest checkpoint.

    tasks: that of the first half of the steps and that of the second; a step has about as many tokens of either. When
    `stop` receives a signal it returns after the step under way, with a checkpoint; it may be the last step.
    """
    device, steps, sequences = model.head.device, needle.steps, needle.sequences
    schedule = dict(schedule="trapezoid", steps=steps, warmup_steps=steps // 3, cooldown_steps=steps // 3)
    optimizers = build_optimizers(config, model, bool(compiled), World.alone(device))
    start = 0
    if checkpoint := latest_checkpoint(folder.checkpoints):
        state = load_checkpoint(checkpoint)
        with checkpoint_errors(checkpoint):
            start = Progress.load(checkpoint, state, steps).step
            model.load_state_dict(state["model"])
            optimizers.load_state_dict(state["optimizers"])
    metrics = Metrics(folder.metrics)
    metrics.truncate(start, validated=-1)
    plans = [model.plan(task.length, backend=config.attention_backend) for task in tasks]
    training_model = compile_model(model, compiled)
    for step in tqdm(range(start, steps), "fine-tuning", initial=start, total=steps, unit="step", disable=None):
        half = 0 if step < steps // 2 else 1
        task, plan = tasks[half], plans[half]
        count = sequences * config.train_length // task.length
        size = micro_batch_size(count * task.length, task.length, config.micro_batch_tokens, world_size=1)
        batch = task.batch(range(step * count, (step + 1) * count))
        inputs, targets, mask = (torch.from_numpy(x).contiguous().to(device) for x in batch)  # (count, T)
        weights = mask / mask.sum()  # the mean over the response tokens of the whole step
        loss = torch.zeros((), device=device)
        for part in zip(inputs.split(size), targets.split(size), weights.split(size)):
            losses = training_model(part[0], part[1], plan=plan, per_token=True)  # (B, T)
            weighted = (losses * part[2]).sum()
            weighted.backward()
            loss += weighted.detach()
        optimizers.step(lr_factor(step, **schedule), loss.isfinite())
        metrics.write(dict(step=step + 1, train_loss=loss.item()))
        stopping = stop.signal_name is not None
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps or stopping:
            state = dict(step=step + 1, model=model.state_dict(), optimizers=optimizers.state_dict())
            save_checkpoint(folder.checkpoints, step + 1, state, keep=1)
        if stopping:
            break
        stop.can_save = True  # from here on there is something to save
    stop.can_save = False  # all is saved


@torch.inference_mode()
def measure_accuracy(config: Config, model: GPT, task: NeedleTask, examples: int, method: Method | None = None) -> dict:
    """Return the shares of needles found by greedy decoding and by teacher forcing, in the task's first examples, and
    by_distance: by greedy decoding, [found, all] of those whose start is d to 2d - 1 tokens before the response, for
    d = 1, 2, 4, ..."""
    device, greedy, forced, by_distance = model.head.device, [], [], {}
    size = max(1, config.micro_batch_tokens // task.length)
    plan = model.plan(task.length, backend=config.attention_backend, method=method)
    by_prompt = defaultdict(list)  # a batch of prompts has one length
    for example in map(task.example, range(examples)):
        by_prompt[example.response_start].append(example)
    batches = [(n, group[i : i + size]) for n, group in by_prompt.items() for i in range(0, len(group), size)]
    for start, batch in batches:
        tokens = torch.from_numpy(np.stack([example.tokens for example in batch])).to(device)  # (B, length + 1)
        response = task.length + 1 - start
        until = dict(target_length=task.length, stop=task.tokenizer.eot)
        decoded = greedy_decode(model, tokens[:, :start], response, **until, method=method)
        predicted = model(tokens[:, :-1], plan=plan, last=response).argmax(dim=-1)  # (B, response)
        for example, ours, given in zip(batch, decoded.tolist(), predicted.tolist()):
            greedy += score(task.tokenizer.decode(ours), example)
            forced += score(task.tokenizer.decode(given), example)
            for right, position in zip(greedy[-NEEDLES:], example.positions, strict=True):
                distance = start - position  # in tokens, from the response back to the needle
                counts = by_distance.setdefault(2 ** (distance.bit_length() - 1), [0, 0])
                counts[0] += right
                counts[1] += 1
    shares = dict(greedy=sum(greedy) / len(greedy), teacher_forcing=sum(forced) / len(forced))
    return shares | dict(by_distance={str(distance): by_distance[distance] for distance in sorted(by_distance)})


def accuracy_table(results: list[dict]) -> str:
    """Return one row a run, and one for its weights run as each other method. results: those of run()."""
    lengths = sorted({int(length) for r in results for length in r["greedy"]})
    rows = [["run", *map(str, lengths), "copier"]]
    for result in results:
        name = result["name"]
        for label, r in {name: result, **{f"{name} as {m}": r for m, r in result.get("as", {}).items()}}.items():
            cells = {int(n): f"{r['greedy'][n]:.3f} ({r['teacher_forcing'][n]:.3f})" for n in r["greedy"]}
            rows.append([label, *(cells.get(n, "") for n in lengths), f"{min(r['oracle'].values()):.3f}"])
    return markdown_table(rows)


if __name__ == "__main__":
    main()

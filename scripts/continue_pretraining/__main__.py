"""Continues the pretraining of a model of Hugging Face's with another attention method, as in the paper's table of
Llama 2 7B: validated at 4k, 16k and 64k, trained at 4k, and validated again.

    python -m scripts.continue_pretraining MODEL --method scale_invariant_p_rope --data data/fineweb_llama2
    python -m scripts.continue_pretraining MODEL --method all --resume auto        the ten of the paper's table
    python -m scripts.continue_pretraining MODEL --dry_run                         parameters and memory, no weights
    torchrun --standalone --nproc_per_node=8 -m scripts.continue_pretraining MODEL ...

MODEL is a folder or a name on the hub, of the family llama. Each run leaves everything in runs/continued/NAME/, as
train_gpt.py does; `--resume auto` continues it from its latest checkpoint. `python -m scripts.reproduce table_llama`
makes the table. docs/huggingface.md says what is ours where the paper says nothing.
"""

import dataclasses
import functools
import hashlib
import math
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from configs.interrupt import exit_code
from data.loader import TrainLoader, check_validation, micro_batch_size
from data.model_files import TOKENIZER_CONFIG, model_file
from data.shards import TOKENIZER_FILE, TokenStream, open_split, tokenizer_of
from errors import exit_on_user_error, require
from model.backends.sdpa import prefer_fast_sdpa
from runtime.checkpoint import check_same_run, checkpoint_errors, latest_checkpoint, load_checkpoint, space_needed
from runtime.device import choose_compile
from runtime.processes import (
    World,
    exit_on_failure,
    fail_together,
    limit_waiting,
    start_processes,
    stop_processes,
)
from runtime.progress import Progress
from runtime.run_folder import RunFolder
from runtime.signals import StopRequest
from runtime.validation import means_by_octave
from scripts.continue_pretraining import checkpoint
from scripts.continue_pretraining.log import Log
from scripts.continue_pretraining.memory import check_memory, checkpoint_bytes, describe_memory
from scripts.continue_pretraining.model import (
    AdamW8bit,
    WithLoss,
    build,
    check_config,
    mean_by_position,
    shard,
    train_step,
)
from scripts.continue_pretraining.settings import NOT_MATHEMATICS, Settings, read_settings
from scripts.huggingface.attention import attention_layers, measure_scores, rescale
from scripts.huggingface.load import read_config

OUT_OF_MEMORY = "lower --micro_batch_tokens or --val_lengths, or use more GPUs (torchrun)"


def main(argv: list[str] | None = None):
    with exit_on_user_error(), exit_on_failure(OUT_OF_MEMORY):
        runs = read_settings(sys.argv[1:] if argv is None else argv, __doc__)
        first, processes = runs[0], int(os.environ.get("WORLD_SIZE", 1))
        if first.dry_run:
            trained = max(runs, key=lambda settings: settings.steps)
            return print(describe_memory(read_config(first.model), trained, processes))
        world = start_processes(first.device)
        prefer_fast_sdpa(world.device)
        for settings in runs:
            with StopRequest() as stop:
                finished = continue_pretraining(settings, world, stop)
            if not finished:
                break
        stop_processes(world)
    if not finished:
        sys.exit(exit_code())


def sequences_at_once(settings: Settings, processes: int) -> int:
    """Return how many sequences a process computes at once. ValueError unless all have as many micro-batches, which the
    exchange of sharded weights needs."""
    sequences = settings.batch_tokens // settings.train_length
    words = f"the {sequences} sequences of a step cannot be shared evenly by {processes} processes"
    require(sequences % processes == 0, f"{words}: use another number of them, or another --batch_tokens")
    return micro_batch_size(settings.batch_tokens, settings.train_length, settings.micro_batch_tokens, processes)


def continue_pretraining(settings: Settings, world: World, stop: StopRequest) -> bool:
    """Do one run, or what is left of it. Return False if a signal to stop came first."""
    # ---- set up: what can be wrong is found before there is a run folder ---------------------------------------------
    path = settings.path
    if (path / "summary.json").exists():
        if world.is_main:
            print(f"{path} is finished: see summary.json there")
        return True
    with fail_together(world):
        mend = "choose another --name, or continue it with --resume auto"
        require(settings.resume == "auto" or not path.exists(), f"{path} exists: {mend}")
        config = read_config(settings.model)
        check_config(config, settings)
        train_text, val_text, data = open_text(settings, config)
        micro_batch = sequences_at_once(settings, world.world_size)
        compiled, compile_note = choose_compile(settings.compile, world.device)
        check_memory(config, settings, world)
        model = build(settings, world)
        scores = score_deviations(model, settings, val_text, world)
    shard(model, world)
    with fail_together(world):
        optimizer = AdamW8bit(model, settings, world, bool(compiled)) if settings.steps else None
        folder = None
        if world.is_main:
            space = space_needed(path / "checkpoints", checkpoint_bytes(config, settings), settings.keep)
            folder = RunFolder.create(settings.runs_dir, settings.name, settings.resume, need_bytes=space)
            stop.mark = folder.mark_interrupted
    progress = resume(settings, world, model, optimizer, data["train"])
    with fail_together(world):
        log = Log(settings, world, folder, progress)
    log.begin(data, model, compile_note, scores)
    run = Run(settings, world, model, optimizer, val_text, data, folder, progress, log, stop)
    limit_waiting(world, settings.timeout)

    # ---- the loop ----------------------------------------------------------------------------------------------------
    first, stopping = progress.step, False
    with load_from(settings, train_text, config.vocab_size, micro_batch, first, world) as loader:
        for step in range(first, settings.steps):
            stopping = stop.is_set(world)
            due = step == 0 or settings.val_every and step % settings.val_every == 0
            if due and step != progress.validated and not stopping:
                stopping = not run.validate(scores)
            if step > first and (stopping or settings.save_every and step % settings.save_every == 0):
                run.save()
            if stopping:
                break
            stop.can_save = True  # from here on there is something to save
            began = time.monotonic()
            loss, grad_norm = train_step(model, next(loader), world)
            with fail_together(world):
                finite = math.isfinite(loss) and math.isfinite(grad_norm)
                mend = "lower --lr, or --resume auto with another --name"
                require(finite, f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; nothing was updated: {mend}")
            optimizer.step(step)
            progress.step = step + 1
            log.step(loss, grad_norm, time.monotonic() - began)

    # ---- the end -----------------------------------------------------------------------------------------------------
    if not stopping:
        if settings.steps > first:
            run.save()  # a validation can run out of memory
        if progress.validated < settings.steps or not settings.steps:
            stopping = not run.validate(scores)
    if stopping:
        told_by = stop.signal_name or "another process"
        log.print(f"{told_by}: stopped after step {progress.step}; --resume auto goes on from there")
        if folder is not None:
            folder.mark_interrupted(stop.signal_name or "of another process")
    else:
        if settings.save_model:
            run.write_model()
        log.finish(data, model)
    log.close()
    return not stopping


# ---- the parts -------------------------------------------------------------------------------------------------------


def load_from(
    settings: Settings, text: TokenStream, vocab_size: int, micro_batch: int, step: int, world: World
) -> TrainLoader:
    length = settings.train_length
    shape = dict(batch_tokens=settings.batch_tokens, length=length, micro_batch_tokens=micro_batch * length)
    where = dict(rank=world.rank, world_size=world.world_size, device=world.device)
    return TrainLoader(text, **shape, **where, vocab_size=vocab_size, start_step=step)


def open_text(settings: Settings, config) -> tuple[TokenStream, TokenStream, dict]:
    """Return the training and the validation text, and what data.json says about them. ValueError for shards that were
    not made with the model's own tokenizer."""
    tokens = settings.steps * settings.batch_tokens
    train_text = open_split(settings.data, "train", config.vocab_size, tokens)
    val_text = open_split(settings.data, "val", config.vocab_size)
    check_validation(val_text, settings.val_lengths, settings.val_tokens)
    enough = len(val_text) > settings.train_length
    require(enough, f"{settings.data}: the validation text is shorter than --train_length {settings.train_length}")
    theirs, file = tokenizer_of(settings.data), model_file(settings.model, TOKENIZER_FILE)
    ours = hashlib.sha256(file.read_bytes()).hexdigest()
    command = f"python -m data.text ... --tokenizer {settings.model} --out {settings.data}"
    words = f"{settings.data} was made with another tokenizer ({theirs}) than that of {settings.model} ({ours})"
    require(theirs == ours, f"{words}: make the shards with `{command}`")
    distinct = min(tokens, len(train_text))
    data = dict(train=train_text.fingerprint(tokens), validation=val_text.fingerprint(settings.val_tokens))
    return train_text, val_text, data | dict(tokenizer=theirs, tokens=tokens, distinct_tokens=distinct)


def score_deviations(model: WithLoss, settings: Settings, text: TokenStream, world: World) -> dict:
    """Return mean and deviation of the scores S in each layer, over heads, on the first sequence of a text, and give
    them the factors of --rescale first. Empty for methods that have no scores."""
    if any(layer.method.replacement is not None for layer in attention_layers(model.model)):
        require(settings.rescale == "no", f"{settings.method} has no scores to rescale")
        return {}
    vocab_size = model.model.config.vocab_size
    tokens = text.read(0, settings.train_length, vocab_size).astype("int64")  # (T,)
    tokens = torch.from_numpy(tokens).to(world.device).unsqueeze(0)
    model.eval()
    if settings.rescale != "no":
        rescale(model.model, tokens, by=settings.rescale)
    mean, std = measure_scores(model.model, tokens).mean(dim=1).T.tolist()  # over heads: (2, layers)
    return dict(scores_mean=mean, scores_std=std)


def resume(
    settings: Settings, world: World, model: WithLoss, optimizer: AdamW8bit | None, fingerprint: str
) -> Progress:
    """Load the latest checkpoint of the run folder, if there is one. Raise ValueError for one of another run."""
    latest = latest_checkpoint(settings.path / "checkpoints")
    if latest is None or optimizer is None:
        return Progress()
    with fail_together(world):
        state = load_checkpoint(latest)
        with checkpoint_errors(latest):
            ours = settings.to_dict() | dict(data_dir=settings.data)
            check_same_run(latest, state, ours, fingerprint, may_differ={*NOT_MATHEMATICS, "data_dir"})
            progress = Progress.load(latest, state, settings.steps)
            files = dict(state["files"])
    checkpoint.load(latest, files, tensors_of(model, optimizer), world)
    return progress


def tensors_of(model: WithLoss, optimizer: AdamW8bit) -> dict[str, torch.Tensor]:
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    return weights | {f"optimizer.{name}": x for name, x in optimizer.state().items()}


@dataclasses.dataclass
class Run:
    """What saving and validating need."""

    settings: Settings
    world: World
    model: WithLoss
    optimizer: AdamW8bit | None
    val_text: TokenStream
    data: dict
    folder: RunFolder | None  # of the main process
    progress: Progress
    log: Log
    stop: StopRequest

    def save(self):
        rest = vars(self.progress) | dict(config=self.settings.to_dict(), fingerprint=self.data["train"])
        where = self.settings.path / "checkpoints"
        tensors = tensors_of(self.model, self.optimizer)
        checkpoint.save(where, self.progress.step, tensors, rest, self.settings.keep, self.world)

    def write_model(self):
        how = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model.model, options=how)  # gathered in the main process
        if self.folder is not None:
            place = self.folder.path / "model"
            self.model.model.save_pretrained(place, state_dict=weights)
            for name in (TOKENIZER_FILE, TOKENIZER_CONFIG):
                if (file := Path(self.settings.data) / name).exists():
                    shutil.copyfile(file, place / name)

    def validate(self, scores: dict) -> bool:
        """Validate at all lengths. Return False if a signal to stop came first. scores: before training."""
        began, settings, step = time.monotonic(), self.settings, self.progress.step
        stopping = functools.partial(self.stop.is_set, self.world)
        means = {}
        for length in settings.val_lengths:
            mean = mean_by_position(self.model, self.val_text, length, settings, self.world, stopping)
            if mean is None:
                return False
            means[str(length)] = mean
        record = dict(step=step, tokens=step * settings.batch_tokens)
        record |= dict(val_loss={length: mean.mean().item() for length, mean in means.items()})
        record |= dict(val_tokens=dict.fromkeys(means, settings.val_tokens))
        record |= dict(val_loss_by_position={length: means_by_octave(mean) for length, mean in means.items()})
        record |= scores if step == 0 else {}
        own = {n: p.tolist() for n, p in self.model.named_parameters() if ".method." in n and p.dim() == 1}
        record |= dict(method_parameters=own, val_seconds=round(time.monotonic() - began, 3))
        self.progress.validation = record
        self.log.validated(record, time.monotonic() - began)
        return True


if __name__ == "__main__":
    main()

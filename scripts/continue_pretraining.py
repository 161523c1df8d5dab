"""Continues the pretraining of a Hugging Face model with another attention method, as in the paper's table of
Llama 2 7B: validates at 4k, 16k and 64k, trains at 4k, and validates again.

    python -m scripts.continue_pretraining MODEL --method scale_invariant_p_rope --data data/fineweb_llama2
    python -m scripts.continue_pretraining MODEL --method all --resume auto        the ten of the paper's table
    python -m scripts.continue_pretraining MODEL --dry_run                         the memory that a run needs
    torchrun --standalone --nproc_per_node=8 -m scripts.continue_pretraining MODEL ...

MODEL is a folder or a name on the hub, of the family llama. Each run leaves everything in runs/continued/NAME/, as
train_gpt.py does; `--resume auto` continues it from its latest checkpoint. `python -m scripts.reproduce table_llama`
makes the table. docs/huggingface.md lists our choices where the paper is silent.
"""

import functools
import hashlib
import math
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from data.download import model_file
from data.loader import TrainLoader, check_validation, sequences_of
from data.shards import TOKENIZER_FILE, TokenStream, open_split, tokenizer_of
from data.tokenizer import TOKENIZER_CONFIG
from errors import exit_on_user_error, require
from model.attention.sdpa import prefer_fast_sdpa
from optim.sharded import Group, Optimizers
from runtime.checkpoint import check_same_run, checkpoint_errors, load_newest, save_checkpoint, set_aside, space_needed
from runtime.device import device_name, peak_memory
from runtime.metrics import Metrics, read_metrics, start_wandb
from runtime.processes import World, exit_on_failure, fail_together, limit_waiting, start_processes, stop_processes
from runtime.progress import Progress
from runtime.run_folder import RunFolder
from runtime.signals import StopRequest, exit_code
from runtime.validation import Stopped, Validation, format_losses
from scripts.hf.attention import attention_layers, convert
from scripts.hf.load import DTYPES, METHOD, load_model, read_config
from scripts.hf.scores import measure_scores, rescale
from scripts.hf.settings import NOT_MATHEMATICS, Settings, read_settings
from scripts.hf.training import AdamW, WithLoss, count_memory

ROOT = Path(__file__).parents[1]
SOURCES = ("scripts/continue_pretraining.py", "scripts/hf/*.py", "model/**/*.py")  # kept in log.txt
SECONDS_A_LINE, SECONDS_TO_WAIT = 10, 600  # between lines on the console; for other processes
OUT_OF_MEMORY = "lower --micro_batch_tokens or --val_lengths, or use more GPUs (torchrun)"


def main(argv: list[str] | None = None):
    with exit_on_user_error(), exit_on_failure(OUT_OF_MEMORY):
        runs = read_settings(sys.argv[1:] if argv is None else argv, __doc__)
        if runs[0].dry_run:
            trained = max(runs, key=lambda settings: settings.steps)
            return print_memory(trained, int(os.environ.get("WORLD_SIZE", 1)))
        world = start_processes(runs[0].device)
        prefer_fast_sdpa(world.device)
        finished = True
        for settings in runs:
            with StopRequest() as stop:
                finished = finished and continue_pretraining(settings, world, stop)
        stop_processes(world)
    if not finished:
        sys.exit(exit_code())


def continue_pretraining(settings: Settings, world: World, stop: StopRequest) -> bool:
    """Do one run, or the rest of it. Return False if a signal stopped it."""
    # ---- setup: every mistake of the user is reported here, before a run folder exists ----
    path = settings.path
    if (path / "summary.json").exists():
        if world.is_main:
            print(f"{path} is finished: see summary.json there")
        return True
    with fail_together(world):
        config = read_config(settings.model)
        fits = config.vocab_size <= 2**16
        require(fits, f"shards have 16-bit tokens. The vocabulary of {settings.model} is larger: {config.vocab_size}.")
        require(config.model_type == "llama", f"{settings.model} caps its logits. Use a model of the family llama.")
        train_text, val_text, data = open_text(settings, config.vocab_size)
        loader = functools.partial(
            TrainLoader, train_text, batch_tokens=settings.batch_tokens, length=settings.train_length,
            micro_batch_tokens=settings.micro_batch_tokens, vocab_size=config.vocab_size, rank=world.rank,
            world_size=world.world_size, device=world.device,
        )  # fmt: skip
        sequences_of(settings.batch_tokens, settings.train_length, world.rank, world.world_size)  # may raise
        dtype = DTYPES[settings.dtype]
        model = WithLoss(load_model(settings.model, dtype=dtype, device=world.device, attention_dropout=0.0))
        convert(model.model, settings.method, train_length=settings.train_length, **settings.method_options)
        model.model.activation_checkpointing_enable()
        scores = score_deviations(model, val_text, settings, world)
        optimizers = None
        if settings.steps:
            adamw = functools.partial(AdamW, weight_decay=settings.weight_decay)
            groups = {"all": Group([*model.parameters()], adamw, settings.lr)}
            optimizers = Optimizers(groups, world.rank, world.world_size)
        folder = None
        if world.is_main:
            memory = count_memory(config, settings, processes=1)
            needed = space_needed(path / "checkpoints", memory["weights"] + memory.get("moments", 0), settings.keep)
            folder = RunFolder.create(settings.runs_dir, settings.name, settings.resume, need_bytes=needed)
            stop.mark = folder.mark_interrupted
    progress = restore(settings, world, model, optimizers, data["train"])
    with fail_together(world):
        metrics = start_log(settings, world, folder, progress, data)
    report = functools.partial(print_and_log, folder)
    report(f"{path}: {settings.model}, {settings.method} on {world.world_size} x {device_name(world.device)}")
    report(f"{num_parameters(model):,} parameters in {settings.dtype}; step {progress.step} of {settings.steps}")
    names = SimpleNamespace(method=settings.method, validate_as=(), val_copy_gaps=(),
                            vocab_size=config.vocab_size, micro_batch_tokens=settings.micro_batch_tokens)  # fmt: skip
    no_plans = {settings.method: dict.fromkeys(settings.val_lengths)}
    validation = Validation(names, model.model, val_text, world, plans=no_plans)
    validation.runner = model
    limit_waiting(world, SECONDS_TO_WAIT)

    # ---- the loop ----
    first, last_line, sequences = progress.step, -math.inf, settings.batch_tokens // settings.train_length
    with loader(start_step=first) as batches:
        for step in range(first, settings.steps + 1):
            stopping, last = stop.is_set(world), step == settings.steps
            save_now = last or (settings.save_every and step % settings.save_every == 0)
            if step > first and (save_now or stopping):  # before a validation, which can run out of memory
                save(settings, world, model, optimizers, progress, data["train"], folder)
            due = step == 0 or last or (settings.val_every and step % settings.val_every == 0)
            if due and step != progress.validated and not stopping:
                began = time.monotonic()
                model.eval()
                passes = dict.fromkeys(settings.val_lengths, settings.val_tokens)
                try:
                    losses = validation.losses(passes, functools.partial(stop.is_set, world))
                except Stopped:
                    stopping = True
                    break
                learned = {name: p.tolist() for name, p in model.named_parameters() if METHOD in name and p.dim() == 1}
                record = dict(step=step, tokens=step * settings.batch_tokens, method_parameters=learned) | losses
                record |= dict(val_seconds=round(time.monotonic() - began, 3)) | (scores if step == 0 else {})
                progress.validation = record
                write(metrics, record)
                report(f"step {step}/{settings.steps}  validation loss {format_losses(losses['val_loss'])}")
            if stopping or last:
                break
            stop.can_save = True  # from here on there is something to save

            # ---- one training step ----
            began = time.monotonic()
            model.train()
            loss = torch.zeros((), device=world.device)
            micro_batches = next(batches)
            for number, (inputs, targets) in enumerate(micro_batches, start=1):  # both (sequences, train_length)
                micro_loss = model(inputs, targets) * (len(inputs) / sequences)
                if number == len(micro_batches):
                    optimizers.overlap_communication()  # sends gradients as they are complete
                micro_loss.backward()
                loss += micro_loss.detach()
            numbers = torch.stack([loss, optimizers.reduce_gradients()])
            world.sum([numbers])
            torch.manual_seed((settings.seed * 2**24 + step) * world.world_size + world.rank)  # of the rounding
            optimizers.step(1.0, numbers.isfinite().all())
            loss, grad_norm = numbers[0].item(), numbers[1].sqrt().item()
            with fail_together(world):
                finite = math.isfinite(loss) and math.isfinite(grad_norm)
                require(finite, f"step {step + 1}: loss {loss}, gradient norm {grad_norm}. Lower --lr.")
            seconds = time.monotonic() - began
            progress.step, progress.seconds = step + 1, progress.seconds + seconds
            write(metrics, dict(
                step=step + 1, tokens=(step + 1) * settings.batch_tokens, train_loss=loss, grad_norm=grad_norm,
                lr=settings.lr, tokens_per_second=round(settings.batch_tokens / seconds),
                seconds=round(progress.seconds, 3), peak_memory_mib=peak_memory(world.device) >> 20,
            ))  # fmt: skip
            if time.monotonic() - last_line > SECONDS_A_LINE:
                last_line, left = time.monotonic(), (settings.steps - step - 1) * seconds / 60
                report(f"step {step + 1}/{settings.steps}  loss {loss:.4f}  {left:.1f} min left")

    # ---- the end ----
    if stopping:
        name = stop.signal_name or "of another process"
        report(f"signal {name}: stopped after step {progress.step}. Continue with --resume auto.")
    if folder is not None:
        if stopping:
            folder.mark_interrupted(name)
        else:
            if settings.save_model:
                write_model(model, settings, folder)
            write_summary(settings, folder, progress, data, num_parameters(model))
        if metrics.wandb is not None:
            metrics.wandb.finish()
        folder.close()
    return not stopping


# ---- the parts -------------------------------------------------------------------------------------------------------


def print_memory(settings: Settings, processes: int):
    parts = count_memory(read_config(settings.model), settings, processes)
    print(f"{settings.model}, {settings.method}: GiB on each of {processes} devices")
    for kind, size in (parts | {"together": sum(parts.values())}).items():
        print(f"{size / 2**30:10.2f}  {kind}")


def num_parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def open_text(settings: Settings, vocab_size: int) -> tuple[TokenStream, TokenStream, dict]:
    """Return the training and the validation text, and the content of data.json. Raises ValueError for shards of
    another tokenizer than the model's."""
    tokens = settings.steps * settings.batch_tokens
    train_text = open_split(settings.data, "train", vocab_size, tokens)
    val_text = open_split(settings.data, "val", vocab_size)
    check_validation(val_text, settings.val_lengths, settings.val_tokens)
    in_data, file = tokenizer_of(settings.data), model_file(settings.model, TOKENIZER_FILE)
    same = in_data == hashlib.sha256(file.read_bytes()).hexdigest()
    command = f"python -m data.text ... --tokenizer {settings.model}"
    require(same, f"{settings.data} has another tokenizer than {settings.model}. Make shards with `{command}`.")
    data = dict(
        train=train_text.fingerprint(tokens), validation=val_text.fingerprint(settings.val_tokens), tokenizer=in_data,
        tokens=tokens, distinct_tokens=min(tokens, len(train_text)),
    )  # fmt: skip
    return train_text, val_text, data


def score_deviations(model: WithLoss, text: TokenStream, settings: Settings, world: World) -> dict:
    """Return mean and deviation of the scores of each layer, over heads, on the first sequence of a text, after
    --rescale. Empty for methods without scores."""
    if any(layer.method.replacement is not None for layer in attention_layers(model.model)):
        require(settings.rescale == "no", f"{settings.method} has no scores. Leave out --rescale.")
        return {}
    tokens = text.read(0, min(settings.train_length, len(text)), model.model.config.vocab_size).astype("int64")
    batch = torch.from_numpy(tokens).to(world.device).unsqueeze(0)  # (1, T)
    model.eval()
    if settings.rescale != "no":
        rescale(model.model, batch, by=settings.rescale)
    mean, std = measure_scores(model.model, batch).mean(dim=1).T.tolist()  # each (layers,)
    return dict(scores_mean=mean, scores_std=std)


def restore(
    settings: Settings, world: World, model: WithLoss, optimizers: Optimizers | None, fingerprint: str
) -> Progress:
    """Load the newest whole checkpoint of the run folder, if there is one. Raises ValueError for one of another run."""
    path, state, damaged = load_newest(settings.path / "checkpoints", world)
    if path is None or optimizers is None:
        return Progress()
    with fail_together(world), checkpoint_errors(path):
        ours, may_differ = settings.to_dict() | dict(data_dir=settings.data), {*NOT_MATHEMATICS, "data_dir"}
        check_same_run(path, state, ours, fingerprint, may_differ)
        progress = Progress.load(path, state, settings.steps)
        model.load_state_dict(state["model"])
        optimizers.load_parameters()
        optimizers.load_state_dict(state["optimizers"])
        for checkpoint, reason in damaged.items() if world.is_main else ():
            print(f"{set_aside(checkpoint)} is damaged ({reason}): {path.name} is used instead", file=sys.stderr)
    return progress


def save(
    settings: Settings, world: World, model: WithLoss, optimizers: Optimizers, progress: Progress, fingerprint: str,
    folder: RunFolder | None,
):  # fmt: skip
    """Save a checkpoint. All processes call this, because they hold the moments together."""
    state = vars(progress) | dict(config=settings.to_dict(), fingerprint=fingerprint, model=model.state_dict())
    state["optimizers"] = optimizers.state_dict()
    with fail_together(world):
        if folder is not None:
            save_checkpoint(folder.checkpoints, progress.step, state, settings.keep)


def start_log(settings: Settings, world: World, folder: RunFolder | None, progress: Progress, data: dict):
    """Write what is about to run. Return the Metrics of the main process, None in the others."""
    if folder is None:
        return None
    metrics = Metrics(folder.metrics)
    metrics.truncate(progress.step, progress.validated)
    metrics.wandb = start_wandb(
        settings.wandb, folder=folder.path, run_id=progress.wandb_id, project="scale-invariant-attention",
        name=settings.name, group="continued", tags=[settings.method], config=settings.to_dict(),
    )  # fmt: skip
    progress.wandb_id = metrics.wandb and metrics.wandb.id
    folder.write_json("config.json", settings.to_dict())
    folder.write_json("data.json", data)
    folder.log_header([path for place in SOURCES for path in sorted(ROOT.glob(place))], world.device)
    return metrics


def write(metrics: Metrics | None, record: dict):
    if metrics is not None:
        metrics.write(record)


def print_and_log(folder: RunFolder | None, text: str):
    if folder is not None:
        print(text, flush=True)
        folder.log(text)


def write_model(model: WithLoss, settings: Settings, folder: RunFolder):
    """Write the model and its tokenizer as load_model reads them."""
    model.model.save_pretrained(folder.path / "model")
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG):
        if (file := Path(settings.data) / name).exists():
            shutil.copyfile(file, folder.path / "model" / name)


def write_summary(settings: Settings, folder: RunFolder, progress: Progress, data: dict, parameters: int):
    """Write summary.json, which marks a finished run."""
    before = next(r for r in read_metrics(folder.metrics) if "val_loss" in r and r["step"] == 0)
    keys = ("name", "model", "method", "method_options", "rescale", "train_length", "lr", "dtype", "steps")
    rate = settings.steps * settings.batch_tokens / progress.seconds if progress.seconds else None
    folder.write_json("summary.json", {key: getattr(settings, key) for key in keys} | dict(
        val_loss=progress.validation["val_loss"], val_loss_before=before["val_loss"],
        val_tokens=progress.validation["val_tokens"], scores_std_before=before.get("scores_std"),
        data=data["train"], validation=data["validation"], tokens=data["tokens"],
        distinct_tokens=data["distinct_tokens"], seconds=round(progress.seconds, 3),
        tokens_per_second=rate and round(rate), parameters=parameters,
    ))  # fmt: skip


if __name__ == "__main__":
    main()

"""Pretrains a GPT with one of the attention methods of model/methods.

    python train_gpt.py PRESET [--field value ...]                                        one device
    torchrun --standalone --nproc_per_node=8 train_gpt.py PRESET [--field value ...]      several

PRESET is one of configs/presets.py; `python train_gpt.py PRESET --help` lists all fields. The run leaves everything in
runs/<name>/ (see runtime/run_folder.py); `--resume auto` continues it from its latest checkpoint.
"""

from configs.interrupt import exit_code, leave_on_signals

if __name__ == "__main__":
    leave_on_signals()  # the imports take seconds; train() listens from then on

import functools
import sys
import time
from pathlib import Path

import torch

from configs.command_line import read_config
from configs.config import NOT_MATHEMATICS, Config
from configs.validation import validation_plan
from data.loader import TrainLoader, check_validation
from data.shards import TokenStream, open_split, tokenizer_of
from errors import exit_on_user_error
from model.attention.sdpa import prefer_fast_sdpa
from model.gpt import GPT, Plans
from model.methods import METHODS, canonical_name
from optim.schedule import check_schedule, lr_factor
from optim.sharded import Optimizers
from runtime.build import (
    build_model,
    build_optimizers,
    checkpoint_bytes,
    compile_models,
    config_of,
    layer_methods,
    micro_batch_of,
    train_step,
)
from runtime.checkpoint import (
    BackgroundSaver,
    check_same_run,
    checkpoint_errors,
    has_checksum,
    load_newest,
    set_aside,
    space_needed,
)
from runtime.copy_gain import check_gaps
from runtime.device import choose_compile, compute_dtype, peak_flops, rng_state, set_rng_state
from runtime.nonfinite import explain_step
from runtime.processes import (
    World,
    exit_on_failure,
    fail_together,
    gather,
    limit_waiting,
    start_processes,
    stop_processes,
)
from runtime.progress import Progress
from runtime.replicas import require_same_parameters
from runtime.run_folder import RunFolder
from runtime.run_log import RunLog
from runtime.signals import StopRequest
from runtime.validation import Validation, validation_plans


def main():
    # A disk may fill up at any time; and torchrun stops the ranks of a job that ends, one of which may be saving.
    with StopRequest() as stop, BackgroundSaver() as saver, exit_on_failure(finish=saver.finish):
        train(stop, saver)


def train(stop: StopRequest, saver: BackgroundSaver):
    # ---- set up: what can be wrong is found before there is a run folder ---------------------------------------------
    with exit_on_user_error():
        config = read_config(sys.argv[1:], __doc__, METHODS, canonical_name)
        world = start_processes(config.device, config.context_parallel)
        with fail_together(world):
            schedule = schedule_of(config)
            for length in config.train_lengths:  # a wrong number of processes is an error now
                micro_batch = micro_batch_of(config, world, length)
            dtype = compute_dtype(config, world.device)
            compiled, compile_note = choose_compile(config.compile, world.device, world.world_size)
            prefer_fast_sdpa(world.device)
            torch.manual_seed(config.seed)
            model = build_model(config, dtype).to(world.device)
            for start in reversed(config.method_starts):  # what is wrong with a later method is found now, too
                plans, val_plans = start_method(config, model, world, start)
            optimizers = build_optimizers(config, model, bool(compiled), world)
            train_text, val_text, data = open_text(config)  # the words are right: now the disk
            path = Path(config.runs_dir) / config.name
            folder = None
            if world.is_main:
                space = space_needed(path / "checkpoints", checkpoint_bytes(optimizers), config.keep)
                folder = RunFolder.create(config.runs_dir, config.name, config.resume, need_bytes=space)
                stop.mark = folder.mark_interrupted

        # ---- resume --------------------------------------------------------------------------------------------------
        progress, words, damaged = resume(config, world, model, optimizers, path, data["train"])
        with fail_together(world):
            if config.method_at(progress.step) != config.method:
                plans, val_plans = start_method(config, model, world, progress.step)
        if (path / "summary.json").exists():
            if world.is_main:
                print(f"{path} is finished: see summary.json there")
            return stop_processes(world)
        load_from = functools.partial(
            TrainLoader,
            train_text,
            batch_tokens=config.batch_tokens,
            length=config.length_at,
            micro_batch_tokens=config.micro_batch_tokens * world.context_size,
            rank=world.data_rank,
            world_size=world.data_size,
            vocab_size=config.vocab_size,
            device=world.device,
        )
        the_run = dict(config=config, world=world, model=model, data=data, folder=folder)
        explain = functools.partial(explain_step, **the_run, load_from=load_from, saver=saver)
        with fail_together(world):
            for checkpoint in damaged if world.is_main else ():
                set_aside(checkpoint)
            log = RunLog(config, world, folder, progress, peak=peak_flops(world.device, dtype), explain=explain)
    log.begin(data, len(train_text), model, plans[config.train_length], micro_batch, compile_note)
    for line in words:
        log.print(line)

    compile_run = functools.partial(compile_models, config, world, model, optimizers, compiled)
    training_model, validation_model = compile_run(plans, progress.step)
    validation = Validation(config, model, validation_model, val_plans, val_text, world)
    limit_waiting(world, config.timeout)

    # ---- the loop ----------------------------------------------------------------------------------------------------
    first, stopping = progress.step, False
    log.restart_clock()
    with load_from(start_step=first) as loader:
        for step in range(first, config.steps):
            saver.check()
            stopping = stop.is_set(world)
            if step in config.method_starts and step > first and not stopping:
                log.flush()
                plans, val_plans = start_method(config, model, world, step)
                training_model, validation.runner = compile_run(plans, step)
                validation.plans = val_plans
                log.method_started(step, plans[config.length_at(step)], model)
            passes = {} if stopping or step == progress.validated else validation_plan(config, step)
            save_now = step > first and config.save_every and step % config.save_every == 0
            compare_now = config.compare_every and step % config.compare_every == 0
            if passes or save_now or stopping or compare_now:
                log.flush()
            if passes or compare_now:
                require_same_parameters(optimizers, world, step)
            if passes:
                stopping = not validate(validation, passes, log, stop)
            if step > first and (save_now or stopping):
                save(progress, optimizers, saver, wait=stopping, **the_run)
            if stopping:
                break
            if passes or save_now or compare_now:
                log.restart_clock()

            stop.can_save = True  # from here on there is something to save
            with exit_on_user_error():
                micro_batches = next(loader)
            factor = lr_factor(step, **schedule)
            length = config.length_at(step)
            sequences = config.batch_tokens // length
            numbers = train_step(training_model, micro_batches, plans[length], optimizers, factor, world, sequences)
            progress.step = step + 1
            log.step_started(progress.step, optimizers.learning_rates(factor), numbers)

    # ---- the end -----------------------------------------------------------------------------------------------------
    if not stopping:
        log.flush()
        if config.steps > first:  # now, as a validation can run out of memory
            save(progress, optimizers, saver, wait=True, **the_run)
        if progress.validated < config.steps:
            stopping = not validate(validation, validation_plan(config, config.steps), log, stop)
    if stopping:
        told_by = stop.signal_name or "another process"
        log.print(f"{told_by}: stopped after step {progress.step}; --resume auto goes on from there")
        if folder is not None:
            folder.mark_interrupted(stop.signal_name or "of another process")
    else:
        log.finish(data, model)
    log.close()
    stop_processes(world)
    if stopping:
        sys.exit(exit_code())


# ---- the parts -------------------------------------------------------------------------------------------------------


def schedule_of(config: Config) -> dict:
    """Return the arguments of lr_factor. Raise ValueError for those that do not go together."""
    schedule = dict(
        steps=config.steps,
        schedule=config.schedule,
        warmup_steps=config.warmup_steps,
        cooldown_steps=config.cooldown_steps,
    )
    check_schedule(**schedule)
    if config.switch_warmup_steps:
        switch = round(config.switch_method_at * config.steps)
        schedule |= dict(restart=switch, restart_warmup_steps=config.switch_warmup_steps)
    return schedule


def open_text(config: Config) -> tuple[TokenStream, TokenStream, dict]:
    """Return the training and the validation text, and what data.json says about them."""
    run_tokens = config.steps * config.batch_tokens
    train_text = open_split(config.data_dir, "train", config.vocab_size, run_tokens)
    val_text = open_split(config.data_dir, "val", config.vocab_size, run_tokens)
    data = dict(
        train=train_text.fingerprint(run_tokens),
        validation=val_text.fingerprint(config.val_tokens),
        tokenizer=tokenizer_of(config.data_dir),
        tokens=run_tokens,
        distinct_tokens=min(run_tokens, len(train_text)),
    )
    check_validation(val_text, config.val_lengths, config.val_tokens)
    check_gaps(val_text, config.val_copy_gaps)
    return train_text, val_text, data


def resume(
    config: Config, world: World, model: GPT, optimizers: Optimizers, path: Path, fingerprint: str
) -> tuple[Progress, list[str], list[Path]]:
    """Load the newest checkpoint of the run folder that is whole, if there is one. Return how far it is, what to say of
    it, and newer ones that are damaged. Raise ValueError for one of another run."""
    checkpoint, state, damaged = load_newest(path / "checkpoints", world)
    if checkpoint is None:
        return Progress(), [], []
    words = [f"{bad} is damaged ({why}): {checkpoint.name} is taken instead" for bad, why in damaged.items()]
    with fail_together(world), checkpoint_errors(checkpoint):
        if not config.force:
            theirs = state | dict(config=config_of(state["config"]).to_dict())
            check_same_run(checkpoint, theirs, config.to_dict(), fingerprint, may_differ=NOT_MATHEMATICS)
        progress = Progress.load(checkpoint, state, config.steps)
        model.load_state_dict(state["model"])
        optimizers.load_parameters()
        optimizers.load_state_dict(state["optimizers"])
        restore_rng(progress, world)
        if not has_checksum(checkpoint):
            words.append(f"{checkpoint} is of an older version: only the checksums of its tensors could be compared")
    return progress, words, [*damaged]


def restore_rng(progress: Progress, world: World):
    if len(progress.rng) == world.world_size:
        set_rng_state(progress.rng[world.rank])


def save(
    progress: Progress,
    optimizers: Optimizers,
    saver: BackgroundSaver,
    *,
    wait: bool,
    config: Config,
    world: World,
    model: GPT,
    data: dict,
    folder: RunFolder | None,
):
    """Begin to save a checkpoint; with `wait`, save it before any rank goes on."""
    require_same_parameters(optimizers, world, progress.step)
    progress.rng = gather(world, rng_state())
    state = dict(optimizers=optimizers.state_dict())  # gathered from all processes
    if folder is not None:
        state |= vars(progress) | dict(config=config.to_dict(), fingerprint=data["train"], model=model.state_dict())
        saver.save(folder.checkpoints, progress.step, state, keep=config.keep)
    if wait:
        with fail_together(world):
            saver.finish()


def start_method(
    config: Config, model: GPT, world: World, step: int
) -> tuple[dict[int, Plans], dict[str, dict[int, Plans]]]:
    """Let the model compute with the attention method of this step, which may not be the one that it was built with.
    Return the plans to train it with, by length, and to validate it with. Raise ValueError for a method that cannot
    train here."""
    if len(config.method_starts) > 1:
        model.replace_methods(layer_methods(config, step))
        torch._dynamo.reset()  # what was compiled was for the one before
    where = dict(backend=config.attention_backend)
    plans = {length: model.plan(length, **where) for length in config.train_lengths}
    if world.device.type == "cpu" and any(part.backend == "flex" for plan in plans.values() for part in plan):
        raise ValueError("FlexAttention cannot train on a CPU: use --attention_backend auto")
    return plans, validation_plans(config, model, world)


def validate(validation: Validation, passes: dict[int, int], log: RunLog, stop: StopRequest) -> bool:
    """Validate on passes[length] tokens at each length. Return False if a signal to stop came first."""
    began, config, step = time.monotonic(), validation.config, log.progress.step
    with exit_on_user_error():  # a shard may have changed
        losses = validation.losses(passes, functools.partial(stop.is_set, validation.world))
        if losses is None:
            return False
        record = dict(step=step, tokens=step * config.batch_tokens, val_profile=config.val_profile) | losses
        if validation.world.is_main:
            record |= validation.attention_statistics()
            record |= dict(val_seconds=round(time.monotonic() - began, 3))
    log.progress.validation = record
    log.validated(record, time.monotonic() - began)
    return True


if __name__ == "__main__":
    main()

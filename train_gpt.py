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
import itertools
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from configs.command_line import read_config, user_errors
from configs.config import NOT_MATHEMATICS, Config, config_hash
from configs.validation import validation_plan, validation_share
from data.fineweb import data_command
from data.loader import TrainLoader, check_validation, micro_batch_size, validation_batches
from data.shards import open_split, tokenizer_of
from model.attention import Plan
from model.backends.sdpa import prefer_fast_sdpa
from model.gpt import GPT
from model.methods import METHODS, check_options, make_alternative
from model.methods.base import Method
from optim.groups import split_parameters
from optim.muon import Muon, as_matrices, fast_dtype, lr_scale
from optim.schedule import check_schedule, lr_factor
from optim.sharded import Group, Optimizers
from runtime.checkpoint import (
    check_progress,
    check_same_run,
    fits,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    space_needed,
)
from runtime.device import Reading, choose_compile, device_name, peak_flops, peak_memory, rng_state, set_rng_state
from runtime.metrics import Metrics, start_wandb
from runtime.nonfinite import examine
from runtime.processes import World, agree, failures_in_words, gather, limit_waiting, start_processes, stop_processes
from runtime.run_folder import RunFolder
from runtime.signals import StopRequest

ROOT = Path(__file__).parent


def main():
    with StopRequest() as stop, failures_in_words():  # a disk may fill up at any time
        train(stop)


def train(stop: StopRequest):
    # ---- configuration, devices, model, data: what can be wrong is found before there is a run folder ----------------
    with user_errors():
        config = read_config(sys.argv[1:], __doc__, METHODS)
        world = start_processes(config.device, config.context_parallel)
        path = Path(config.runs_dir) / config.name
        with agree(world):
            schedule = dict(
                steps=config.steps,
                schedule=config.schedule,
                warmup_steps=config.warmup_steps,
                cooldown_steps=config.cooldown_steps,
            )
            check_schedule(**schedule)
            most_tokens = config.micro_batch_tokens * world.context_size
            micro_batch = micro_batch_size(config.batch_tokens, config.train_length, most_tokens, world.data_size)
            dtype = compute_dtype(config, world.device)
            compiled, compile_note = choose_compile(config.compile, world.device, world.world_size)
            prefer_fast_sdpa(world.device)
            torch.manual_seed(config.seed)
            model = build_model(config, dtype).to(world.device)
            plan = model.plan(config.train_length, backend=config.attention_backend, context=world.context)
            val_plans = validation_plans(model, config, config.val_lengths, world)
            if world.device.type == "cpu" and plan.backend == "flex":
                raise ValueError("FlexAttention cannot train on a CPU: use --attention_backend auto")
            optimizers = build_optimizers(config, model, bool(compiled), world)
            run_tokens = config.steps * config.batch_tokens  # the words are right: now the disk
            train_stream = open_split(config.data_dir, "train", config.vocab_size, run_tokens)
            val_stream = open_split(config.data_dir, "val", config.vocab_size, run_tokens)
            data = dict(
                train=train_stream.fingerprint(run_tokens),
                validation=val_stream.fingerprint(config.val_tokens),
                tokenizer=tokenizer_of(config.data_dir),
                tokens=run_tokens,
                distinct_tokens=min(run_tokens, len(train_stream)),
            )
            check_validation(val_stream, config.val_lengths, config.val_tokens)
            if world.is_main:
                space = space_needed(path / "checkpoints", checkpoint_bytes(optimizers), config.keep)
                folder = RunFolder.create(config.runs_dir, config.name, config.resume, need_bytes=space)
                stop.mark = folder.mark_interrupted

        # ---- resume --------------------------------------------------------------------------------------------------
        start, seconds, skipped, validation, validated, wandb_id, rng = 0, 0.0, 0, None, -1, None, []
        with agree(world):
            if checkpoint := latest_checkpoint(path / "checkpoints"):
                state = load_checkpoint(checkpoint)
                with fits(checkpoint):
                    if not config.force:
                        may_differ = NOT_MATHEMATICS
                        check_same_run(checkpoint, state, config.to_dict(), data["train"], may_differ=may_differ)
                    check_progress(checkpoint, state, config.steps)
                    model.load_state_dict(state["model"])
                    optimizers.load_parameters()
                    optimizers.load_state_dict(state["optimizers"])
                    start, seconds, skipped = state["step"], state["seconds"], state.get("skipped", 0)
                    validation, wandb_id, rng = state["validation"], state["wandb_id"], state.get("rng", [])
                    validated = validation["step"] if validation else -1
                    if len(rng) == world.world_size:
                        set_rng_state(rng[world.rank])
                del state
        if (path / "summary.json").exists():
            if world.is_main:
                print(f"{path} is finished: see summary.json there")
            return stop_processes(world)
        with agree(world):
            if world.is_main:
                metrics = Metrics(folder.metrics)
                metrics.truncate(start, validated)
                try:
                    metrics.wandb = start_wandb(
                        config.wandb,
                        project=config.wandb_project,
                        name=config.name,
                        group=config.group or None,
                        tags=[config.method, *config.tags],
                        config=config.to_dict(),
                        folder=folder.path,
                        run_id=wandb_id,
                    )
                except ValueError:
                    folder.discard()  # so that the corrected command finds no folder in its way
                    raise
                wandb_id = metrics.wandb.id if metrics.wandb else wandb_id

    num_parameters = sum(p.numel() for p in model.parameters())
    flops_per_token = model_flops_per_token(config)
    peak = peak_flops(world.device, dtype)

    def say(text: str):  # on the console and in log.txt, by the main process
        if world.is_main:
            tqdm.write(text)
            sys.stdout.flush()  # a sweep keeps these lines in a file: the last ones of a run that is killed too
            folder.log(text)

    if world.is_main:
        folder.write_json("config.json", config.to_dict())
        folder.write_json("data.json", data)
        sources = [ROOT / "train_gpt.py", *sorted(ROOT.glob("model/**/*.py")), *sorted(ROOT.glob("optim/*.py"))]
        folder.log_header(sources, world.device)
    say(f"{path}: {config.method} {config.method_options or ''} on {world.world_size} x {device_name(world.device)}")
    accumulation = config.batch_tokens // config.train_length // micro_batch // world.data_size
    say(
        f"{num_parameters:,} parameters; {config.steps} steps ({schedule_in_words(config)}) of {config.batch_tokens:,} "
        f"tokens, {accumulation} x "
        f"{micro_batch} sequences of {config.train_length} a process; {flops_per_token / 1e6:,.1f} MFLOP a token"
    )
    epochs = run_tokens / len(train_stream)
    say(f"{run_tokens:,} tokens of {len(train_stream):,} distinct ones in {config.data_dir}: {epochs:.2f} epochs")
    if epochs > 1:
        more = data_command(config.data_dir, run_tokens)
        say(f"warning: the text is shorter than the run and is read {epochs:.2f} times: more comes with `{more}`")
    say(f"{str(dtype).removeprefix('torch.')}; compile {compile_note}; attention by {plan.backend} ({plan.why})")
    if peak:
        say(f"MFU of {peak[0]:.3g} FLOP/s ({peak[1]})")
    share = f"validation profile {config.val_profile}: {validation_share(config):.1%} of the FLOPs of training"
    say(share + (f"; resumed at step {start}" if start else ""))

    training_model = compile_model(model, compiled)
    on_cpu = world.device.type == "cpu"  # there the long sequences take longer to compile than to compute
    evaluated_model = model if on_cpu else training_model

    def save(step: int):
        state = dict(optimizers=optimizers.state_dict(), rng=gather(world, rng_state()))  # of all processes
        if world.is_main:
            state |= dict(step=step, seconds=seconds, skipped=skipped, validation=validation, wandb_id=wandb_id)
            state |= dict(config=config.to_dict(), fingerprint=data["train"], model=model.state_dict())
            save_checkpoint(folder.checkpoints, step, state, keep=config.keep)

    def explain(step: int, words: str) -> str:
        """Repeats the step that was not finite, on the weights that it left as they were, and keeps what it finds."""
        own, first = world.own_tokens(config.train_length), (step - 1) * config.batch_tokens
        losses = lambda inputs, targets: model(inputs[:, own], targets[:, own], plan=plan, per_token=True)
        with load_from(start_step=step - 1) as again:
            ranks = gather(world, examine(losses, next(again), model.named_parameters()))
        shard, token = train_stream.where(first)
        saved, dump = latest_checkpoint(path / "checkpoints"), f"nonfinite_{step:06d}.json"
        where = dict(first_token=first, tokens=config.batch_tokens, shard=shard, token_in_shard=token)
        if world.is_main:
            found = dict(found=words, checkpoint=str(saved), data=data["train"], ranks=ranks)
            folder.write_json(dump, where | found | dict(config=config.to_dict()))
        return (
            f"{words}; nothing was updated. Its {config.batch_tokens} tokens begin with token {token} of {shard}; the "
            f"last checkpoint is {saved}; more is in {path / dump}. --on_nonfinite skip would go on"
        )

    # A step's numbers are read when the device is already busy with the next step, so that it never waits for us.
    unread, step_seconds, clock, last_line = None, [], time.monotonic(), -math.inf
    words = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"  # our own estimate of the time left
    bar = tqdm(total=config.steps, initial=start, bar_format=words, disable=None if world.is_main else True)

    def log_step():
        nonlocal unread, seconds, skipped, clock, last_line
        if unread is None:
            return
        (step, factor, numbers), unread = unread, None
        (loss, grad_norm), now = numbers.wait()
        elapsed, clock = now - clock, now
        if not math.isfinite(loss + grad_norm):
            words = f"step {step}: loss {loss}, gradient norm {grad_norm}"
            if config.on_nonfinite == "stop":
                with user_errors(), agree(world):
                    raise ValueError(explain(step, words))
            skipped += 1
            say(f"{words}; skipped, {skipped} so far")
        seconds += elapsed
        step_seconds.append(elapsed)
        rate = config.batch_tokens / elapsed
        mfu = rate * flops_per_token / (peak[0] * world.world_size) if peak else None
        if world.is_main:
            record = dict(step=step, tokens=step * config.batch_tokens, train_loss=loss, grad_norm=grad_norm)
            record |= dict(lr=optimizers.learning_rates(factor), tokens_per_second=round(rate))
            record |= dict(mfu=round(mfu, 4)) if peak else {}
            record |= dict(skipped=skipped) if skipped else {}
            metrics.write(record | dict(seconds=round(seconds, 3), peak_memory_mib=peak_memory(world.device) >> 20))
        line = f"loss {loss:.4f}  {rate:,.0f} tokens/s" + (f"  MFU {mfu:.1%}" if peak else "")
        line += time_left(step_seconds, config.steps - step)
        bar.set_postfix_str(line, refresh=False)
        bar.update()
        if time.monotonic() - last_line > 10:
            last_line = time.monotonic()
            say(f"step {step}/{config.steps}  {line}")

    # ---- compile, in a step that changes nothing ---------------------------------------------------------------------
    if compiled and start < config.steps:
        tokens = torch.zeros(micro_batch, config.train_length, dtype=torch.int64, device=world.device)
        optimizers.found_inf.fill_(1)
        train_step(training_model, [(tokens, tokens)], plan, optimizers, 1.0, world)
        optimizers.found_inf.zero_()
    limit_waiting(world, config.timeout)

    if len(rng) == world.world_size:
        set_rng_state(rng[world.rank])  # again: compiling may have drawn some
    load_from = functools.partial(
        TrainLoader,
        train_stream,
        batch_tokens=config.batch_tokens,
        length=config.train_length,
        micro_batch_size=micro_batch,
        rank=world.data_rank,
        world_size=world.data_size,
        vocab_size=config.vocab_size,
        device=world.device,
    )
    loader = load_from(start_step=start)
    for step in range(start, config.steps + 1):
        last = step == config.steps
        passes = validation_plan(config, step)  # how many tokens at which length
        save_now = config.save_every and step % config.save_every == 0
        stopping = stop.agreed(world)

        # ---- validate and save ---------------------------------------------------------------------------------------
        if passes or save_now or stopping:
            log_step()
            if last and step > start:
                save(step)  # first, because a validation can run out of memory
            if passes and not stopping and step != validated:
                began = time.monotonic()
                stops = functools.partial(stop.agreed, world)
                with user_errors():  # a shard may have changed
                    losses = validate_all(evaluated_model, val_plans, config, val_stream, world, passes, stops)
                stopping = losses is None
            if passes and not stopping and step != validated:
                validated = step
                validation = dict(step=step, tokens=step * config.batch_tokens, val_profile=config.val_profile) | losses
                if world.is_main:
                    with user_errors():
                        validation |= attention_statistics(model, config, val_stream)
                    validation |= dict(val_seconds=round(time.monotonic() - began, 3))
                    metrics.write(validation)
                took = f"({time.monotonic() - began:.1f} s)"
                say(f"step {step}/{config.steps}  validation loss {losses_in_words(validation['val_loss'])}  {took}")
                for name, theirs in validation.get("val_loss_as", {}).items():
                    say(f"step {step}/{config.steps}  the same weights as {name}: {losses_in_words(theirs)}")
            if (save_now or stopping) and start < step < config.steps:
                save(step)
            clock = time.monotonic()
        if stopping or last:
            break

        # ---- step ----------------------------------------------------------------------------------------------------
        stop.holds = True  # from here on there is something to save
        with user_errors():
            micro_batches = next(loader)
        factor = lr_factor(step, **schedule)
        numbers = train_step(training_model, micro_batches, plan, optimizers, factor, world)
        log_step()  # the one before
        unread = step + 1, factor, Reading(numbers)

    # ---- the end -----------------------------------------------------------------------------------------------------
    bar.close()
    loader.close()
    if stopping:
        say(f"{stop.heard or 'another process'}: stopped after step {step}; --resume auto goes on from there")
        if world.is_main:
            folder.mark_interrupted(stop.heard or "of another process")
    elif not all(map(math.isfinite, validation["val_loss"].values())):
        with user_errors(), agree(world):
            words = "the last update made weights that are not finite: lower the learning rates"
            raise ValueError(f"step {step}: validation loss {validation['val_loss']}; {words}")
    elif world.is_main:
        summary = dict(
            name=config.name,
            method=config.method,
            train_length=config.train_length,
            val_loss=validation["val_loss"],
            val_loss_as=validation.get("val_loss_as", {}),
            val_tokens=validation["val_tokens"],
            val_profile=config.val_profile,
            steps=config.steps,
            tokens=run_tokens,
            seconds=round(seconds, 3),
            tokens_per_second=round(config.batch_tokens / statistics.median(step_seconds)) if step_seconds else None,
            parameters=num_parameters,
            config_hash=config_hash(config),
            data=data["train"],
            distinct_tokens=data["distinct_tokens"],
        )
        folder.write_json("summary.json", summary)
        guessing = math.log(config.vocab_size)
        if min(validation["val_loss"].values()) >= guessing - 1e-4:
            say(
                f"warning: the run learned nothing or diverged: its validation loss is not below that of guessing, "
                f"ln(vocab_size) = {guessing:.4f}; lower the learning rates"
            )
    if world.is_main:
        if metrics.wandb:
            metrics.wandb.finish()
        folder.close()
    stop_processes(world)
    if stopping:
        sys.exit(exit_code())


# ---- set-up ----------------------------------------------------------------------------------------------------------


def compile_model(model: GPT, compiled: str | None) -> torch.nn.Module:
    torch._dynamo.config.recompile_limit = 32  # shapes: training and every validation length, ragged ends too
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # never fall back to eager without a word
    if compiled == "blocks":
        for block in model.blocks:
            block.compile(dynamic=False)
    return torch.compile(model, dynamic=False) if compiled == "model" else model


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    return fast_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)


def build_model(config: Config, dtype: torch.dtype) -> GPT:
    model = GPT(
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        model_dim=config.model_dim,
        train_length=config.train_length,
        method=config.method,
        method_options=config.method_options,
        length_scale=config.length_scale,
        dtype=dtype,
    )
    if config.bf16_embedding:
        model.embedding.bfloat16()
    return model


def build_alternatives(config: Config) -> dict[str, Method]:
    """The methods of validate_as, by name. ValueError for one that does not train as the run's method does."""
    shape = dict(num_heads=config.num_heads, head_dim=config.model_dim // config.num_heads)
    shape |= dict(train_length=config.train_length, length_scale=config.length_scale)
    check_options(config.method, config.method_options)  # before one can be mistaken for a part of the shape
    alternative = functools.partial(make_alternative, config.method, **shape, **config.method_options)
    return {name: alternative(name) for name in config.validate_as}


def validation_plans(model: GPT, config: Config, lengths, world: World) -> dict[str, dict[int, Plan]]:
    """The plans of validations, by method and length: of the method that trains, and of those of validate_as."""
    methods = {config.method: None} | build_alternatives(config)
    where = dict(backend=config.attention_backend, context=world.context)
    return {name: {n: model.plan(n, method=method, **where) for n in lengths} for name, method in methods.items()}


def build_optimizers(config: Config, model: GPT, compiled: bool, world: World) -> Optimizers:
    """Muon for the matrices of the blocks, Adam for all else."""
    params = split_parameters(
        model.named_parameters(remove_duplicate=False),
        dict(
            head=lambda name, p: name == "head",
            matrices=lambda name, p: name.startswith("blocks.") and p.ndim >= 2,
            scalars=lambda name, p: name.startswith("blocks.") and p.ndim < 2,
            embedding=lambda name, p: name.startswith("embedding."),
        ),
    )
    dtype = compute_dtype(config, world.device)
    muon = functools.partial(Muon, momentum=config.muon_momentum, compile=compiled, dtype=dtype)
    adam = functools.partial(torch.optim.Adam, betas=config.adam_betas, eps=config.adam_eps, fused=True)
    groups = dict(
        head=Group(params["head"], adam, config.head_lr),
        matrices=Group(params["matrices"], muon, config.muon_lr, units=as_matrices, lr_scale=lr_scale),
        scalars=Group(params["scalars"], adam, config.scalar_lr),
        embedding=Group(params["embedding"], adam, config.embedding_lr),
    )
    return Optimizers(groups, world.rank, world.world_size, skip=config.on_nonfinite == "skip")


def schedule_in_words(config: Config) -> str:
    if config.schedule == "cosine":
        return "cosine"
    warmup = f"the first {config.warmup_steps} of warm-up, " if config.warmup_steps else ""
    return f"{warmup}the last {config.cooldown_steps} of cooldown"


def checkpoint_bytes(optimizers: Optimizers) -> int:
    """Parameters with their optimizer state: one momentum for Muon, two moments for Adam."""
    return sum(
        p.numel() * p.element_size() * (2 if name == "matrices" else 3)
        for name, group in optimizers.groups.items()
        for p in group.params
    )


def model_flops_per_token(config: Config) -> int:
    """Floating-point operations of forward and backward pass, attention counted for the causal half only."""
    d, L, V, T = config.model_dim, config.num_layers, config.vocab_size, config.train_length
    return 6 * (12 * d * d * L + d * V) + 6 * d * (T + 1) * L


# ---- in the loop -----------------------------------------------------------------------------------------------------


def train_step(
    model, micro_batches: list, plan, optimizers: Optimizers, lr_factor: float, world: World
) -> torch.Tensor:
    """One update. Loss and gradient norm over all processes, (2,) on the device: the host waits for nothing.

    Where one of the two is not finite, weights and optimizer state stay as they are, and in all steps after it.
    """
    loss = torch.zeros((), device=world.device)
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        own = world.own_tokens(inputs.shape[1])
        part = model(inputs[:, own], targets[:, own], plan=plan) / (len(micro_batches) * world.world_size)
        if number == len(micro_batches):
            optimizers.start()
        part.backward()
        loss += part.detach()
    numbers = torch.stack([loss, optimizers.finish()])
    sum_over_processes([numbers], world)
    numbers[1].sqrt_()
    optimizers.step(lr_factor, numbers.isfinite().all())
    return numbers


def time_left(step_seconds: list[float], steps: int) -> str:
    """Words for what so many steps will take, as long as the last 20 took; none until five were timed after the first,
    which is slower."""
    recent = step_seconds[1:][-20:]
    return f"  {statistics.median(recent) * steps / 60:.1f} min left" if len(recent) >= 5 else ""


def sum_over_processes(tensors: list[torch.Tensor], world):
    if world.world_size > 1:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


def validate(
    model, plans, config: Config, stream, world, passes: dict[int, int], stopping=lambda: False
) -> dict | None:
    """Mean loss in nats at each length, on the first passes[length] tokens of the text, each token a target once; and
    by position: entry k is the mean over positions 2^(k-1) .. 2^k - 1 (entry 0: position 0). None if stopping(),
    which is asked before each batch, says so."""
    val_loss, by_position = {}, {}
    for length, tokens in passes.items():
        micro_batch = max(1, config.micro_batch_tokens * world.context_size // length)
        batches = validation_batches(
            stream,
            length=length,
            val_tokens=tokens,
            micro_batch_size=micro_batch,
            rank=world.data_rank,
            world_size=world.data_size,
            device=world.device,
            vocab_size=config.vocab_size,
        )
        total = torch.zeros(length, dtype=torch.float64, device=world.device)  # of all sequences, at each position
        own = world.own_tokens(length)
        most = -(-tokens // length // world.data_size // micro_batch)  # batches of a rank; some may have one less
        for _ in range(most):
            if stopping():
                return None
            with torch.inference_mode():
                for inputs, targets in itertools.islice(batches, 1):
                    losses = model(inputs[:, own], targets[:, own], plan=plans[length], per_token=True)  # (B, own)
                    total[own] += losses.double().sum(dim=0)
        sum_over_processes([total], world)
        mean = total.cpu() / (tokens // length)
        val_loss[str(length)] = mean.mean().item()
        edges = [0, *(2**k for k in range((length - 1).bit_length())), length]
        by_position[str(length)] = [round(mean[a:b].mean().item(), 5) for a, b in zip(edges, edges[1:]) if b > a]
    val_tokens = {str(length): tokens for length, tokens in passes.items()}
    return dict(val_loss=val_loss, val_tokens=val_tokens, val_loss_by_position=by_position)


def validate_all(model, plans: dict[str, dict], config: Config, stream, world, passes, stopping) -> dict | None:
    """validate with the method that trains; and val_loss_as, the losses of the same weights run as validate_as."""
    ours = plans[config.method]
    result = validate(model, ours, config, stream, world, passes, stopping)
    if result is None or not config.validate_as:
        return result
    as_others = {}
    for name in config.validate_as:
        theirs = plans[name]
        differ = {n: passes[n] for n in passes if not same_rotation(ours[n], theirs[n])}
        found = validate(model, theirs, config, stream, world, differ, stopping)
        if found is None:
            return None
        as_others[name] = result["val_loss"] | found["val_loss"]
    return result | dict(val_loss_as=as_others)


def same_rotation(a: Plan, b: Plan) -> bool:
    return a.cos is None or torch.equal(a.cos, b.cos) and torch.equal(a.sin, b.sin)


def losses_in_words(val_loss: dict) -> str:
    return ", ".join(f"{loss:.4f} at {length}" for length, loss in val_loss.items())


def attention_statistics(model: GPT, config: Config, stream) -> dict:
    """Mean and deviation of the scores S in each layer, on one sequence, and the methods' own parameters."""
    tokens = torch.from_numpy(stream.read(0, config.train_length).astype("int64")).to(model.head.device)
    mean, std = zip(*model.score_statistics(tokens.unsqueeze(0)))
    learned = {name: p.tolist() for name, p in model.named_parameters() if ".method." in name}
    return dict(scores_mean=mean, scores_std=std, method_parameters=learned)


if __name__ == "__main__":
    main()

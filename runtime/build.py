"""Builds the parts of a run from its configuration: text, model, compiled model, plans, optimizers, loader."""

import dataclasses
import functools
import platform
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from configs.command_line import read_config
from configs.config import Config, batch_order, describe_differences
from data.loader import TrainLoader, check_validation, rank_sequences
from data.shards import TokenStream, open_split, tokenizer_of
from data.sources import data_command
from errors import UserError
from model.attention.plan import Plan
from model.gpt import GPT
from model.loss import compile_problem
from model.methods import METHODS
from model.methods.make import alternative_methods, layer_methods
from model.methods.names import canonical_name
from optim.muon import Muon, as_matrices, shape_scale
from optim.schedule import lr_factor
from optim.sharded import Group, Optimizers
from runtime.checkpoint import Progress
from runtime.processes import World

CALIBRATION_TOKENS = 8192  # the pairs of queries and keys of longer sequences would not fit in memory


def config_of(stored: dict, kind: type[Config] = Config) -> Config:
    """Return the configuration stored in a config.json or a checkpoint. Missing fields get their defaults.

    kind: Config or a subclass. Raise ValueError for values that a configuration cannot have.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    values = {}
    for name in known & stored.keys():
        value = stored[name]
        values[name] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
    return kind(**values)


def read_run(arguments: list[str], usage: str = "") -> Config:
    """Return the checked configuration of a run: see read_config and resolve. Without a name, it gets a default name.

    usage: the text that --help prints.
    """
    config = resolve(read_config(arguments, f"{usage}\n\nMethods: {', '.join(METHODS)}.\n"))
    default_name = f"{arguments[0]}-{config.method.replace(',', '.')}-s{config.seed}"
    return config if config.name else dataclasses.replace(config, name=default_name)


def resolve(config: Config) -> Config:
    """Return the configuration with canonical names of methods.

    Raise ValueError for an unknown method or option, and for a method of validate_as that trains differently.
    """
    others = tuple(map(canonical_name, config.validate_as))
    config = dataclasses.replace(config, method=canonical_name(config.method), validate_as=others)
    with torch.device("meta"):  # without memory, because this is only a check
        methods = layer_methods(config)
    if config.document_mask != "off":
        for method in methods:
            method.check_documents()
    alternative_methods(config)
    return config


# ---- text ------------------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """The two splits of a data folder."""

    train: TokenStream
    validation: TokenStream

    def describe(self, config: Config) -> dict:
        """Return the content of a run's data.json."""
        run_tokens = config.steps * config.batch_tokens
        return {
            "train": self.train.fingerprint(run_tokens),
            "validation": self.validation.fingerprint(config.val_tokens),
            "tokenizer": tokenizer_of(config.data_dir),
            "tokens": run_tokens,
            "distinct_tokens": min(run_tokens, len(self.train)),
        }


def open_text(config: Config, world: World) -> Text:
    """Return the text of the run's data folder.

    Raise ValueError for missing or damaged shards, a validation text that is too short, or more ranks than sequences.
    """
    for length in config.train_lengths:  # this check needs no files, so it comes first
        rank_sequences(config.batch_tokens, length, world.rank, world.world_size)
    command = data_command(config.data_dir, config.steps * config.batch_tokens, config.vocab_size)
    remedy = f"Get them with `{command}`."
    train_text = open_split(config.data_dir, "train", config.vocab_size, remedy)
    val_text = open_split(config.data_dir, "val", config.vocab_size, remedy)
    check_validation(val_text, config.val_lengths, config.val_tokens)
    return Text(train_text, val_text)


def build_loader(config: Config, world: World, text: TokenStream, progress: Progress) -> TrainLoader:
    """Return the loader of this rank's micro-batches. It begins with the step that `progress` has reached."""
    return TrainLoader(
        text,
        batch_tokens=config.batch_tokens,
        length=config.length_at,
        micro_batch_tokens=config.micro_batch_tokens,
        vocab_size=config.vocab_size,
        rank=world.rank,
        world_size=world.world_size,
        first_token=progress.first_token,
        start_step=progress.step,
        order=batch_order(config),
        device=world.device,
    )


def calibration_tokens(config: Config, text: TokenStream, first_token: int = 0) -> Tensor:
    """Return about CALIBRATION_TOKENS tokens of the training text from first_token on, (B, T) int64."""
    length = min(config.train_length, CALIBRATION_TOKENS)
    tokens = text.read(first_token, CALIBRATION_TOKENS // length * length, config.vocab_size)
    return torch.from_numpy(tokens.astype("int64")).view(-1, length)


# ---- model -----------------------------------------------------------------------------------------------------------


def compile_model(model: GPT, config: Config, world: World) -> nn.Module:
    """Return the compiled model for training, or the model itself if torch.compile is off. All ranks call this.

    Set model.compile_note to "on", or to "off" and why. Also compile each block of `model` in place, for validation: a
    whole model takes very long at 64k tokens. There, Infini-attention in plain PyTorch has 21,939 operations in the
    model, 1,831 in a block. The compiler runs at the first call with each length.

    Raise UserError if --compile is "on" and compiling fails, and if only some ranks can compile.
    """
    # 1. Try the compiler.
    model.compile_note = "on"
    if config.compile == "off":
        model.compile_note = "off"
    elif problem := compile_problem(world.device):
        if config.compile == "on":
            raise UserError(f"torch.compile does not work here ({problem}). Use --compile off.")
        model.compile_note = f"off, as it does not work here ({problem})"

    # 2. Compare the ranks. Compiled and other code round differently.
    notes = world.gather(model.compile_note)
    for rank, note in enumerate(notes):
        if (note == "on") != (notes[0] == "on"):
            problem = f"torch.compile is {notes[0]} on rank 0, and {note} on rank {rank}"
            raise UserError(f"{problem}. Repair the machine where it is off, or use --compile off.")
    if model.compile_note != "on":
        return model

    # 3. Compile.
    # Each length, size of a micro-batch and method needs a compilation. Beyond the limit, eager mode would be slow.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for block in model.blocks:
        block.compile(dynamic=False)
    return torch.compile(model, dynamic=False)


def plan_attention(config: Config, model: GPT, world: World, text: Text) -> dict[int, Plan]:
    """Return the plans of attention by training length, as GPT.plan returns them. All ranks call this.

    Raise UserError on all ranks if a rank cannot use any allowed backend, or if the ranks' backends differ.
    """
    if world.is_main and world.device.type == "cuda":
        print("checking attention on the GPU against float64: about a minute", flush=True)

    # 1. Plan on this rank.
    plans, problem = {}, None
    token = None
    if config.masks_documents("train"):
        token = text.validation.document_token  # the training text may begin with a copy row
    try:
        for length in config.train_lengths:
            plans[length] = model.plan(length, backend=config.attention_backend, document_token=token)
    except UserError as error:
        problem = str(error)

    # 2. Tell the other ranks the backends, or the problem.
    layers = () if problem else plans[config.train_length].layers
    backends = tuple(layer.backend.name for layer in layers)
    reasons = "; ".join(f"{layer.backend.name} ({layer.why})" for layer in layers)
    message = problem or f"attention by {reasons}"
    if world.world_size > 1:
        message = f"rank {world.rank} on {platform.node()}: {message}"
    choices = dict(world.gather((backends, message)))

    # 3. Compare the ranks.
    if () in choices:
        raise UserError(choices[()])
    if len(choices) > 1:
        found = ", but ".join(choices.values())
        raise UserError(f"{found}. Set one that all ranks have: --attention_backend.")
    return plans


# ---- optimizers, and one step ----------------------------------------------------------------------------------------


def build_optimizers(config: Config, model: GPT, world: World) -> Optimizers:
    """Return the optimizers: Muon for the blocks' matrices, Adam for embedding, head and the methods' parameters.

    Muon is compiled if compile_model has compiled the model.
    """
    # 1. Divide the parameters of the blocks.
    matrices = []
    method_parameters = []
    for name, p in model.blocks.named_parameters():
        kind = method_parameters if ".method." in name else matrices
        kind.append(p)

    # 2. Group all parameters of the model.
    compiled = model.compile_note == "on"
    muon = functools.partial(Muon, momentum=config.muon_momentum, compile=compiled, dtype=model.dtype)
    adam = functools.partial(torch.optim.Adam, betas=config.adam_betas, eps=config.adam_eps, fused=True)
    groups = {
        "head": Group([model.head], adam, config.head_lr),
        "matrices": Group(matrices, muon, config.muon_lr, units=as_matrices, lr_scale=shape_scale),
        "scalars": Group(method_parameters, adam, config.scalar_lr),
        "embedding": Group([model.embedding.weight], adam, config.embedding_lr),
    }
    assert sum(len(group.params) for group in groups.values()) == len([*model.parameters()])  # each in one group
    return Optimizers(
        groups,
        world.rank,
        world.world_size,
        continue_after_nonfinite=config.on_nonfinite == "skip",
    )


def trains_alike(config: Config, other: Config, steps: int) -> bool:
    """Return True if the configurations differ only in later steps. The first steps have equal rates and batches."""
    fields = ("steps", "schedule", "warmup_steps", "cooldown_steps", "length_schedule")
    longer = dataclasses.replace(other, **{field: getattr(config, field) for field in fields})
    plans = []
    for run in (config, other):
        order = batch_order(run)[:steps]
        plans.append([(lr_factor(run, step), run.length_at(step), batch) for step, batch in enumerate(order)])
    return not describe_differences(config, longer) and plans[0] == plans[1]


def accumulate(losses: Iterable[Tensor]) -> Tensor:
    """Add the gradients of all losses, as the loop of train_gpt.py does. Return the sum of the losses, 0-D.

    losses: a generator computes one loss at a time, so the memory of a micro-batch is free before the next.
    """
    total = 0
    for loss in losses:
        loss.backward()
        total += loss.detach()
    return total

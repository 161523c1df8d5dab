"""Make the parts of a run from its config: text, model, optimizers, compiled models."""

import copy
import dataclasses
import functools
from typing import Any

import torch

from configs.config import Config
from data.loader import check_validation, micro_batch_size, sequences_of
from data.shards import TokenStream, open_split
from errors import require
from model.gpt import GPT, Plans
from model.methods import make_layers, method_options
from model.methods.base import Method
from model.methods.scale_invariant import TAU
from optim.muon import Muon, as_matrices, lr_scale
from optim.sharded import Group, Optimizers
from runtime.copy_gain import check_gaps
from runtime.device import compute_dtype, rng_state, set_rng_state
from runtime.processes import World
from runtime.validation import Validation


def config_of(stored: dict[str, Any], kind: type[Config] = Config) -> Config:
    """Return the config, of this class, in a config.json or a checkpoint. Fields that it lacks have their defaults.

    Raise an exception of many kinds for a dictionary that is no config.
    """
    if (scale := stored.get("length_scale", 1.0)) != 1.0:  # the field's name while it scaled tau too
        options = dict(stored.get("method_options", {}))
        if "tau" in method_options(stored["method"]):
            options.setdefault("tau", TAU * scale)
            if options["tau"] == TAU:
                del options["tau"]  # the default now
        stored = stored | dict(position_scale=scale, method_options=options)
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known})


def layer_methods(config: Config) -> list[Method]:
    """Return the attention methods of the layers, with new parameters. Raise ValueError for an unknown one."""
    return make_layers(
        config.method,
        config.num_layers,
        num_heads=config.num_heads,
        head_dim=config.model_dim // config.num_heads,
        train_length=config.train_length,
        position_scale=config.position_scale,
        options=config.method_options,
    )


def build_model(config: Config, dtype: torch.dtype) -> GPT:
    """Return the model with new random float32 weights on the CPU, computing in this dtype.

    Raise ValueError for an attention method or an option that does not exist.
    """
    return GPT(
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        model_dim=config.model_dim,
        train_length=config.train_length,
        method=config.method,
        method_options=config.method_options,
        position_scale=config.position_scale,
        dtype=dtype,
    )


def new_model(config: Config, device: torch.device) -> GPT:
    """Return the model on the device, with the data type that the config chooses there. Raise as build_model does."""
    return build_model(config, compute_dtype(config, device)).to(device)


def open_text(config: Config, world: World) -> tuple[TokenStream, TokenStream]:
    """Return the training and the validation text.

    Raise ValueError for missing or damaged shards, for a validation text that is too short, and for more ranks than
    sequences in a step.
    """
    for length in config.train_lengths:  # the command line is checked before the disk
        sequences_of(config.batch_tokens, length, world.rank, world.world_size)
    run_tokens = config.steps * config.batch_tokens
    train_text = open_split(config.data_dir, "train", config.vocab_size, run_tokens)
    val_text = open_split(config.data_dir, "val", config.vocab_size, run_tokens)
    check_validation(val_text, config.val_lengths, config.val_tokens)
    check_gaps(val_text, config.val_copy_gaps)
    return train_text, val_text


def training_plans(config: Config, model: GPT) -> dict[int, Plans]:
    """Return what attention prepares for each training length. Raise ValueError for a backend that cannot train."""
    plans = {length: model.plan(length, backend=config.attention_backend) for length in config.train_lengths}
    on_cpu = model.head.device.type == "cpu"
    flex_on_cpu = on_cpu and any(part.backend == "flex" for plan in plans.values() for part in plan)
    require(not flex_on_cpu, "attention_backend flex cannot train on a CPU. Use --attention_backend auto.")
    return plans


def compile_model(model: GPT, compiled: str | None) -> torch.nn.Module:
    """Return the model to train with: compiled as a whole ("model"), block by block ("blocks") or not at all (None)."""
    if compiled is None:
        return model
    torch._dynamo.config.recompile_limit = 32  # shapes: training and every validation length, ragged ends too
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # never fall back to eager silently
    if compiled == "blocks":
        for block in model.blocks:
            block.compile(dynamic=False)
    return torch.compile(model, dynamic=False) if compiled == "model" else model


def compile_for_validation(model: GPT, compiled: str | None) -> GPT:
    """Return the model to validate with: the same weights, each block compiled on its own unless compiled is None.

    Each validation length is compiled anew. Compiled as a whole, 64k tokens of a method in plain PyTorch take very long
    (Infini-attention has 21,939 operations, and one block of it 1,831).
    """
    if compiled != "model":  # "blocks" are compiled already
        return model
    view = copy.copy(model)
    blocks = torch.nn.ModuleList(torch.compile(block, dynamic=False) for block in model.blocks)
    view._modules = model._modules | {"blocks": blocks}
    return view


def compile_models(
    config: Config, world: World, model: GPT, optimizers: Optimizers, compiled: str | None,
    plans: dict[int, Plans], validation: Validation, step: int,
) -> torch.nn.Module:  # fmt: skip
    """Return the compiled model to train with from this step on, and let `validation` use the compiled blocks.

    Every length that is still to come is compiled now, in a step that changes nothing. Compilers may draw random
    numbers, so the generators' states are restored.
    """
    state = rng_state()
    training_model = compile_model(model, compiled)
    if world.device.type != "cpu":  # on a CPU, long sequences take longer to compile than to compute
        validation.runner = compile_for_validation(model, compiled)
    if compiled:
        optimizers.found_inf.fill_(1)  # so that the steps update nothing
        for length in dict.fromkeys(map(config.length_at, range(step, config.steps))):
            share = config.batch_tokens, length, config.micro_batch_tokens, world.world_size, world.rank
            tokens = torch.zeros(micro_batch_size(*share), length, dtype=torch.int64, device=world.device)
            train_step(training_model, [(tokens, tokens)], plans[length], optimizers, 1.0, world)
        optimizers.found_inf.zero_()
    set_rng_state(state)
    return training_model


def build_optimizers(config: Config, model: GPT, compiled: bool, world: World) -> Optimizers:
    """Return Muon for the matrices of the blocks, and Adam for the embedding, the head and the methods' parameters.

    The groups are ordered as the backward pass produces their gradients (the head first).
    """
    blocks = [*model.blocks.named_parameters()]
    muon = functools.partial(Muon, momentum=config.muon_momentum, compile=compiled, dtype=model.dtype)
    adam = functools.partial(torch.optim.Adam, betas=config.adam_betas, eps=config.adam_eps, fused=True)
    matrices = [p for name, p in blocks if ".method." not in name]
    scalars = [p for name, p in blocks if ".method." in name]
    groups = {
        "head": Group([model.head], adam, config.head_lr),
        "matrices": Group(matrices, muon, config.muon_lr, units=as_matrices, lr_scale=lr_scale),
        "scalars": Group(scalars, adam, config.scalar_lr),
        "embedding": Group([model.embedding.weight], adam, config.embedding_lr),
    }
    assert sum(len(group.params) for group in groups.values()) == len([*model.parameters()])  # each in one group
    return Optimizers(groups, world.rank, world.world_size, skip=config.on_nonfinite == "skip")


def checkpoint_bytes(optimizers: Optimizers) -> int:
    """Return the size of the parameters with their optimizer state: one momentum for Muon, two moments for Adam."""
    return sum(
        p.numel() * p.element_size() * (2 if name == "matrices" else 3)
        for name, group in optimizers.groups.items()
        for p in group.params
    )


def train_step(
    model, micro_batches: list, plan, optimizers: Optimizers, lr_factor: float, world: World
) -> torch.Tensor:
    """Make the update of train_gpt.py, for programs with another loop: fine-tuning, benchmarks, compilation.

    Return loss and gradient norm over all ranks, (2,) on the device, without waiting for them. All ranks have as many
    sequences. Where one of the two numbers is not finite, weights and optimizer state stay as they are.
    """
    sequences = sum(len(inputs) for inputs, _ in micro_batches) * world.world_size
    loss = torch.zeros((), device=world.device)
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        micro_loss = model(inputs, targets, plan=plan) / (sequences / len(inputs))
        if number == len(micro_batches):
            optimizers.overlap_communication()
        micro_loss.backward()
        loss += micro_loss.detach()
    numbers = torch.stack([loss, optimizers.reduce_gradients()])
    world.sum([numbers])
    numbers[1].sqrt_()
    optimizers.step(lr_factor, numbers.isfinite().all())
    return numbers

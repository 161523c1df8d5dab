"""Make what a run consists of from its config: the model, its optimizers, and what of it is compiled.

train_gpt.py uses it, and so do the scripts that evaluate, fine-tune or measure a model.
"""

import copy
import dataclasses
import functools
from typing import Any

import torch

from configs.config import Config
from data.loader import micro_batch_size
from errors import require
from model.gpt import GPT, Plans
from model.methods import check_options, make_layers, method_options
from model.methods.base import Method
from model.methods.scale_invariant import TAU
from optim.groups import split_parameters
from optim.muon import Muon, as_matrices, lr_scale
from optim.sharded import Group, Optimizers
from runtime.device import rng_state, set_rng_state
from runtime.processes import World


def config_of(stored: dict[str, Any]) -> Config:
    """Return the config in a config.json or a checkpoint. Fields that it lacks have their defaults.

    Raise an exception of many kinds for a dictionary that is no config.
    """
    if (scale := stored.get("length_scale", 1.0)) != 1.0:  # the field's name while it scaled tau too
        options = dict(stored.get("method_options", {}))
        if "tau" in method_options(stored["method"]):
            options.setdefault("tau", TAU * scale)
            if options["tau"] == TAU:
                del options["tau"]  # the default now
        stored = stored | dict(position_scale=scale, method_options=options)
    known = {field.name for field in dataclasses.fields(Config)}
    return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known})


def layer_methods(config: Config, step: int = 0) -> list[Method]:
    """Return the attention methods of the layers in a step, with new parameters. Raise ValueError for a method or an
    option that there is not, and for a switch to the same method."""
    same = config.switch_method_at and config.switch_method_to == config.method
    require(not same, f"switch_method_to {config.method} is the method before it: choose another, or no switch")
    name, options = config.method_at(step), config.method_options
    check_options(config.method, options)  # another one, of a later step, takes those that it has
    options = {option: value for option, value in options.items() if option in method_options(name)}
    shape = dict(num_heads=config.num_heads, head_dim=config.model_dim // config.num_heads)
    shape |= dict(train_length=config.train_length, position_scale=config.position_scale)
    return make_layers(name, config.num_layers, **shape, **options)


def build_model(config: Config, dtype: torch.dtype, step: int = 0) -> GPT:
    """Return the model with new random weights and the attention method of this step, on the CPU. Raise ValueError for
    a method or an option that there is not, and for a switch between methods of other parameters."""
    model = GPT(
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
    if config.method_at(step) != config.method:
        model.replace_methods(layer_methods(config, step))
    return model


def compile_model(model: GPT, compiled: str | None) -> torch.nn.Module:
    """Return the model to train with: compiled as a whole ("model"), block by block ("blocks") or not at all (None)."""
    if compiled is None:
        return model
    torch._dynamo.config.recompile_limit = 32  # shapes: training and every validation length, ragged ends too
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # never fall back to eager without a word
    if compiled == "blocks":
        for block in model.blocks:
            block.compile(dynamic=False)
    return torch.compile(model, dynamic=False) if compiled == "model" else model


def compile_for_validation(model: GPT, compiled: str | None) -> GPT:
    """Return the model to validate with: the same weights, its blocks compiled each on its own unless compiled is None.

    Each validation length is compiled anew, and as a whole, 64k tokens of a method in plain PyTorch take very long
    (Infini-attention: 21,939 operations, of which 1,831 as one block).
    """
    if compiled != "model":  # "blocks" are compiled already
        return model
    view = copy.copy(model)
    blocks = torch.nn.ModuleList(torch.compile(block, dynamic=False) for block in model.blocks)
    view._modules = model._modules | dict(blocks=blocks)
    return view


def compile_models(
    config: Config,
    world: World,
    model: GPT,
    optimizers: Optimizers,
    compiled: str | None,
    plans: dict[int, Plans],
    step: int,
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the model to train and the one to validate with from this step on, and leave random numbers as they are,
    of which compiling may draw some."""
    state = rng_state()
    training_model = compile_model(model, compiled)
    on_cpu = world.device.type == "cpu"  # there the long sequences take longer to compile than to compute
    validation_model = model if on_cpu else compile_for_validation(model, compiled)
    if compiled:
        for length in dict.fromkeys(map(config.length_at, range(step, config.steps))):
            compile_step(training_model, length, plans[length], optimizers, config, world)
    set_rng_state(state)
    return training_model, validation_model


def micro_batch_of(config: Config, world: World, length: int) -> int:
    """Return the sequences of this length in a micro-batch of this rank. Raise ValueError as micro_batch_size does."""
    most_tokens = config.micro_batch_tokens * world.context_size
    return micro_batch_size(config.batch_tokens, length, most_tokens, world.data_size, world.data_rank)


def compile_step(model, length: int, plan: Plans, optimizers: Optimizers, config: Config, world: World):
    """Compile everything that a step of this length needs, in one that changes nothing."""
    micro_batch = micro_batch_of(config, world, length)
    tokens = torch.zeros(micro_batch, length, dtype=torch.int64, device=world.device)
    optimizers.found_inf.fill_(1)
    train_step(model, [(tokens, tokens)], plan, optimizers, 1.0, world)
    optimizers.found_inf.zero_()


def build_optimizers(config: Config, model: GPT, compiled: bool, world: World) -> Optimizers:
    """Return Muon for the matrices of the blocks, and Adam for all else, the methods' own parameters too."""
    params = split_parameters(
        model.named_parameters(remove_duplicate=False),
        dict(
            head=lambda name, p: name == "head",
            matrices=lambda name, p: name.startswith("blocks.") and ".method." not in name,
            scalars=lambda name, p: name.startswith("blocks.") and ".method." in name,
            embedding=lambda name, p: name.startswith("embedding."),
        ),
    )
    muon = functools.partial(Muon, momentum=config.muon_momentum, compile=compiled, dtype=model.dtype)
    adam = functools.partial(torch.optim.Adam, betas=config.adam_betas, eps=config.adam_eps, fused=True)
    groups = dict(
        head=Group(params["head"], adam, config.head_lr),
        matrices=Group(params["matrices"], muon, config.muon_lr, units=as_matrices, lr_scale=lr_scale),
        scalars=Group(params["scalars"], adam, config.scalar_lr),
        embedding=Group(params["embedding"], adam, config.embedding_lr),
    )
    return Optimizers(groups, world.rank, world.world_size, skip=config.on_nonfinite == "skip")


def checkpoint_bytes(optimizers: Optimizers) -> int:
    """Return the size of the parameters with their optimizer state: one momentum for Muon, two moments for Adam."""
    return sum(
        p.numel() * p.element_size() * (2 if name == "matrices" else 3)
        for name, group in optimizers.groups.items()
        for p in group.params
    )


def train_step(
    model, micro_batches: list, plan, optimizers: Optimizers, lr_factor: float, world: World, sequences: int = 0
) -> torch.Tensor:
    """Make one update. Return loss and gradient norm over all processes, (2,) on the device, without waiting for them.

    sequences: of the step, of all processes; 0: each has as many as this one.

    Where one of the two is not finite, weights and optimizer state stay as they are, and in all steps after it.
    """
    loss = torch.zeros((), device=world.device)
    sequences = sequences or sum(len(inputs) for inputs, _ in micro_batches) * world.data_size
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        own = world.own_tokens(inputs.shape[1])
        part = model(inputs[:, own], targets[:, own], plan=plan) / (sequences / len(inputs) * world.context_size)
        if number == len(micro_batches):
            optimizers.start()
        part.backward()
        loss += part.detach()
    numbers = torch.stack([loss, optimizers.finish()])
    world.sum([numbers])
    numbers[1].sqrt_()
    optimizers.step(lr_factor, numbers.isfinite().all())
    return numbers

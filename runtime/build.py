"""Builds the parts of a run from its configuration: text, model, optimizers, compiled model."""

import dataclasses
import functools
import platform
from typing import Any

import torch
from torch import nn

from configs.config import Config
from data.loader import check_validation, rank_sequences
from data.shards import TokenStream, open_split
from errors import UserError, require
from model.gpt import GPT, Plans
from optim.muon import Muon, as_matrices, lr_scale
from optim.sharded import Group, Optimizers
from runtime.processes import World

CALIBRATION_TOKENS = 8192  # the pairs of queries and keys of longer sequences would not fit in memory


def config_of(stored: dict[str, Any], kind: type[Config] = Config) -> Config:
    """Return the configuration stored in a config.json or a checkpoint. Missing fields get their defaults.

    kind: Config or a subclass. A damaged dictionary may raise any Exception.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known})


def build_model(config: Config, dtype: torch.dtype) -> GPT:
    """Return the model with random float32 weights on the CPU. dtype: computes with this dtype.

    Raise ValueError for an unknown attention method or option.
    """
    return GPT(
        vocab_size=config.vocab_size, num_layers=config.num_layers, num_heads=config.num_heads,
        model_dim=config.model_dim, train_length=config.train_length, method=config.method,
        method_options=config.method_options, position_scale=config.position_scale, dtype=dtype,
    )  # fmt: skip


def calibration_tokens(config: Config, text: TokenStream, first_token: int = 0) -> torch.Tensor:
    """Return about CALIBRATION_TOKENS tokens of the training text from first_token on, (B, T) int64."""
    length = min(config.train_length, CALIBRATION_TOKENS)
    tokens = text.read(first_token, CALIBRATION_TOKENS // length * length, config.vocab_size)
    return torch.from_numpy(tokens.astype("int64")).view(-1, length)


def open_text(config: Config, world: World) -> tuple[TokenStream, TokenStream]:
    """Return the training text and the validation text.

    Raise ValueError for missing or damaged shards, a validation text that is too short, or more ranks than sequences.
    """
    for length in config.train_lengths:  # this check needs no files, so it comes first
        rank_sequences(config.batch_tokens, length, world.rank, world.world_size)
    run_tokens = config.steps * config.batch_tokens
    train_text = open_split(config.data_dir, "train", config.vocab_size, run_tokens)
    val_text = open_split(config.data_dir, "val", config.vocab_size, run_tokens)
    check_validation(val_text, config.val_lengths, config.val_tokens)
    return train_text, val_text


def plan_attention(config: Config, model: GPT, world: World) -> dict[int, Plans]:
    """Return the plans of attention by training length, as GPT.plan returns them. All ranks call this.

    Raise UserError on all ranks if a rank cannot use any allowed backend, or if the ranks' backends differ.
    """
    if world.is_main and world.device.type == "cuda":
        print("checking attention on the GPU against float64: about a minute", flush=True)
    plans, problem = {}, None
    try:
        for length in config.train_lengths:
            plans[length] = model.plan(length, backend=config.attention_backend)
    except UserError as error:
        problem = str(error)
    layer_plans = plans.get(config.train_length, ())
    outcome = problem or f"attention by {'; '.join(f'{plan.backend} ({plan.why})' for plan in layer_plans)}"
    rank = f"rank {world.rank} on {platform.node()}: " if world.world_size > 1 else ""
    reports = world.gather((problem is None, tuple(plan.backend for plan in layer_plans), rank + outcome))
    for passed, _, message in reports:
        require(passed, message)
    choices = {backends: message for _, backends, message in reports}
    require(len(choices) == 1, f"{', but '.join(choices.values())}. Set one that all ranks have: --attention_backend.")
    return plans


def compile_model(model: GPT) -> nn.Module:
    """Return the compiled model for training. Also compile each block of `model` in place, for validation.

    The compiler runs at the first call with each length. Validation compiles blocks, because a whole model takes very
    long at 64k tokens. There, Infini-attention in plain PyTorch has 21,939 operations in the model, 1,831 in a block.
    """
    torch._dynamo.config.recompile_limit = 32  # shapes: training, every validation length, incomplete last batches
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # a silent fallback to eager mode would be slow
    for block in model.blocks:
        block.compile(dynamic=False)
    return torch.compile(model, dynamic=False)


def build_optimizers(config: Config, model: GPT, compiled: bool, world: World) -> Optimizers:
    """Return the optimizers: Muon for the blocks' matrices, Adam for embedding, head and the methods' parameters."""
    blocks = [*model.blocks.named_parameters()]
    muon = functools.partial(Muon, momentum=config.muon_momentum, compile=compiled, dtype=model.dtype)
    adam = functools.partial(torch.optim.Adam, betas=config.adam_betas, eps=config.adam_eps, fused=True)
    matrices = [p for name, p in blocks if ".method." not in name]
    method_parameters = [p for name, p in blocks if ".method." in name]
    groups = {
        "head": Group([model.head], adam, config.head_lr),
        "matrices": Group(matrices, muon, config.muon_lr, units=as_matrices, lr_scale=lr_scale),
        "scalars": Group(method_parameters, adam, config.scalar_lr),
        "embedding": Group([model.embedding.weight], adam, config.embedding_lr),
    }
    assert sum(len(group.params) for group in groups.values()) == len([*model.parameters()])  # each in one group
    return Optimizers(groups, world.rank, world.world_size, skip=config.on_nonfinite == "skip")


def train_step(
    model, micro_batches: list, plan, optimizers: Optimizers, lr_factor: float, world: World
) -> torch.Tensor:
    """Make one training step like train_gpt.py, for fine-tuning and benchmarks.

    Return loss and gradient norm over all ranks, (2,) on the device, without a wait for the device. If loss or norm is
    not finite, weights and optimizer state do not change.
    """
    sequences = torch.tensor(float(sum(len(inputs) for inputs, _ in micro_batches)))  # on the CPU
    world.sum(sequences)  # ranks may have different numbers of sequences
    loss = torch.zeros((), device=world.device)
    for inputs, targets in micro_batches:
        micro_loss = model(inputs, targets, plan=plan) / (sequences / len(inputs))
        micro_loss.backward()
        loss += micro_loss.detach()
    loss_and_norm = torch.stack([loss, optimizers.reduce_gradients()])  # the squared norm, until sqrt_
    world.sum(loss_and_norm)
    loss_and_norm[1].sqrt_()
    optimizers.step(lr_factor, loss_and_norm.isfinite().all())
    return loss_and_norm

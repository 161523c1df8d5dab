"""The losses of a model on validation text: at several lengths, by position, and as several methods; and copy gain."""

import itertools
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from configs.config import Config
from data.loader import validation_batches
from data.shards import TokenStream
from model.gpt import GPT, Plans
from model.methods import make_alternative
from model.methods.base import Method
from runtime.build import uncompiled
from runtime.copy_gain import copy_length, measure_copy_gain
from runtime.processes import World

SUBSET = 4  # of the fast profile: a quarter of the tokens, in a quarter of the validations


class Stopped(Exception):
    """A signal to stop came before the end of a validation."""


class Validation:
    """Validates a model on a text at the lengths of the config.

    plans: what attention prepared, by method (the method that trains, and the methods in validate_as) and length.
    """

    def __init__(self, config: Config, model: GPT, text: TokenStream, world: World):
        """Raise ValueError for methods and lengths that do not fit."""
        self.config, self.text, self.world = config, text, world
        self.stopping = lambda: False
        self.eager = uncompiled(model)  # to compile a length for a few sequences takes longer than to compute them
        self.model = self.eager if world.device.type == "cpu" else model  # on CPUs, compiling takes longer anyway
        lengths = (*config.val_lengths, *map(copy_length, config.val_copy_gaps))
        self.plans = {
            name: {n: model.plan(n, backend=config.attention_backend, method=method) for n in lengths}
            for name, method in {config.method: None, **build_alternatives(config)}.items()
        }

    def measure(self, tokens_by_length: dict[int, int], stopping: Callable[[], bool]) -> dict:
        """Return the record of a validation during training. Raise Stopped if stopping() says so before a batch.

        Keys: those of `losses` and `copy_gains`, method_parameters (each head's own) and val_seconds.
        """
        began, self.stopping = time.monotonic(), stopping
        record = self.losses(tokens_by_length)
        if self.config.val_copy_gaps and len(tokens_by_length) == len(self.config.val_lengths):
            record |= self.copy_gains()
        learned = {name: p.tolist() for name, p in self.model.named_parameters() if ".method." in name and p.dim() == 1}
        return record | {"method_parameters": learned, "val_seconds": round(time.monotonic() - began, 3)}

    def stop_if_asked(self):
        if self.stopping():
            raise Stopped

    def losses(self, tokens_by_length: dict[int, int]) -> dict:
        """Return val_loss and val_tokens by length, val_loss_by_position, and val_loss_as.

        val_loss: the mean loss in nats on the first tokens of the text. val_loss_as: the same for each method of
        validate_as, if there is any.
        """
        first, *others = self.plans
        means = {n: self.mean_by_position(self.plans[first][n], n, tokens) for n, tokens in tokens_by_length.items()}
        record = {
            "val_loss": {str(length): mean.mean().item() for length, mean in means.items()},
            "val_tokens": {str(length): tokens for length, tokens in tokens_by_length.items()},
            "val_loss_by_position": {str(length): means_by_octave(mean) for length, mean in means.items()},
        }
        for name in others:
            # Up to the training length, the methods have the same rotary tables.
            longer = {n: tokens for n, tokens in tokens_by_length.items() if n > self.config.train_length}
            losses = {
                str(n): self.mean_by_position(self.plans[name][n], n, tokens).mean().item()
                for n, tokens in longer.items()
            }
            record.setdefault("val_loss_as", {})[name] = record["val_loss"] | losses
        return record

    def copy_gains(self) -> dict:
        """Return what measure_copy_gain returns, and copy_gain_as for the methods of validate_as."""
        measured = {
            name: measure_copy_gain(
                self.eager,
                plans,
                self.text,
                self.config.val_copy_gaps,
                vocab_size=self.config.vocab_size,
                micro_batch_tokens=self.config.micro_batch_tokens,
                world=self.world,
                before_batch=self.stop_if_asked,
            )
            for name, plans in self.plans.items()
        }
        record = measured.pop(self.config.method)
        return record | ({"copy_gain_as": {name: r["copy_gain"] for name, r in measured.items()}} if measured else {})

    @torch.inference_mode()
    def mean_by_position(self, plan: Plans, length: int, tokens: int) -> Tensor:
        """Return the loss at each position, (length,) float64, a mean over the sequences. Raise Stopped if asked to."""
        world, config = self.world, self.config
        micro_batch = max(1, config.micro_batch_tokens // length)
        batches = validation_batches(
            self.text,
            length=length,
            val_tokens=tokens,
            micro_batch_size=micro_batch,
            rank=world.rank,
            world_size=world.world_size,
            device=world.device,
            vocab_size=config.vocab_size,
        )
        total = torch.zeros(length, dtype=torch.float64, device=world.device)  # over all sequences
        most = -(-tokens // length // world.world_size // micro_batch)  # batches of a rank; some ranks have one less
        for _ in range(most):
            self.stop_if_asked()
            for inputs, targets in itertools.islice(batches, 1):
                losses = self.model(inputs, targets, plan=plan, per_token=True)  # (B, length)
                total += losses.double().sum(dim=0)
        world.sum(total)
        return total.cpu() / (tokens // length)


def validation_plan(config: Config, step: int) -> dict[int, int]:
    """Return on how many tokens of each length to validate before this step (at config.steps: after the last), or {}.

    The tokens are the first of the validation text. The last validation is the same in both profiles.
    """
    full = dict.fromkeys(config.val_lengths, config.val_tokens)
    if step == config.steps:
        return full
    if not config.val_every or step % config.val_every:
        return {}
    if config.val_profile == "paper":
        return full
    plan = {config.train_length: config.val_tokens}
    if step % (SUBSET * config.val_every) == 0:
        unit = math.lcm(*config.val_lengths)  # whole sequences of every length; it divides val_tokens
        subset = max(1, config.val_tokens // SUBSET // unit) * unit
        plan = dict.fromkeys(config.val_lengths, subset) | plan
    return {length: plan[length] for length in config.val_lengths if length in plan}


def build_alternatives(config: Config) -> dict[str, Method]:
    """Return the methods of validate_as, by name. Raise ValueError for a method that trains differently."""
    return {
        name: make_alternative(
            config.method,
            name,
            num_heads=config.num_heads,
            head_dim=config.model_dim // config.num_heads,
            train_length=config.train_length,
            position_scale=config.position_scale,
            options=config.method_options,
        )
        for name in config.validate_as
    }


def means_by_octave(mean: Tensor) -> list[float]:
    """Return means over ranges of positions: entry k over 2^(k-1) .. 2^k - 1, entry 0 over position 0 alone."""
    length = len(mean)
    edges = [0, *(2**k for k in range((length - 1).bit_length())), length]
    return [round(mean[a:b].mean().item(), 5) for a, b in zip(edges, edges[1:]) if b > a]

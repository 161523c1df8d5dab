"""Measures validation losses by length and position, copy gain and far gain, also as the methods of validate_as."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from configs.config import Config
from data.loader import check_validation
from data.shards import TokenStream
from model.gpt import GPT, Plans
from model.methods import make_alternative
from model.methods.base import Method
from runtime.build import uncompiled
from runtime.copy_gain import copy_length, losses_over_ranks, measure_copy_gain
from runtime.far_gain import RATIO, measure_far_gain
from runtime.processes import World

SUBSET = 4  # the fast profile uses a quarter of the tokens, in a quarter of the validations
LIGHT = dict(lengths=16, gaps=2, tokens=16)  # largest length and gap in training lengths; 1 / share of the tokens


class Stopped(Exception):
    """A signal to stop arrived during a validation."""


class Validation:
    """Validates a model on a text at the lengths of the configuration.

    plans: attention plans by method, then by length. The first method is the trained one, then follow validate_as.
    """

    def __init__(self, config: Config, model: GPT, text: TokenStream, world: World):
        """Raise ValueError for a method in validate_as that trains differently."""
        self.config, self.text, self.world = config, text, world
        self.stopping = lambda: False
        self.eager = uncompiled(model)  # for gains: compiling a length would take longer than its few sequences
        self.model = self.eager if world.device.type == "cpu" else model  # on a CPU, compiling always takes longer
        lengths = [*config.val_lengths, *map(copy_length, config.val_copy_gaps)]
        lengths += [config.train_length, RATIO * config.train_length] if config.val_far_windows else []
        self.plans = {
            name: {n: model.plan(n, backend=config.attention_backend, method=method) for n in lengths}
            for name, method in {config.method: None, **build_alternatives(config)}.items()
        }

    def measure(self, tokens_by_length: dict[int, int], stopping: Callable[[], bool], last: bool = False) -> dict:
        """Return the record of a validation of a run. Raise Stopped if stopping() is True before a batch.

        The record has the keys of `losses`, `copy_gains` and, for the last validation, `far_gains`. It also has
        method_parameters (one value a head) and val_seconds.
        """
        began, self.stopping = time.monotonic(), stopping
        record = self.losses(tokens_by_length, by_block=last)
        if gaps := validation_gaps(self.config, tokens_by_length, last):
            record |= self.copy_gains(gaps)
        if self.config.val_far_windows and last:
            record |= self.far_gains()
        learned = {name: p.tolist() for name, p in self.model.named_parameters() if ".method." in name and p.dim() == 1}
        return record | {"method_parameters": learned, "val_seconds": round(time.monotonic() - began, 3)}

    def stop_if_asked(self):
        if self.stopping():
            raise Stopped

    def losses(self, tokens_by_length: dict[int, int], by_block: bool = False) -> dict:
        """Return val_loss and val_tokens by length, val_loss_by_position, and val_loss_as.

        val_loss: mean loss in nats a token on the first tokens of the text. val_loss_as: the same by method of
        validate_as; left out if there is none. by_block: add val_loss_by_block, the losses of equal parts of the text:
        the most parts that have whole sequences at every length. Their spread shows how much the text matters.
        """
        first, *others = self.plans
        measured = {n: self.mean_losses(self.plans[first][n], n, tokens) for n, tokens in tokens_by_length.items()}
        record = {
            "val_loss": {str(length): mean.mean().item() for length, (mean, _) in measured.items()},
            "val_tokens": {str(length): tokens for length, tokens in tokens_by_length.items()},
            "val_loss_by_position": {str(length): means_by_octave(mean) for length, (mean, _) in measured.items()},
        }
        if by_block:
            blocks = math.gcd(*(len(by_sequence) for _, by_sequence in measured.values()))
            record["val_loss_by_block"] = {
                str(length): rounded(by_sequence.view(blocks, -1).mean(dim=1))
                for length, (_, by_sequence) in measured.items()
            }
        for name in others:
            # The methods have the same rotary tables up to the training length, so only longer ones are measured.
            longer = {n: tokens for n, tokens in tokens_by_length.items() if n > self.config.train_length}
            losses = {str(n): self.mean_losses(self.plans[name][n], n, t)[0].mean().item() for n, t in longer.items()}
            record.setdefault("val_loss_as", {})[name] = record["val_loss"] | losses
        return record

    def copy_gains(self, gaps: Sequence[int]) -> dict:
        """Return the result of measure_copy_gain, and copy_gain_as and copy_loss_as by method of validate_as."""
        return self.measure_methods(measure_copy_gain, gaps, keys=("copy_gain", "copy_loss"))

    def far_gains(self) -> dict:
        """Return the result of measure_far_gain, and far_gain_as by method of validate_as."""
        windows = self.config.val_far_windows, self.config.train_length
        return self.measure_methods(measure_far_gain, *windows, keys=("far_gain",))

    def measure_methods(self, measure: Callable[..., dict], *arguments: Any, keys: Sequence[str]) -> dict:
        """Return the results of the run's method, and for each key, under KEY_as, the results of each other method."""
        measured = {
            name: measure(
                self.eager, plans, self.text, *arguments, vocab_size=self.config.vocab_size, world=self.world,
                micro_batch_tokens=self.config.micro_batch_tokens, before_batch=self.stop_if_asked,
            )
            for name, plans in self.plans.items()
        }  # fmt: skip
        record = measured.pop(self.config.method)
        return record | {f"{key}_as": {name: r[key] for name, r in measured.items()} for key in keys if measured}

    def mean_losses(self, plan: Plans, length: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the mean loss at each position (length,) and of each sequence (tokens / length,), both float64.

        Raise Stopped after a signal to stop.
        """
        check_validation(self.text, [length], tokens)
        text = self.text.read(0, tokens + 1, self.config.vocab_size)
        batch = text[:-1].reshape(-1, length), text[1:].reshape(-1, length)
        size = self.config.micro_batch_tokens
        losses = losses_over_ranks(self.model, plan, *batch, size, self.world, self.stop_if_asked)
        return losses.mean(dim=0), losses.mean(dim=1)


def validation_plan(config: Config, step: int) -> dict[int, int]:
    """Return the validation tokens by length before this step; {} if no validation is due.

    Step config.steps is the last validation. It is the same in each profile.
    """
    full = dict.fromkeys(config.val_lengths, config.val_tokens)
    if step == config.steps:
        return full
    if not config.val_every or step % config.val_every:
        return {}
    if config.val_profile == "paper":
        return full
    if config.val_profile == "light":
        return part_of_text(config, LIGHT["tokens"], LIGHT["lengths"] * config.train_length)
    plan = {config.train_length: config.val_tokens}
    if step % (SUBSET * config.val_every) == 0:
        plan = part_of_text(config, SUBSET) | plan
    return {length: plan[length] for length in config.val_lengths if length in plan}


def part_of_text(config: Config, divisor: int, longest: int | None = None) -> dict[int, int]:
    """Return val_tokens / divisor by length up to `longest`, rounded down to whole sequences of every length."""
    lengths = [length for length in config.val_lengths if longest is None or length <= longest]
    unit = math.lcm(*lengths)
    return dict.fromkeys(lengths, max(1, config.val_tokens // divisor // unit) * unit)


def validation_gaps(config: Config, tokens_by_length: dict[int, int], last: bool) -> list[int]:
    """Return the copy gaps of a validation. tokens_by_length: its plan (validation_plan)."""
    if config.val_profile == "light" and not last:
        return [gap for gap in config.val_copy_gaps if gap <= LIGHT["gaps"] * config.train_length]
    return list(config.val_copy_gaps) if len(tokens_by_length) == len(config.val_lengths) else []


def build_alternatives(config: Config) -> dict[str, Method]:
    """Return the methods of validate_as by name. Raise ValueError for a method that trains differently."""
    return {
        name: make_alternative(
            config.method, name, num_heads=config.num_heads, head_dim=config.model_dim // config.num_heads,
            train_length=config.train_length, position_scale=config.position_scale, options=config.method_options,
        )
        for name in config.validate_as
    }  # fmt: skip


def means_by_octave(mean: Tensor) -> list[float]:
    """Return means over octaves of positions: entry 0 is position 0, entry k covers 2^(k-1) .. 2^k - 1."""
    length = len(mean)
    edges = [0, *(2**k for k in range((length - 1).bit_length())), length]
    return rounded(torch.stack([mean[a:b].mean() for a, b in zip(edges, edges[1:]) if b > a]))


def rounded(numbers: Tensor) -> list[float]:
    return [round(number, 5) for number in numbers.tolist()]

"""Measures validation losses by length and position, copy gain and far gain, also as the methods of validate_as.

It also measures the largest attention logit of each layer.
The profile decides on how much of it a run spends time before its last validation, which measures everything:

    paper    all lengths, all tokens, all copy gaps
    fast     the training length; every fourth time also the other lengths, on a quarter of the tokens, and copy gaps
    light    lengths up to 16 training lengths, copy gaps up to 2, on a sixteenth of the tokens

Far gain is measured at the end alone.
"""

import copy
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from configs.config import Config
from data.loader import check_validation
from data.shards import TokenStream
from measure.copy_gain import check_gaps, copy_length, measure_copy_gain
from measure.documents import own_context
from measure.far_gain import RATIO, check_windows, measure_far_gain
from measure.losses import Losses
from measure.riffle import CHUNKS, measure_riffle_gain
from model.gpt import GPT
from model.methods.make import alternative_methods
from model.scores import attention_by_layer
from runtime.processes import World

PROBE = 2048  # tokens whose attention logits are measured, or one sequence of the training length if it is longer
SUBSET = 4  # the fast profile uses a quarter of the tokens, in a quarter of the validations
# The light profile, before the last validation:
LIGHT_LENGTHS = 16  # the largest length, in training lengths
LIGHT_GAPS = 2  # the largest copy gap, in training lengths
LIGHT_TOKENS = 16  # 1 / share of the tokens


@dataclasses.dataclass(eq=False)
class Validation:
    """Validates a model on a text at the lengths of the configuration.

    plans: attention plans by method, then by length. The first method is the trained one, then follow validate_as.
    Raise ValueError for a text that is too short, and for a method in validate_as that trains differently.
    """

    config: Config
    model: GPT
    text: TokenStream
    world: World
    riffles: bool = False  # so that riffle_gains has its plan

    def __post_init__(self):
        check_text(self.config, self.text)
        self.before_batch = lambda: None  # called equally often on all ranks
        self.eager = uncompiled(self.model)  # for gains: compiling a length would take longer than its few sequences
        if self.world.device.type == "cpu":  # there, compiling always takes longer
            self.model = self.eager

        # The lengths that are measured.
        config = self.config
        lengths = {config.train_length, *config.val_lengths, *map(copy_length, config.val_copy_gaps)}
        if config.val_far_windows:
            lengths.add(RATIO * config.train_length)
        if self.riffles:
            lengths.add(CHUNKS * config.train_length)

        # Their plans.
        token = self.text.document_token if config.masks_documents("val") else None
        plan = functools.partial(self.model.plan, backend=config.attention_backend, document_token=token)
        self.plans = {config.method: {length: plan(length) for length in lengths}}
        for name, method in alternative_methods(config).items():
            self.plans[name] = {length: plan(length, method=method) for length in lengths}

    def is_due(self, step: int) -> bool:
        """Return True if a run validates before this step."""
        return bool(validation_plan(self.config, step))

    def measure(self, step: int, before_batch: Callable[[], None]) -> dict:
        """Return the record of the validation before this step.

        The record has the keys of `losses`, `copy_gains` and, for the last validation, `far_gains`. It also has
        max_logit and attention_entropy (by layer), method_parameters (one value a head) and val_seconds. An error of
        before_batch ends the validation.
        """
        # 1. Measure.
        began = time.monotonic()
        self.before_batch = before_batch
        is_last = step == self.config.steps
        tokens_by_length = validation_plan(self.config, step)
        record = self.losses(tokens_by_length, complete=is_last)
        if gaps := validation_gaps(self.config, tokens_by_length, is_last):
            record |= self.copy_gains(gaps)
        if self.config.val_far_windows and is_last:
            record |= self.far_gains()
        if self.eager.blocks:  # a model of Hugging Face has none
            record |= self.attention_by_layer()

        # 2. Add the parameters of the methods, and the time.
        record["method_parameters"] = {}
        for name, p in self.model.named_parameters():
            if ".method." in name and p.dim() == 1:
                record["method_parameters"][name] = p.tolist()
        record["val_seconds"] = round(time.monotonic() - began, 3)
        return record

    def losses(self, tokens_by_length: dict[int, int], complete: bool = False) -> dict:
        """Return val_loss and val_tokens by length, val_loss_by_position, and val_loss_as.

        val_loss: mean loss in nats a token on the first tokens of the text. val_loss_as: the same by method of
        validate_as; left out if there is none. complete: add two results. val_loss_by_block has the losses of equal
        parts of the text: the most parts that have whole sequences at every length. Their spread shows how much the
        text matters. val_loss_own has the losses at lengths above the training length on the val_tokens_own tokens
        that have more than a training length of their own document before them.
        """
        # 1. The losses of the run's method.
        trained, *others = self.plans
        record = {"val_loss": {}, "val_tokens": {}, "val_loss_by_position": {}}
        by_sequence, own = {}, {}
        for length, tokens in tokens_by_length.items():
            inputs, losses = self.token_losses(trained, length, tokens)
            by_position = losses.mean(dim=0)
            by_sequence[length] = losses.mean(dim=1)
            record["val_loss"][str(length)] = by_position.mean().item()
            record["val_tokens"][str(length)] = tokens
            record["val_loss_by_position"][str(length)] = means_by_octave(by_position)
            if complete and length > self.config.train_length:
                context = own_context(inputs, self.text.document_token)
                own[str(length)] = losses[context > self.config.train_length]

        # 2. The same by blocks of the text, and of tokens far inside their documents.
        if complete:
            record["val_loss_by_block"] = {}
            blocks = math.gcd(*map(len, by_sequence.values()))
            for length, losses in by_sequence.items():
                means = losses.view(blocks, -1).mean(dim=1)
                record["val_loss_by_block"][str(length)] = rounded(means)
            record["val_tokens_own"] = {length: len(losses) for length, losses in own.items()}
            record["val_loss_own"] = {length: losses.mean().item() for length, losses in own.items() if len(losses)}

        # 3. The losses of the other methods. Up to the training length, they have the same rotary tables.
        for name in others:
            losses = dict(record["val_loss"])
            for length, tokens in tokens_by_length.items():
                if length > self.config.train_length:
                    _, by_token = self.token_losses(name, length, tokens)
                    losses[str(length)] = by_token.mean(dim=0).mean().item()
            record.setdefault("val_loss_as", {})[name] = losses
        return record

    def copy_gains(self, gaps: Sequence[int]) -> dict:
        """Return the result of measure_copy_gain, and KEY_as by method of validate_as for its main results."""
        keys = ("copy_gain", "copy_gain_error", "copy_loss", "copy_accuracy")
        return self.measure_methods(measure_copy_gain, gaps, keys=keys)

    def far_gains(self) -> dict:
        """Return the result of measure_far_gain, and far_gain_as and its error by method of validate_as."""
        arguments = self.config.val_far_windows, self.config.train_length
        return self.measure_methods(measure_far_gain, *arguments, keys=("far_gain", "far_gain_error"))

    def riffle_gains(self, tokens: int) -> dict:
        """Return the result of measure_riffle_gain, and riffle_gain_as and its error by method of validate_as."""
        arguments = self.config.train_length, tokens
        return self.measure_methods(measure_riffle_gain, *arguments, keys=("riffle_gain", "riffle_gain_error"))

    def attention_by_layer(self) -> dict[str, dict[str, float]]:
        """Return max_logit and attention_entropy by layer on the first PROBE tokens of the text, on each rank."""
        length = self.config.train_length
        sequences = max(1, PROBE // length)
        tokens = self.text.read(0, sequences * length, self.config.vocab_size)  # goes round a shorter text
        batch = torch.from_numpy(tokens.astype("int64")).view(sequences, length)
        plan = self.plans[self.config.method][length]
        return attention_by_layer(self.eager, batch.to(self.world.device), plan)

    def measure_methods(self, measure: Callable[..., dict], *arguments: Any, keys: Sequence[str]) -> dict:
        """Return the results of the run's method, and for each key, under KEY_as, the results of each other method."""
        record = {}
        for name in self.plans:
            losses = self.losses_as(name, self.eager)
            result = measure(losses, self.text, *arguments, vocab_size=self.config.vocab_size)
            if name == self.config.method:
                record |= result
                continue

            # Another method adds its main results alone.
            for key in keys:
                record.setdefault(f"{key}_as", {})[name] = result[key]
        return record

    def losses_as(self, name: str, model: GPT, *, documents: bool = False) -> Losses:
        """Return the function from inputs and targets to losses with this method.

        documents: attention stays within documents, if the configuration says so.
        """
        plans = self.plans[name]
        if not documents:
            plans = {length: plan and dataclasses.replace(plan, document_token=None) for length, plan in plans.items()}
        return Losses(
            model,
            plans,
            micro_batch_tokens=self.config.micro_batch_tokens,
            world=self.world,
            before_batch=self.before_batch,
        )

    def token_losses(self, name: str, length: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and their losses by this method, (tokens / length, length) int64 and float64."""
        # The last input needs a target, so the text is one token longer.
        text = self.text.read(0, tokens + 1, self.config.vocab_size)
        inputs = text[:-1].reshape(-1, length)
        targets = text[1:].reshape(-1, length)
        losses_of = self.losses_as(name, self.model, documents=True)
        return torch.from_numpy(inputs.astype("int64")), losses_of(inputs, targets)


def check_text(config: Config, text: TokenStream):
    """Raise ValueError if the validation text is too short for the losses or the gains."""
    check_validation(text, config.val_lengths, config.val_tokens)
    check_gaps(text, config.val_copy_gaps)
    check_windows(text, config.val_far_windows, config.train_length)


def uncompiled(model: GPT) -> GPT:
    """Return a model that shares the weights of `model`. Its blocks run without torch.compile."""
    view = copy.copy(model)
    blocks = nn.ModuleList(copy.copy(block) for block in model.blocks)
    view._modules = model._modules | {"blocks": blocks}
    return view


# ---- when a run validates, and on how much ---------------------------------------------------------------------------


def validation_plan(config: Config, step: int) -> dict[int, int]:
    """Return the validation tokens by length before this step; {} if no validation is due.

    Step config.steps is the last validation. It is the same in each profile.
    """
    # 1. The last validation, and steps between validations.
    full = dict.fromkeys(config.val_lengths, config.val_tokens)
    if step == config.steps:
        return full
    if not config.val_every or step % config.val_every:
        return {}

    # 2. The profiles.
    if config.val_profile == "paper":
        return full
    if config.val_profile == "light":
        return part_of_text(config, LIGHT_TOKENS, LIGHT_LENGTHS * config.train_length)
    plan = {config.train_length: config.val_tokens}
    if step % (SUBSET * config.val_every) == 0:
        plan = part_of_text(config, SUBSET) | plan
    return {length: plan[length] for length in config.val_lengths if length in plan}  # in their order


def part_of_text(config: Config, divisor: int, longest: int | None = None) -> dict[int, int]:
    """Return val_tokens / divisor by length up to `longest`, rounded down to whole sequences of every length."""
    lengths = [length for length in config.val_lengths if longest is None or length <= longest]

    # All lengths use the same tokens.
    unit = math.lcm(*lengths)
    units = max(1, config.val_tokens // divisor // unit)
    return dict.fromkeys(lengths, units * unit)


def validation_gaps(config: Config, tokens_by_length: dict[int, int], last: bool) -> list[int]:
    """Return the copy gaps of a validation. tokens_by_length: its plan (validation_plan)."""
    if config.val_profile == "light" and not last:
        return [gap for gap in config.val_copy_gaps if gap <= LIGHT_GAPS * config.train_length]
    return list(config.val_copy_gaps) if {*tokens_by_length} == {*config.val_lengths} else []


def means_by_octave(mean: Tensor) -> list[float]:
    """Return means over octaves of positions: entry 0 is position 0, entry k covers 2^(k-1) .. 2^k - 1."""
    length = len(mean)
    octaves = (length - 1).bit_length()
    edges = [0, *(2**k for k in range(octaves)), length]
    means = [mean[a:b].mean() for a, b in itertools.pairwise(edges) if b > a]
    return rounded(torch.stack(means))


def rounded(numbers: Tensor) -> list[float]:
    """Return the numbers with five decimals, for metrics.jsonl."""
    return [round(number, 5) for number in numbers.tolist()]

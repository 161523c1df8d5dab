"""The losses of a model on validation text: at several sequence lengths, by position, and as several methods."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from configs.config import Config
from data.loader import validation_batches
from data.shards import TokenStream
from model.gpt import GPT, Plans
from model.methods import check_options, make_alternative
from model.methods.base import Method
from runtime.copy_gain import copy_length, measure_copy_gain, uncompiled
from runtime.processes import World


class Stopped(Exception):
    """A signal to stop came before the end of a validation."""


@dataclasses.dataclass
class Validation:
    """What is validated, and on what.

    plans: see validation_plans. runner: the model, or what it was compiled to.
    """

    config: Config
    model: GPT
    runner: torch.nn.Module
    plans: dict[str, dict[int, Plans]]
    stream: TokenStream
    world: World

    def losses(self, passes: dict[int, int], stopping: Callable[[], bool] = lambda: False) -> dict | None:
        """Return the mean loss in nats at each length, on the first passes[length] tokens of the text (val_loss,
        val_tokens), the same by position (val_loss_by_position), and that of the same weights run as each of
        validate_as (val_loss_as). None if stopping(), which is asked before each batch, says so.
        """
        ours, as_others = self.plans[self.config.method], {}
        try:
            result = self._validate(ours, passes, stopping)
            for name in self.config.validate_as:
                theirs = self.plans[name]
                differ = {n: passes[n] for n in passes if not same_rotation(ours[n], theirs[n])}
                as_others[name] = result["val_loss"] | self._validate(theirs, differ, stopping)["val_loss"]
            if self.config.val_copy_gaps and len(passes) == len(self.config.val_lengths):
                result |= self.copy_gains(self.config.val_copy_gaps, stopping)
        except Stopped:
            return None
        return result | (dict(val_loss_as=as_others) if as_others else {})

    def _validate(self, plans: dict[int, Plans], passes: dict[int, int], stopping: Callable[[], bool]) -> dict:
        means = {str(n): self.mean_by_position(plans[n], n, tokens, stopping) for n, tokens in passes.items()}
        return dict(
            val_loss={length: mean.mean().item() for length, mean in means.items()},
            val_tokens={str(length): tokens for length, tokens in passes.items()},
            val_loss_by_position={length: means_by_octave(mean) for length, mean in means.items()},
        )

    def copy_gains(self, gaps: Sequence[int], stopping: Callable[[], bool] = lambda: False) -> dict:
        """Return the copy gains at these gaps (see measure_copy_gain), and copy_gain_as, those of the same weights run
        as each of validate_as. Raise Stopped if stopping() says so."""

        def stop_if_asked():
            if stopping():
                raise Stopped

        measured = {
            name: measure_copy_gain(
                uncompiled(self.model),
                plans,
                self.stream,
                gaps,
                vocab_size=self.config.vocab_size,
                micro_batch_tokens=self.config.micro_batch_tokens,
                world=self.world,
                before_batch=stop_if_asked,
            )
            for name, plans in self.plans.items()
        }
        result = measured.pop(self.config.method)
        return result | (dict(copy_gain_as={name: r["copy_gain"] for name, r in measured.items()}) if measured else {})

    def mean_by_position(self, plan: Plans, length: int, tokens: int, stopping: Callable[[], bool]) -> Tensor:
        """Return the loss at each position, (length,) float64, a mean over the sequences. Raise Stopped if stopping()
        says so."""
        world, config = self.world, self.config
        micro_batch = max(1, config.micro_batch_tokens * world.context_size // length)
        batches = validation_batches(
            self.stream,
            length=length,
            val_tokens=tokens,
            micro_batch_size=micro_batch,
            rank=world.data_rank,
            world_size=world.data_size,
            device=world.device,
            vocab_size=config.vocab_size,
        )
        total = torch.zeros(length, dtype=torch.float64, device=world.device)  # of all sequences
        own = world.own_tokens(length)
        most = -(-tokens // length // world.data_size // micro_batch)  # batches of a rank; some may have one less
        for _ in range(most):
            if stopping():
                raise Stopped
            with torch.inference_mode():
                for inputs, targets in itertools.islice(batches, 1):
                    losses = self.runner(inputs[:, own], targets[:, own], plan=plan, per_token=True)  # (B, own)
                    total[own] += losses.double().sum(dim=0)
        world.sum([total])
        return total.cpu() / (tokens // length)

    def attention_statistics(self) -> dict:
        """Return mean and deviation of the scores S in each layer, on one sequence, and the methods' own parameters of
        which a head has one."""
        tokens = self.stream.read(0, self.config.train_length).astype("int64")  # (T,)
        batch = torch.from_numpy(tokens).to(self.model.head.device).unsqueeze(0)
        mean, std = zip(*self.model.score_statistics(batch))
        learned = {name: p.tolist() for name, p in self.model.named_parameters() if ".method." in name and p.dim() == 1}
        return dict(scores_mean=mean, scores_std=std, method_parameters=learned)


def validation_plans(
    config: Config, model: GPT, world: World, lengths: Sequence[int] | None = None
) -> dict[str, dict[int, Plans]]:
    """Return the plans of attention by method (the one that trains, and those of validate_as) and length (default: the
    config's). Raise ValueError for methods and lengths that do not go with the model."""
    methods = {config.method: None} | build_alternatives(config)
    where = dict(backend=config.attention_backend)
    lengths = lengths or (*config.val_lengths, *map(copy_length, config.val_copy_gaps))
    return {name: {n: model.plan(n, method=method, **where) for n in lengths} for name, method in methods.items()}


def build_alternatives(config: Config) -> dict[str, Method]:
    """Return the methods of validate_as, by name. Raise ValueError for one that does not train as its own."""
    shape = dict(num_heads=config.num_heads, head_dim=config.model_dim // config.num_heads)
    shape |= dict(train_length=config.train_length, position_scale=config.position_scale)
    check_options(config.method, config.method_options)  # before one can be mistaken for a part of the shape
    alternative = functools.partial(make_alternative, config.method, **shape, **config.method_options)
    return {name: alternative(name) for name in config.validate_as}


def same_rotation(ours: Plans, theirs: Plans) -> bool:
    """Tell whether two methods of which one can be validated as the other are the same at a length."""
    (a,), (b,) = ours, theirs
    return a.cos is None or torch.equal(a.cos, b.cos) and torch.equal(a.sin, b.sin)


def means_by_octave(mean: Tensor) -> list[float]:
    """Return means over ranges of positions: entry k over 2^(k-1) .. 2^k - 1, entry 0 over position 0 alone."""
    length = len(mean)
    edges = [0, *(2**k for k in range((length - 1).bit_length())), length]
    return [round(mean[a:b].mean().item(), 5) for a, b in zip(edges, edges[1:]) if b > a]


def format_losses(val_loss: dict[str, float]) -> str:
    return ", ".join(f"{loss:.4f} at {length}" for length, loss in val_loss.items())

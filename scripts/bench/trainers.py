"""The training steps that scripts/bench/step.py times: ours, and those of baselines.py, built, compiled and run."""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from configs.config import Config
from data.loader import TrainLoader, micro_batch_size
from data.shards import open_split
from errors import require
from model.gpt import Plans
from model.methods import canonical_name
from optim.sharded import Optimizers
from runtime.build import build_model, build_optimizers, train_step
from runtime.device import choose_compile, compute_dtype
from runtime.processes import World
from scripts.bench.baselines import MatrixMuon, NanoGPT, adamw, plain_loss, separate_projections, with_default_sdpa
from scripts.bench.protocol import time_calls

OURS = "scale_invariant_p_rope"
PARTS = ["qkv", "muon", "loss"]
DEFAULT_VARIANTS = ["record8", "p_rope", OURS, "logn_p_rope", "alibi", "record8+flex", "nanogpt"]
DEFAULT_VARIANTS += [f"{OURS}-{part}" for part in PARTS]
KINDS = ("step", "micro", "optimizer")  # what is timed of each variant


@dataclasses.dataclass(frozen=True)
class StepVariant:
    method: str  # of our model; "" for nanoGPT's
    backend: str = "auto"
    replaced: frozenset[str] = frozenset()  # parts that are as in record 8: qkv, muon, loss, sdpa
    counterpart: str = ""  # the variant to compare with, besides the baseline


def read_variant(name: str) -> StepVariant:
    """Return the variant of that name. Raise ValueError for an unknown one."""
    record8 = frozenset([*PARTS, "sdpa"])
    fixed = dict(nanogpt=StepVariant(""), record8=StepVariant("p_rope", "sdpa", record8))
    fixed["record8+flex"] = StepVariant(OURS, "flex", record8)
    if name in fixed:
        return fixed[name]
    ours, *parts = name.split("-")
    method, _, backend = ours.partition(":")
    canonical_name(method)  # ValueError for an unknown one
    forms = "record8, record8+flex, nanogpt or METHOD[:BACKEND][-PART]"
    require(set(parts) <= set(PARTS), f"unknown variant {name!r}: it is {forms}, PART one of {', '.join(PARTS)}")
    counterpart = ours if parts else {"p_rope": "record8", OURS: "record8+flex"}.get(method, "p_rope")
    return StepVariant(method, backend or "auto", frozenset(parts), counterpart)


@dataclasses.dataclass
class Trainer:
    """A variant, built and compiled: everything that its step takes."""

    model: torch.nn.Module
    call: Callable  # (inputs, targets, plan=plan) -> mean loss
    plan: Plans | None
    optimizers: Optimizers
    loader: TrainLoader
    bytes: int = 0  # of weights and optimizer state

    @property
    def backend(self) -> str:
        return ", ".join(dict.fromkeys(part.backend for part in self.plan)) if self.plan else "sdpa"


class StepBench:
    """Builds, runs and times trainers of one configuration on one device."""

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device, self.world = config, device, World.alone(device)
        self.dtype = compute_dtype(config, device)
        compiled, self.compile_note = choose_compile(config.compile, device)
        self.compiled = compiled is not None
        self.stream = open_split(config.data_dir, "train", config.vocab_size)
        shape = config.batch_tokens, config.train_length
        self.sequences = micro_batch_size(*shape, config.micro_batch_tokens, 1)  # in a micro-batch
        self.accumulation = config.batch_tokens // config.train_length // self.sequences

    def describe(self, tokens: str) -> str:
        """Return shape, batch, precision and compilation in words; `tokens` says where the tokens are from."""
        config = self.config
        return (
            f"{config.num_layers} layers of width {config.model_dim}, {config.num_heads} heads, vocabulary "
            f"{config.vocab_size:,}; {self.accumulation} x {self.sequences} sequences of {config.train_length} tokens "
            f"a step; {tokens}; {str(self.dtype).removeprefix('torch.')}, compile {self.compile_note}"
        )

    # ---- building ----------------------------------------------------------------------------------------------------

    def build(self, variant: StepVariant) -> Trainer:
        """Return the trainer after three steps at rate zero, which compile it and make its optimizer state.

        Raise ValueError, or whatever it fails with, for a variant that cannot run here.
        """
        before = self.allocated()
        torch.manual_seed(self.config.seed)
        model, plan, optimizers = self.build_ours(variant) if variant.method else self.build_nanogpt()
        call = plain_loss(model) if "loss" in variant.replaced else model
        if self.compiled:
            call = torch.compile(call, dynamic=False)
        if "sdpa" in variant.replaced:
            call = with_default_sdpa(call)
        trainer = Trainer(model, call, plan, optimizers, self.loader())
        for _ in range(3):
            self.step(trainer)
        trainer.bytes = self.allocated() - before
        return trainer

    def build_ours(self, variant: StepVariant) -> tuple[torch.nn.Module, Plans, Optimizers]:
        if variant.backend == "flex" and self.device.type == "cpu":
            raise ValueError("FlexAttention has no backward pass on a CPU")
        config = self.config
        if variant.method != config.method:
            config = dataclasses.replace(config, method=variant.method, method_options={})
        model = build_model(config, self.dtype).to(self.device)
        fill_zeros(model)
        plan = model.plan(config.train_length, backend=variant.backend)
        if "qkv" in variant.replaced:
            separate_projections(model)
        optimizers = build_optimizers(config, model, self.compiled, self.world)
        if "muon" in variant.replaced:
            settings = dict(momentum=config.muon_momentum, compile=self.compiled, dtype=self.dtype)
            muon = functools.partial(MatrixMuon, **settings)
            matrices = dataclasses.replace(optimizers.groups["matrices"], make=muon)
            optimizers = Optimizers(optimizers.groups | dict(matrices=matrices))
        return model, plan, optimizers

    def build_nanogpt(self) -> tuple[torch.nn.Module, None, Optimizers]:
        config = self.config
        shape = config.vocab_size, config.num_layers, config.num_heads, config.model_dim, config.train_length
        model = NanoGPT(*shape, self.dtype).to(self.device)
        return model, None, adamw(model)

    def loader(self) -> TrainLoader:
        shape = dict(batch_tokens=self.config.batch_tokens, length=self.config.train_length)
        shape |= dict(micro_batch_tokens=self.config.micro_batch_tokens, vocab_size=self.config.vocab_size)
        return TrainLoader(self.stream, **shape, device=self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    # ---- what is timed -----------------------------------------------------------------------------------------------

    def step(self, trainer: Trainer, rate: float = 0.0, micro_batches: int | None = None) -> Tensor:
        batches = next(trainer.loader)[:micro_batches]
        return train_step(trainer.call, batches, trainer.plan, trainer.optimizers, rate, self.world)

    def micro(self, trainer: Trainer):
        inputs, targets = self.micro_batch
        trainer.call(inputs, targets, plan=trainer.plan).backward()

    def optimizer(self, trainer: Trainer):
        squared_norm = trainer.optimizers.finish()
        trainer.optimizers.step(0.0, squared_norm.isfinite())

    @functools.cached_property
    def micro_batch(self) -> tuple[Tensor, Tensor]:
        with self.loader() as loader:
            return next(loader)[0]

    def time(self, trainer: Trainer, kind: str, iterations: int) -> float:
        """Return the seconds of a step, a micro-batch or an optimizer step (`kind`, of KINDS)."""
        if kind == "optimizer":
            seconds = 0.0
            for _ in range(iterations):
                self.micro(trainer)  # gradients, which the optimizer drops
                seconds += time_calls(lambda: self.optimizer(trainer), 1, self.device) / iterations
        else:
            call = self.step if kind == "step" else self.micro
            seconds = time_calls(lambda: call(trainer), iterations, self.device)
        trainer.model.zero_grad(set_to_none=True)
        return seconds

    def peak_bytes(self, trainer: Trainer) -> int | None:
        """Return the most memory that a step holds, the other trainers' weights and states left out; None on a CPU."""
        if self.device.type != "cuda":
            return None
        others = self.allocated() - trainer.bytes
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step(trainer)
        return torch.cuda.max_memory_allocated(self.device) - others


@torch.no_grad()
def fill_zeros(model: torch.nn.Module):
    """Draw weights that start at zero from N(0, 0.02), as products with zeros can be faster than others."""
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(0, 0.02)

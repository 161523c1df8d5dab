"""A training step of one configuration, built and compiled, for scripts/bench/step.py and scripts/doctor.py."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.config import Config
from data.loader import TrainLoader
from data.shards import open_split
from runtime.build import build_model, build_optimizers, compile_model, train_step
from runtime.device import choose_compile, compute_dtype
from runtime.processes import World
from scripts.bench.protocol import time_calls

WARM_UP_STEPS = 3  # compile the step and make the optimizer's state


class RandomTokens:
    """A stream of independent tokens: the r-th most frequent token has a probability in proportion to 1 / r."""

    def read(self, start: int, count: int, vocab_size: int) -> np.ndarray:
        cumulative = np.cumsum(1 / np.arange(1, vocab_size + 1))
        return np.searchsorted(cumulative, np.random.default_rng(start).random(count) * cumulative[-1])


class Trainer:
    """Everything that a training step needs, after a few steps at rate zero.

    Weights that start at zero are drawn from N(0, 0.02), because products with zeros can be faster than others. The
    constructor raises ValueError, or any error of a compiler, for a configuration that cannot train here.
    """

    def __init__(self, config: Config, device: torch.device):
        allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self.config = dataclasses.replace(config, length_schedule=())  # every step is of train_length tokens
        self.device, self.world, self.dtype = device, World.alone(device), compute_dtype(config, device)
        compiled, self.compile_note = choose_compile(config.compile, device)
        torch.manual_seed(config.seed)
        self.model = build_model(config, self.dtype).to(device)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.any():
                    parameter.normal_(0, 0.02)
        self.plan = self.model.plan(config.train_length, backend=config.attention_backend)
        self.optimizers = build_optimizers(config, self.model, bool(compiled), self.world)
        self.compiled_model = compile_model(self.model, compiled)
        has_data = Path(config.data_dir).is_dir()
        self.text = config.data_dir if has_data else f"random tokens, because there is no {config.data_dir}"
        self.loader = TrainLoader(
            open_split(config.data_dir, "train", config.vocab_size) if has_data else RandomTokens(),
            batch_tokens=config.batch_tokens,
            length=config.train_length,
            micro_batch_tokens=config.micro_batch_tokens,
            vocab_size=config.vocab_size,
            device=device,
        )
        for _ in range(WARM_UP_STEPS):
            self.step()
        self.peak_bytes = None  # the most memory held in a step, without the memory of others (CUDA)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.step()
            self.peak_bytes = torch.cuda.max_memory_allocated(device) - allocated

    @property
    def backends(self) -> str:
        return ", ".join(dict.fromkeys(plan.backend for plan in self.plan))

    def step(self, lr_factor: float = 0.0) -> Tensor:
        """Make a training step and return its loss."""
        return train_step(
            self.compiled_model, next(self.loader), self.plan, self.optimizers, lr_factor, self.world
        )[0]  # fmt: skip

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the next step's loss, by parameter."""
        sequences = self.config.batch_tokens // self.config.train_length
        for inputs, targets in next(self.loader):
            (self.compiled_model(inputs, targets, plan=self.plan) * (len(inputs) / sequences)).backward()
        gradients = {name: p.grad.detach() for name, p in self.model.named_parameters()}
        self.model.zero_grad(set_to_none=True)
        return gradients

    def time_step(self, count: int = 1) -> float:
        """Return the seconds of a step at rate zero, which leaves all weights as they are."""
        return time_calls(self.step, count, self.device)

"""Builds, compiles and times the training step of one configuration, for scripts.bench step and scripts.doctor."""

import torch
from torch import Tensor

from configs.config import Config
from data.loader import micro_batch_size
from runtime.build import build_model, build_optimizers, compile_model, train_step
from runtime.device import choose_compile, compute_dtype
from runtime.processes import World
from scripts.bench.protocol import time_calls

WARM_UP_STEPS = 3  # untimed steps, which compile and make the optimizer's state


class Trainer:
    """A model, its optimizers and one batch of random tokens, after a few steps at learning rate zero.

    Weights that start at zero are drawn from N(0, 0.02), because products with zeros can be faster than others. The
    constructor raises ValueError, or any error of a compiler, for a configuration that cannot train here.
    """

    def __init__(self, config: Config, device: torch.device):
        allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self.config, self.world, self.dtype = config, World(0, 1, device), compute_dtype(config, device)
        compiled, self.compile_note = choose_compile(config.compile, device)
        torch.manual_seed(config.seed)
        self.model = build_model(config, self.dtype).to(device)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.any():
                    parameter.normal_(0, 0.02)
        self.plan = self.model.plan(config.train_length, backend=config.attention_backend)
        self.backends = ", ".join(dict.fromkeys(plan.backend for plan in self.plan))
        self.optimizers = build_optimizers(config, self.model, compiled, self.world)
        self.compiled_model = compile_model(self.model) if compiled else self.model
        self.sequences = config.batch_tokens // config.train_length
        size = micro_batch_size(config.batch_tokens, config.train_length, config.micro_batch_tokens, world_size=1)
        generator = torch.Generator().manual_seed(0)
        shape = self.sequences, config.train_length + 1
        tokens = torch.randint(config.vocab_size, shape, generator=generator).to(device)
        self.micro_batches = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens.split(size)]
        for _ in range(WARM_UP_STEPS):
            self.step()
        self.peak_bytes = None  # peak memory of a step, without the memory of other variants (CUDA)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.step()
            self.peak_bytes = torch.cuda.max_memory_allocated(device) - allocated

    def step(self, lr_factor: float = 0.0) -> Tensor:
        """Make a training step and return its loss."""
        numbers = train_step(self.compiled_model, self.micro_batches, self.plan, self.optimizers, lr_factor, self.world)
        return numbers[0]

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of the loss by parameter."""
        for inputs, targets in self.micro_batches:
            (self.compiled_model(inputs, targets, plan=self.plan) * (len(inputs) / self.sequences)).backward()
        gradients = {name: p.grad.detach() for name, p in self.model.named_parameters()}
        self.model.zero_grad(set_to_none=True)
        return gradients

    def time_step(self, count: int = 1) -> float:
        """Return the seconds of a step. The learning rate is zero, so the weights do not change."""
        return time_calls(self.step, count, self.world.device)

"""Builds, compiles and times the training step of one configuration, for scripts.bench step and scripts.doctor."""

from collections.abc import Iterator

import torch
from torch import Tensor

from configs.config import Config
from data.loader import micro_batch_size
from model.gpt import GPT
from runtime.build import accumulate, build_optimizers, compile_model
from runtime.device import compute_dtype
from runtime.processes import World
from scripts.bench.protocol import time_calls

WARM_UP_STEPS = 3  # untimed steps, which compile and make the optimizer's state


class Trainer:
    """A model, its optimizers and one batch of random tokens, after a few steps at learning rate zero.

    Weights that start at zero are drawn from N(0, 0.02), because products with zeros can be faster than others. The
    constructor raises ValueError, or any error of a compiler, for a configuration that cannot train here.
    """

    def __init__(self, config: Config, device: torch.device):
        # 1. The model and its optimizers.
        allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self.config, self.world, self.dtype = config, World(0, 1, device), compute_dtype(config, device)
        torch.manual_seed(config.seed)
        self.model = GPT(config, self.dtype).to(device)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.any():
                    parameter.normal_(0, 0.02)
        token = 0 if config.masks_documents("train") else None
        self.plan = self.model.plan(config.train_length, backend=config.attention_backend, document_token=token)
        self.backends = ", ".join(dict.fromkeys(layer.backend.name for layer in self.plan.layers))
        self.compiled = compile_model(self.model, config, self.world)
        self.optimizers = build_optimizers(config, self.model, self.world)

        # 2. A batch of random tokens.
        sequences = config.batch_tokens // config.train_length
        size = micro_batch_size(sequences, config.train_length, config.micro_batch_tokens)
        generator = torch.Generator().manual_seed(0)
        shape = sequences, config.train_length + 1
        tokens = torch.randint(config.vocab_size, shape, generator=generator).to(device)
        parts = tokens[:, :-1], tokens[:, 1:]  # inputs, targets
        self.micro_batches = [*zip(*(part.contiguous().split(size) for part in parts))]

        # 3. Warm up, and measure the memory.
        for _ in range(WARM_UP_STEPS):
            self.step()
        self.peak_bytes = None  # peak memory of a step, without the memory of other variants (CUDA)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.step()
            self.peak_bytes = torch.cuda.max_memory_allocated(device) - allocated

    def step(self, lr_factor: float = 0.0) -> Tensor:
        """Make a training step and return its loss."""
        loss, grad_norm = self.optimizers.reduce(accumulate(self.losses()))
        self.optimizers.step(lr_factor, torch.isfinite(loss + grad_norm))
        return loss

    def losses(self) -> Iterator[Tensor]:
        """Yield each micro-batch's part of the mean loss."""
        for inputs, targets in self.micro_batches:
            yield self.compiled(inputs, targets, plan=self.plan) / (self.config.batch_tokens / inputs.numel())

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of the loss by parameter."""
        accumulate(self.losses())
        gradients = {name: p.grad.detach() for name, p in self.model.named_parameters()}
        self.model.zero_grad(set_to_none=True)
        return gradients

    def time_step(self, count: int = 1) -> float:
        """Return the seconds of a step. The learning rate is zero, so the weights do not change."""
        return time_calls(self.step, count, self.world.device)

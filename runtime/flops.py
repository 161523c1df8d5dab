"""Counts the floating-point operations (FLOPs) of a run: matrix products, and attention to the visible keys."""

from collections import Counter

from configs.config import Config
from runtime.build import layer_methods
from runtime.validation import validation_plan


def attention_flops_per_token(config: Config, length: int) -> int:
    """Return the FLOPs a token of the products q k and p v in one forward pass over sequences of this length.

    Infini-attention counts as if all keys were visible."""
    flops = 0
    for method in layer_methods(config):
        window = length if method.window is None else min(method.window.window, length)
        pairs = window * length - window * (window - 1) // 2  # of a query and a visible key
        widening = method.vector_dim // method.head_dim  # of q and k, not of v
        flops += 2 * config.model_dim * (widening + 1) * pairs
    return flops // length


def forward_flops_per_token(config: Config, length: int) -> int:
    """Return the FLOPs a token of one forward pass over sequences of this length."""
    d, L, V = config.model_dim, config.num_layers, config.vocab_size
    in_methods = sum(p.numel() for method in layer_methods(config) for p in method.parameters() if p.dim() == 2)
    return 2 * (12 * d * d * L + d * V + in_methods) + attention_flops_per_token(config, length)


def training_flops_per_token(config: Config) -> int:
    """Return the FLOPs a token of training, as a mean over the run. A backward pass counts as two forward passes."""
    steps = Counter(map(config.length_at, range(config.steps)))
    return 3 * sum(n * forward_flops_per_token(config, length) for length, n in steps.items()) // max(1, config.steps)


def validation_share(config: Config) -> float:
    """Return the ratio of the FLOPs of all validations of a run to the FLOPs of its training."""
    tokens = Counter()  # by length
    for step in range(config.steps + 1):
        tokens.update(validation_plan(config, step))
    for length in tokens:  # beyond the training length, every method of validate_as needs another validation
        tokens[length] *= 1 + len(config.validate_as) * (length > config.train_length)
    flops = sum(count * forward_flops_per_token(config, length) for length, count in tokens.items())
    return flops / max(1, config.steps * config.batch_tokens * training_flops_per_token(config))

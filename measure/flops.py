"""Counts the floating-point operations (FLOPs) of a run: matrix products, and attention to the visible keys.

A product of matrices (n, k) and (k, m) takes 2 n k m FLOPs. Norms, softmax and rotations are not counted.
"""

from collections import Counter

from configs.config import Config
from measure.validation import validation_plan
from model.methods.make import layer_methods


def attention_flops_per_token(config: Config, length: int) -> int:
    """Return the FLOPs a token of the products q k and p v in one forward pass over sequences of this length.

    Infini-attention and a document mask count as if all keys were visible.
    """
    flops = 0
    for method in layer_methods(config):
        window = length if method.window is None else min(method.window.window, length)
        pairs = window * length - window * (window - 1) // 2  # of a query and a visible key
        widening = method.vector_dim // method.head_dim  # of q and k, not of v
        flops += 2 * config.model_dim * (widening + 1) * pairs
    return flops // length


def forward_flops_per_token(config: Config, length: int) -> int:
    """Return the FLOPs a token of one forward pass over sequences of this length."""
    # The weights that multiply each token.
    d = config.model_dim
    in_blocks = config.num_layers * 12 * d * d  # 4 d^2 of attention, 8 d^2 of the MLP
    in_head = d * config.vocab_size
    in_methods = 0
    for method in layer_methods(config):
        in_methods += sum(p.numel() for p in method.parameters() if p.dim() == 2)
    return 2 * (in_blocks + in_head + in_methods) + attention_flops_per_token(config, length)


def training_flops_per_token(config: Config) -> int:
    """Return the FLOPs a token of training, as a mean over the run. A backward pass counts as two forward passes."""
    total = 0
    for length, steps in Counter(map(config.length_at, range(config.steps))).items():
        total += steps * forward_flops_per_token(config, length)
    return 3 * total // max(1, config.steps)


def validation_share(config: Config) -> float:
    """Return the ratio of the FLOPs of all validation losses of a run to the FLOPs of its training.

    Copy gain and far gain are not counted.
    """
    tokens_by_length = Counter()
    for step in range(config.steps + 1):
        tokens_by_length.update(validation_plan(config, step))

    flops = 0
    for length, tokens in tokens_by_length.items():
        # Beyond the training length, every method of validate_as needs another validation.
        passes = 1 + len(config.validate_as) if length > config.train_length else 1
        flops += passes * tokens * forward_flops_per_token(config, length)
    training = config.steps * config.batch_tokens * training_flops_per_token(config)
    return flops / max(1, training)

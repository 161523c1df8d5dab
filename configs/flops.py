"""Count the floating-point operations of a model, attention for the causal half only."""

from configs.config import Config


def forward_flops_per_token(config: Config, length: int) -> int:
    """Return those of one forward pass over sequences of this length."""
    d, L, V = config.model_dim, config.num_layers, config.vocab_size
    return 2 * (12 * d * d * L + d * V) + 2 * d * (length + 1) * L


def training_flops_per_token(config: Config) -> int:
    """Return those of a forward and a backward pass (twice as much) at the training length."""
    return 3 * forward_flops_per_token(config, config.train_length)

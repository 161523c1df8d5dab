"""Query temperatures: factors of the logits that grow with the query's position i beyond the training length.

    LogBeyondTraining   c(i) = max(1, log(i + 1) / log(training length))    SWAN-GPT (Puvvada et al. 2025, 2504.08719)
    LogSteps            c(i) = 1 + 0.1 log(1 + floor((i + 1) / 8192))       Llama 4's released code (Meta 2025)

Both models have such a factor in one layer of four, which has no positions; the other three have RoPE. SWAN's window
there is 512 tokens. Llama 4's layers attend in chunks of 8192 tokens and have a rotary base of 500,000; ours attend in
a sliding window of 512 tokens and have the usual base. The base of SWAN's logarithm is our choice: nothing jumps there.
"""

import math

import torch

from model.methods.base import QueryScale


class LogBeyondTraining(QueryScale):
    def __init__(self, num_heads, head_dim, train_length):
        super().__init__()
        self.log_train_length = math.log(max(train_length, 2))

    def table(self, positions, target_length):
        return ((positions + 1).double().log() / self.log_train_length).clamp(min=1)  # (T,)


class LogSteps(QueryScale):
    lengths = {"floor": 1}

    def __init__(self, num_heads, head_dim, train_length, floor: float = 8192.0):
        """floor: tokens a step."""
        super().__init__()
        self.floor = floor

    def table(self, positions, target_length):
        return 1 + 0.1 * torch.log(1 + torch.floor((positions + 1).double() / self.floor))  # (T,)

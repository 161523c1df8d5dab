"""Query temperatures: factors of the logits that grow with the query's position i.

    LogBeyondTraining   c(i) = max(1, log(i + 1) / log(training length))    SWAN-GPT (Puvvada et al. 2025, 2504.08719)
    LogSteps            c(i) = 1 + 0.1 log(1 + floor((i + 1) / 8192))       Llama 4's released code (Meta 2025)
    LogOffset           c(i) = log(i + a) / log(a)                          HyPE (Chen et al. 2026, 2601.22156)

In the first two models, one layer of four has this factor and no positions, and three layers have RoPE. SWAN's RoPE
layers have a sliding window of 512 tokens. Llama 4's attend in chunks of 8192 tokens, with base 500,000. Our Llama 4
has windows of 512 tokens and the usual base. We chose the base of SWAN's logarithm: it makes c continuous at the
training length.

HyPE's attention layers have no positions either. Its authors train without the factor, and then choose a for inference:
500 for their smallest model. We train with it.
"""

import math

import torch

from errors import require
from model.methods.base import QueryScale


class LogBeyondTraining(QueryScale):
    def __init__(self, shape):
        super().__init__()
        self.log_train_length = math.log(max(shape.train_length, 2))

    def table(self, positions, target_length):
        return ((positions + 1).double().log() / self.log_train_length).clamp(min=1)  # (T,)


class LogSteps(QueryScale):
    lengths = ("floor",)

    def __init__(self, shape, floor: float = 8192.0):
        """floor: tokens for which c(i) is constant."""
        super().__init__()
        self.floor = floor

    def table(self, positions, target_length):
        return 1 + 0.1 * torch.log(1 + torch.floor((positions + 1).double() / self.floor))  # (T,)


class LogOffset(QueryScale):
    lengths = ("offset",)

    def __init__(self, shape, offset: float = 500.0):
        """offset: a, the number of tokens after which c(i) grows visibly."""
        super().__init__()
        require(offset > 1, f"offset is {offset}. Use more than 1 token.")
        self.offset = offset

    def table(self, positions, target_length):
        return torch.log(positions.double() + self.offset) / math.log(self.offset)  # (T,)

"""SWAN's scaling of the global layers (Puvvada et al. 2025, SWAN-GPT, arXiv 2504.08719): beyond the training length the
logits of a query grow with the logarithm of how many keys it sees; up to there they are as they were trained.

    c(i) = max(1, log(i + 1) / log(training length))

The model's layers without positions have it, one in four, before three of RoPE with a window of 512 (METHODS, `swan`).
That the logarithm's base is the training length, so that nothing jumps there, is chosen here.
"""

import math

from model.methods.base import QueryScale


class LogBeyondTraining(QueryScale):
    def __init__(self, num_heads, head_dim, train_length):
        super().__init__()
        self.log_train_length = math.log(max(train_length, 2))

    def table(self, positions, target_length):
        return ((positions + 1).double().log() / self.log_train_length).clamp(min=1)  # (T,)

    def multiplier(self, table, x):
        return table.unsqueeze(0)  # (1, T)

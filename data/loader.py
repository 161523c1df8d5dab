"""Batches: the tokens of training step n, and a check of the tokens of validation.

Let B be batch_tokens. Step n = 0, 1, ... reads B + 1 tokens from token n B on, counted from the run's first token.
Inputs are these tokens without the last, targets are these tokens without the first. Sequence length, micro-batch size
and number of processes do not change them. So a run that resumes on another number of GPUs sees the same tokens.
Methods and lengths are compared on the same text.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from data.shards import TokenStream
from errors import UserError

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (micro_batch_size, length) int64


# ---- training ----


def rank_sequences(batch_tokens: int, length: int, rank: int, world_size: int) -> range:
    """Return the indices of a rank's sequences in a step. The first ranks may have one sequence more than the others.

    Raise ValueError if batch_tokens is not a multiple of the length, or if a rank has no sequence.
    """
    sequences, rest = divmod(batch_tokens, length)
    if rest:
        problem = f"batch_tokens {batch_tokens} is not a multiple of the sequence length {length}"
        raise UserError(f"{problem}. Change either.")
    if world_size > sequences:
        problem = f"{world_size} processes are more than the {sequences} sequences of {length} tokens in a step"
        raise UserError(f"{problem}. Use at most {sequences} processes or a larger batch_tokens.")
    share, remainder = divmod(sequences, world_size)
    first = rank * share + min(rank, remainder)
    return range(first, first + share + (rank < remainder))


def micro_batch_size(batch_tokens: int, length: int, micro_batch_tokens: int, world_size: int, rank: int = 0) -> int:
    """Return the sequences of a micro-batch: as few micro-batches as micro_batch_tokens allows, of nearly equal size.

    The last micro-batch of a rank may be smaller.
    """
    share = rank_sequences(batch_tokens, length, rank, world_size)
    largest = max(1, micro_batch_tokens // length)
    num_micro_batches = math.ceil(len(share) / largest)
    return math.ceil(len(share) / num_micro_batches)


class TrainLoader:
    """Iterates over steps: `next(loader)` returns the list of micro-batches of one step for one rank.

    A step has `batch_tokens // length` sequences in stream order. Rank r has the r-th contiguous share, cut in order
    into micro-batches of up to `micro_batch_size` sequences. `length`: tokens, or a function from a step to tokens.
    Step 0 begins at token `first_token` of the stream. The first `next` returns step `start_step`. A thread reads
    two steps ahead, and `next` raises its errors. Copies to a CUDA device are asynchronous, from pinned memory.

    Raise ValueError as rank_sequences does, and for a token outside `vocab_size`.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        batch_tokens: int,
        length: int | Callable[[int], int],
        micro_batch_tokens: int,
        vocab_size: int,
        rank: int = 0,
        world_size: int = 1,
        first_token: int = 0,
        start_step: int = 0,
        device: str | torch.device = "cpu",
    ):
        self.stream = stream
        self._batch_tokens = batch_tokens
        self._length_at = length if callable(length) else lambda step: length
        self._micro_batch_tokens = micro_batch_tokens
        self._vocab_size = vocab_size
        self._rank = rank
        self._world_size = world_size
        self._first_token = first_token
        self._next_step = start_step
        self._device = torch.device(device)
        rank_sequences(batch_tokens, self._length_at(start_step), rank, world_size)  # raises before the thread starts

        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-loader")
        if self._device.type == "cuda":
            # A new thread uses device 0. Without set_device, pinning memory opens a context of every rank on that GPU.
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            self._reader.submit(torch.cuda.set_device, index)
        self._pending = deque()
        for _ in range(2):
            self._submit()

    def _submit(self) -> None:
        self._pending.append(self._reader.submit(self._load, self._next_step))
        self._next_step += 1

    def _load(self, step: int) -> tuple[Tensor, int]:
        """Return inputs and targets of a step, (2, sequences, length) int64, and the size of a micro-batch."""
        length = self._length_at(step)
        share = rank_sequences(self._batch_tokens, length, self._rank, self._world_size)
        size = micro_batch_size(self._batch_tokens, length, self._micro_batch_tokens, self._world_size, self._rank)

        start = self._first_token + step * self._batch_tokens + share.start * length
        tokens = self.stream.read(start, len(share) * length + 1, self._vocab_size)
        tokens = torch.from_numpy(tokens.astype("int64"))
        batch = torch.stack([tokens[:-1], tokens[1:]]).view(2, -1, length)
        if self._device.type == "cuda":
            batch = batch.pin_memory()
        return batch, size

    def __next__(self) -> list[Batch]:
        self._submit()
        batch, size = self._pending.popleft().result()
        # The caller's thread copies, because its stream orders the copy before the kernels that read the batch.
        batch = batch.to(self._device, non_blocking=True)
        return [micro_batch.unbind() for micro_batch in batch.split(size, dim=1)]

    def close(self) -> None:
        """Drop the steps read ahead and end the thread."""
        self._reader.shutdown(cancel_futures=True)


# ---- validation ----


def check_validation(stream: TokenStream, lengths: Sequence[int], val_tokens: int) -> None:
    """Raise ValueError unless the first `val_tokens` of the stream divide into sequences of each length."""
    unit = math.lcm(*lengths)
    largest = (len(stream) - 1) // unit * unit  # the last input needs a target
    if not 0 < val_tokens <= largest or val_tokens % unit:
        problem = f"val_tokens {val_tokens} does not fit lengths {list(lengths)} and a text of {len(stream)} tokens"
        remedy = f"Use a multiple of {unit} up to {largest}" if largest else "Use shorter lengths"
        raise UserError(f"{problem}. {remedy}, or prepare more text.")

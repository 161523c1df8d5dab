"""Batches: the tokens of training step n, and a check of the tokens of validation.

Let B be batch_tokens. Step n = 0, 1, ... reads B + 1 tokens from token n B on, counted from the run's first token. With
an `order` of the batches, it reads them from token order[n] B on.
Inputs are these tokens without the last, targets are these tokens without the first. Sequence length, micro-batch size
and number of processes do not change them. So a run that resumes on another number of GPUs sees the same tokens.
Methods and lengths are compared on the same text.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass

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
        raise UserError(
            f"batch_tokens {batch_tokens} is not a multiple of the sequence length {length}. Change either."
        )
    if world_size > sequences:
        raise UserError(
            f"{world_size} processes are more than the {sequences} sequences of {length} tokens in a step. "
            f"Use at most {sequences} processes or a larger batch_tokens."
        )
    share, remainder = divmod(sequences, world_size)
    first = rank * share + min(rank, remainder)
    return range(first, first + share + (rank < remainder))


def micro_batch_size(sequences: int, length: int, micro_batch_tokens: int) -> int:
    """Return the sequences of a micro-batch: as few micro-batches as micro_batch_tokens allows, of nearly equal size.

    sequences: of a step on one rank. The last micro-batch may be smaller.
    """
    largest = max(1, micro_batch_tokens // length)
    num_micro_batches = math.ceil(sequences / largest)
    return math.ceil(sequences / num_micro_batches)


@dataclass(eq=False)
class TrainLoader:
    """Iterates over steps: `next(loader)` returns the list of micro-batches of one step for one rank.

    A step has `batch_tokens // length` sequences in stream order. Rank r has the r-th contiguous share, cut in order
    into micro-batches of up to `micro_batch_size` sequences. `length` maps a step to tokens a sequence.
    Step 0 begins at token `first_token` of the stream. The first `next` returns step `start_step`. A thread reads
    two steps ahead, and `next` raises its errors. Copies to a CUDA device are asynchronous, from pinned memory.

    Raise ValueError as rank_sequences does, and for a token outside `vocab_size`.
    """

    stream: TokenStream
    _: KW_ONLY
    batch_tokens: int
    length: Callable[[int], int]
    micro_batch_tokens: int
    vocab_size: int
    rank: int = 0
    world_size: int = 1
    first_token: int = 0
    start_step: int = 0
    order: Sequence[int] = ()
    device: torch.device = torch.device("cpu")

    def __post_init__(self):
        self._share(self.start_step)  # raises before the thread starts
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-loader")
        if self.device.type == "cuda":
            # A new thread uses device 0. Without set_device, pinning memory opens a context of every rank on that GPU.
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            self._reader.submit(torch.cuda.set_device, index)
        self._next_step = self.start_step
        self._pending = deque()
        for _ in range(2):
            self._submit()

    def _submit(self):
        self._pending.append(self._reader.submit(self._load, self._next_step))
        self._next_step += 1

    def _share(self, step: int) -> tuple[range, int]:
        """Return the indices of this rank's sequences in a step, and their length in tokens."""
        length = self.length(step)
        return rank_sequences(self.batch_tokens, length, self.rank, self.world_size), length

    def _load(self, step: int) -> tuple[Tensor, int]:
        """Return inputs and targets of a step, (2, sequences, length) int64, and the size of a micro-batch."""
        share, length = self._share(step)
        batch_number = self.order[step] if step < len(self.order) else step
        start = self.first_token + batch_number * self.batch_tokens + share.start * length
        tokens = self.stream.read(start, len(share) * length + 1, self.vocab_size)
        tokens = torch.from_numpy(tokens.astype("int64"))
        batch = torch.stack([tokens[:-1], tokens[1:]]).view(2, -1, length)
        if self.device.type == "cuda":
            batch = batch.pin_memory()
        return batch, micro_batch_size(len(share), length, self.micro_batch_tokens)

    def __next__(self) -> list[Batch]:
        self._submit()
        batch, size = self._pending.popleft().result()
        # The caller's thread copies, because its stream orders the copy before the kernels that read the batch.
        batch = batch.to(self.device, non_blocking=True)
        return [micro_batch.unbind() for micro_batch in batch.split(size, dim=1)]

    def close(self):
        """Drop the steps read ahead and end the thread."""
        self._reader.shutdown(cancel_futures=True)


# ---- validation ----


def check_validation(stream: TokenStream, lengths: Sequence[int], val_tokens: int):
    """Raise ValueError unless the first `val_tokens` of the stream divide into sequences of each length."""
    unit = math.lcm(*lengths)
    largest = (len(stream) - 1) // unit * unit  # the last input needs a target
    if not 0 < val_tokens <= largest or val_tokens % unit:
        problem = f"val_tokens {val_tokens} does not fit lengths {list(lengths)} and a text of {len(stream)} tokens"
        remedy = f"Use a multiple of {unit} up to {largest}" if largest else "Use shorter lengths"
        raise UserError(f"{problem}. {remedy}, or prepare more text.")

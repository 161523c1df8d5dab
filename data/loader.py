"""Which tokens step n trains on, and which tokens validation sees.

Step n is tokens [n * batch_tokens, (n + 1) * batch_tokens] of the stream (the last one only as a target), whatever the
sequence length, micro-batch size and number of processes. So a run resumed at step n, or on another number of GPUs,
continues with exactly the tokens that it would have seen, and methods and lengths are compared on the same text.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from data.shards import TokenStream
from errors import require

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (micro_batch_size, length) int64


def _host_tensor(tokens: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(tokens.astype(np.int64))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=device.type == "cuda")


# ---- training ----


def sequences_of(batch_tokens: int, length: int, rank: int, world_size: int) -> range:
    """Return which sequences of a step a rank has: shares that differ by one at most, the larger ones first.

    Raise ValueError when a step is not whole sequences, or fewer of them than processes.
    """
    multiple = batch_tokens % length == 0
    require(multiple, f"batch_tokens {batch_tokens} is not a multiple of the sequence length {length}")
    sequences = batch_tokens // length
    many = f"more processes ({world_size}) than sequences in a step ({sequences} of {length} tokens)"
    require(world_size <= sequences, f"{many}: use at most {sequences} processes or a larger batch_tokens")
    share, rest = divmod(sequences, world_size)
    first = rank * share + min(rank, rest)
    return range(first, first + share + (rank < rest))


def micro_batch_size(batch_tokens: int, length: int, micro_batch_tokens: int, world_size: int, rank: int = 0) -> int:
    """Return the most sequences within micro_batch_tokens, but at least 1, that divide a rank's share of a step."""
    share = len(sequences_of(batch_tokens, length, rank, world_size))
    most = max(1, micro_batch_tokens // length)
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    return max(size for divisor in small for size in (divisor, share // divisor) if size <= most)


class TrainLoader:
    """Iterates over steps: `next(loader)` is the list of micro-batches of one step for one rank.

    A step is `batch_tokens // length` sequences in stream order, over all ranks. Rank r of W has the r-th contiguous
    share of them (`sequences_of`), cut in order into micro-batches of equal size, at most `micro_batch_tokens` each (at
    least one sequence). `length` is a number of tokens, or a function that returns it for a step. The first `next` is
    of `start_step`; step 0 begins with token `first_token` of the stream. One thread reads `prefetch` steps ahead; an
    error in it is raised by the `next` of that step.
    Copies to a CUDA device are asynchronous, from pinned memory. Use the loader in a `with`, or `close` it.

    Raise ValueError if a step is not whole sequences or has fewer of them than there are ranks, and for a token outside
    `vocab_size`, naming file and token.
    """

    def __init__(
        self, stream: TokenStream, *, batch_tokens: int, length: int | Callable[[int], int], micro_batch_tokens: int,
        vocab_size: int, rank: int = 0, world_size: int = 1, first_token: int = 0,
        start_step: int = 0, device: str | torch.device = "cpu",
        prefetch: int = 2,
    ):  # fmt: skip
        self.stream, self._vocab_size, self._device = stream, vocab_size, torch.device(device)
        self._batch_tokens, self._micro_batch_tokens = batch_tokens, micro_batch_tokens
        self._rank, self._world_size, self._first_token = rank, world_size, first_token
        self._length_at = length if callable(length) else lambda step: length
        self._next_step = start_step
        sequences_of(batch_tokens, self._length_at(start_step), rank, world_size)  # a wrong shape is an error now
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-loader")
        if self._device.type == "cuda":
            # A new thread is on device 0, and pinning there would open a context of every rank on the first GPU.
            own = torch.cuda.current_device() if self._device.index is None else self._device.index
            self._reader.submit(torch.cuda.set_device, own)
        self._pending = deque()
        for _ in range(prefetch):
            self._submit()

    def _submit(self) -> None:
        self._pending.append(self._reader.submit(self._load, self._next_step))
        self._next_step += 1

    def _load(self, step: int) -> tuple[Tensor, Tensor, int]:
        length = self._length_at(step)
        share = sequences_of(self._batch_tokens, length, self._rank, self._world_size)
        size = micro_batch_size(self._batch_tokens, length, self._micro_batch_tokens, self._world_size, self._rank)
        start = self._first_token + step * self._batch_tokens + share.start * length
        tokens = self.stream.read(start, len(share) * length + 1, self._vocab_size)  # (share + 1,)
        inputs, targets = (_host_tensor(part, self._device) for part in (tokens[:-1], tokens[1:]))
        return inputs.view(-1, length), targets.view(-1, length), size  # (share, length)

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> list[Batch]:
        self._submit()
        # Copied by the caller's thread: its stream orders the copy before the kernels that read it.
        *tensors, size = self._pending.popleft().result()
        inputs, targets = (_to_device(tensor, self._device) for tensor in tensors)
        return list(zip(inputs.split(size), targets.split(size)))

    def close(self) -> None:
        """Drop the steps read ahead and end the thread."""
        self._reader.shutdown(cancel_futures=True)

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


# ---- validation ----


def check_validation(stream: TokenStream, lengths: Sequence[int], val_tokens: int) -> None:
    """Raise ValueError unless the first `val_tokens` of the stream are whole sequences of each length, with targets."""
    unit, available = math.lcm(*lengths), len(stream)
    largest = (available - 1) // unit * unit  # the last input needs a target
    advice = f"the validation shards hold {available} tokens, the largest valid val_tokens is {largest}"
    whole = val_tokens > 0 and val_tokens % unit == 0
    require(whole, f"val_tokens {val_tokens} is not a multiple of {unit} (lengths {list(lengths)}): {advice}")
    require(val_tokens <= largest, f"val_tokens {val_tokens} needs {val_tokens + 1} tokens: {advice}")


def validation_batches(
    stream: TokenStream, *, length: int, val_tokens: int, micro_batch_size: int, vocab_size: int,
    rank: int = 0, world_size: int = 1, device: str | torch.device = "cpu",
) -> Iterator[Batch]:  # fmt: skip
    """Yield one rank's validation batches: the first `val_tokens` of the stream, each token a target once.

    The tokens are the same at every length and in every run. Rank r of W takes sequences r, r + W, ... so counts may
    differ by one between ranks; its last micro-batch may be smaller.
    """
    check_validation(stream, [length], val_tokens)
    device = torch.device(device)
    mine = range(rank, val_tokens // length, world_size)
    for first in range(0, len(mine), micro_batch_size):
        rows = [stream.read(i * length, length + 1, vocab_size) for i in mine[first : first + micro_batch_size]]
        tokens = np.stack(rows)  # (b, length + 1)
        inputs, targets = (_to_device(_host_tensor(part, device), device) for part in (tokens[:, :-1], tokens[:, 1:]))
        yield inputs, targets  # (b, length)

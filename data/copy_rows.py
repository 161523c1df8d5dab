"""Copy rows: rows of the train stream that repeat one segment, mixed into rows of natural text.

A row of N tokens starts at a multiple of N in the stream. Small models learn in-context copying from copy rows much
earlier than from natural text alone.

Half of the segments are tokens drawn by their frequency in the train text. The other half are pieces of that text.
The length of a segment is log-uniform from MIN_SEGMENT tokens to half a row. Rows of natural text are pieces from
random places of the train text, so that the first training steps already see documents from all of it.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from errors import require

SEED = 0
MIN_SEGMENT = 8  # tokens

RowLengths = Sequence[tuple[int, int | None]]  # (tokens in a row, stream position where these rows end)


def check_rows(share: float, row_lengths: RowLengths):
    """Raise ValueError for a share outside [0, 1) and for rows too short for two segments."""
    require(0 <= share < 1, f"--copy-rows {share}: out of range. Use at least 0 and less than 1.")
    shortest = min(length for length, _ in row_lengths)
    require(shortest >= 2 * MIN_SEGMENT, f"--row-tokens {shortest}: too short. Use at least {2 * MIN_SEGMENT} tokens.")


def rows(text: np.ndarray, share: float, row_lengths: RowLengths) -> Iterator[np.ndarray]:
    """Yield the rows of the stream, uint16, until the natural rows hold as many tokens as the train text.

    text: (tokens,) uint16, the natural train text, which may be a memory map.
    share: probability that a row is a copy row, less than 1. row_lengths: rows of 2 * MIN_SEGMENT tokens or more.
    Raise ValueError if the text is shorter than the longest row.
    """
    longest = max(length for length, _ in row_lengths)
    require(len(text) >= longest, f"--row-tokens {longest}: the train text has {len(text)} tokens. Use more text.")
    rng = np.random.Generator(np.random.PCG64(SEED))
    position = 0  # tokens in all rows so far
    natural_tokens = 0  # tokens in rows of natural text so far
    for length, end in row_lengths:
        while position != end and natural_tokens < len(text):
            if rng.random() < share:
                segment = _draw_segment(text, length, rng)
                yield np.resize(segment, length)  # repeats the segment
            else:
                yield _draw_piece(text, length, rng)
                natural_tokens += length
            position += length


def _draw_segment(text: np.ndarray, row_length: int, rng: np.random.Generator) -> np.ndarray:
    longest = row_length // 2
    log_length = rng.uniform(math.log(MIN_SEGMENT), math.log(longest + 1))
    length = min(longest, int(math.exp(log_length)))
    if rng.random() < 0.5:
        return text[rng.integers(0, len(text), length)]
    return _draw_piece(text, length, rng)


def _draw_piece(text: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    start = rng.integers(0, len(text) - length + 1)
    return text[start : start + length]

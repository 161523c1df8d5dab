"""Measures copy gain: the loss on the first copy of a span minus the loss on the second copy.

A sequence is a span of 32 tokens, `gap` tokens of validation text (the filler), and the same span again. Spans are of
two kinds. A "random" span has tokens from random positions of the text, so only copying can predict its second copy. A
"text" span is a contiguous piece of the text outside the filler. Olsson et al. (2022, arXiv 2209.11895) measure
in-context learning in a similar way.

The accuracy of the second copy, by distance, is the copy accuracy of the forgetting curve (Liu et al., 2024, arXiv
2410.04727). `recovery` compares models that copy unequally well at a short distance: it is the gain at a gap, divided
by the gain at a gap within the training length.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from data.shards import TokenStream
from errors import UserError
from measure.losses import Losses

SPAN = 32  # tokens
SPANS = 48  # of each kind, at each gap
KINDS = ("random", "text")
SEED = 20241103


def copy_length(gap: int) -> int:
    """Return the length of a sequence with this gap, in tokens."""
    return gap + 2 * SPAN


def check_gaps(stream: TokenStream, gaps: Sequence[int]):
    """Raise ValueError if the text is too short for a span and a filler of `gap` tokens."""
    for gap in gaps:
        if gap + SPAN > len(stream):
            problem = f"copy gap {gap} needs {gap + SPAN} validation tokens, but the text has {len(stream)}"
            raise UserError(f"{problem}. Use a smaller gap or prepare more text.")


def copy_sequences(stream: TokenStream, gap: int, vocab_size: int) -> np.ndarray:
    """Return the sequences of both kinds, (2, 48, 64 + gap) int64. They depend on the text and the gap alone."""
    size = len(stream)

    # 1. Draw where fillers, text spans and the tokens of random spans begin.
    generator = np.random.default_rng([SEED, gap])
    starts = generator.integers(size, size=SPANS)  # of the fillers; after the stream's end, read() goes to its start
    offsets = generator.integers(size - gap - SPAN + 1, size=SPANS)  # from a filler's end to its text span
    positions = generator.integers(size, size=(SPANS, SPAN))  # of the tokens in random spans

    # 2. Read them, and put a sequence of each kind together.
    sequences = {kind: [] for kind in KINDS}
    read = functools.partial(stream.read, vocab_size=vocab_size)
    for start, offset, span_positions in zip(starts.tolist(), offsets.tolist(), positions.tolist()):
        filler = read(start, gap)
        random_span = np.concatenate([read(position, 1) for position in span_positions])
        text_span = read(start + gap + offset, SPAN)

        sequences["random"].append(np.concatenate([random_span, filler, random_span]))
        sequences["text"].append(np.concatenate([text_span, filler, text_span]))
    return np.array([*sequences.values()], dtype=np.int64)


def measure_copy_gain(losses: Losses, stream: TokenStream, gaps: Sequence[int], vocab_size: int) -> dict:
    """Return copy_loss ([first copy, second copy]), copy_gain (first - second) and copy_gain_error, in nats a token.

    copy_accuracy is the share of the second copy's tokens that are the most likely ones. Each result is a dictionary by
    kind, then by gap. copy_gain_error is the standard error over spans. losses: with a plan for the copy_length of each
    gap. The gaps have passed check_gaps.
    """
    result = {}
    for name in ("copy_loss", "copy_gain", "copy_gain_error", "copy_accuracy"):
        result[name] = {kind: {} for kind in KINDS}

    first_copy = torch.arange(SPAN - 1)  # predicts tokens 1 .. 31, because token 0 has no context
    for gap in gaps:
        # 1. The mean loss of each copy.
        sequences = copy_sequences(stream, gap, vocab_size)
        sequences = sequences.reshape(-1, copy_length(gap))  # (96, 64 + gap)
        second_copy = first_copy + SPAN + gap
        positions = torch.cat([first_copy, second_copy])
        targets = np.roll(sequences, -1, axis=1)
        by_token = losses(sequences, targets, positions)
        by_copy = by_token.unflatten(1, (2, -1)).mean(dim=2)  # (96, 2)
        hits = losses.hits(sequences, targets, last=SPAN)[:, :-1]  # the last position has no target

        # 2. Means over the spans of a kind.
        for kind, copy_losses, kind_hits in zip(KINDS, by_copy.split(SPANS), hits.split(SPANS)):  # (48, 2), (48, 31)
            gains = copy_losses[:, 0] - copy_losses[:, 1]
            result["copy_loss"][kind][str(gap)] = copy_losses.mean(dim=0).tolist()
            result["copy_gain"][kind][str(gap)] = gains.mean().item()
            result["copy_gain_error"][kind][str(gap)] = gains.std().item() / SPANS**0.5
            result["copy_accuracy"][kind][str(gap)] = kind_hits.mean().item()
    return result


def recovery(gains: dict, errors: dict, train_length: int) -> dict:
    """Return copy gain beyond the training length over copy gain within it, and its standard error, by gap.

    gains, errors: copy_gain and copy_gain_error of one kind, by gap. The copies at the longest gap whose sequence fits
    into train_length are the reference. Without such a gap, or if its gain is not above twice its error, the ratio
    means nothing and the result is empty.
    """
    within = [gap for gap in gains if copy_length(int(gap)) <= train_length]
    near = max(within, key=int, default=None)
    if near is None or gains[near] <= 2 * errors[near]:
        return {}
    ratios = {}
    for gap in gains:
        if int(gap) > int(near):
            ratio = gains[gap] / gains[near]
            # Gaps have different spans, so their errors are independent.
            error = math.hypot(errors[gap], ratio * errors[near]) / gains[near]
            ratios[gap] = ratio, error
    return ratios

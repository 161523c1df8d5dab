"""Measures copy gain: the loss on the first copy of a span minus the loss on the second copy.

A sequence is a span of 32 tokens, `gap` tokens of validation text (the filler), and the same span again. Spans are of
two kinds. A "random" span has tokens from random positions of the text, so only copying can predict its second copy. A
"text" span is a contiguous piece of the text outside the filler. Olsson et al. (2022, arXiv 2209.11895) measure
in-context learning in a similar way.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from data.shards import TokenStream
from errors import require
from model.gpt import GPT, Plans
from runtime.processes import World

SPAN = 32  # tokens
SPANS = 48  # of each kind, at each gap
KINDS = ("random", "text")
SEED = 20241103


def copy_length(gap: int) -> int:
    """Return the length of a sequence with this gap, in tokens."""
    return gap + 2 * SPAN


def check_gaps(stream: TokenStream, gaps: Sequence[int]) -> None:
    """Raise ValueError if the text is too short for a span and a filler of `gap` tokens."""
    for gap in gaps:
        fits = gap + SPAN <= len(stream)
        problem = f"copy gap {gap} needs {gap + SPAN} validation tokens, but the text has {len(stream)}"
        require(fits, f"{problem}. Use a smaller gap or prepare more text.")


def copy_sequences(stream: TokenStream, gap: int, vocab_size: int) -> np.ndarray:
    """Return the sequences of both kinds, (2, 48, 64 + gap) int64. They depend on the text and the gap alone."""
    check_gaps(stream, [gap])
    generator, size = np.random.default_rng([SEED, gap]), len(stream)
    starts = generator.integers(size, size=SPANS)  # of the fillers; after the stream's end, read() goes to its start
    offsets = generator.integers(size - gap - SPAN + 1, size=SPANS)  # from a filler's end to its text span
    positions = generator.integers(size, size=(SPANS, SPAN))  # of the tokens in random spans
    rows = []
    for start, offset, span_positions in zip(starts, offsets, positions):
        filler = stream.read(int(start), gap, vocab_size)
        random = np.concatenate([stream.read(int(position), 1, vocab_size) for position in span_positions])
        text = stream.read(int(start + gap + offset), SPAN, vocab_size)
        rows.append([np.concatenate([span, filler, span]) for span in (random, text)])  # in the order of KINDS
    return np.array(rows, dtype=np.int64).swapaxes(0, 1)


@torch.inference_mode()
def losses_over_ranks(
    model: GPT, plan: Plans, inputs: np.ndarray, targets: np.ndarray, micro_batch_tokens: int, world: World,
    before_batch: Callable[[], None] = lambda: None, positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the loss in nats of each target, (sequences, length) float64 on the CPU.

    inputs, targets: (sequences, length) integers, divided among the ranks. before_batch: called equally often on all
    ranks. positions: (positions,) int64; the losses at these positions alone, (sequences, positions).
    """
    count, length = inputs.shape
    positions = (torch.arange(length) if positions is None else positions).to(world.device)
    losses = torch.zeros(count, len(positions), dtype=torch.float64, device=world.device)
    rank_rows = [*range(world.rank, count, world.world_size)]
    micro_batch = max(1, micro_batch_tokens // length)
    for first in range(0, -(-count // world.world_size), micro_batch):
        before_batch()
        if rows := rank_rows[first : first + micro_batch]:
            batch = (torch.from_numpy(x[rows].astype(np.int64)).to(world.device) for x in (inputs, targets))
            token_loss = model(*batch, plan=plan, per_token=True)  # (B, length)
            losses[rows] = token_loss.double()[:, positions]
    world.sum(losses)
    return losses.cpu()


def measure_copy_gain(
    model: GPT, plans: dict[int, Plans], stream: TokenStream, gaps: Sequence[int], *,
    vocab_size: int, micro_batch_tokens: int, world: World, before_batch: Callable[[], None] = lambda: None,
) -> dict:  # fmt: skip
    """Return copy_loss ([first copy, second copy]), copy_gain (first - second) and copy_gain_error, in nats a token.

    Each is a dictionary by kind, then by gap. copy_gain_error is the standard error over spans. plans: by sequence
    length, see copy_length. Raise ValueError for a gap that is too long for the validation text.
    """
    result = {name: {kind: {} for kind in KINDS} for name in ("copy_loss", "copy_gain", "copy_gain_error")}
    first_copy = torch.arange(SPAN - 1)  # predicts tokens 1 .. 31, because token 0 has no context
    for gap in gaps:
        sequences = copy_sequences(stream, gap, vocab_size).reshape(len(KINDS) * SPANS, -1)
        positions, plan = torch.cat([first_copy, first_copy + SPAN + gap]), plans[copy_length(gap)]
        batch = sequences, np.roll(sequences, -1, axis=1)
        by_token = losses_over_ranks(model, plan, *batch, micro_batch_tokens, world, before_batch, positions)
        losses = by_token.unflatten(1, (2, -1)).mean(dim=2)  # of each copy
        for kind, copy_losses in zip(KINDS, losses.split(SPANS)):  # (48, 2)
            gains = copy_losses[:, 0] - copy_losses[:, 1]
            result["copy_loss"][kind][str(gap)] = copy_losses.mean(dim=0).tolist()
            result["copy_gain"][kind][str(gap)] = gains.mean().item()
            result["copy_gain_error"][kind][str(gap)] = gains.std().item() / SPANS**0.5
    return result

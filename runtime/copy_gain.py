"""Copy gain: how much lower the loss is on the second copy of a span than on the first, by the distance between them.

A sequence is a span of 32 tokens, `gap` tokens of validation text (the filler), and the same span again. Spans are of
two kinds. "random" spans hold tokens drawn at random positions of the text, so only copying can predict them. "text"
spans are contiguous pieces of the text from outside the filler. Olsson et al. (2022, arXiv 2209.11895) measure
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
    """Return the tokens in a sequence with this gap."""
    return gap + 2 * SPAN


def check_gaps(stream: TokenStream, gaps: Sequence[int]) -> None:
    """Raise ValueError unless a span fits into the text beside the filler of each gap."""
    for gap in gaps:
        fits = gap + SPAN <= len(stream)
        short = f"copy gap {gap} needs {gap + SPAN} validation tokens, the text has {len(stream)}"
        require(fits, f"{short}. Use a smaller gap or prepare more text.")


def copy_sequences(stream: TokenStream, gap: int, vocab_size: int) -> np.ndarray:
    """Return the sequences of both kinds, (2, 48, 64 + gap) int64. They depend on the text and the gap alone."""
    check_gaps(stream, [gap])
    generator, size = np.random.default_rng([SEED, gap]), len(stream)
    starts = generator.integers(size, size=SPANS)  # of the fillers; the stream continues at its start
    offsets = generator.integers(size - gap - SPAN + 1, size=SPANS)  # of the text spans, after the fillers
    positions = generator.integers(size, size=(SPANS, SPAN))
    rows = {kind: [] for kind in KINDS}
    for start, offset, drawn in zip(starts, offsets, positions):
        filler = stream.read(int(start), gap, vocab_size)
        spans = dict(
            random=np.concatenate([stream.read(int(position), 1, vocab_size) for position in drawn]),
            text=stream.read(int(start + gap + offset), SPAN, vocab_size),
        )
        for kind, span in spans.items():
            rows[kind].append(np.concatenate([span, filler, span]))
    return np.array([rows[kind] for kind in KINDS], dtype=np.int64)


@torch.inference_mode()
def span_losses(
    model: GPT, plan: Plans, sequences: np.ndarray, micro_batch_tokens: int, world: World,
    before_batch: Callable[[], None] = lambda: None,
) -> Tensor:  # fmt: skip
    """Return the mean loss in nats a token on each copy of each span, (sequences, 2) float64 on the CPU.

    Means are over tokens 1 .. 31 of a copy: nothing predicts token 0. sequences: (sequences, 64 + gap) int64. They are
    shared by the ranks. before_batch: called equally often on all ranks.
    """
    count, length = sequences.shape
    losses = torch.zeros(count, 2, dtype=torch.float64, device=world.device)
    share = [*range(world.rank, count, world.world_size)]
    micro_batch = max(1, micro_batch_tokens // length)
    for first in range(0, -(-count // world.world_size), micro_batch):
        before_batch()
        if rows := share[first : first + micro_batch]:
            tokens = torch.from_numpy(sequences[rows]).to(world.device)  # (B, length)
            by_token = model(tokens, tokens.roll(-1, dims=1), plan=plan, per_token=True).double()  # (B, length)
            copies = by_token[:, : SPAN - 1], by_token[:, length - SPAN : -1]  # the loss at t is that of token t + 1
            losses[rows] = torch.stack([part.mean(dim=1) for part in copies], dim=1)
    world.sum(losses)
    return losses.cpu()


def measure_copy_gain(
    model: GPT, plans: dict[int, Plans], stream: TokenStream, gaps: Sequence[int], *,
    vocab_size: int, micro_batch_tokens: int, world: World, before_batch: Callable[[], None] = lambda: None,
) -> dict:  # fmt: skip
    """Return copy_loss ([first, second] copy), copy_gain (first - second) and copy_gain_error (its standard error over
    spans), each by kind and gap, in nats a token.

    plans: by copy_length. Raise ValueError for a gap that the validation text does not allow.
    """
    result = {name: {kind: {} for kind in KINDS} for name in ("copy_loss", "copy_gain", "copy_gain_error")}
    for gap in gaps:
        sequences = copy_sequences(stream, gap, vocab_size).reshape(len(KINDS) * SPANS, -1)
        plan = plans[copy_length(gap)]
        losses = span_losses(model, plan, sequences, micro_batch_tokens, world, before_batch)
        for kind, by_span in zip(KINDS, losses.split(SPANS)):  # (48, 2)
            gains = by_span[:, 0] - by_span[:, 1]
            result["copy_loss"][kind][str(gap)] = by_span.mean(dim=0).tolist()
            result["copy_gain"][kind][str(gap)] = gains.mean().item()
            result["copy_gain_error"][kind][str(gap)] = gains.std().item() / SPANS**0.5
    return result

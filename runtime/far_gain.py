"""Far gain: the loss on natural text with about T tokens of context minus the loss with 16 T. T: training length.

A window is 16 T consecutive tokens of the validation text. The model predicts the last T / 4 tokens twice: from the
whole window, and from the last T tokens, where a target has 3/4 T to T tokens of context. The 8 tokens before a token
are its 8-gram. The latest earlier occurrence of the same 8-gram in the window decides the class of the token:

    far     the occurrence is more than T tokens back, so only the whole window contains it
    near    the occurrence is at most T tokens back, and the short context may lack it
    none    the 8-gram has no earlier occurrence

A model that reads far tokens gains in the class `far`. A model that is only disturbed by them loses in all classes.
"""

from collections.abc import Callable

import numpy as np
import torch

from data.shards import TokenStream
from errors import require
from model.gpt import GPT, Plans
from runtime.copy_gain import losses_over_ranks
from runtime.processes import World

RATIO = 16  # training lengths in a window
GRAM = 8  # tokens
CLASSES = ("far", "near", "none")


def check_windows(stream: TokenStream, windows: int, train_length: int) -> None:
    """Raise ValueError if the text is too short for this number of windows without overlap."""
    needed = windows * RATIO * train_length
    problem = f"far gain of {windows} windows needs {needed} validation tokens, but the text has {len(stream)}"
    require(needed <= len(stream), f"{problem}. Use fewer windows or prepare more text.")


def far_windows(stream: TokenStream, windows: int, train_length: int, vocab_size: int) -> np.ndarray:
    """Return evenly spaced windows of the text, (windows, 16 T) int64."""
    check_windows(stream, windows, train_length)
    length = RATIO * train_length
    starts = np.linspace(0, len(stream) - length, windows).astype(int)
    return np.array([stream.read(int(start), length, vocab_size) for start in starts], dtype=np.int64)


def classify(window: np.ndarray, train_length: int) -> np.ndarray:
    """Return the classes of the last T / 4 tokens of a window (16 T,), as int64 indices into CLASSES (T / 4,)."""
    last_place, first_target, classes = {}, len(window) - train_length // 4, []
    for place in range(GRAM, len(window)):
        gram = window[place - GRAM : place].tobytes()
        if place >= first_target:
            distance = place - last_place.get(gram, place)
            name = "none" if distance == 0 else "far" if distance > train_length else "near"
            classes.append(CLASSES.index(name))
        last_place[gram] = place
    return np.array(classes)


def measure_far_gain(
    model: GPT, plans: dict[int, Plans], stream: TokenStream, windows: int, train_length: int, *,
    vocab_size: int, micro_batch_tokens: int, world: World, before_batch: Callable[[], None] = lambda: None,
) -> dict:  # fmt: skip
    """Return four results, each a dict by class. A class without tokens is left out.

    far_loss: nats a token, [with about T, with 16 T tokens of context]. far_gain: the first loss minus the second.
    far_gain_error: the standard error of far_gain over windows. far_tokens: the number of tokens.
    plans: by length, for T and 16 T.
    """
    T, num_targets = train_length, train_length // 4
    tokens = far_windows(stream, windows, T, vocab_size)
    classes = torch.from_numpy(np.stack([classify(window, T) for window in tokens]))  # (windows, T / 4)
    losses = torch.stack([  # position t predicts token t + 1
        losses_over_ranks(model, plans[n], tokens[:, -n:], np.roll(tokens[:, -n:], -1, axis=1), micro_batch_tokens,
                          world, before_batch, torch.arange(n - num_targets - 1, n - 1))
        for n in (T, RATIO * T)
    ])  # (2, windows, T / 4)  # fmt: skip
    result = {name: {} for name in ("far_loss", "far_gain", "far_gain_error", "far_tokens")}
    for index, name in enumerate(CLASSES):
        members = classes == index
        if count := members.sum().item():
            mean = (losses * members).sum(dim=(1, 2)) / count
            gain = (mean[0] - mean[1]).item()
            # Windows are independent, tokens of one window are not, so we sum over a window before we square.
            deviations = ((losses[0] - losses[1] - gain) * members).sum(dim=1)  # (windows,)
            result["far_loss"][name], result["far_gain"][name] = mean.tolist(), gain
            result["far_gain_error"][name] = deviations.square().sum().sqrt().item() / count
            result["far_tokens"][name] = count
    return result

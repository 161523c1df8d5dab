"""Far gain: how much lower the loss on natural text is with 16 training lengths of context than with one.

A window is 16 T consecutive tokens of the validation text, T the training length. Its last T / 4 tokens are predicted
twice: from the whole window, and from its last T tokens alone. A token is in one of three classes. The class follows
from the last place in the window where the same 8 tokens precede a token as precede this one:

    far     more than T tokens back: only the whole window shows it
    near    at most T tokens back
    none    there is no such place

A model that reads far tokens gains in the class `far`. A model that is only disturbed by them loses in all classes.
"""

from collections.abc import Callable

import numpy as np
import torch

from data.shards import TokenStream
from errors import require
from model.gpt import GPT, Plans
from runtime.copy_gain import token_losses
from runtime.processes import World

RATIO = 16  # training lengths in a window
GRAM = 8  # tokens
CLASSES = ("far", "near", "none")


def check_windows(stream: TokenStream, windows: int, train_length: int) -> None:
    """Raise ValueError unless the text has that many windows without overlap."""
    needed = windows * RATIO * train_length
    short = f"far gain of {windows} windows needs {needed} validation tokens, the text has {len(stream)}"
    require(needed <= len(stream), f"{short}. Use fewer windows or prepare more text.")


def far_windows(stream: TokenStream, windows: int, train_length: int, vocab_size: int) -> np.ndarray:
    """Return windows at equal distances in the text, (windows, 16 T) int64."""
    check_windows(stream, windows, train_length)
    length = RATIO * train_length
    starts = np.linspace(0, len(stream) - length, windows).astype(int)
    return np.array([stream.read(int(start), length, vocab_size) for start in starts], dtype=np.int64)


def classify(window: np.ndarray, train_length: int) -> np.ndarray:
    """Return the class of each of the last T / 4 tokens of a window (16 T,): an index into CLASSES, (T / 4,) int64."""
    last_place, first_target, classes = {}, len(window) - train_length // 4, []
    for place in range(GRAM, len(window)):
        gram = window[place - GRAM : place].tobytes()
        if place >= first_target:
            distance = place - last_place.get(gram, place)
            name = "none" if distance == 0 else "far" if distance > train_length else "near"
            classes.append(CLASSES.index(name))
        last_place[gram] = place
    return np.array(classes)


@torch.inference_mode()
def measure_far_gain(
    model: GPT, plans: dict[int, Plans], stream: TokenStream, windows: int, train_length: int, *,
    vocab_size: int, micro_batch_tokens: int, world: World, before_batch: Callable[[], None] = lambda: None,
) -> dict:  # fmt: skip
    """Return far_loss (nats a token with [T, 16 T] tokens of context), far_gain (their difference), far_gain_error
    (its standard error over windows) and far_tokens (number of tokens), each by class. Classes without tokens are left
    out.

    plans: by length, for T and 16 T.
    """
    T, size = train_length, train_length // 4
    tokens = far_windows(stream, windows, T, vocab_size)
    classes = torch.from_numpy(np.stack([classify(window, T) for window in tokens]))  # (windows, T / 4)
    losses = torch.stack([
        token_losses(model, plans[n], tokens[:, -n:], torch.arange(n - size - 1, n - 1),
                     micro_batch_tokens, world, before_batch)
        for n in (T, RATIO * T)
    ])  # (2, windows, T / 4)  # fmt: skip
    result = {name: {} for name in ("far_loss", "far_gain", "far_gain_error", "far_tokens")}
    for number, name in enumerate(CLASSES):
        members = classes == number
        if count := members.sum().item():
            mean = (losses * members).sum(dim=(1, 2)) / count
            gain = (mean[0] - mean[1]).item()
            # The error of a ratio of sums: windows are independent, tokens of a window are not.
            deviations = ((losses[0] - losses[1] - gain) * members).sum(dim=1)  # (windows,)
            result["far_loss"][name], result["far_gain"][name] = mean.tolist(), gain
            result["far_gain_error"][name] = deviations.square().sum().sqrt().item() / count
            result["far_tokens"][name] = count
    return result

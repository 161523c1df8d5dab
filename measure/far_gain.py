"""Far gain: the loss on natural text with about T tokens of context minus the loss with 16 T. T: training length.

A window is 16 T consecutive tokens of the validation text. The model predicts the last T / 4 tokens twice: from the
whole window, and from the last T tokens, where a target has 3/4 T to T tokens of context. The 8 tokens before a token
are its 8-gram. The latest earlier occurrence of the same 8-gram in the window decides the class of the token:

    far     the occurrence is more than T tokens back, so only the whole window contains it
    near    the occurrence is at most T tokens back, and the short context may lack it
    none    the 8-gram has no earlier occurrence

A model that reads far tokens gains in the class `far`. A model that is only disturbed by them loses in all classes.
"""

import numpy as np
import torch

from data.shards import TokenStream
from errors import UserError
from measure.losses import Losses

RATIO = 16  # training lengths in a window
GRAM = 8  # tokens
CLASSES = ("far", "near", "none")


def check_windows(stream: TokenStream, windows: int, train_length: int):
    """Raise ValueError if the text is too short for this number of windows without overlap."""
    needed = windows * RATIO * train_length
    if needed > len(stream):
        problem = f"far gain of {windows} windows needs {needed} validation tokens, but the text has {len(stream)}"
        raise UserError(f"{problem}. Use fewer windows or prepare more text.")


def far_windows(stream: TokenStream, windows: int, train_length: int, vocab_size: int) -> np.ndarray:
    """Return evenly spaced windows of the text, (windows, 16 T) int64. check_windows has passed."""
    length = RATIO * train_length
    starts = np.linspace(0, len(stream) - length, windows).astype(int).tolist()
    texts = [stream.read(start, length, vocab_size) for start in starts]
    return np.array(texts, dtype=np.int64)


def classify(window: np.ndarray, train_length: int) -> np.ndarray:
    """Return the classes of the last T / 4 tokens of a window (16 T,), as int64 indices into CLASSES (T / 4,)."""
    classes = []
    last_place = {}  # of an 8-gram: the place of the token after it
    first_target = len(window) - train_length // 4
    for place in range(GRAM, len(window)):
        gram = window[place - GRAM : place].tobytes()
        if place >= first_target:
            distance = place - last_place.get(gram, place)
            name = "none" if distance == 0 else "far" if distance > train_length else "near"
            classes.append(CLASSES.index(name))
        last_place[gram] = place
    return np.array(classes)


def measure_far_gain(losses: Losses, stream: TokenStream, windows: int, train_length: int, vocab_size: int) -> dict:
    """Return four results, each a dict by class. A class without tokens is left out.

    far_loss: nats a token, [with about T, with 16 T tokens of context]. far_gain: the first loss minus the second.
    far_gain_error: the standard error of far_gain over windows. far_tokens: the number of tokens.
    losses: with a plan for T and for 16 T.
    """
    # 1. The losses of each window's last T / 4 tokens, with a short and with a long context.
    num_targets = train_length // 4
    tokens = far_windows(stream, windows, train_length, vocab_size)
    by_context = []
    for length in (train_length, RATIO * train_length):
        inputs = tokens[:, -length:]
        positions = torch.arange(length - num_targets - 1, length - 1)  # position t predicts token t + 1
        by_context.append(losses(inputs, np.roll(inputs, -1, axis=1), positions))
    by_context = torch.stack(by_context)  # (2, windows, T / 4)
    differences = by_context[0] - by_context[1]

    # 2. Their means over the tokens of each class.
    classes = torch.from_numpy(np.stack([classify(window, train_length) for window in tokens]))  # (windows, T / 4)
    result = {name: {} for name in ("far_loss", "far_gain", "far_gain_error", "far_tokens")}
    for index, name in enumerate(CLASSES):
        members = classes == index
        count = members.sum().item()
        if count == 0:
            continue
        mean = (by_context * members).sum(dim=(1, 2)) / count
        gain = (mean[0] - mean[1]).item()
        # Windows are independent, tokens of one window are not, so we sum over a window before we square.
        deviations = ((differences - gain) * members).sum(dim=1)  # (windows,)
        result["far_loss"][name] = mean.tolist()
        result["far_gain"][name] = gain
        result["far_gain_error"][name] = deviations.square().sum().sqrt().item() / count
        result["far_tokens"][name] = count
    return result

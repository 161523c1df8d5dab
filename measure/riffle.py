"""Riffle gain: the loss on documents that are shuffled with others minus the loss on the same documents when whole.

Each document is cut into chunks of one training length. In a riffled sequence, chunk i is from document j + i. So a
chunk keeps its position, and the chunks before it are text of other documents. Each token is scored in both sequences,
at the same position, with the same tokens of its chunk before it. A model gains from whole documents if it reads its
own document beyond a training length, by copying or otherwise. The idea is RiffleEval's (marin-community/marin#8655).
"""

import numpy as np
import torch

from data.shards import TokenStream
from errors import UserError
from measure.losses import Losses

CHUNKS = 16  # of a document


def long_documents(stream: TokenStream, length: int, tokens: int, vocab_size: int) -> np.ndarray:
    """Return the first `length` + 1 tokens of the documents that have them, in the text's first tokens.

    (documents, length + 1) int64. Raise ValueError for fewer than CHUNKS documents, whose chunks would meet again.
    """
    text = stream.read(0, min(tokens, len(stream)), vocab_size).astype(np.int64)
    starts = np.flatnonzero(text == stream.document_token)
    lengths = np.diff(starts, append=len(text))
    documents = [text[start : start + length + 1] for start in starts[lengths > length]]
    if len(documents) < CHUNKS:
        problem = (
            f"the text has {len(documents)} documents of more than {length} tokens, but riffle gain needs {CHUNKS}"
        )
        raise UserError(f"{problem}. Use text with longer documents, or more of it.")
    return np.stack(documents)


def riffle(documents: np.ndarray, step: int = 1) -> np.ndarray:
    """Return sequences whose chunk i is chunk i of document j + i, for each j. documents: (documents, length).

    step: -1 puts riffled sequences back into the order of the documents.
    """
    count, length = documents.shape
    chunks = documents.reshape(count, CHUNKS, length // CHUNKS)
    source = (np.arange(count)[:, None] + step * np.arange(CHUNKS)) % count  # (documents, CHUNKS)
    return chunks[source, np.arange(CHUNKS)].reshape(count, length)


def measure_riffle_gain(losses: Losses, stream: TokenStream, train_length: int, tokens: int, vocab_size: int) -> dict:
    """Return riffle_gain and riffle_gain_error in nats a token, by the end of an octave of positions.

    The octaves begin after the first chunk: with T = 512, "1024" has positions 512 to 1,023. The error is the standard
    error over documents. riffle_documents: their number. losses: with a plan for CHUNKS training lengths.
    """
    length = CHUNKS * train_length
    documents = long_documents(stream, length, tokens, vocab_size)
    inputs, targets = documents[:, :-1], documents[:, 1:]
    whole = losses(inputs, targets)  # (documents, length)
    riffled = losses(riffle(inputs), riffle(targets))
    differences = torch.from_numpy(riffle(riffled.numpy(), step=-1)) - whole
    count = len(documents)
    result = {"riffle_gain": {}, "riffle_gain_error": {}, "riffle_documents": count}
    end = 2 * train_length
    while end <= length:
        gains = differences[:, end // 2 : end].mean(dim=1)
        result["riffle_gain"][str(end)] = gains.mean().item()
        result["riffle_gain_error"][str(end)] = gains.std().item() / count**0.5
        end *= 2
    return result

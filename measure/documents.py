"""Finds the tokens whose own document reaches far back. On other tokens, a long context is text of other documents.

Of web text, few tokens are in documents of more than 4,096 tokens. So a loss at 65,536 tokens measures mostly whether
text of other documents disturbs the model.
"""

import numpy as np

from data.shards import TokenStream


def own_context(inputs: np.ndarray, start: int) -> np.ndarray:
    """Return the number of tokens of its own document before each target, (sequences, length) int64.

    inputs: (sequences, length); the target of position t is the token after it. start: the token before each document,
    see document_token. A document that began before the sequence counts from the sequence's first token.
    """
    positions = np.arange(inputs.shape[1])
    starts = np.where(inputs == start, positions, 0)
    return positions + 1 - np.maximum.accumulate(starts, axis=1)


def document_token(stream: TokenStream) -> int:
    """Return the token before each document. It is the first token of a split."""
    return int(stream.read(0, 1)[0])

"""Finds the tokens whose own document reaches far back. On other tokens, a long context is text of other documents.

Of web text, few tokens are in documents of more than 4,096 tokens. So a loss at 65,536 tokens measures mostly whether
text of other documents disturbs the model.
"""

import torch
from torch import Tensor

from model.attention.plan import document_starts


def own_context(inputs: Tensor, document_token: int) -> Tensor:
    """Return the number of tokens of its own document before each target, (sequences, length) int64.

    inputs: (sequences, length); the target of position t is the token after it. document_token: the token before each
    document; as a target, it counts as the end of the document before it. A document that began before the sequence
    counts from the sequence's first token.
    """
    return torch.arange(1, inputs.shape[1] + 1) - document_starts(inputs, document_token)

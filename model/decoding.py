"""Exact decoding with a key-value cache, for every attention method.

The prompt takes one ordinary forward pass. Each later token takes one step. Its logits equal the logits of a full
forward pass, up to rounding. Keys are cached after rotation. NTK, YaRN and LogN's constant form depend on the length
of the whole sequence. So this length, target_length, must be known before the first token.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from errors import UserError
from model.attention.plan import Plan
from model.gpt import GPT, norm
from model.methods.base import Method
from model.tensors import linear


def greedy_decode(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    target_length: int | None = None,
    stop: int | None = None,
    method: Method | None = None,
) -> Tensor:
    """Return the most likely next tokens, (B, N) int64 on the model's device, N <= max_new_tokens.

    tokens (B, T), integers: prompts of equal length. A row ends at its first token `stop`, and is padded with `stop`.
    Decoding ends early when all rows have ended. target_length: the length that NTK, YaRN and LogN's constant form use.
    The default is all tokens that the model sees, T + max_new_tokens - 1. It is ours: the paper describes no decoding.
    method: see GPT.plan. Raise ValueError for an empty prompt and for a target_length below the default.
    """
    stop = -1 if stop is None else stop  # -1 is no token
    chosen = []
    ended = torch.zeros(tokens.shape[0], dtype=torch.bool, device=model.head.device)
    for token in decode(model, tokens, max_new_tokens, target_length=target_length, method=method):
        chosen.append(token.masked_fill(ended, stop))
        ended = chosen[-1] == stop  # also True for a padded row
        if ended.all():
            break
    return torch.stack(chosen, dim=1)


def decode(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    choose: Callable[[Tensor], Tensor] | None = None,
    target_length: int | None = None,
    method: Method | None = None,
) -> Iterator[Tensor]:
    """Yield the next tokens, (B,) int64 on the model's device, as soon as each is chosen.

    choose: takes the float32 logits (B, vocabulary) and returns tokens (B,). The default returns the most likely
    tokens. For the other arguments see greedy_decode and GPT.plan.
    """
    choose = choose or (lambda logits: logits.argmax(dim=-1))
    decoder = Decoder(model, tokens.shape[-1] + max_new_tokens - 1, target_length=target_length, method=method)
    token = choose(decoder.prefill(tokens))
    yield token
    for _ in range(max_new_tokens - 1):
        token = choose(decoder.step(token))
        yield token


def sample(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Return tokens (B,) int64 on logits' device, drawn from softmax(logits / temperature), logits (B, vocabulary).

    top_k: draw only from the top_k most likely tokens. temperature 0 returns the most likely token. generator: on the
    CPU. The CPU draws the tokens, so a seed draws the same numbers on every device.
    """
    if temperature < 1e-300:  # logits divided by less would not be finite
        return logits.argmax(dim=-1)
    vocabulary = logits.shape[-1]
    likely, tokens = logits.double().cpu().topk(min(top_k or vocabulary, vocabulary), dim=-1)  # descending
    probabilities = (likely / temperature).softmax(dim=-1)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return tokens.gather(-1, drawn).squeeze(-1).to(logits.device)


class Decoder:
    """Feeds a model one prompt, then one token at a time: max_length tokens in all.

    target_length (default: max_length) and method: see greedy_decode.
    Raise ValueError if target_length < max_length.
    """

    def __init__(
        self,
        model: GPT,
        max_length: int,
        *,
        target_length: int | None = None,
        method: Method | None = None,
    ):
        self.model = model
        self.max_length = max_length
        self.plan = functools.partial(
            model.plan,
            target_length=max_length if target_length is None else target_length,
            method=method,
        )
        self.step_plan = self.plan(max_length, queries=1, backend="blocks")

    @torch.inference_mode()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Start with new prompts, tokens (B, T), and return the float32 logits (B, vocabulary) of the next token.

        Raise ValueError for empty prompts.
        """
        self.caches = [Cache(self.max_length, block.attention.method) for block in self.model.blocks]
        self.length = tokens.shape[1]
        return self.last_logits(tokens, self.plan(self.length))

    @torch.inference_mode()
    def step(self, token: Tensor) -> Tensor:
        """Return the float32 logits (B, vocabulary) after one more token (B,). Raise ValueError beyond max_length."""
        if self.length == self.max_length:
            raise UserError(f"max_length {self.max_length} is reached. Make a longer Decoder.")
        self.length += 1
        return self.last_logits(token.unsqueeze(1), self.step_plan.up_to(self.length))

    def last_logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """Return the logits after tokens (B, T), the newest ones."""
        x = self.model.embed(tokens.to(self.model.head.device))
        for number, (block, cache) in enumerate(zip(self.model.blocks, self.caches)):
            x = block(x, plan.for_layer(number), cache)
        return linear(norm(x[:, -1]), self.model.head).float()


class Cache:
    """Keeps rotated keys, values, and features of the tokens so far, for one layer.

    It also keeps unrotated keys for a Replacement.
    """

    def __init__(self, max_length: int, method: Method):
        self.max_length = max_length
        self.keeps_unrotated = method.replacement is not None
        self.length = 0  # tokens so far
        self.stored: list[Tensor | None] = []

    def append(self, rotated_k: Tensor, k: Tensor, v: Tensor, features: Tensor | None) -> list[Tensor | None]:
        """Add new tokens, (B, H, T, ...), and return the same of all tokens so far."""
        new = [rotated_k, k if self.keeps_unrotated else None, v, features]
        if not self.stored:
            self.stored = [None if part is None else self.empty(part) for part in new]
        start, self.length = self.length, self.length + v.shape[2]
        seen = []
        for stored, part in zip(self.stored, new):
            if part is not None:
                stored[:, :, start : self.length] = part
            seen.append(None if part is None else stored[:, :, : self.length])
        return seen

    def empty(self, part: Tensor) -> Tensor:
        B, H, _, *rest = part.shape
        return part.new_empty(B, H, self.max_length, *rest)

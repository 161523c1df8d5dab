"""Exact decoding with a key-value cache, for every attention method.

The prompt goes through the model in one piece, by the ordinary path. Each later token costs one step, and its logits
equal those of the full computation up to rounding. Keys are cached after rotation. NTK, YaRN and LogN's constant form
scale with the length of the sequence, so that length is fixed before the first token: target_length.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from errors import require
from model.attention import attend, blocks, transform
from model.attention.base import Plan, extra_logits
from model.gpt import GPT, linear, norm
from model.methods.base import Method, upcast


def greedy_decode(
    model: GPT, tokens: Tensor, max_new_tokens: int, *,
    target_length: int | None = None, stop: int | None = None, method: Method | None = None,
) -> Tensor:  # fmt: skip
    """Return the most likely tokens, one after the other: (B, N) int64 on the model's device, N <= max_new_tokens.

    tokens (B, T), integers: prompts of equal length. A row ends with its first token `stop`, and is filled up with
    `stop`. Decoding ends early when all rows have ended. target_length (default: T + max_new_tokens - 1, all tokens
    that the model sees): the length that NTK, YaRN and LogN's constant form scale prompt and new tokens to. That is our
    choice; the paper does not say how it decodes. method: see GPT.plan. ValueError for an empty prompt and for lengths
    that do not fit each other.
    """
    stop = -1 if stop is None else stop  # -1 is no token
    chosen = []
    ended = torch.zeros(tokens.shape[0], dtype=torch.bool, device=model.head.device)
    for token in decode(model, tokens, max_new_tokens, target_length=target_length, method=method):
        chosen.append(token.masked_fill(ended, stop))
        ended = chosen[-1] == stop
        if ended.all():
            break
    return torch.stack(chosen, dim=1)


def decode(
    model: GPT, tokens: Tensor, max_new_tokens: int, *,
    choose: Callable[[Tensor], Tensor] | None = None, target_length: int | None = None, method: Method | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the tokens that follow, (B,) int64 on the model's device, each as soon as it is chosen.

    choose: takes the float32 logits (B, vocabulary) and returns tokens (B,); default: the most likely ones. For the
    other arguments see greedy_decode.
    """
    require(max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {max_new_tokens}")
    choose = choose or (lambda logits: logits.argmax(dim=-1))
    decoder = Decoder(model, tokens.shape[-1] + max_new_tokens - 1, target_length=target_length, method=method)
    token = choose(decoder.prefill(tokens))
    yield token
    for _ in range(max_new_tokens - 1):
        token = choose(decoder.step(token))
        yield token


def sample(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Return tokens (B,) int64 on logits' device, drawn from softmax(logits / temperature), logits (B, vocabulary).

    Only the top_k most likely are drawn from, and of these the smallest number whose probability together is at least
    top_p (Holtzman et al. 2019, arXiv 1904.09751), at least one. temperature 0 takes the most likely. generator: of the
    CPU, where the drawing is done, so that a seed draws the same numbers on every device.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    likely, tokens = logits.double().cpu().topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)  # descending
    # The largest logit is subtracted first: a logit over a small temperature would be infinite.
    probabilities = ((likely - likely[:, :1]) / temperature).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = probabilities.masked_fill(before >= top_p, 0.0)
    kept[:, 0] = probabilities[:, 0]  # rounding could remove it
    return tokens.gather(-1, torch.multinomial(kept, 1, generator=generator)).squeeze(-1).to(logits.device)


class Decoder:
    """Feeds a model one prompt, then one token at a time: max_length tokens in all.

    target_length (default: max_length) and method: see greedy_decode. ValueError for a target_length below max_length.
    """

    def __init__(self, model: GPT, max_length: int, *, target_length: int | None = None, method: Method | None = None):
        target_length = max_length if target_length is None else target_length
        short = f"target_length {target_length} is less than the {max_length} tokens of prompt and continuation"
        require(target_length >= max_length, f"{short}. Give the length of the whole sequence.")
        self.model, self.max_length, self.target_length = model, max_length, target_length
        self.device, self.method = model.head.device, method
        repeated = [block.attention.method for block in model.blocks[: model.pattern_length]]
        self.methods = [method] if method else repeated
        self.tables = []  # of each method: cos, sin and the query scale's table at all positions
        for one in self.methods:
            cos = sin = query_table = None
            if one.rotation is not None:
                cos, sin = one.rotation.tables(max_length, target_length, self.device)
            if one.query_scale is not None:
                query_table = one.query_scale.table(torch.arange(max_length), target_length).to(self.device)
            self.tables.append((cos, sin, query_table))

    @torch.inference_mode()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Start with new prompts, tokens (B, T), and return the float32 logits (B, vocabulary) after them.

        ValueError for prompts that are empty or longer than max_length.
        """
        shape = tuple(tokens.shape)
        filled = len(shape) == 2 and tokens.numel() > 0
        require(filled, f"prompts must be (batch, length) with at least one token each, got {shape}")
        too_long = f"a prompt of {shape[1]} tokens does not fit a decoder of {self.max_length}"
        require(shape[1] <= self.max_length, too_long)
        self.length = shape[1]
        plans = self.model.plan(self.length, target_length=self.target_length, method=self.method)
        methods = [block.attention.method for block in self.model.blocks]
        self.caches = [KeyValueCache(self.max_length) if m.replacement is None else StateCache() for m in methods]
        return self.last_logits(tokens, plans, [cache.prefill for cache in self.caches])

    @torch.inference_mode()
    def step(self, token: Tensor) -> Tensor:
        """Return the float32 logits (B, vocabulary) after one more token (B,). ValueError beyond max_length."""
        require(self.length < self.max_length, f"the decoder is full: it was made for {self.max_length} tokens")
        here = slice(self.length, self.length + 1)
        plans = []
        for method, tables in zip(self.methods, self.tables):
            cos, sin, query_table = (None if table is None else table[here] for table in tables)
            shape = method.num_heads, method.head_dim, 1, 1  # one query and its own key; the other keys are cached
            plans.append(Plan("blocks", *shape, cos=cos, sin=sin, query_table=query_table))
        self.length += 1
        return self.last_logits(token.unsqueeze(1), plans, [cache.step for cache in self.caches])

    def last_logits(self, tokens: Tensor, plans: Sequence[Plan], attend_by_layer: list) -> Tensor:  # tokens (B, T)
        x = self.model.embed(tokens.to(self.device))
        for block, plan, attend_here in zip(self.model.blocks, itertools.cycle(plans), attend_by_layer):
            x = block(x, plan, attend_here)
        return linear(norm(x[:, -1]), self.model.head).float()


class KeyValueCache:
    """Holds the rotated keys and the values of one layer that a token can see, and attends to them.

    A windowed layer has room for two windows, so its keys are moved only once in `window` tokens.
    """

    def __init__(self, max_length: int):
        self.max_length = max_length

    def prefill(self, method: Method, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, plan: Plan) -> Tensor:
        self.seen = self.max_length if method.window is None else min(method.window.window, self.max_length)
        # a_t and m_t of the last query against all keys, (1 or H, 1, seen); earlier queries use the last columns.
        last_query = Plan("blocks", method.num_heads, method.vector_dim, 1, self.seen, device=k.device)
        self.bands = blocks.prepare(method.score_change, last_query)
        new = self.parts(method, transform(method, q, k, plan, x)[1], v, x)
        room = min(2 * self.seen, self.max_length)
        self.stored = [part.new_empty(*part.shape[:2], room, *part.shape[3:]) for part in new]
        self.length = 0  # keys stored
        self.append([part[:, :, -self.seen :] for part in new])
        return attend(method, q, k, v, x=x, plan=plan)

    def step(self, method: Method, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, plan: Plan) -> Tensor:
        """Return the output (B, H, 1, D) of one new token; q, k, v and x are those of this token."""
        q, k = transform(method, q, k, plan, x)
        self.append(self.parts(method, k, v, x))
        visible = slice(max(0, self.length - self.seen), self.length)
        keys, values, *of_tokens = (part[:, :, visible] for part in self.stored)
        more = extra_logits(method, of_tokens[0] if of_tokens else None)
        return attend_to_cache(q, keys, values, q_offset=keys.shape[2] - 1, bands=self.bands, **more)

    def parts(self, method: Method, rotated_k: Tensor, v: Tensor, x: Tensor) -> list[Tensor]:
        """Return the tensors to store: keys, values and, with a key bias, its numbers of each token."""
        return [rotated_k, v] if method.key_bias is None else [rotated_k, v, method.of_tokens(x)]

    def append(self, new: list[Tensor]):
        count, room = new[0].shape[2], self.stored[0].shape[2]
        if self.length + count > room:  # there is no room for one more token
            for part in self.stored:
                part[:, :, : self.seen - 1] = part[:, :, self.length - self.seen + 1 : self.length].clone()
            self.length = self.seen - 1
        here = slice(self.length, self.length + count)
        for part, x in zip(self.stored, new):
            part[:, :, here] = x
        self.length = here.stop


class StateCache:
    """Holds the state of one layer's Replacement between tokens."""

    def prefill(self, method: Method, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, plan: Plan) -> Tensor:
        self.state = method.replacement.start_decoding(k, v, transform(method, q, k, plan, x)[1])
        return attend(method, q, k, v, x=x, plan=plan)

    def step(self, method: Method, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, plan: Plan) -> Tensor:
        rotated = transform(method, q, k, plan, x)
        y, self.state = method.replacement.decode(self.state, q, k, v, *rotated, attend_to_cache)
        return y


def attend_to_cache(
    q: Tensor, k: Tensor, v: Tensor, *, q_offset: int, bands: blocks.Bands | None = None, **extra: Tensor
) -> Tensor:
    """Return causal attention of one query in plain PyTorch, on any device. Scores are float32, as in the kernels.

    extra: see extra_logits.
    """
    return blocks.run(upcast(q), upcast(k), v, q_offset=q_offset, prepared=bands, **extra)

"""Exact decoding with a key-value cache, for every attention method.

The prompt takes one ordinary forward pass. Each later token takes one step. Its logits equal the logits of a full
forward pass, up to rounding. Keys are cached after rotation. NTK, YaRN and LogN's constant form depend on the length
of the whole sequence. So this length, target_length, must be known before the first token.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from errors import require
from model.attention import attend, blocks, transform
from model.attention.base import Plan, extra_logits
from model.gpt import GPT, linear, norm
from model.methods.base import Method
from model.tensors import upcast


def greedy_decode(
    model: GPT, tokens: Tensor, max_new_tokens: int, *,
    target_length: int | None = None, stop: int | None = None, method: Method | None = None,
) -> Tensor:  # fmt: skip
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
    model: GPT, tokens: Tensor, max_new_tokens: int, *,
    choose: Callable[[Tensor], Tensor] | None = None, target_length: int | None = None, method: Method | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the next tokens, (B,) int64 on the model's device, as soon as each is chosen.

    choose: takes the float32 logits (B, vocabulary) and returns tokens (B,). The default returns the most likely
    tokens. For the other arguments see greedy_decode.
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
    if temperature == 0:
        return logits.argmax(dim=-1)
    likely, tokens = logits.double().cpu().topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)  # descending
    probabilities = (likely / temperature).softmax(dim=-1)
    return tokens.gather(-1, torch.multinomial(probabilities, 1, generator=generator)).squeeze(-1).to(logits.device)


class Decoder:
    """Feeds a model one prompt, then one token at a time: max_length tokens in all.

    target_length (default: max_length) and method: see greedy_decode. Raise ValueError if target_length < max_length.
    """

    def __init__(self, model: GPT, max_length: int, *, target_length: int | None = None, method: Method | None = None):
        target_length = max_length if target_length is None else target_length
        problem = f"target_length {target_length} is less than the {max_length} tokens of prompt and continuation"
        require(target_length >= max_length, f"{problem}. Give the length of the whole sequence.")
        self.model, self.max_length, self.target_length = model, max_length, target_length
        self.device, self.method = model.head.device, method
        self.tables = []  # for each method: cos, sin and the query scale's table at all positions
        for layer_method in [method] if method else model.methods:
            cos = sin = query_table = None
            if layer_method.rotation is not None:
                cos, sin = layer_method.rotation.tables(max_length, target_length, self.device)
            if layer_method.query_scale is not None:
                query_table = layer_method.query_scale.table(torch.arange(max_length), target_length).to(self.device)
            self.tables.append((layer_method, cos, sin, query_table))

    @torch.inference_mode()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Start with new prompts, tokens (B, T), and return the float32 logits (B, vocabulary) of the next token.

        Raise ValueError for empty prompts.
        """
        self.length = tokens.shape[1]
        plans = self.model.plan(self.length, target_length=self.target_length, method=self.method)
        self.caches = [Cache(self.max_length) for _ in self.model.blocks]
        return self.last_logits(tokens, plans, [cache.prefill for cache in self.caches])

    @torch.inference_mode()
    def step(self, token: Tensor) -> Tensor:
        """Return the float32 logits (B, vocabulary) after one more token (B,). Raise ValueError beyond max_length."""
        require(self.length < self.max_length, f"max_length {self.max_length} is reached. Make a longer Decoder.")
        position = slice(self.length, self.length + 1)
        plans = []
        for method, *tables in self.tables:
            cos, sin, query_table = (None if table is None else table[position] for table in tables)
            shape = method.num_heads, method.head_dim, 1, 1  # one query and its own key; the other keys are cached
            plans.append(Plan("blocks", *shape, cos=cos, sin=sin, query_table=query_table))
        self.length += 1
        return self.last_logits(token.unsqueeze(1), plans, [cache.step for cache in self.caches])

    def last_logits(self, tokens: Tensor, plans: Sequence[Plan], attend_by_layer: list) -> Tensor:  # tokens (B, T)
        x = self.model.embed(tokens.to(self.device))
        for block, plan, attend_cached in zip(self.model.blocks, itertools.cycle(plans), attend_by_layer):
            x = block(x, plan, attend_cached)
        return linear(norm(x[:, -1]), self.model.head).float()


class Cache:
    """Stores rotated keys and values of one layer's earlier tokens, and attends to them.

    It also stores unrotated keys for a Replacement, and each token's numbers for a key bias or a Replacement.
    """

    def __init__(self, max_length: int):
        self.max_length = max_length

    def prefill(self, method: Method, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, plan: Plan) -> Tensor:
        self.max_visible = self.max_length if method.window is None else min(method.window.window, self.max_length)
        # a_t and m_t of the last query and all keys, (1 or H, 1, visible). Earlier queries use the last columns.
        last_query = Plan("blocks", method.num_heads, method.vector_dim, 1, self.max_visible, device=k.device)
        self.bands = blocks.prepare(method.score_change, last_query)
        self.length = 0  # tokens stored
        self.append(method, transform(method, q, k, plan, x)[1], k, v, x)
        return attend(method, q, k, v, x=x, plan=plan)

    def step(self, method: Method, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, plan: Plan) -> Tensor:
        """Return the output (B, H, 1, D) of one new token; q, k, v and x belong to this token."""
        rotated_q, rotated_k = transform(method, q, k, plan, x)
        self.append(method, rotated_k, k, v, x)
        visible = slice(max(0, self.length - self.max_visible), self.length)
        keys, values, *others = (part[:, :, visible] for part in self.stored)
        q_offset = keys.shape[2] - 1
        if method.replacement is not None:
            k, *token_features = others
            return method.replacement.attend(q, k, values, rotated_q, keys, q_offset, attend_to_cache, *token_features)
        extra = extra_logits(method, others[0] if others else None)
        bands = self.bands if visible.start == 0 else self.bands._replace(skip_first=False)
        return attend_to_cache(rotated_q, keys, values, q_offset=q_offset, bands=bands, **extra)

    def append(self, method: Method, rotated_k: Tensor, k: Tensor, v: Tensor, x: Tensor):
        new = [rotated_k, v]  # (B, H, T, D)
        if method.replacement is not None:
            new.append(k)
        if (token_features := method.token_features(x)) is not None:
            new.append(token_features)  # (B, H, T, ...)
        if self.length == 0:
            self.stored = [part.new_empty(*part.shape[:2], self.max_length, *part.shape[3:]) for part in new]
        start, self.length = self.length, self.length + k.shape[2]
        for stored, part in zip(self.stored, new):
            stored[:, :, start : self.length] = part


def attend_to_cache(
    q: Tensor, k: Tensor, v: Tensor, *, q_offset: int, bands: blocks.Bands | None = None, **extra: Tensor
) -> Tensor:
    """Return causal attention of one query in plain PyTorch, on any device. Scores are float32. extra: extra_logits."""
    return blocks.run(upcast(q), upcast(k), v, q_offset=q_offset, prepared=bands, **extra)

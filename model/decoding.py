"""Exact decoding with a key-value cache, for every attention method.

The prompt goes through the model in one piece, by the ordinary path; after it, each token costs one step, and its
logits are those of the full computation up to rounding. Keys are cached after rotation, so all that depends on the
length of the sequence (the frequencies of NTK and YaRN, LogN's constant form) has to be fixed before the first token:
that is target_length. A cache that rescales while it grows mixes keys of different frequencies.
"""

import torch
from torch import Tensor

from errors import require
from model.attention import Plan, attend, transform
from model.backends import blocks
from model.backends.base import Call
from model.gpt import GPT, linear, norm
from model.methods.base import Method, upcast


def greedy_decode(
    model: GPT, tokens: Tensor, max_new_tokens: int, *,
    target_length: int | None = None, stop: int | None = None, method: Method | None = None,
) -> Tensor:  # fmt: skip
    """Return the most likely tokens, one after the other: (B, N) int64 on the model's device, N <= max_new_tokens.

    tokens (B, T), integers: prompts of equal length. A row ends with its first token `stop`, and is filled up with
    `stop`; decoding ends early when all rows have. target_length (default: T + max_new_tokens - 1, as the last token is
    only chosen): the length of the whole sequence that the model sees, to which NTK, YaRN and LogN's constant form
    scale prompt and new tokens alike. That is our choice: the paper does not say how it decodes. method: see GPT.plan.
    ValueError for an empty prompt and for lengths that do not go together.
    """
    require(max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {max_new_tokens}")
    stop = -1 if stop is None else stop  # -1 is no token
    decoder = Decoder(model, tokens.shape[-1] + max_new_tokens - 1, target_length=target_length, method=method)
    chosen = [decoder.prefill(tokens).argmax(dim=-1)]  # of (B,)
    while len(chosen) < max_new_tokens and not (chosen[-1] == stop).all():
        token = decoder.step(chosen[-1]).argmax(dim=-1)
        chosen.append(token.masked_fill(chosen[-1] == stop, stop))
    return torch.stack(chosen, dim=1)


class Decoder:
    """Feeds a model one prompt, then one token at a time: up to max_length tokens together.

    target_length and method as in greedy_decode (default: max_length, and the model's own). ValueError for a
    target_length of less than max_length.
    """

    def __init__(self, model: GPT, max_length: int, *, target_length: int | None = None, method: Method | None = None):
        target_length = max_length if target_length is None else target_length
        short = f"target_length {target_length} is less than the {max_length} tokens of prompt and continuation"
        require(target_length >= max_length, f"{short}: it must be the length of the whole sequence")
        self.model, self.max_length, self.target_length = model, max_length, target_length
        self.device = model.head.device
        self.method = method = method or model.blocks[0].attention.method
        self.cos = self.sin = self.query_table = None  # of all positions
        if method.rotation is not None:
            self.cos, self.sin = method.rotation.tables(max_length, target_length, self.device)
        if method.query_scale is not None:
            self.query_table = method.query_scale.table(torch.arange(max_length), target_length).to(self.device)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Return the float32 logits (B, vocabulary) after the prompts, tokens (B, T), and forget what was before.

        ValueError for prompts that are empty or longer than max_length.
        """
        shape, most = tuple(tokens.shape), self.max_length
        some = len(shape) == 2 and tokens.numel() > 0
        require(some, f"prompts must be (batch, length) with at least one token each, got {shape}")
        require(shape[1] <= most, f"a prompt of {shape[1]} tokens does not fit a decoder of {most}")
        self.length = shape[1]
        plan = self.model.plan(self.length, target_length=self.target_length, method=self.method)
        methods = [block.attention.method for block in self.model.blocks]
        self.caches = [KeyValueCache(most) if m.replacement is None else ReplacementCache() for m in methods]
        return self.last_logits(tokens, plan, [cache.prefill for cache in self.caches])

    @torch.inference_mode()
    def step(self, token: Tensor) -> Tensor:
        """Return the float32 logits (B, vocabulary) after one more token (B,). ValueError beyond max_length."""
        full = self.length == self.max_length
        require(not full, f"the decoder already holds the {self.max_length} tokens that it was made for")
        here = slice(self.length, self.length + 1)
        cos, sin, query_table = (x if x is None else x[here] for x in (self.cos, self.sin, self.query_table))
        call = Call(self.method.num_heads, self.method.head_dim, query_length=1, key_length=1)  # the others are cached
        plan = Plan("blocks", call, cos, sin, query_table)
        self.length += 1
        return self.last_logits(token.unsqueeze(1), plan, [cache.step for cache in self.caches])

    def last_logits(self, tokens: Tensor, plan: Plan, attend_by_layer: list) -> Tensor:  # tokens (B, T)
        x = self.model.embed(tokens.to(self.device))
        for block, attend_here in zip(self.model.blocks, attend_by_layer):
            x = block(x, plan, attend_here)
        return linear(norm(x[:, -1]), self.model.head).float()


class KeyValueCache:
    """Holds the rotated keys and the values of one layer, and attends to them."""

    def __init__(self, max_length: int):
        self.max_length = max_length

    def prefill(self, method: Method, q: Tensor, k: Tensor, v: Tensor, *, plan: Plan) -> Tensor:
        B, H, _, D = k.shape
        self.length = 0
        # a_t and m_t of the last query against all keys, (1 or H, 1, max_length): an earlier one's are the last columns
        last_query = Call(method.num_heads, D, query_length=1, key_length=self.max_length, device=k.device)
        self.bands = blocks.prepare(method.score_change, last_query)
        self.k, self.v = (k.new_empty(B, H, self.max_length, D) for _ in range(2))
        self.append(transform(method, q, k, plan)[1], v)
        return attend(method, q, k, v, plan=plan)

    def step(self, method: Method, q: Tensor, k: Tensor, v: Tensor, *, plan: Plan) -> Tensor:  # of one token each
        q, k = transform(method, q, k, plan)
        self.append(k, v)
        keys, values = self.k[:, :, : self.length], self.v[:, :, : self.length]
        return step_attention(q, keys, values, q_offset=self.length - 1, bands=self.bands)

    def append(self, k: Tensor, v: Tensor):
        new = slice(self.length, self.length + k.shape[2])
        self.k[:, :, new], self.v[:, :, new] = k, v
        self.length = new.stop


class ReplacementCache:
    """Holds what one layer's Replacement carries from token to token."""

    def prefill(self, method: Method, q: Tensor, k: Tensor, v: Tensor, *, plan: Plan) -> Tensor:
        self.state = method.replacement.start_decoding(k, v, transform(method, q, k, plan)[1])
        return attend(method, q, k, v, plan=plan)

    def step(self, method: Method, q: Tensor, k: Tensor, v: Tensor, *, plan: Plan) -> Tensor:  # of one token each
        y, self.state = method.replacement.decode(self.state, q, k, v, *transform(method, q, k, plan), step_attention)
        return y


def step_attention(q: Tensor, k: Tensor, v: Tensor, *, q_offset: int, bands: blocks.Bands | None = None) -> Tensor:
    """Return causal attention of one query in plain PyTorch, on any device; scores are float32, as in the kernels."""
    return blocks.run(upcast(q), upcast(k), v, q_offset=q_offset, prepared=bands)

"""The GPT of this repository as a model of Hugging Face's transformers, for any of its attention methods.

In an exported folder, this file and all that it imports are those of the repository, side by side (modules.py).

The cache is transformers' own, DynamicCache, so that beams, samples and drafts are repeated, reordered and cropped as
in other models. Keys are cached as they are rotated. All that depends on the length of the text (the frequencies of NTK
and YaRN, LogN's constant form) is therefore fixed before the first token: that is target_length, as in decoding.py.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from errors import require
from model.attention import Plan, attend_rotated, make_plan, transform
from model.gpt import GPT, linear, norm
from model.methods.base import Method, upcast
from scripts.export.configuration_method_gpt import MethodGPTConfig


class MethodGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = MethodGPTConfig
    base_model_prefix = "gpt"
    _keep_in_fp32_modules_strict = ["method"]  # what a method learns are a few numbers, which stay exact
    _no_split_modules = ["Block"]

    def __init__(self, config: MethodGPTConfig):
        """ValueError for an attention method or an option that there is not."""
        super().__init__(config)
        shape = {name: getattr(config, name) for name in ("vocab_size", "num_layers", "num_heads", "model_dim")}
        lengths = dict(train_length=config.train_length, position_scale=config.position_scale)
        self.gpt = GPT(**shape, **lengths, method=config.method, method_options=config.method_options)
        self.post_init()

    def _init_weights(self, module):
        """Leave the weights as GPT has drawn them."""

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: DynamicCache | None = None,
        use_cache: bool | None = None, labels: Tensor | None = None, logits_to_keep: int | Tensor = 0,
        target_length: int | None = None,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Return the float32 logits of the last logits_to_keep positions (0: all), (B, positions, vocabulary).

        input_ids (B, T) follow what past_key_values holds. attention_mask (B, all tokens so far): 0 for padding, to the
        left or to the right, beside which a row is what it would be alone. labels (B, T), -100 for none: the loss is
        the mean cross-entropy, in nats, of all but the first, each given those before it. target_length: the length of
        the whole text, padding included, to which some methods scale (default: of all tokens so far).
        """
        gpt = self.gpt
        gpt.dtype = gpt.head.dtype
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        grows = past_key_values is None or isinstance(past_key_values, DynamicCache)
        require(grows, f"a {type(past_key_values).__name__} cannot be used: leave out cache_implementation")
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        texts = find_texts(attention_mask, len(input_ids), past, past + input_ids.shape[1])
        plans = {}
        if past_key_values is not None and target_length is not None:  # else the plans of one step are not the next's
            plans = past_key_values.__dict__.setdefault("plans", {})
            plans.update(passing={})
        x = gpt.embed(input_ids)
        for number, block in enumerate(gpt.blocks):
            x = block(x, None, LayerAttention(number, past_key_values, texts, target_length, plans))
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = linear(norm(x)[:, positions], gpt.head).float()
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def generate(self, inputs: Tensor | None = None, generation_config=None, **kwargs):
        """Generate as every model of transformers does. target_length (default: of the prompt and all new tokens but
        the last, as that is only chosen): as of forward."""
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        length = 1 if prompt is None else prompt.shape[1]
        given = generation_config or self.generation_config
        new, most = (kwargs.get(name) or getattr(given, name, None) for name in ("max_new_tokens", "max_length"))
        if not new and not most:
            new = kwargs["max_new_tokens"] = 20  # as transformers has it
        kwargs.setdefault("target_length", max(length, (length + new if new else most) - 1))
        return super().generate(inputs, generation_config, **kwargs)


class Text(NamedTuple):
    """Rows of a batch with the same padding, whose tokens are those from `start` to before `stop` of all, and of which
    those before `first` are cached."""

    rows: Tensor | slice
    start: int
    first: int
    stop: int


def find_texts(mask: Tensor | None, B: int, past: int, length: int) -> list[Text]:
    """Return the texts of a batch, mask being (B, length) or, without padding, None. ValueError for padding inside a
    text, and for a row of nothing else."""
    if mask is None or mask.all():
        return [Text(slice(None), 0, past, length)]
    shape = tuple(mask.shape)
    require(shape == (B, length), f"attention_mask must be ({B}, {length}), 1 for text and 0 for padding, got {shape}")
    mask = mask.bool()
    starts, lengths = mask.int().argmax(dim=1), mask.sum(dim=1)  # (B,)
    spans = torch.stack([starts, starts + lengths], dim=1)
    positions = torch.arange(length, device=mask.device)
    whole = (positions >= spans[:, :1]) & (positions < spans[:, 1:])
    inside = "attention_mask has a row with padding inside its text, or without text"
    require(lengths.all() and torch.equal(whole, mask), f"{inside}: pad prompts on the left")
    texts = []
    for start, stop in spans.unique(dim=0).tolist():
        rows = (spans == torch.tensor([start, stop], device=mask.device)).all(dim=1).nonzero()[:, 0]
        texts.append(Text(rows, start, max(past, start), stop))
    return [text for text in texts if text.first < text.stop]


@dataclasses.dataclass
class LayerAttention:
    """The attention of one layer to new tokens and those of the cache, in place of model.attention.attend."""

    layer: int
    cache: DynamicCache | None
    texts: list[Text]
    target_length: int | None
    plans: dict  # those made so far: of single tokens, which the cache keeps for those after them, and of this pass

    def __call__(self, method: Method, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, plan: None) -> Tensor:
        """q, k, v (B, H, T, D) and x (B, T, C) are of the new tokens; the output is (B, H, T, D)."""
        past = 0 if self.cache is None else self.cache.get_seq_length(self.layer)
        new = [slice(text.first - past, text.stop - past) for text in self.texts]
        plans = [self.plan(method, text, q.device, q.dtype) for text in self.texts]
        rotated = [
            transform(method, q[t.rows, :, here], k[t.rows, :, here], plan, x[t.rows, here])
            for t, here, (plan, _) in zip(self.texts, new, plans)
        ]
        of_tokens = method.of_tokens(x)  # (B, H, T) or (B, H, T, E)
        rotated_k = self.together([pair[1] for pair in rotated], new, k)
        unrotated = k if method.replacement is not None else None
        rotated_k, v, of_tokens, unrotated = self.extend(method, rotated_k, v, of_tokens, unrotated)
        outputs = []
        for t, here, (_, plan), (rotated_q, _) in zip(self.texts, new, plans, rotated):
            seen = (t.rows, slice(None), slice(t.start, t.stop))
            vectors = [rotated_q, rotated_k[seen], v[seen]]
            if unrotated is not None:
                vectors += [q[t.rows, :, here], unrotated[seen]]
            more = None if of_tokens is None else of_tokens[seen]
            outputs.append(attend_rotated(method, plan, *vectors, of_tokens=more))
        return self.together(outputs, new, q)

    def extend(self, method: Method, rotated_k, v, of_tokens, unrotated):
        """Add these to the cache and return what it holds of each. It has keys and values alone, so beside the keys are
        the unrotated keys of a Replacement and the numbers of_tokens, with which all is in float32."""
        if method.vector_dim > method.head_dim:
            v = F.pad(v, (0, method.vector_dim - method.head_dim))
        if self.cache is None:
            return rotated_k, v, of_tokens, unrotated
        dtype, D = rotated_k.dtype, rotated_k.shape[3]
        numbers = None if of_tokens is None else of_tokens.reshape(*of_tokens.shape[:3], -1)
        beside = [x for x in (unrotated, numbers) if x is not None]
        if numbers is not None:
            rotated_k = upcast(rotated_k)
        kept, v = self.cache.update(torch.cat([rotated_k, *beside], dim=-1), v, self.layer)
        rotated_k, *beside = kept.split([D, *(x.shape[3] for x in beside)], dim=-1)
        if of_tokens is not None:
            of_tokens = beside.pop().squeeze(-1) if of_tokens.dim() == 3 else beside.pop()
        if unrotated is not None:
            unrotated = beside.pop().to(dtype)
        return rotated_k.to(dtype), v.to(dtype), of_tokens, unrotated

    def together(self, parts: list[Tensor], new: list[slice], like: Tensor) -> Tensor:
        """Return the texts' parts (rows, H, tokens, D) as one tensor (B, H, T, D), zero where there is padding. like:
        one of this B, H and T."""
        if isinstance(self.texts[0].rows, slice):
            return parts[0]
        whole = parts[0].new_zeros(*like.shape[:3], parts[0].shape[3])
        for text, here, part in zip(self.texts, new, parts):
            whole[text.rows, :, here] = part
        return whole

    def plan(self, method: Method, text: Text, device: torch.device, dtype: torch.dtype) -> tuple[Plan, Plan]:
        """Return what a text's new tokens are rotated by, and what they attend to it by."""
        first, length = text.first - text.start, text.stop - text.start
        target = length if self.target_length is None else self.target_length - text.start
        more = f"{text.stop} tokens are more than target_length {self.target_length}: give a larger one"
        require(length <= target, f"{more} (drafts may go beyond the last token)")
        where = dict(target_length=target, device=device, dtype=dtype, normalised=True)
        if length - first == 1 < target:  # one plan serves all steps of a text
            key = method.name, target, dtype
            if key not in self.plans:
                last = make_plan(method, 1, target, q_offset=target - 1, backend="blocks", **where)
                self.plans[key] = last
            plan = self.plans[key]
            table = None
            if method.query_scale is not None:
                table = method.query_scale.table(torch.tensor([first]), target).to(device)
            call = dataclasses.replace(plan.call, key_length=length, q_offset=first)
            plan = dataclasses.replace(plan, call=call, query_table=table)
        else:
            key, passing = (method.name, first, length), self.plans.setdefault("passing", {})
            if key not in passing:
                passing[key] = make_plan(method, length - first, length, q_offset=first, **where)
            plan = passing[key]
        cos, sin = (table if table is None else table[first:length] for table in (plan.cos, plan.sin))
        own = dataclasses.replace(plan.call, q_offset=0)  # the tables then are of the new tokens alone
        return dataclasses.replace(plan, call=own, cos=cos, sin=sin), plan

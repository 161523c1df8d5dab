"""The GPT of this repository as a model of Hugging Face's transformers, for any of its attention methods.

An exported folder holds this file and all that it imports of the repository, side by side (modules.py).

The cache is transformers' DynamicCache, so that beams, samples and drafts work as in other models. It holds keys
without rotation, and beside them the layer's input where a method needs it. Every call rotates all keys for one length
of the whole sequence, target_length, because NTK, YaRN and LogN's constant form depend on it.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from errors import require
from model.attention import attend_rotated, make_plan, transform
from model.gpt import GPT, linear, norm
from model.methods.base import Method
from scripts.hf.configuration_method_gpt import MethodGPTConfig


class MethodGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = MethodGPTConfig
    base_model_prefix = "gpt"
    _keep_in_fp32_modules_strict = ["method"]  # the few learned numbers of a method stay exact
    _no_split_modules = ["Block"]

    def __init__(self, config: MethodGPTConfig):
        """Build the model. Raises ValueError for an unknown attention method or option."""
        super().__init__(config)
        self.gpt = GPT(
            vocab_size=config.vocab_size, num_layers=config.num_layers, num_heads=config.num_heads,
            model_dim=config.model_dim, train_length=config.train_length, method=config.method,
            method_options=config.method_options, position_scale=config.position_scale,
        )  # fmt: skip
        self.post_init()

    def _init_weights(self, module):
        """Keep the weights as GPT has drawn them."""

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: DynamicCache | None = None,
        use_cache: bool | None = None, labels: Tensor | None = None, logits_to_keep: int | Tensor = 0,
        target_length: int | None = None,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Return the float32 logits of the last logits_to_keep positions (0: all), (B, positions, vocabulary).

        input_ids (B, T) follow the tokens in past_key_values. attention_mask (B, all tokens so far) may be 0 for
        padding at the end, when nothing is cached. labels (B, T), -100 for none: the loss is the mean cross-entropy in
        nats of all tokens but the first. target_length: length of the whole sequence (default: all tokens so far).
        """
        gpt = self.gpt
        gpt.dtype = gpt.head.dtype
        cache = past_key_values
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        grows = cache is None or isinstance(cache, DynamicCache)
        require(grows, f"a {type(cache).__name__} has a fixed size. Leave out cache_implementation.")
        first = 0 if cache is None else cache.get_seq_length()
        if attention_mask is not None and not attention_mask.all():
            at_the_end = first == 0 and bool((attention_mask.long().diff(dim=1) <= 0).all())
            message = "attention_mask hides tokens that later ones see. Pad on the right; generate from equal lengths."
            require(at_the_end, message)  # no token sees padding after it
        attention = CachedAttention(cache, first, first + input_ids.shape[1], target_length)
        x = gpt.embed(input_ids)
        for attention.layer, block in enumerate(gpt.blocks):
            x = block(x, None, attention)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = linear(norm(x)[:, positions], gpt.head).float()
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def generate(self, inputs: Tensor | None = None, generation_config=None, **kwargs):
        """Generate as every model of transformers does. target_length (default: the prompt and all new tokens but the
        last, which no token sees): see forward."""
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        length = 1 if prompt is None else prompt.shape[1]
        given = generation_config or self.generation_config
        new, longest = (kwargs.get(name) or getattr(given, name, None) for name in ("max_new_tokens", "max_length"))
        if not new and not longest:
            new = kwargs["max_new_tokens"] = 20  # transformers' default
        kwargs.setdefault("target_length", max(length, (length + new if new else longest) - 1))
        return super().generate(inputs, generation_config, **kwargs)


@dataclasses.dataclass
class CachedAttention:
    """Attention of the tokens at first..length-1 to those in the cache and themselves, one layer after the other.

    It takes the place of model.attention.attend.
    """

    cache: DynamicCache | None
    first: int
    length: int
    target_length: int | None
    layer: int = 0
    plans: dict = dataclasses.field(default_factory=dict)  # by method

    def __call__(self, method: Method, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, plan: None) -> Tensor:
        """Return the output (B, H, T, D). q, k, v (B, H, T, D) and x (B, T, C) are of the new tokens."""
        if method.name not in self.plans:
            self.plans[method.name] = make_plan(
                method, self.length - self.first, self.length, q_offset=self.first, target_length=self.target_length,
                device=q.device, dtype=q.dtype, backend="blocks" if q.shape[2] == 1 else "auto", normalised=True,
            )  # fmt: skip
        plan, all_x = self.plans[method.name], x
        if self.cache is not None:
            x_by_head = x.unflatten(-1, (k.shape[1], -1)).transpose(1, 2)  # (B, H, T, D)
            new = torch.cat([k, x_by_head], dim=-1) if method.needs_input else k
            cached, v = self.cache.update(new, v, self.layer)
            k, all_x = cached[..., : k.shape[3]], cached[..., k.shape[3] :].transpose(1, 2).flatten(2)
        rotated_q, rotated_k = transform(method, q, k, plan, x)
        wide_v = F.pad(v, (0, method.vector_dim - method.head_dim))
        unrotated = () if method.replacement is None else (q, k)
        of_tokens = method.of_tokens(all_x)
        return attend_rotated(method, plan, rotated_q, rotated_k, wide_v, *unrotated, of_tokens=of_tokens)

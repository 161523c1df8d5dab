"""The GPT of this repository, with any of its attention methods, as a model of Hugging Face's transformers.

An exported folder holds this file and all modules that it imports from the repository, side by side (modules.py).

The cache is transformers' DynamicCache, so beam search, sampling and assisted decoding work as in other models. It
holds unrotated keys, and the layer's input if the method needs it. NTK, YaRN and LogN's constant form depend on the
length of the whole sequence, target_length. So every call rotates all keys for this length.
"""

import functools

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from errors import require
from model.attention import Plan, attend_rotated, make_plan, transform
from model.gpt import GPT, linear, norm
from model.methods.base import Method
from model.tensors import upcast


@strict
class MethodGPTConfig(PreTrainedConfig):
    """Holds the arguments of GPT (gpt.py), with checked types. max_position_embeddings is the longest validated length.
    Other programs stop there by default, but the model has no limit."""

    model_type = "method_gpt"
    attribute_map = {"hidden_size": "model_dim", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}

    vocab_size: int = 50304
    num_layers: int = 12
    num_heads: int = 6
    model_dim: int = 768
    train_length: int = 4096
    method: str = "scale_invariant_p_rope"
    method_options: dict[str, int | float | bool | str | None] | None = None
    position_scale: int | float = 1.0
    max_position_embeddings: int = 65_536
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False


class MethodGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = MethodGPTConfig
    base_model_prefix = "gpt"
    _keep_in_fp32_modules_strict = ["method"]  # a method has few parameters, and rounding them would cost accuracy

    def __init__(self, config: MethodGPTConfig):
        """Build the model. Raise ValueError for an unknown attention method or option."""
        super().__init__(config)
        self.gpt = GPT(
            vocab_size=config.vocab_size, num_layers=config.num_layers, num_heads=config.num_heads,
            model_dim=config.model_dim, train_length=config.train_length, method=config.method,
            method_options=config.method_options, position_scale=config.position_scale,
        )  # fmt: skip
        self.post_init()

    def _init_weights(self, module):
        """Keep the initial weights of GPT."""

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: DynamicCache | None = None,
        use_cache: bool | None = None, labels: Tensor | None = None, logits_to_keep: int | Tensor = 0,
        target_length: int | None = None,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Return the float32 logits of the last logits_to_keep positions (0: all), (B, positions, vocabulary).

        input_ids (B, T) follow the tokens in past_key_values. attention_mask must be all 1. labels: (B, T), with -100
        to leave out a token. The loss is the mean cross-entropy in nats of all tokens but the first. target_length:
        length of the whole sequence (default: all tokens so far).
        """
        visible = attention_mask is None or attention_mask.all()
        require(visible, "attention_mask hides tokens. Pass rows of equal lengths, or pad on the right without a mask.")
        gpt, cache = self.gpt, past_key_values
        gpt.dtype = gpt.head.dtype
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        count, first = input_ids.shape[1], 0 if cache is None else cache.get_seq_length()
        x, plans = gpt.embed(input_ids), {}
        for layer, block in enumerate(gpt.blocks):
            method = block.attention.method
            if method.name not in plans:
                plans[method.name] = make_plan(
                    method, count, first + count, q_offset=first, target_length=target_length, device=x.device,
                    dtype=gpt.dtype, backend="blocks" if count == 1 else "auto",
                )  # fmt: skip
            x = block(x, plans[method.name], functools.partial(attend_with_cache, cache=cache, layer=layer))
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = linear(norm(x)[:, positions], gpt.head).float()
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def generate(self, inputs: Tensor | None = None, generation_config=None, **kwargs):
        """Generate with the interface of transformers. target_length: see forward. By default it counts the prompt and
        the new tokens without the last one, because no token attends to that."""
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        length = 1 if prompt is None else prompt.shape[1]
        given = generation_config or self.generation_config
        new = kwargs.get("max_new_tokens") or given.max_new_tokens
        longest = kwargs.get("max_length") or given.max_length or length + 20  # transformers' default
        kwargs.setdefault("target_length", max(length, (length + new if new else longest) - 1))
        return super().generate(inputs, generation_config, **kwargs)


def attend_with_cache(
    method: Method, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, plan: Plan, cache: DynamicCache | None, layer: int
) -> Tensor:
    """Return the attention of new tokens to the cached tokens and to themselves, (B, H, T, D).

    q, k, v (B, H, T, D) and x (B, T, C) belong to the new tokens. This replaces model.attention.attend.
    """
    all_x = x
    if cache is not None:
        x_by_head = x.unflatten(-1, (k.shape[1], -1)).transpose(1, 2)  # (B, H, T, D)
        new = torch.cat([k, x_by_head], dim=-1) if method.needs_input else k
        cached, v = cache.update(new, v, layer)
        k, all_x = cached[..., : k.shape[3]], cached[..., k.shape[3] :].transpose(1, 2).flatten(2)
    if q.shape[2] == 1:  # the backend is plain PyTorch here, which would compute bfloat16 scores
        q, k = upcast(q), upcast(k)
    rotated_q, rotated_k = transform(method, q, k, plan, x)
    wide_v = F.pad(v, (0, method.vector_dim - method.head_dim))
    unrotated = () if method.replacement is None else (q, k)
    return attend_rotated(
        method, plan, rotated_q, rotated_k, wide_v, *unrotated, token_features=method.token_features(all_x)
    )

"""The GPT of this repository, with any of its attention methods, as a model of Hugging Face's transformers.

An exported folder holds this file and all modules that it imports from the repository, side by side (modules.py).

The cache is transformers' DynamicCache, so beam search, sampling and assisted decoding work as in other models. It
holds keys, and the layer's input if the method needs it. The angles of NTK and YaRN depend on the length of the whole
sequence, target_length. So their cache holds unrotated keys, and every call rotates all of them.
"""

import functools

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from errors import require
from model.attention.attend import rotate
from model.attention.plan import MAX_LENGTH, LayerPlan, Plan
from model.gpt import GPT, norm
from model.methods.base import Method
from model.tensors import linear


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
    accepts_loss_kwargs = False  # transformers' Trainer would pass num_items_in_batch
    _keep_in_fp32_modules_strict = ["method"]  # a method has few parameters, and rounding them would cost accuracy

    def __init__(self, config: MethodGPTConfig):
        """Build the model. Raise ValueError for an unknown attention method or option."""
        super().__init__(config)
        self.gpt = GPT(config)
        self.step_plans = {}  # at most one
        self.post_init()

    def _init_weights(self, module):
        """Keep the initial weights of GPT."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        target_length: int | None = None,
        output_hidden_states: bool = False,
        **others,
    ) -> CausalLMOutputWithPast:
        """Return the float32 logits of the last logits_to_keep positions (0: all), (B, positions, vocabulary).

        input_ids (B, T), or their rows of the embedding, inputs_embeds (B, T, C), follow the tokens in past_key_values.
        attention_mask must be all 1. labels: (B, T), with -100 to leave out a token. The loss is the mean cross-entropy
        in nats of all tokens but the first. target_length: length of the whole sequence, if it is to become longer.
        output_hidden_states: also return the input of each layer and the input of the head. others: tokenizers, which
        `generate` hands through. Raise ValueError for another argument.
        """
        unknown = [name for name, value in others.items() if value is not None and not name.endswith("tokenizer")]
        require(not unknown, f"the model takes no {', '.join(unknown)}. Leave it out.")
        require((input_ids is None) != (inputs_embeds is None), "Pass either input_ids or inputs_embeds.")
        known = past_key_values is None or isinstance(past_key_values, DynamicCache)
        require(known, f"the model has no {type(past_key_values).__name__}. Use the default cache_implementation.")
        visible = attention_mask is None or attention_mask.all()
        require(visible, "attention_mask hides tokens. Pass rows of equal lengths, or pad on the right without a mask.")
        gpt, cache = self.gpt, past_key_values
        gpt.dtype = gpt.head.dtype
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        if inputs_embeds is None:
            inputs_embeds = gpt.embedding(input_ids)
        count, first = inputs_embeds.shape[1], 0 if cache is None else cache.get_seq_length()
        x = norm(inputs_embeds.to(gpt.dtype))
        states = []  # empty unless asked for, because they would take the memory of all layers
        length = max(target_length or 0, first + count)  # assisted decoding may draft beyond the target
        if count == 1 and target_length is not None:
            plan = self.step_plan(length).up_to(first + 1)
        else:
            plan = gpt.plan(first + count, queries=count, target_length=length)
        for layer, block in enumerate(gpt.blocks):
            layer_plan = plan.for_layer(layer)
            layer_cache = None if cache is None else LayerCache(cache, layer, block.attention.method, layer_plan)
            if output_hidden_states:
                states.append(x)
            x = block(x, layer_plan, layer_cache)
        x = norm(x)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = linear(x[:, positions], gpt.head).float()
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        hidden = (*states, x) if output_hidden_states else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=hidden)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.gpt.embedding

    def set_input_embeddings(self, embedding: nn.Embedding):
        self.gpt.embedding = embedding

    def get_output_embeddings(self) -> nn.Linear:
        """Return a layer that shares the head's weight. resize_token_embeddings changes the size of such a layer."""
        width, vocabulary = reversed(self.gpt.head.shape)
        layer = nn.Linear(width, vocabulary, bias=False, device="meta")
        layer.weight = self.gpt.head
        return layer

    def set_output_embeddings(self, layer: nn.Linear):
        self.gpt.head = layer.weight

    def step_plan(self, target_length: int) -> Plan:
        """Return the plan of a single query after up to target_length keys. All steps of `generate` share it."""
        key = target_length, self.gpt.dtype, self.gpt.head.device
        if key not in self.step_plans:
            self.step_plans = {key: self.gpt.plan(target_length, queries=1, backend="blocks")}
        return self.step_plans[key]

    def generate(self, inputs: Tensor | None = None, generation_config=None, **kwargs):
        """Generate with the interface of transformers. target_length: see forward. By default it counts the prompt and
        the new tokens without the last one, because no token attends to that."""
        prompts = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        prompt = next((prompt for prompt in prompts if prompt is not None), None)
        length = 1 if prompt is None else prompt.shape[1]
        given = generation_config or self.generation_config
        new = kwargs.get("max_new_tokens") or given.max_new_tokens
        longest = kwargs.get("max_length") or given.max_length or length + 20  # transformers' default
        kwargs.setdefault("target_length", max(length, (length + new if new else longest) - 1))
        return super().generate(inputs, generation_config, **kwargs)


@functools.cache
def keeps_unrotated(method: Method) -> bool:
    """Return True if a method's cache must have unrotated keys."""
    if method.rotation is None or method.replacement is not None:
        return method.replacement is not None
    (one, _), (other, _) = (method.rotation.frequencies(length) for length in (1, MAX_LENGTH))
    return not torch.equal(one, other)


class LayerCache:
    """Keeps keys, values and features of one layer in transformers' cache."""

    def __init__(self, cache: DynamicCache, layer: int, method: Method, plan: LayerPlan):
        self.cache, self.layer, self.method, self.plan = cache, layer, method, plan

    def append(self, rotated_k: Tensor, k: Tensor, v: Tensor, features: Tensor | None) -> tuple:
        """Add new tokens, (B, H, T, ...), and return the same of all tokens so far.

        If the cache has rotated keys, both keys are these.
        """
        unrotated = keeps_unrotated(self.method)
        if not unrotated:
            k = rotated_k
        width, dtype = k.shape[3], k.dtype
        if features is not None:  # behind the keys, in one tensor
            k = torch.cat([k, features.reshape(*features.shape[:3], -1)], dim=3)
        k, v = self.cache.update(k, v, self.layer)
        if features is not None:
            features = k[..., width:].reshape(*k.shape[:3], *features.shape[3:])
        rotated_k = k = k[..., :width].to(dtype)
        if unrotated:
            _, rotated_k = rotate(self.method, k, k, self.plan)
        return rotated_k.to(dtype), k, v, features

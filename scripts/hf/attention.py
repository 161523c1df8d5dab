"""Puts our attention methods into Hugging Face models, in place of their rotation and attention.

    model = load_model("meta-llama/Llama-2-7b-hf", dtype=torch.bfloat16)
    convert(model, "scale_invariant_p_rope", train_length=4096)

Transformers offers three hooks: a rope type (ours leaves q and k as they are), an attention function, and a mask
function (ours returns positions instead of a mask). The key-value cache holds keys without rotation, so every call
rotates all keys for the same sequence length. docs/huggingface.md lists our choices where the paper is silent.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from errors import require
from model.attention import Plan, attend, make_plan
from model.methods import check_options, layer_pattern, make_method, method_options
from model.methods.base import Method, upcast
from model.methods.rope import BASE
from model.methods.window import SlidingWindow

FAMILIES = {"llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM"}  # class by model_type
RECORD = "attention_method"  # the field of the model's configuration that describes the conversion
ROPE_TYPE, ATTENTION = "unrotated", "attend_with_method"  # the names that transformers knows ours by


class Positions(NamedTuple):
    query: int  # of the first query
    key: int  # of the first key: not 0 where the cache of a sliding layer has dropped keys


@dataclasses.dataclass
class Shared:
    """State that all converted layers of a model share.

    target_length: tokens of the whole sequence, for methods that depend on it; None: the length of each call.
    observe: called with (layer, q, k, plan) before each layer attends, q and k without rotation.
    """

    target_length: int | None = None
    observe: Callable[[nn.Module, Tensor, Tensor, Plan], object] | None = None
    lengths: tuple = ()
    plans: dict = dataclasses.field(default_factory=dict)  # of calls of these lengths

    def plan(self, method: Method, positions: Positions, q: Tensor, k: Tensor, softcap: float | None) -> Plan:
        """Return the plan of a call with q (B, H, Tq, D) and k (B, H, Tk, D)."""
        end, window = positions.query + q.shape[2], method.window and method.window.window
        # Tensors made in inference mode cannot serve training, so these plans are kept apart.
        lengths = (end, q.shape[2], self.target_length, torch.is_inference_mode_enabled())
        if self.lengths != lengths:
            self.lengths = lengths
            self.plans.clear()
        key = (method.name, window, positions.key, q.device, q.dtype)
        if key not in self.plans:
            target_length = self.target_length or end
            plan = make_plan(
                method, q.shape[2], k.shape[2], q_offset=positions.query - positions.key, target_length=target_length,
                device=q.device, dtype=q.dtype, backend="blocks" if q.shape[2] == 1 else "auto", softcap=softcap,
            )  # fmt: skip
            if plan.sin is not None:
                plan = dataclasses.replace(plan, sin=-plan.sin)  # the direction in which these models rotate
            if plan.query_table is not None and positions.key:  # the scale depends on the position in the sequence
                table = method.query_scale.table(torch.arange(positions.query, end), target_length)
                plan = dataclasses.replace(plan, query_table=table.to(q.device))
            self.plans[key] = plan
        return self.plans[key]


def unrotated(config, device=None, seq_len=None, layer_type=None) -> tuple[Tensor, float]:
    """Return frequencies of 0, (D/2,), and the factor 1, so that transformers' rotation changes nothing."""
    return torch.zeros(config.head_dim // 2, device=device), 1.0


def find_positions(
    *, q_length, kv_length, q_offset, kv_offset, attention_mask=None, allow_is_causal_skip=True, **unused
) -> Positions:
    """Return, in place of a mask, the positions of queries and keys.

    Raises ValueError for anything but causal attention over whole sequences.
    """
    grows = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    require(grows, "this cache has a fixed size. Use the default, DynamicCache.")
    require(allow_is_causal_skip, "rows hold several sequences. Pass one sequence a row, with position_ids 0, 1, 2 ...")
    if attention_mask is not None and not attention_mask.all():
        at_the_end = q_offset == 0 and bool((attention_mask.long().diff(dim=1) <= 0).all())
        message = "attention_mask hides tokens that later ones see. Pad on the right; generate from equal lengths."
        require(at_the_end, message)  # no token sees padding after it
    return Positions(q_offset, kv_offset)


def attend_with_method(
    layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Positions, scaling: float,
    softcap: float | None = None, **unused,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return a layer's attention by its method, (B, Tq, H, D), as transformers' attention functions do.

    query (B, H, Tq, D); key, value (B, H / groups, Tk, D), without rotation; attention_mask: from find_positions.
    """
    require(isinstance(attention_mask, Positions), "converted models make their own mask. Pass none of 4 dimensions.")
    if layer.num_key_value_groups > 1:
        key, value = (x.repeat_interleave(layer.num_key_value_groups, dim=1) for x in (key, value))
    plan = layer.shared.plan(layer.method, attention_mask, query, key, softcap)
    if softcap is not None or query.shape[2] == 1:  # plain PyTorch runs these, and scores must be float32
        query, key = upcast(query), upcast(key)
    factor = scaling * query.shape[-1] ** 0.5  # our scores are q.k / sqrt(D)
    query = query if math.isclose(factor, 1) else query * factor
    if layer.shared.observe is not None:
        layer.shared.observe(layer, query, key, plan)
    return attend(layer.method, query, key, value, plan=plan).transpose(1, 2), None


def register():
    """Register our rope type, attention function and mask function with transformers."""
    import transformers
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    transformers.AttentionInterface.register(ATTENTION, attend_with_method)
    AttentionMaskInterface.register(ATTENTION, find_positions)
    ROPE_INIT_FUNCTIONS[ROPE_TYPE] = unrotated


def convert(model: nn.Module, method: str, /, *, train_length: int | None = None, **options) -> nn.Module:
    """Make every layer of a model attend by one of our methods, in place, and return the model.

    model: of FAMILIES, on any device; it may have been converted before. train_length (default:
    max_position_embeddings) and options: see make_method; the default base of a rotation is the model's. The learned
    parameters of the method are self_attn.method of each layer, in float32. model.config.attention_method keeps a
    record. Raises ValueError for a model or method that this cannot work with.
    """
    config = model.config
    supported = config.model_type in FAMILIES
    require(supported, f"the model family {config.model_type} is not supported. Use {' or '.join(FAMILIES)}.")
    require(not config.attention_dropout, "our attention has no dropout. Load the model with attention_dropout=0.0.")
    causal = not getattr(config, "use_bidirectional_attention", False)
    require(causal, "our attention is causal, and this model's is not. Use a causal model.")
    train_length = config.max_position_embeddings if train_length is None else train_length
    earlier = getattr(config, RECORD, None) or {}
    rope = earlier.get("rope_parameters", config.rope_parameters)
    layers = attention_layers(model)
    methods = make_methods(config, rope, method, train_length, options)
    for layer, own in zip(layers, methods, strict=True):
        if (window := getattr(layer, "sliding_window", None)) is not None:
            window = min(window, window if own.window is None else own.window.window)
            own.window = SlidingWindow(own.num_heads, own.head_dim, own.train_length, window)
        check_method(own, layer)
    register()
    setattr(config, RECORD, dict(name=method, train_length=train_length, options=options, rope_parameters=rope))
    config.rope_parameters = rope | {"rope_type": ROPE_TYPE}
    shared = model.attention_shared = Shared()
    for layer, own in zip(layers, methods):
        layer.method, layer.shared = own.to(layer.q_proj.weight.device), shared
    device = model.model.rotary_emb.inv_freq.device
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.set_attn_implementation(ATTENTION)
    return model


def make_methods(config, rope: dict, name: str, train_length: int, options: dict) -> list[Method]:
    """Return the methods of the layers, with the model's base where a method has RoPE's frequencies.

    rope: the model's rope_parameters. Raises ValueError where they are more than a base and none is given.
    """
    check_options(name, options)
    methods = []
    for part in itertools.islice(itertools.cycle(layer_pattern(name)), config.num_hidden_layers):
        known = method_options(part)
        own = {option: value for option, value in options.items() if option in known}
        like_rope = "base" in known and (known["base"].default == BASE or own.get("form") == "barbero")
        if like_rope and "base" not in own:
            own["base"] = rope["rope_theta"]
            message = f"the model's frequencies (rope type {rope['rope_type']}) do not follow from a base alone"
            require(rope["rope_type"] == "default", f"{message}. Pass base={own['base']:g} to {part}.")
        heads, head_dim = config.num_attention_heads, config.head_dim
        methods.append(make_method(part, num_heads=heads, head_dim=head_dim, train_length=train_length, **own))
    return methods


def check_method(method: Method, layer: nn.Module):
    """Raise ValueError for a method that cannot run in a layer."""
    needs_input = method.needs_input or method.output_gate is not None
    require(not needs_input, f"{method.name} needs the layer's input, which transformers does not pass to attention.")
    special = getattr(layer, "attn_logit_softcapping", None) or method.window
    replaces = method.replacement is not None
    require(not (replaces and special), f"{method.name} replaces the softmax: the model's soft cap or window is lost.")
    scaled = not math.isclose(layer.scaling * method.head_dim**0.5, 1)
    nonlinear = method.vector_dim > method.head_dim
    require(not (nonlinear and scaled), f"{method.name} is not linear in q: the model's scale of scores is lost.")


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a model, layer by layer."""
    return [block.self_attn for block in model.model.layers]

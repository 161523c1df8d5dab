"""Puts our attention methods into Hugging Face's Llama models, in place of their rotation and attention.

    model = load_model("meta-llama/Llama-2-7b-hf", dtype=torch.bfloat16)
    convert(model, "scale_invariant_p_rope", train_length=4096)

Transformers offers three hooks: a rope type, an attention function, and a mask function. Our rope type leaves q and k
unrotated, and our mask function returns a position instead of a mask. The key-value cache holds unrotated keys, so
every call rotates all keys for the same sequence length. docs/huggingface.md lists the choices that are ours.
"""

import dataclasses

import torch
from torch import Tensor, nn

from errors import require
from model.attention.attend import attend
from model.attention.choose import choose_backend
from model.attention.plan import LayerPlan, plan_layer
from model.methods.base import Method, Rotation, Shape
from model.methods.make import make_layers
from model.methods.names import all_mechanisms
from model.methods.rope import BASE

RECORD = "attention_method"  # field of the model's configuration that records the conversion
# Names of our hooks in transformers. An exported model has its own names (modules.py).
ROPE_TYPE, ATTENTION = "scale_invariant::unrotated", "scale_invariant::attend"


@dataclasses.dataclass
class Shared:
    """State that all converted layers of a model share.

    target_length: length of the whole sequence in tokens, for methods that depend on it. None: the length of each call.
    """

    target_length: int | None = None
    lengths: tuple = ()
    plans: dict = dataclasses.field(default_factory=dict)  # for calls of these lengths

    def plan(self, method: Method, q: Tensor, k: Tensor) -> LayerPlan:
        """Return the plan for q (B, H, Tq, D), the last Tq tokens of k (B, H, Tk, D)."""
        # Tensors made in inference mode cannot be used in training, so the two modes have separate plans.
        lengths = (q.shape[2], k.shape[2], self.target_length, torch.is_inference_mode_enabled())
        if self.lengths != lengths:
            self.lengths = lengths
            self.plans.clear()
        key = (method.name, q.device, q.dtype)
        if key not in self.plans:
            name = "blocks" if q.shape[2] == 1 else "auto"
            backend, why = choose_backend(method, q.device, q.dtype, name)
            plan = plan_layer(
                method,
                backend,
                q.shape[2],
                k.shape[2],
                target_length=self.target_length,
                device=q.device,
                why=why,
            )
            if plan.sin is not None:
                plan = dataclasses.replace(plan, sin=-plan.sin)  # Llama models rotate in the other direction
            self.plans[key] = plan
        return self.plans[key]


def unrotated(config, device=None, **unused) -> tuple:
    """Return zero frequencies, (D/2,), and the factor 1, so that transformers' rotation changes nothing."""
    return torch.zeros(config.head_dim // 2, device=device), 1.0


def find_position(*, q_offset, attention_mask=None, allow_is_causal_skip=True, **unused) -> int:
    """Return the position of the first query, which takes the place of a mask.

    Raise ValueError for padding, and for a row with several sequences.
    """
    require(allow_is_causal_skip, "a row has several sequences. Pass one sequence a row, with position_ids 0, 1, 2 ...")
    visible = attention_mask is None or attention_mask.all()
    require(visible, "attention_mask hides tokens. Pass rows of equal lengths, or pad on the right without a mask.")
    return q_offset


def attend_with_method(
    layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: int, **unused
) -> tuple:
    """Return the attention of a layer by its method, (B, Tq, H, D), with the interface of transformers.

    query (B, H, Tq, D); key, value (B, H / groups, Tk, D), unrotated; attention_mask: the result of find_position.
    """
    require(isinstance(attention_mask, int), "attention_mask has 4 dimensions. Leave it out.")
    if layer.num_key_value_groups > 1:
        key, value = (x.repeat_interleave(layer.num_key_value_groups, dim=1) for x in (key, value))
    plan = layer.shared.plan(layer.method, query, key)
    return attend(layer.method, query, key, value, plan=plan).transpose(1, 2), None


@torch.no_grad()
def convert(model: nn.Module, method: str, /, *, train_length: int | None = None, **options) -> nn.Module:
    """Convert a Llama model to one of our attention methods, in place, and return it. Attention has no dropout.

    model: on any device. If it was converted before, parameters of its method are lost. train_length (default:
    max_position_embeddings) and options: see make_method. The default rotary base is the model's. self_attn.method of
    each layer has the method's parameters, in float32. model.config.attention_method records the conversion. Raise
    ValueError for an unfit model or method.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # 1. The model, and its rotary base.
    config = model.config
    llama = config.model_type in ("llama", "method_llama")  # the second is an exported model (modeling_method_llama.py)
    require(llama, f"a {config.model_type} model cannot be converted. Use a Llama model.")
    train_length = config.max_position_embeddings if train_length is None else train_length
    earlier = getattr(config, RECORD, None) or {}
    rope = earlier.get("rope_parameters", config.rope_parameters)
    rotations = [mechanism for mechanism in all_mechanisms(method) if issubclass(mechanism, Rotation)]
    like_rope = any(rotation.scaled_defaults(1.0, options).get("base") == BASE for rotation in rotations)
    if like_rope and "base" not in options:
        problem = f"the model has rope type {rope['rope_type']}, so its base alone does not give its frequencies"
        require(rope["rope_type"] == "default", f"{problem}. Pass base={rope['rope_theta']:g}.")
        options["base"] = rope["rope_theta"]

    # 2. The method of each layer.
    shape = Shape(config.num_attention_heads, config.head_dim, train_length)
    methods = make_layers(method, shape, config.num_hidden_layers, options)
    for layer_method in methods:
        problem = f"{method} needs the layer's input, which transformers withholds. Use another method."
        require(not layer_method.needs_input, problem)

    # 3. Our hooks, and the record in the configuration.
    AttentionInterface.register(ATTENTION, attend_with_method)
    AttentionMaskInterface.register(ATTENTION, find_position)
    ROPE_INIT_FUNCTIONS[ROPE_TYPE] = unrotated
    setattr(config, RECORD, {"name": method, "train_length": train_length, "options": options, "rope_parameters": rope})
    config.rope_parameters = rope | {"rope_type": ROPE_TYPE}
    shared = model.attention_shared = Shared()
    for layer, layer_method in zip(attention_layers(model), methods, strict=True):
        layer_method.reset_parameters()
        layer.method, layer.shared = layer_method.to(layer.q_proj.weight.device), shared
    device = model.model.rotary_emb.inv_freq.device
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.set_attn_implementation(ATTENTION)
    return model


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the attention module of each layer."""
    return [block.self_attn for block in model.model.layers]

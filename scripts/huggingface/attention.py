"""Puts our attention methods into models of Hugging Face's, in the place of their own rotation and attention.

    model = load_model("meta-llama/Llama-2-7b-hf", dtype=torch.bfloat16)
    convert(model, "scale_invariant_p_rope", train_length=4096)

It goes through what transformers offers: a rope type that leaves q and k as they are, an attention function, and the
mask function beside it, which says where queries and keys stand. So the cache holds keys that are not rotated, and all
keys are rotated for each call: what depends on the length of the sequence is the same for all of them.

Our choices, where the paper says nothing about continual pretraining:

- Rotation: by the model's own base, in the direction of these models, opposite to ours (theirs is by +angle; pairs are
  (k, k + d/2) in both). p-RoPE's default form (`form="half_truncate"`) gives the first d/4 pairs frequencies from 1 to
  1/1024, which are not those that the model was trained with, and does not rotate the last d/4; `form="barbero"` keeps
  RoPE's first half of frequencies as they are and does not rotate the rest.
- LogN begins with a mean factor of 1 over the training length: s = 1 / mean log n, 0.1366 at 4096.
- Scores are scaled as in the model, 1/sqrt(d) or Gemma-2's query_pre_attn_scalar^-1/2; Gemma-2's soft cap comes before
  a_t S + m_t; its sliding layers keep their window, the shorter of the two where the method has one as well.
- These models do not normalise q and k, so the deviation of the scores, which the paper's theory takes to be 1, is
  whatever it is: measure_scores reports it, rescale makes it 1. No kernel is told a bound of the scores.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from errors import require
from model.attention import Plan, attend, make_plan, transform
from model.methods import check_options, layer_pattern, make_method, method_options
from model.methods.base import Method, upcast
from model.methods.rope import BASE
from model.methods.window import SlidingWindow
from scripts.huggingface.load import FAMILIES, RECORD, import_transformers

UNROTATED = "unrotated"  # the rope type
NAME = "attend_with_method"  # of the attention function


class Places(NamedTuple):
    """Where the first query and the first key of a call stand in the sequence."""

    query: int
    key: int


@dataclasses.dataclass
class Shared:
    """What all converted layers of a model have in common."""

    target_length: int | None = None  # of the whole sequence, where that is known
    observe: Callable | None = None  # called with (layer, q, k, plan) before each layer attends
    lengths: tuple = ()  # that `plans` are for
    plans: dict = dataclasses.field(default_factory=dict)

    def plan(self, method: Method, places: Places, q: Tensor, k: Tensor, softcap: float | None) -> Plan:
        """Return the plan of a call, q (B, H, Tq, D) against k (B, H, Tk, D), kept until a call of other lengths."""
        lengths = (*places, q.shape[2], k.shape[2])
        end, window = places.query + q.shape[2], method.window and method.window.window
        target = end if self.target_length is None else self.target_length
        known = f"the model was told that sequences have {target} tokens (set_target_length), and this has {end}"
        require(end <= target, known)
        if lengths[0] and self.target_length is None:
            words = f"{method.name} follows the length of the sequence, which grows: tell it with set_target_length"
            require(same_lengths(method, places.query, end), words)
        if self.lengths != (end, q.shape[2]):
            self.plans.clear()
            self.lengths = (end, q.shape[2])
        key = (method.name, window, *lengths, q.device, q.dtype)
        if key not in self.plans:
            how = dict(device=q.device, dtype=q.dtype, target_length=target, softcap=softcap)
            backend = "blocks" if q.shape[2] == 1 else "auto"  # as in model/decoding.py
            offset = places.query - places.key
            plan = make_plan(method, q.shape[2], k.shape[2], q_offset=offset, backend=backend, **how)
            if plan.sin is not None:
                plan = dataclasses.replace(plan, sin=-plan.sin)  # the direction in which these models rotate
            if plan.query_table is not None and places.key:  # which depends on where a query really stands
                table = method.query_scale.table(torch.arange(places.query, end), target)
                plan = dataclasses.replace(plan, query_table=table.to(q.device))
            self.plans[key] = plan
        return self.plans[key]


def same_lengths(method: Method, length: int, other: int) -> bool:
    """Tell whether a method rotates and scales alike in sequences of both lengths."""
    return all(torch.equal(x, y) for x, y in zip(*(length_settings(method, n) for n in (length, other))))


def length_settings(method: Method, length: int) -> list[Tensor]:
    """Return what a method makes of the length of the whole sequence."""
    settings = []
    if method.rotation is not None:
        frequencies, amplitude = method.rotation.frequencies(length)
        settings += [frequencies, torch.tensor(amplitude)]
    if method.query_scale is not None:
        settings.append(method.query_scale.table(torch.zeros(1, dtype=torch.int64), length))
    return settings


def unrotated(config, device=None, seq_len=None, layer_type=None) -> tuple[Tensor, float]:
    """Return frequencies of 0, (D/2,), and the factor 1: q and k times cos 0 are what they were."""
    return torch.zeros(config.head_dim // 2, device=device), 1.0


def find_places(*, q_length, kv_length, q_offset, kv_offset, attention_mask=None, allow_is_causal_skip=True, **others):
    """Return, in the place of a mask, where queries and keys stand. ValueError for what causal attention over whole
    sequences is not: padding before tokens, packed sequences, caches of a fixed size."""
    words = "a converted model needs a cache that grows with the sequence (DynamicCache, the default)"
    require(isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length, words)
    words = "a converted model takes one sequence a row: position_ids must be 0, 1, 2 ..."
    require(allow_is_causal_skip, words)
    if attention_mask is not None and not attention_mask.all():
        mask = attention_mask.long()
        words = (
            "a converted model takes padding after the tokens alone, which none of them sees, and not in generation:"
        )
        right = q_offset == 0 and bool((mask.diff(dim=1) <= 0).all())
        require(right, f"{words} pad on the right, generate from prompts of equal length")
    return Places(q_offset, kv_offset)


def attend_with_method(
    layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Places, scaling: float,
    softcap: float | None = None, **others,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return a layer's attention by its method, (B, Tq, H, D), as transformers' attention functions do.

    query (B, H, Tq, D); key, value (B, H / groups, Tk, D), all unrotated; attention_mask: what find_places returned.
    """
    require(isinstance(attention_mask, Places), "a converted model makes its own mask: give none of four dimensions")
    groups, shared = layer.num_key_value_groups, layer.shared
    key, value = (x if groups == 1 else x.repeat_interleave(groups, dim=1) for x in (key, value))
    one_step = query.shape[2] == 1
    plan = shared.plan(layer.method, attention_mask, query, key, softcap)
    if softcap is not None or one_step:  # in plain PyTorch, where nothing else keeps scores in float32
        query, key = upcast(query), upcast(key)
    if shared.observe is not None:
        shared.observe(layer, scale_queries(layer, query, scaling), key, plan)
    output = attend(layer.method, scale_queries(layer, query, scaling), key, value, plan=plan)
    return output.transpose(1, 2), None


def scale_queries(layer: nn.Module, q: Tensor, scaling: float) -> Tensor:
    """Return q times what makes of our 1/sqrt(d) the model's scaling and the layer's factor, if it has one."""
    factor = scaling * q.shape[-1] ** 0.5
    if layer.score_factor is not None:
        return (upcast(q) * (factor * layer.score_factor).to(q.device).view(-1, 1, 1)).to(q.dtype)
    return q if math.isclose(factor, 1) else q * factor


def register():
    """Make known to transformers our attention function, what stands for its mask, and the rope type."""
    transformers = import_transformers()
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    transformers.AttentionInterface.register(NAME, attend_with_method)
    AttentionMaskInterface.register(NAME, find_places)
    ROPE_INIT_FUNCTIONS[UNROTATED] = unrotated


def convert(model: nn.Module, method: str, /, *, train_length: int | None = None, **options) -> nn.Module:
    """Make every layer of a model attend by one of our methods, in place, and return the model.

    model: of one of FAMILIES, converted before or not, on any device. train_length (default: max_position_embeddings)
    and options: see make_method; the default base of a rotation is the model's. What a method learns becomes
    self_attn.method of each layer, in float32. The method is written down in model.config.attention_method.
    ValueError for methods that need more than q, k and v, or more than these models let them do.
    """
    config = model.config
    supported = " and ".join(FAMILIES)
    require(config.model_type in FAMILIES, f"models of the families {supported} take methods, not {config.model_type}")
    require(not config.attention_dropout, "our attention has no dropout: load the model with attention_dropout=0.0")
    causal = not getattr(config, "use_bidirectional_attention", False)
    require(causal, "our attention is causal, and this model's is not")
    train_length = config.max_position_embeddings if train_length is None else train_length
    earlier = getattr(config, RECORD, None) or {}
    rope = earlier.get("rope_parameters", config.rope_parameters)
    methods = make_methods(config, rope, method, train_length, options)
    for layer, own in zip((block.self_attn for block in model.model.layers), methods, strict=True):
        add_window(own, getattr(layer, "sliding_window", None))
        check_method(own, layer)
    spread = len({parameter.is_meta for parameter in model.parameters()}) > 1  # by accelerate, which offloads some
    words = f"a part of the model is offloaded, where what {method} learns cannot be: load it without device_map"
    require(not (spread and any(True for own in methods for _ in own.parameters())), words)
    register()
    record = dict(name=method, train_length=train_length, options=options, rope_parameters=rope)
    setattr(config, RECORD, record)
    config.rope_parameters = rope | {"rope_type": UNROTATED}
    shared = model.attention_shared = Shared()
    for block, own in zip(model.model.layers, methods):
        layer = block.self_attn
        layer.method, layer.shared = own.to(layer.q_proj.weight.device), shared
        layer.register_buffer("score_factor", None)  # (H,), by rescale
    device = model.model.rotary_emb.inv_freq.device
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.set_attn_implementation(NAME)
    return model


def make_methods(config, rope: dict, name: str, train_length: int, options: dict) -> list[Method]:
    """Return the layers' methods, rotating by the model's base where the method rotates as RoPE does.

    rope: the model's own rope_parameters. ValueError where that has more to it than a base.
    """
    check_options(name, options)
    shape = dict(num_heads=config.num_attention_heads, head_dim=config.head_dim, train_length=train_length)
    methods = []
    for part in itertools.islice(itertools.cycle(layer_pattern(name)), config.num_hidden_layers):
        known = method_options(part)
        own = {option: value for option, value in options.items() if option in known}
        as_rope = "base" in known and (known["base"].default == BASE or own.get("form") == "barbero")
        if as_rope and "base" not in own:
            base, kind = rope["rope_theta"], rope["rope_type"]
            words = f"this model's frequencies are not those of a base alone (rope type {kind}), {part}'s are"
            require(kind == "default", f"{words}: give base={base:g} to go on with these")
            own["base"] = base
        methods.append(make_method(part, **shape, **own))
    return methods


def add_window(method: Method, window: int | None):
    """Hide from a method's queries the keys at this distance or further away, as the layer does."""
    if window is not None:
        shortest = window if method.window is None else min(window, method.window.window)
        method.window = SlidingWindow(method.num_heads, method.head_dim, method.train_length, shortest)


def check_method(method: Method, layer: nn.Module):
    """Raise ValueError for a method that cannot run in a layer."""
    name, replaces = method.name, method.replacement is not None
    beyond = method.needs_input or method.output_gate is not None
    require(
        not beyond, f"{name} looks at the input of the layer, which transformers' attention functions are not given"
    )
    special = getattr(layer, "attn_logit_softcapping", None) or method.window
    require(
        not (replaces and special), f"{name} replaces the softmax, and this model caps its scores or hides far keys"
    )
    scaled = not math.isclose(layer.scaling * method.head_dim**0.5, 1)
    nonlinear = method.vector_dim > method.head_dim
    words = f"{name} is not linear in q, and this model scales its scores by something else than 1/sqrt(d)"
    require(not (nonlinear and scaled), words)


def set_target_length(model: nn.Module, length: int | None):
    """Tell a converted model how long the whole sequence will be, in tokens; None: as long as it is in each call.

    Methods that follow the length (NTK, YaRN, LogN's constant form) need it to generate with a cache beyond the
    training length: the prompt and all new tokens then are rotated and scaled for the same length.
    """
    model.attention_shared.target_length = length
    model.attention_shared.lengths = ()


@torch.no_grad()
def measure_scores(model: nn.Module, tokens: Tensor, num_queries: int = 64, adjust: str | None = None) -> Tensor:
    """Return mean and standard deviation of the scores S, before a soft cap, of each layer and head: (layers, H, 2).

    tokens (B, T) int64; the last num_queries queries count, against all earlier keys but the first, an outlier in most
    models; queries without LogN's factor. adjust: see rescale.
    """
    found = []

    def observe(layer, q, k, plan):
        q, k = transform(layer.method, q, k, plan, scale_queries=False)
        T, queries = k.shape[2], min(num_queries, q.shape[2])
        positions = torch.arange(T, device=q.device)
        counted = (positions[-queries:, None] > positions) & (positions > 0)  # (queries, T)
        scores = (upcast(q[:, :, -queries:]) @ upcast(k).mT)[:, :, counted] / q.shape[-1] ** 0.5  # (B, H, pairs)
        by_head = scores.transpose(0, 1).flatten(1)  # (H, B pairs)
        found.append(torch.stack((by_head.mean(dim=1), by_head.std(dim=1)), dim=1).cpu())
        if adjust is not None:
            deviation = by_head.std(dim=1) if adjust == "head" else by_head.std().expand(len(by_head))
            before = 1 if layer.score_factor is None else layer.score_factor.to(deviation.device)
            layer.score_factor = before / deviation

    require(tokens.shape[1] >= 4, f"scores are measured on at least 4 tokens, got {tokens.shape[1]}")
    shared = model.attention_shared
    shared.observe = observe
    try:
        model.model(tokens, use_cache=False)
    finally:
        shared.observe = None
    return torch.stack(found)


def rescale(model: nn.Module, tokens: Tensor, by: str = "layer") -> Tensor:
    """Give the scores of each layer, or each head, a factor that makes their deviation on these tokens 1.

    Layer after layer in one pass, each on what the rescaled layers before it give. The factors, self_attn.score_factor
    (H,), are saved with the weights. It changes what the model computes, as the conversion does: train it afterwards.
    by: "layer" or "head". Return what measure_scores found on the way, before each layer's own factor.
    """
    require(by in ("layer", "head"), f"factors are by layer or by head, not by {by!r}")
    nonlinear = [
        layer.method.name for layer in attention_layers(model) if layer.method.vector_dim > layer.method.head_dim
    ]
    require(
        not nonlinear,
        f"a factor of q does not scale the scores of {nonlinear and nonlinear[0]}, which is not linear in q",
    )
    return measure_scores(model, tokens, adjust=by)


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a model, layer by layer."""
    return [block.self_attn for block in model.model.layers]

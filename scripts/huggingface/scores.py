"""The queries and keys of a Hugging Face model's layers, as it runs, before rotation and after it."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.attention import transform
from scripts.huggingface.load import RECORD

Receive = Callable[[int, float, bool, Tensor, Tensor], object]


@torch.inference_mode()
def record_layers(model: nn.Module, tokens: Tensor, receive: Receive):
    """Run a model on tokens (B, T), and hand over what each layer's scores are made of while it runs.

    receive(layer, scale, rotated, q, k) is called twice a layer, before rotation and after it: the scores are
    scale q.k, in Gemma-2 those before the soft cap. q (B, H, T, D), k (B, H_kv, T, D): H / H_kv queries in turn share a
    head of keys. One layer's q and k are in memory at a time, wherever the weights are.

    After rotation, q and k are what transformers gives to its attention function, in whose place ours is meanwhile; it
    goes on with that one. Before rotation, they are what the projections q_proj and k_proj give. In a converted model
    (attention.py) the method rotates, if it does at all, and q has the factor that makes the scores q.k / sqrt(d).
    """
    if getattr(model.config, RECORD, None):
        return record_converted(model, tokens, receive)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    implementation, projected = model.config._attn_implementation, {}
    attentions = [module for module in model.modules() if hasattr(module, "q_proj")]
    stock = ALL_ATTENTION_FUNCTIONS.get_interface(
        implementation, sys.modules[type(attentions[0]).__module__].eager_attention_forward
    )

    def keep(projection, _, output):
        projected[projection] = output

    def attention(module, q, k, *rest, scaling, **options):
        made = (projected.pop(projection) for projection in (module.q_proj, module.k_proj))  # (B, T, heads D)
        receive(module.layer_idx, scaling, False, *(x.unflatten(-1, (-1, q.shape[-1])).transpose(1, 2) for x in made))
        receive(module.layer_idx, scaling, True, q, k)
        return stock(module, q, k, *rest, scaling=scaling, **options)

    hooks = [p.register_forward_hook(keep) for module in attentions for p in (module.q_proj, module.k_proj)]
    ALL_ATTENTION_FUNCTIONS[implementation] = attention  # in this instance alone: what is registered stays
    try:
        model.base_model(tokens, use_cache=False)  # without the head: no logits over the vocabulary
    finally:
        del ALL_ATTENTION_FUNCTIONS[implementation]
        for hook in hooks:
            hook.remove()


def record_converted(model: nn.Module, tokens: Tensor, receive: Receive):
    """Do what record_layers does with a model into which attention.convert has put a method."""

    def observe(layer, q, k, plan):
        forms = {False: (q, k)}
        if layer.method.rotation is not None:
            forms[True] = transform(layer.method, q, k, plan, scale_queries=False)
        for rotated, (q, k) in forms.items():
            receive(layer.layer_idx, q.shape[-1] ** -0.5, rotated, q, k)

    model.attention_shared.observe = observe
    try:
        model.base_model(tokens, use_cache=False)
    finally:
        model.attention_shared.observe = None

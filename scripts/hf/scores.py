"""Measures the attention scores of Hugging Face models while they run, and rescales them."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from errors import require
from model.attention import transform
from model.methods.base import upcast
from scripts.hf.attention import RECORD, attention_layers

Receive = Callable[[int, float, bool, Tensor, Tensor], object]
NUM_QUERIES = 64  # the last queries, whose scores are measured


@torch.no_grad()
def record_layers(model: nn.Module, tokens: Tensor, receive: Receive):
    """Run a model on tokens (B, T), and pass the queries and keys of each layer to a function while it runs.

    receive(layer, scale, rotated, q, k) is called before rotation and, if the layer rotates, after it. The scores are
    scale q.k, before a soft cap; LogN's factor is left out. q (B, H, T, D), k (B, H_kv, T, D): H / H_kv consecutive
    queries share a head of keys. In a converted model, q before rotation is the very tensor that the layer uses.
    """
    if getattr(model.config, RECORD, None):

        def observe(layer, q, k, plan):
            receive(layer.layer_idx, q.shape[-1] ** -0.5, False, q, k)
            if layer.method.rotation is not None:
                q, k = transform(layer.method, q, k, plan, scale_queries=False)
                receive(layer.layer_idx, q.shape[-1] ** -0.5, True, q, k)

        model.attention_shared.observe = observe
        try:
            model.base_model(tokens, use_cache=False)  # without the head, so no logits over the vocabulary
        finally:
            model.attention_shared.observe = None
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layers, projected, implementation = attention_layers(model), {}, model.config._attn_implementation
    eager = sys.modules[type(layers[0]).__module__].eager_attention_forward
    original = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)

    def keep(projection, _, output):
        projected[projection] = output

    def attention(layer, q, k, *rest, scaling, **options):
        flat = (projected.pop(projection) for projection in (layer.q_proj, layer.k_proj))  # (B, T, heads D)
        receive(layer.layer_idx, scaling, False, *(x.unflatten(-1, (-1, q.shape[-1])).transpose(1, 2) for x in flat))
        receive(layer.layer_idx, scaling, True, q, k)
        return original(layer, q, k, *rest, scaling=scaling, **options)

    hooks = [projection.register_forward_hook(keep) for layer in layers for projection in (layer.q_proj, layer.k_proj)]
    ALL_ATTENTION_FUNCTIONS[implementation] = attention  # hides the registered function, which stays registered
    try:
        model.base_model(tokens, use_cache=False)
    finally:
        del ALL_ATTENTION_FUNCTIONS[implementation]
        for hook in hooks:
            hook.remove()


def measure_scores(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return mean and standard deviation of the scores of each layer and head, (layers, H, 2).

    tokens (B, T) int64. The scores are those after rotation, of the last queries and all earlier keys but the first,
    which is an outlier in most models.
    """
    found = {}

    def receive(layer, scale, rotated, q, k):  # the last call of a layer counts
        scores = last_scores(q, k, scale)
        found[layer] = torch.stack((scores.mean(dim=1), scores.std(dim=1)), dim=1).cpu()

    record_layers(model, tokens, receive)
    return torch.stack([found[layer] for layer in sorted(found)])


def last_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return the scores that measure_scores counts, (H, B pairs)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    positions = torch.arange(k.shape[2], device=q.device)
    counted = (positions[-NUM_QUERIES:, None] > positions) & (positions > 0)  # (queries, T)
    scores = (upcast(q[:, :, -NUM_QUERIES:]) @ upcast(k).mT)[:, :, counted] * scale  # (B, H, pairs)
    return scores.transpose(0, 1).flatten(1)


def rescale(model: nn.Module, tokens: Tensor, by: str):
    """Scale q_proj of each layer, or each of its heads, so that the scores on these tokens have the deviation 1.

    One pass rescales layer after layer, each on the output of the rescaled layers before it. model: converted; by:
    "layer" or "head". Raises ValueError for a method that is not linear in q.
    """
    layers, attended = attention_layers(model), {}
    nonlinear = {layer.method.name for layer in layers if layer.method.vector_dim > layer.method.head_dim}
    require(not nonlinear, f"{', '.join(nonlinear)} is not linear in q: its scores cannot be rescaled.")

    def receive(number, scale, rotated, q, k):
        layer = layers[number]
        if not rotated:
            attended[number] = q
        if rotated == (layer.method.rotation is not None):
            scores = last_scores(q, k, scale)
            deviation = scores.std(dim=1) if by == "head" else scores.std().expand(len(scores))  # (H,)
            attended.pop(number).div_(deviation.view(-1, 1, 1))  # in this pass
            rows = deviation.repeat_interleave(layer.head_dim)  # (H D,)
            for parameter in layer.q_proj.parameters():  # weight (H D, C) and, in some models, bias (H D,)
                parameter.div_(rows.view(-1, *[1] * (parameter.dim() - 1)))

    record_layers(model, tokens, receive)

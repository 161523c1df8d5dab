"""Measures the attention scores of Hugging Face models."""

import sys

import torch
from torch import Tensor, nn

from model.attention.attend import rotate, rotate_and_scale
from model.scores import pair_scores, score_pairs
from scripts.hf.convert import attention_layers


@torch.no_grad()
def layer_scores(model: nn.Module, tokens: Tensor, max_pairs: int, calibrate: bool = False) -> list[tuple]:
    """Return entries (layer, rotated, scores) of the model on tokens (B, T). scores: (H, pairs) float64 on the CPU.

    The scores are scale q.k of the pairs of score_pairs, without a soft cap or LogN's factor. Each layer has an entry
    without rotation, and a second entry with rotation if the layer rotates. calibrate: in a converted model with
    learn_moments, set mean and deviation of each head before its layer runs (model/scores.py).
    """
    pairs, found = score_pairs(*tokens.shape, max_pairs), []

    def observe(layer, _, inputs):
        projections = [projection(inputs["hidden_states"]) for projection in (layer.q_proj, layer.k_proj)]
        q, k = (x.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for x in projections)  # (B, H, T, D)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # a method may treat each head differently
        found.append((layer.layer_idx, False, pair_scores(q, k, pairs, layer.scaling)))

        method = getattr(layer, "method", None)
        if calibrate:
            scaled_q, scaled_k = rotate_and_scale(method, q, k, None, layer.shared.plan(method, q, k))
            method.calibrate(pair_scores(scaled_q, scaled_k, pairs, scaled_q.shape[-1] ** -0.5))

        # Rotate with the code of the model, or with our method, which may widen q and k.
        if method is None:
            apply_rotary_pos_emb = sys.modules[type(layer).__module__].apply_rotary_pos_emb
            q, k = apply_rotary_pos_emb(q, k, *inputs["position_embeddings"])
        elif method.rotation is not None:
            rotated = rotate(method, q, k, layer.shared.plan(method, q, k))
            q, k = (x.to(q.dtype) for x in rotated)
        if method is None or method.rotation is not None:
            scale = layer.scaling * (layer.head_dim / q.shape[-1]) ** 0.5
            found.append((layer.layer_idx, True, pair_scores(q, k, pairs, scale)))

    hooks = [layer.register_forward_pre_hook(observe, with_kwargs=True) for layer in attention_layers(model)]
    try:
        model.base_model(tokens, use_cache=False)  # without the head, so no logits over the vocabulary
    finally:
        for hook in hooks:
            hook.remove()
    return found

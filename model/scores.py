"""Measures the scores S = q.k / sqrt(d) of a model by layer and head, and its logits. The theory assumes S ~ N(0, 1).

`calibrate` passes each head's scores to its mechanisms, such as scale-invariant attention with learned moments.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from errors import require
from model.attention.attend import rotate, rotate_and_scale
from model.attention.blocks import Blocks
from model.attention.plan import Plan
from model.gpt import GPT, norm
from model.tensors import upcast

MAX_PAIRS = 2**16  # random pairs of a query and a key, for the moments of a head


def iterate_layers(model: GPT, tokens: Tensor, plan: Plan) -> Iterator[tuple]:
    """Yield each layer's method, plan, input x (B, T, C), and q, k (B, H, T, D) before rotation, at least float32."""
    plan, x = plan.for_tokens(tokens), model.embed(tokens)
    for number, block in enumerate(model.blocks):
        layer_plan = plan.for_layer(number)
        layer_input = norm(x)
        q, k, _ = block.attention.queries_keys_values(layer_input)
        yield block.attention.method, layer_plan, layer_input, upcast(q), upcast(k)
        x = block(x, layer_plan)


def score_pairs(batch: int, length: int, max_pairs: int) -> tuple:
    """Return indices (b, i, j) of sequences, queries and keys: all pairs 1 <= j < i, or max_pairs random ones.

    The paper leaves out the beginning-of-sequence token, an outlier and attention sink, so key 0 is left out here.
    """
    require(length >= 3, f"The text has {length} tokens. Use at least 3.")
    i, j = torch.tril_indices(length - 1, length - 1, offset=-1) + 1
    chosen = torch.arange(batch * len(i))
    if len(chosen) > max_pairs:
        chosen = torch.randint(len(chosen), (max_pairs,), generator=torch.Generator().manual_seed(0))
    pair = chosen % len(i)
    return chosen // len(i), i[pair], j[pair]


@torch.inference_mode()
def layer_scores(model: GPT, tokens: Tensor, max_pairs: int) -> Iterator[tuple]:
    """Yield (layer, rotated, S) with scores S = q.k / sqrt(d), float64 (H, pairs) on the CPU.

    tokens (B, T). All layers and heads use the same pairs (score_pairs). S is taken before LogN or another scaling.
    Each layer comes first without rotation. If the method rotates, it comes a second time, rotated.
    """
    plan = model.plan(tokens.shape[1], backend="blocks")
    pairs = score_pairs(*tokens.shape, max_pairs)
    for number, (method, layer_plan, _, q, k) in enumerate(iterate_layers(model, tokens, plan)):
        yield number, False, pair_scores(q, k, pairs, q.shape[-1] ** -0.5)
        if method.rotation is not None:
            q, k = rotate(method, q, k, layer_plan)
            yield number, True, pair_scores(q, k, pairs, q.shape[-1] ** -0.5)


def pair_scores(q: Tensor, k: Tensor, pairs: Iterable[Tensor], scale: float) -> Tensor:
    """Return scale * q.k of the pairs of score_pairs, float64 (H, pairs) on the CPU.

    q, k (B, H, T, D).
    """
    b, i, j = (index.to(q.device) for index in pairs)
    q, k = upcast(q), upcast(k)
    heads = []
    for head in range(q.shape[1]):  # one by one, to bound the memory
        products = q[b, head, i] * k[b, head, j]
        heads.append(products.sum(dim=-1))
    return (torch.stack(heads) * scale).double().cpu()


@torch.inference_mode()
def attention_by_layer(model: GPT, tokens: Tensor, plan: Plan) -> dict:
    """Return max_logit and attention_entropy on tokens (B, T), each by layer, from "0".

    max_logit: the largest logit a_t S + m_t + b_j - b_i over sequences, heads, queries and visible keys. b: the key
    bias, if there is one. Softmax ignores b_i. Without b_i, the logits of forgetting attention would grow with the
    position. attention_entropy: of the attention weights of a query in nats, the mean over sequences, heads and
    queries. A sink is no key. All backends' runs compute both in float32 by blocks. Layers whose method has a
    Replacement have no logits and are left out.
    """
    largest, entropies = {}, {}
    for number, (method, layer_plan, x, q, k) in enumerate(iterate_layers(model, tokens, plan)):
        if method.replacement is None:
            q, k = rotate_and_scale(method, q, k, x, layer_plan)
            key_bias = None if method.key_bias is None else method.key_bias.bias(method.token_features(x))  # (B, H, T)
            rows = Blocks().row_statistics(q, k, layer_plan, method.score_change, key_bias)  # (B, H, T, 2)
            maxima = rows[..., 0] if key_bias is None else rows[..., 0] - key_bias
            largest[str(number)] = maxima.max().item()
            entropies[str(number)] = rows[..., 1].mean().item()
    return {"max_logit": largest, "attention_entropy": entropies}


# ---- calibration -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def calibrate(model: GPT, tokens: Tensor):
    """Set the calibrated parameters of all methods, such as learned moments, to the values on tokens (B, T).

    Each layer is measured after the layers before it have been calibrated, without a document mask.
    """
    pairs = score_pairs(*tokens.shape, MAX_PAIRS)
    for method, plan, x, q, k in iterate_layers(model, tokens, model.plan(tokens.shape[1], backend="blocks")):
        q, k = rotate_and_scale(method, q, k, x, plan)
        method.calibrate(pair_scores(q, k, pairs, q.shape[-1] ** -0.5))


def calibrated_parameters(model: nn.Module) -> set[str]:
    """Return the names of a model's parameters that calibration sets."""
    names = set()
    for name, module in model.named_modules():
        for parameter in getattr(module, "calibrated", ()):
            names.add(f"{name}.{parameter}")
    return names

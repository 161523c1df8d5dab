"""Runs an attention method: chooses the backend, prepares what depends on the length alone, and calls it.

attend is causal attention by one method: q and k are rotated and q is scaled by what make_plan has prepared; then a
backend (model/backends/) computes the softmax over a_t S + m_t, biases of keys, windows and sinks included. A
Replacement computes the output itself, with the backend for the softmax attention inside it. model/reference.py is the
formula that all of this is held to. An output gate is left to the layer (model/gpt.py).
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.func import functional_call

from errors import require
from model.backends import AUTOMATIC, BACKENDS
from model.backends.base import Call, bound_products, extra_logits
from model.context import check_context, local_shard, to_heads, to_tokens
from model.kernels.distance import MAX_LENGTH, learned_parameters
from model.methods.base import Method, upcast


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about one call that does not depend on weights or activations; build it once a length and reuse it.

    With a context group, cos, sin and query_table are those of this rank's tokens.
    """

    backend: str
    call: Call
    cos: Tensor | None = None  # (Tk, D/2)
    sin: Tensor | None = None  # (Tk, D/2)
    query_table: Tensor | None = None  # (Tq,)
    prepared: object = None  # by the backend; where a_t and m_t are learned, without them
    why: str = ""  # this backend was chosen


def make_plan(
    method: Method, query_length: int, key_length: int, *, q_offset: int = 0, target_length: int | None = None,
    device="cpu", dtype: torch.dtype = torch.float32, backend: str = "auto", context: ProcessGroup | None = None,
    normalised: bool = False, softcap: float | None = None,
) -> Plan:  # fmt: skip
    """Return the plan for queries at positions q_offset.. against keys at positions 0..key_length-1, of this dtype.

    target_length (default: key_length) is the length of the whole sequence, which fixes the scaling of methods that
    depend on it (NTK, YaRN, LogN's constant form). With a context group, the plan is for this rank's part of as many
    queries as keys. normalised: the caller answers for it that q and k have the norm sqrt(D), by QK-norm; our Triton
    kernel then needs no running maximum. softcap: scores S are softcap tanh(S / softcap) before a_t and m_t, as in
    Gemma-2, which the backend blocks alone can do. ValueError for lengths, backends or groups that do not go together.
    """
    target_length = key_length if target_length is None else target_length
    queries = f"{query_length} queries from position {q_offset}"
    require(query_length >= 1 and q_offset >= 0, f"{queries}: there must be at least 1, from position 0 or later")
    require(q_offset + query_length <= key_length, f"{queries} see further than the {key_length} keys")
    require(key_length <= target_length, f"{key_length} keys are more than the target length {target_length}")
    require(key_length <= MAX_LENGTH, f"attention covers up to {MAX_LENGTH} positions, got {key_length}")
    device = torch.device(device)
    if softcap is not None:
        require(backend in ("auto", "blocks"), f"attention_backend {backend} does not cap scores: use auto or blocks")
        require(method.replacement is None, f"{method.name} has no scores to cap")
        backend = "blocks"
    backend, why = choose_backend(method, device, backend, dtype)
    if context is not None:
        assert query_length == key_length
        check_context(method.num_heads, [key_length], context.size())
    cos = sin = query_table = prepared = None
    if method.rotation is not None:
        cos, sin = method.rotation.tables(key_length, target_length, device)
    if method.query_scale is not None:
        positions = torch.arange(q_offset, q_offset + query_length)
        query_table = method.query_scale.table(positions, target_length).to(device)
    bound = math.inf
    if normalised:
        bound = bound_products(method.head_dim, dtype, largest_gain(method, target_length, query_table))
    window = None if method.window is None else method.window.window
    shape = method.num_heads, method.vector_dim, query_length, key_length, q_offset
    call = Call(*shape, device, dtype, context, bound, window, softcap)
    cos, sin, query_table = (local_shard(table, 0, context) for table in (cos, sin, query_table))
    if method.replacement is None:
        known = None if learned_parameters(method.score_change) else method.score_change
        prepared = BACKENDS[backend].prepare(known, call)
    return Plan(backend, call, cos, sin, query_table, prepared, why)


def largest_gain(method: Method, target_length: int, query_table: Tensor | None) -> float:
    """Return the largest factor by which `transform` raises |q| |k|; infinite where what is learned scales q."""
    gain = 1.0
    if method.rotation is not None:
        gain = method.rotation.gain(target_length)
    if method.query_scale is not None:
        learned = any(True for _ in method.query_scale.parameters())
        gain *= math.inf if learned else method.query_scale.multiplier(query_table, None).abs().max().item()
    return gain


def choose_backend(method: Method, device: torch.device, backend: str = "auto", dtype=torch.float32) -> tuple[str, str]:
    """Return the backend that will run, and a reason for the log. ValueError for one that cannot run."""
    if backend != "auto":
        require(backend in BACKENDS, f"unknown attention backend {backend!r}; valid: auto, {', '.join(BACKENDS)}")
        reason = BACKENDS[backend].find_problem(method, device, dtype)
        require(reason is None, f"attention_backend {backend} cannot run: {reason}: use auto")
        return backend, "as asked for"
    reasons = []
    for name in AUTOMATIC.get(device.type, ()):
        reason = BACKENDS[name].find_problem(method, device, dtype)
        if reason is None and hasattr(BACKENDS[name], "check_on_this_machine"):
            reason = BACKENDS[name].check_on_this_machine(method, device, dtype)
        if reason is None:
            return name, "; ".join(reasons) or f"the first choice on {device.type}"
        reasons.append(f"{name} cannot run: {reason}")
    return "blocks", "; ".join(reasons) or f"nothing faster runs on {device.type}"


def attend(
    method: Method, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None = None,
    q_offset: int = 0, target_length: int | None = None, backend: str = "auto", plan: Plan | None = None,
) -> Tensor:  # fmt: skip
    """Return causal attention by `method`: (B, H, Tq, D), in v's dtype.

    q (B, H, Tq, D) and k, v (B, H, Tk, D) come after QK-norm and before any rotation; query i stands at position
    q_offset + i, key j at position j. x (B, T, C): the input of the layer, of methods that look at it (all tokens are
    queries then). target_length and backend: see make_plan. A plan made before replaces the three keyword arguments
    ahead of it. ValueError for shapes that do not fit the method or each other.
    """
    method.check_shapes(q, k, v)
    require(x is not None or not method.needs_input, f"{method.name} needs x, the input of the layer")
    if plan is None:
        plan = make_plan(
            method, q.shape[2], k.shape[2],
            q_offset=q_offset, target_length=target_length, device=q.device, dtype=q.dtype, backend=backend,
        )  # fmt: skip
    wide_v = F.pad(v, (0, method.vector_dim - method.head_dim)) if method.vector_dim > method.head_dim else v
    vectors = *transform(method, q, k, plan, x), wide_v
    of_tokens = method.of_tokens(x)
    if method.replacement is not None:
        vectors += q, k
    context = plan.call.context
    if context is None:
        return attend_rotated(method, plan, *vectors, of_tokens=of_tokens)
    if of_tokens is not None:
        (of_tokens,) = to_heads([of_tokens.reshape(*of_tokens.shape[:3], -1)], context)
        of_tokens = of_tokens.squeeze(-1)  # a number a token, of a KeyBias
    return to_tokens(attend_rotated(method, plan, *to_heads(vectors, context), of_tokens=of_tokens), context)


def transform(
    method: Method, q: Tensor, k: Tensor, plan: Plan, x: Tensor | None = None, *, scale_queries: bool = True
) -> tuple[Tensor, Tensor]:
    """Return q and k rotated, and q scaled, in float32 whatever their dtype, to which they are rounded at the end.

    x (B, T, C): the layer's input, where the scale looks at it.
    """
    new_q, new_k = q, k
    if method.rotation is not None:
        mine = slice(plan.call.q_offset, plan.call.q_offset + q.shape[2])
        new_q = method.rotation.rotate(upcast(q), plan.cos[mine], plan.sin[mine])
        new_k = method.rotation.rotate_keys(upcast(k), plan.cos, plan.sin)
    if method.query_scale is not None and scale_queries:
        new_q, factors = upcast(new_q), method.query_scale.multiplier(plan.query_table, x)
        new_q = new_q * factors.to(new_q.dtype).unsqueeze(-1)  # ([B,] 1 or H, Tq, 1)
    return new_q.to(q.dtype), new_k.to(k.dtype)


def attend_rotated(
    method: Method, plan: Plan, rotated_q: Tensor, rotated_k: Tensor, v: Tensor, *unrotated: Tensor,
    of_tokens: Tensor | None = None,
):  # fmt: skip
    """Return attend's output after `transform`, of this rank's heads, v being as wide as rotated q and k. unrotated: q
    and k, for a Replacement; of_tokens: see Method."""
    backend, call = BACKENDS[plan.backend], plan.call
    if method.replacement is None:
        prepared = plan.prepared
        if learned_parameters(method.score_change):
            prepared = backend.prepare(method.score_change, call, prepared)
        more = extra_logits(method, of_tokens, call.context)
        output = backend.run(rotated_q, rotated_k, v, q_offset=call.q_offset, prepared=prepared, **more)
        return output[..., : method.head_dim] if method.vector_dim > method.head_dim else output
    arguments = *unrotated, v, rotated_q, rotated_k, call.q_offset, backend.run
    if of_tokens is not None:
        arguments += (of_tokens,)
    if call.context is None:
        return method.replacement.attend(*arguments)
    mine = {name: local_shard(p, 0, call.context) for name, p in method.replacement.named_parameters()}
    return functional_call(method.replacement, mine, arguments)

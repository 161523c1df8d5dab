"""Causal attention by any method: `make_plan` once a length, then `attend` in every layer and pass.

attend rotates q and k, scales q, and lets a backend compute the softmax over a_t S + m_t with key biases, window and
sink. A Replacement computes the output itself. reference.py is the formula that every backend is held to.

    backend      computes                                used by `auto` for
    sdpa         PyTorch's fused causal attention        CUDA: methods that do not change the score (LogN is in q)
    flex         FlexAttention, compiled                 CUDA: all other methods; no gradients on a CPU
    flex_flash   FlexAttention by FlashAttention-4       nothing; Hopper and Blackwell
    cpu          our C++ kernel                          CPU, float32: every softmax but with skip_first
    blocks       plain PyTorch, blocks of queries        whatever no other backend runs

A backend is three functions, and a line in BACKENDS:

    unsupported(method, device, dtype)        why it cannot run this method there, or None
    prepare(score_change, plan, earlier)      a_t and m_t in the backend's own form, for the lengths of the plan
    run(q, k, v, *, q_offset=0, prepared, key_bias, sink)
                                              the output (B, H, Tq, D) of q (B, H, Tq, D) and k, v (B, H, Tk, D)

`prepare` runs once a length. Learned a_t and m_t need more calls: the first one, once a length, has score_change=None.
Each layer and pass then calls it with the score change, and `earlier` is the result of the first call, whose constant
parts stay. The result is differentiable in the learned parameters. `run` without `prepared` is plain causal attention.
key_bias (B, H, Tk) is added to the logits; sink (H,) is one more logit a row, without a value. A backend whose
`unsupported` refuses these need not take them.
"""

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError, require
from model.attention import blocks, check, cpu, flex, sdpa
from model.attention.base import MAX_LENGTH, Plan, extra_logits, learned_parameters
from model.methods.base import AttentionWeights, Method
from model.tensors import upcast

BACKENDS = {"sdpa": sdpa, "flex": flex, "flex_flash": flex.FLASH, "cpu": cpu, "blocks": blocks}
AUTOMATIC = {"cuda": ("sdpa", "flex"), "cpu": ("cpu",)}  # by device, the preferred first; blocks after them


def make_plan(
    method: Method, query_length: int, key_length: int, *, q_offset: int = 0, target_length: int | None = None,
    device="cpu", dtype: torch.dtype = torch.float32, backend: str = "auto",
) -> Plan:  # fmt: skip
    """Return the plan for queries at positions q_offset.. against keys at positions 0..key_length-1, of this dtype.

    target_length (default: key_length): the length of the whole sequence. NTK, YaRN and LogN's constant form scale
    with it. ValueError for lengths that do not fit each other, and for a backend that cannot run.
    """
    target_length = key_length if target_length is None else target_length
    queries = f"{query_length} queries from position {q_offset}"
    require(query_length >= 1 and q_offset >= 0, f"{queries}: there must be at least 1, from position 0 or later")
    require(q_offset + query_length <= key_length, f"{queries} see further than the {key_length} keys")
    require(key_length <= target_length, f"{key_length} keys are more than the target length {target_length}")
    require(key_length <= MAX_LENGTH, f"attention covers up to {MAX_LENGTH} positions, got {key_length}")
    device = torch.device(device)
    backend, why = choose_backend(method, device, backend, dtype)
    cos = sin = query_table = None
    if method.rotation is not None:
        cos, sin = method.rotation.tables(key_length, target_length, device)
    if method.query_scale is not None:
        positions = torch.arange(q_offset, q_offset + query_length)
        query_table = method.query_scale.table(positions, target_length).to(device)
    plan = Plan(
        backend, method.num_heads, method.vector_dim, query_length, key_length, q_offset, device, dtype,
        window=None if method.window is None else method.window.window,
        cos=cos, sin=sin, query_table=query_table, why=why,
    )  # fmt: skip
    if method.replacement is not None:
        return plan
    constant = None if learned_parameters(method.score_change) else method.score_change
    return dataclasses.replace(plan, prepared=BACKENDS[backend].prepare(constant, plan))


def choose_backend(method: Method, device: torch.device, backend: str = "auto", dtype=torch.float32) -> tuple[str, str]:
    """Return the backend that will run, and a reason for the log. On CUDA it has passed its check.

    Raise UserError for a named backend that cannot run or fails its check, and if no backend passes.
    """
    if backend == "auto" and isinstance(method.replacement, AttentionWeights):
        return "blocks", "plain PyTorch"
    if backend != "auto":
        require(backend in BACKENDS, f"unknown attention backend {backend!r}; valid: auto, {', '.join(BACKENDS)}")
        problem, result = check_once(backend, method, device, dtype)
        if problem:
            # A wrong gradient spoils weeks of training without a sign, so it ends the run although the user named the
            # backend. A kernel under development can raise its limits by ERROR_FACTOR.
            other = choose_backend(method, device, dtype=dtype)[0]
            raise UserError(f"attention_backend {backend} cannot run: {problem}. Use {other}.")
        return backend, result or "as asked for"
    reasons = []
    for name in (*AUTOMATIC.get(device.type, ()), "blocks"):
        problem, result = check_once(name, method, device, dtype)
        if problem is None:
            return name, "; ".join(filter(None, (result, *reasons))) or f"the first choice on {device.type}"
        reasons.append(f"{name} cannot run: {problem}")
    raise UserError(f"no attention backend is right for {method.name} on {device}: {'; '.join(reasons)}")


def check_once(backend: str, method: Method, device: torch.device, dtype: torch.dtype) -> check.Checked:
    """Return the reason why a backend cannot run or fails its check, or None; and the check's result for the log."""
    if reason := BACKENDS[backend].unsupported(method, device, dtype):
        return check.Checked(reason)
    # A check takes seconds on a CPU. The tests cover the backends there, and the doctor makes the check.
    if device.type != "cuda" or not torch.cuda.is_available() or torch.compiler.is_compiling():
        return check.Checked(None)
    return cached_check(backend, method, device, dtype)


@functools.lru_cache(maxsize=16)  # not again for each length, or each prompt
def cached_check(backend: str, *arguments) -> check.Checked:
    return check.check_backend(BACKENDS[backend], *arguments)


def attend(
    method: Method, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None = None,
    q_offset: int = 0, target_length: int | None = None, backend: str = "auto", plan: Plan | None = None,
) -> Tensor:  # fmt: skip
    """Return causal attention by `method`: (B, H, Tq, D), in v's dtype.

    q (B, H, Tq, D) and k, v (B, H, Tk, D) come after QK-norm and before any rotation. Query i stands at position
    q_offset + i, key j at position j. x (B, T, C): the layer's input, for methods that look at it; all tokens are
    queries then. target_length and backend: see make_plan. A plan replaces q_offset, target_length and backend.
    ValueError for shapes that do not fit the method or each other.
    """
    method.check_shapes(q, k, v)
    require(x is not None or not method.needs_input, f"{method.name} needs x, the input of the layer")
    if plan is None:
        plan = make_plan(
            method, q.shape[2], k.shape[2],
            q_offset=q_offset, target_length=target_length, device=q.device, dtype=q.dtype, backend=backend,
        )  # fmt: skip
    wide_v = F.pad(v, (0, method.vector_dim - method.head_dim)) if method.vector_dim > method.head_dim else v
    unrotated = () if method.replacement is None else (q, k)
    return attend_rotated(
        method, plan, *transform(method, q, k, plan, x), wide_v, *unrotated, token_features=method.token_features(x)
    )


def transform(
    method: Method, q: Tensor, k: Tensor, plan: Plan, x: Tensor | None = None, *, scale_queries: bool = True
) -> tuple[Tensor, Tensor]:
    """Return q and k rotated, and q scaled, computed in float32 and rounded to their dtype once at the end.

    x (B, T, C): the layer's input, for a scale that looks at it.
    """
    new_q, new_k = q, k
    if method.rotation is not None:
        mine = slice(plan.q_offset, plan.q_offset + q.shape[2])
        new_q = method.rotation.rotate(upcast(q), plan.cos[mine], plan.sin[mine])
        new_k = method.rotation.rotate_keys(upcast(k), plan.cos, plan.sin)
    if method.query_scale is not None and scale_queries:
        new_q, factors = upcast(new_q), method.query_scale.multiplier(plan.query_table, x)
        new_q = new_q * factors.to(new_q.dtype).unsqueeze(-1)  # ([B,] 1 or H, Tq, 1)
    return new_q.to(q.dtype), new_k.to(k.dtype)


def attend_rotated(
    method: Method, plan: Plan, rotated_q: Tensor, rotated_k: Tensor, v: Tensor, *unrotated: Tensor,
    token_features: Tensor | None = None,
):  # fmt: skip
    """Return attend's output after `transform`. v is as wide as rotated q and k.

    unrotated: q and k, for a Replacement. token_features: see Method.
    """
    backend = BACKENDS[plan.backend]
    if method.replacement is not None:
        output = method.replacement.attend(
            *unrotated, v, rotated_q, rotated_k, plan.q_offset, backend.run, token_features
        )
        shape = rotated_q.shape[:3] + v.shape[3:]
        assert output.shape == shape, f"{method.name} returned {tuple(output.shape)}, not {tuple(shape)}"
        return output
    prepared = plan.prepared
    if learned_parameters(method.score_change):
        prepared = backend.prepare(method.score_change, plan, prepared)
    more = extra_logits(method, token_features)
    output = backend.run(rotated_q, rotated_k, v, q_offset=plan.q_offset, prepared=prepared, **more)
    return output[..., : method.head_dim] if method.vector_dim > method.head_dim else output

"""Runs an attention method: which kernel, with what prepared once a length; and the plain form that all are held to.

    backend   computes                               used for
    sdpa      torch's fused causal attention         methods that leave the score alone (LogN is in q), on CUDA
    triton    our kernel, model/kernels/flash.py     methods that change the score, on CUDA
    flex      FlexAttention, compiled                the same, where the kernel cannot run; no gradients on a CPU
    cpu       our kernel, model/kernels/cpu.py       everything on a CPU, in float32
    blocks    blocks of queries, plain PyTorch       everything, where none of these can run

`auto` chooses by that table. A method with a Replacement uses these for the softmax attention inside it.
"""

import dataclasses
import functools
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.func import functional_call
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from model.context import check_context, own_part, to_heads, to_tokens
from model.kernels import cpu
from model.kernels.distance import MAX_LENGTH, Coefficients, learned_parameters, make_coefficients
from model.methods.base import Method

BACKENDS = ("auto", "sdpa", "triton", "flex", "cpu", "blocks")
QUERY_BLOCK = 128  # queries a block; the fastest of 64, 128 and 256 on a CPU (results/speed/cpu_step.md)
RECOMPUTE_LENGTH = 4096  # from this many keys on, the blocks' probabilities are recomputed in the backward pass
FLEX_BLOCK = 128  # FlexAttention's block mask granularity


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about one call that does not depend on weights or activations; build it once a length and reuse it."""

    backend: str
    q_offset: int
    cos: Tensor | None = None  # (Tk, D/2); with a context group, the first three are those of this rank's tokens,
    sin: Tensor | None = None  # (Tk, D/2)
    query_table: Tensor | None = None  # (Tq,)
    scale_band: Tensor | float = 1.0  # a of a block of queries, (1 or H, block, Tk); and these of its heads
    bias_band: Tensor | None = None  # m, and -inf for keys in the future, (1 or H, block, Tk)
    coefficients: Coefficients | None = None  # of the Triton kernel
    tables: Tensor | None = None  # of the kernel for CPUs, (2, 1 or H, Tk)
    score_mod: Callable | None = None
    block_mask: object | None = None
    context: ProcessGroup | None = None  # the ranks that share the sequence (model/context.py)
    why: str = ""  # this backend


def make_plan(
    method: Method,
    query_length: int,
    key_length: int,
    *,
    q_offset: int = 0,
    target_length: int | None = None,
    device="cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    context: ProcessGroup | None = None,
) -> Plan:
    """The plan for queries at positions q_offset.. against keys at positions 0..key_length-1, of this dtype.

    target_length (default: key_length) is the length of the whole sequence, which fixes the scaling of methods that
    depend on it (NTK, YaRN, LogN's constant form). With a context group, the plan is for this rank's part of as many
    queries as keys. ValueError for lengths, backends or groups that do not go together.
    """
    target_length = key_length if target_length is None else target_length
    if query_length < 1 or q_offset < 0:
        raise ValueError(f"there must be at least 1 query, at position 0 or later: got {query_length} from {q_offset}")
    if q_offset + query_length > key_length:
        raise ValueError(f"{query_length} queries from position {q_offset} see further than the {key_length} keys")
    if key_length > target_length:
        raise ValueError(f"{key_length} keys are more than the target length {target_length}")
    if key_length > MAX_LENGTH:
        raise ValueError(f"attention covers up to {MAX_LENGTH} positions, got {key_length}")
    device = torch.device(device)
    backend, why = choose_backend(method, device, backend, dtype)
    if context is not None:
        assert query_length == key_length
        check_context(method.num_heads, [key_length], context.size())
    plan = {}
    if method.rotation is not None:
        tables = method.rotation.tables(key_length, target_length, device)
        plan["cos"], plan["sin"] = (own_part(table, 0, context) for table in tables)
    if method.query_scale is not None:
        positions = own_part(torch.arange(q_offset, q_offset + query_length), 0, context)
        plan["query_table"] = method.query_scale.table(positions, target_length).to(device)
    if method.replacement is None:
        if backend == "flex":
            plan["block_mask"] = causal_block_mask(query_length, key_length, q_offset, device)
        if not learned_parameters(method.score_change):
            plan |= score_parts(method, backend, query_length, key_length, q_offset, device, dtype, context)
    return Plan(backend, q_offset, context=context, why=why, **plan)


def score_parts(method: Method, backend: str, query_length, key_length, q_offset, device, dtype, context) -> dict:
    """The parts of a plan that hold a_t and m_t. Where these are learned, every layer makes its own in every pass."""
    if backend == "blocks":
        scale, bias = block_bands(method, query_length, key_length, device)
        scale = own_part(scale, 0, context) if isinstance(scale, Tensor) else scale
        return dict(scale_band=scale, bias_band=own_part(bias, 0, context))
    if backend == "flex":
        return dict(score_mod=flex_score_mod(method, q_offset, context))
    if backend == "cpu":
        tables = cpu.make_tables(method.score_change, method.num_heads, method.head_dim, key_length)
        return dict(tables=own_part(tables, 1, context))
    if backend == "triton" and method.score_change is not None:
        shape = dict(num_heads=method.num_heads, head_dim=method.head_dim, key_length=key_length, q_offset=q_offset)
        coefficients = make_coefficients(method.score_change, **shape, dtype=dtype, device=device)
        return dict(coefficients=own_coefficients(coefficients, context))
    return {}


def own_coefficients(c: Coefficients, context: ProcessGroup | None) -> Coefficients:
    heads_at = dict(table=1, polynomials=1, tangent=1, parameter=0)
    parts = {name: own_part(x, dim, context) for name, dim in heads_at.items() if (x := getattr(c, name)) is not None}
    return dataclasses.replace(c, **parts)


def choose_backend(method: Method, device: torch.device, backend: str = "auto", dtype=torch.float32) -> tuple[str, str]:
    """The backend that will run, and the words for the log that say why. ValueError for one that cannot run."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; valid: {', '.join(BACKENDS)}")
    if backend == "auto":
        if device.type == "cpu":
            reason = cpu.problem(device, dtype)
            return ("blocks", f"the kernel for CPUs cannot run: {reason}") if reason else ("cpu", "our kernel for CPUs")
        if device.type != "cuda":
            return "blocks", f"nothing faster runs on {device.type}"
        if method.score_change is None:
            return "sdpa", f"{method.name} leaves the score alone"
        reason = triton_problem(method, device, dtype)
        if reason is None and torch.cuda.is_available() and not torch.compiler.is_compiling():
            reason = check_once(method, device, dtype)
        if reason:
            fallback = "flex" if find_spec("triton") else "blocks"  # Inductor needs Triton too
            return fallback, f"our Triton kernel cannot run: {reason}"
        return "triton", f"our kernel, as {method.name} changes the score"
    if backend == "sdpa" and method.score_change is not None:
        raise ValueError(f"{method.name} changes the attention score, which sdpa cannot: use auto")
    if backend == "flex" and method.replacement is not None:
        raise ValueError(f"{method.name} is not a softmax over changed scores: FlexAttention cannot run it, use auto")
    problems = dict(triton=lambda: triton_problem(method, device, dtype), cpu=lambda: cpu.problem(device, dtype))
    if backend in problems and (reason := problems[backend]()):
        raise ValueError(f"attention_backend {backend} cannot run: {reason}: use auto")
    return backend, "as asked for"


def triton_problem(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the Triton kernel cannot run this method here, or None."""
    if not find_spec("triton"):
        return "Triton is not installed"
    from model.kernels import flash  # only now, as it needs Triton

    if [p.shape for p in learned_parameters(method.score_change).values()] not in ([], [(method.num_heads,)]):
        return f"it takes one learned number a head, {method.name} has others"
    return flash.problem(device, dtype, method.head_dim)


@torch.inference_mode(False)
@torch.enable_grad()
def failed_check(method: Method, device: torch.device, dtype: torch.dtype, length: int = 1200) -> str | None:
    """Runs the Triton kernel once, forward and backward: None, or how it fails or differs from plain_attention here.

    Each version of Triton compiles it anew for each kind of GPU: this is to trust the numbers on all of them.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = 4, 1, method.num_heads, length, method.head_dim
    *inputs, dout = torch.randn(shape, device=device, generator=generator).to(dtype).unbind()
    try:
        ours = output_and_gradients(functools.partial(attend, method, backend="triton"), inputs, dout)
    except Exception as error:  # Triton's and CUDA's errors are of many kinds
        return f"it failed its check with {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    *inputs, dout = [x.double() for x in (*inputs, dout)]
    exact = output_and_gradients(functools.partial(plain_attention, method), inputs, dout)
    error = max(((x - y).norm() / y.norm()).item() for x, y in zip(ours, exact))
    tolerance = 4 * torch.finfo(dtype).eps + 1e-5  # its rounding is about one eps
    return None if error <= tolerance else f"it failed its check: its numbers are wrong by {error:.1e}"


check_once = functools.lru_cache(maxsize=8)(failed_check)  # not again for each length, or each prompt


def output_and_gradients(run: Callable, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """run(*inputs), and the gradients of the inputs when dout is that of the output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = run(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, dout)]


def attend(
    method: Method,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_offset: int = 0,
    target_length: int | None = None,
    backend: str = "auto",
    plan: Plan | None = None,
) -> Tensor:
    """Causal attention by `method`: the output (B, H, Tq, D), in v's dtype.

    q (B, H, Tq, D) and k, v (B, H, Tk, D) come after QK-norm and before any rotation; query i stands at position
    q_offset + i, key j at position j. target_length and backend: see make_plan. A plan made before replaces the three
    keyword arguments ahead of it. ValueError for shapes that do not fit the method or each other.
    """
    check_shapes(method, q, k, v)
    if plan is None:
        plan = make_plan(
            method, q.shape[2], k.shape[2],
            q_offset=q_offset, target_length=target_length, device=q.device, dtype=q.dtype, backend=backend,
        )  # fmt: skip
    vectors = *transform(method, q, k, plan), v
    if method.replacement is not None:
        vectors += q, k
    if plan.context is None:
        return attend_rotated(method, plan, *vectors)
    return to_tokens(attend_rotated(method, plan, *to_heads(vectors, plan.context)), plan.context)


def attend_rotated(method: Method, plan: Plan, rotated_q: Tensor, rotated_k: Tensor, v: Tensor, *unrotated: Tensor):
    """attend after `transform`; with a context group, by this rank's heads. unrotated: q and k, for a Replacement."""
    if learned_parameters(method.score_change):
        shape = rotated_q.shape[2], rotated_k.shape[2], plan.q_offset, v.device, rotated_q.dtype
        plan = dataclasses.replace(plan, **score_parts(method, plan.backend, *shape, plan.context))
    if method.replacement is None:
        return softmax_attention(rotated_q, rotated_k, v, q_offset=plan.q_offset, plan=plan)
    q, k = unrotated
    causal = functools.partial(softmax_attention, plan=dataclasses.replace(plan, bias_band=None))
    arguments = q, k, v, rotated_q, rotated_k, plan.q_offset, causal
    if plan.context is None:
        return method.replacement.attend(*arguments)
    mine = {name: own_part(p, 0, plan.context) for name, p in method.replacement.named_parameters()}
    return functional_call(method.replacement, mine, arguments)


def check_shapes(method: Method, q: Tensor, k: Tensor, v: Tensor):
    expected = (q.shape[0], method.num_heads, k.shape[2], method.head_dim) if q.dim() == k.dim() == 4 else None
    if k.shape != expected or v.shape != expected or (*q.shape[:2], q.shape[3]) != (*expected[:2], expected[3]):
        raise ValueError(
            f"{method.name} was made for q, k, v of shape (batch, {method.num_heads}, length, {method.head_dim}), "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )


def transform(method: Method, q: Tensor, k: Tensor, plan: Plan, scale_queries: bool = True) -> tuple[Tensor, Tensor]:
    """Rotation of q and k and scaling of q, in float32 whatever the dtype of q, which is rounded once at the end."""
    if method.rotation is None and (method.query_scale is None or not scale_queries):
        return q, k
    if method.rotation is not None:
        end = plan.q_offset + q.shape[2]
        new_q = method.rotation.rotate(upcast(q), plan.cos[plan.q_offset : end], plan.sin[plan.q_offset : end])
        new_k = method.rotation.rotate(upcast(k), plan.cos, plan.sin)
    else:
        new_q, new_k = upcast(q), k
    if method.query_scale is not None and scale_queries:
        new_q = new_q * method.query_scale.multiplier(plan.query_table).unsqueeze(-1)  # (H, Tq, 1)
    return new_q.to(q.dtype), new_k.to(k.dtype)


def upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, *, q_offset: int, plan: Plan) -> Tensor:
    if plan.backend == "flex":
        return flex(q, k, v, plan)
    if plan.backend == "sdpa":
        return sdpa(q, k, v, q_offset)
    if plan.backend == "triton":
        from model.kernels.flash import flash_attention

        return flash_attention(q, k, v, plan.coefficients, q_offset=q_offset)
    if plan.backend == "cpu":
        tables = cpu.make_tables(None, 1, q.shape[3], k.shape[2]) if plan.tables is None else plan.tables
        return cpu.cpu_attention(q, k, v, tables, q_offset=q_offset)
    return query_blocks(q, k, v, q_offset, plan.scale_band, plan.bias_band)


# ---- sdpa ------------------------------------------------------------------------------------------------------------


def prefer_fast_sdpa(device: torch.device):
    """From Hopper on, cuDNN's kernel is about twice as fast as the FlashAttention-2 that torch would take first."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        torch.backends.cuda.enable_flash_sdp(False)


def sdpa(q: Tensor, k: Tensor, v: Tensor, q_offset: int) -> Tensor:
    Tq, Tk = q.shape[2], k.shape[2]
    if q_offset == 0 and Tq == Tk:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    visible = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(q_offset)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def block_bands(method: Method | None, query_length: int, key_length: int, device) -> tuple[Tensor | float, Tensor]:
    """The coefficients a, m of one block of queries, m being -inf for keys in the future.

    Both are constant along diagonals, so one band serves all blocks: its last columns are the keys up to a block's
    last query, and a block whose last query sees n keys uses the last n columns.
    """
    block = min(QUERY_BLOCK, query_length)
    rows = torch.arange(block, device=device).unsqueeze(-1)  # (block, 1)
    distance = rows - (block - 1) + torch.arange(key_length - 1, -1, -1, device=device)  # (block, Tk)
    scale, bias = 1.0, torch.zeros(1, 1, 1, dtype=torch.float64, device=device)
    if method is not None and method.score_change is not None:
        head = torch.arange(method.num_heads, device=device).view(-1, 1, 1)  # (H, 1, 1)
        scale, bias = method.score_change.coefficients(distance.clamp(min=0).double(), head)
    if isinstance(scale, Tensor):
        scale = scale.float().expand(scale.shape[0] if scale.dim() == 3 else 1, *distance.shape)
    bias = torch.where(distance < 0, -torch.inf, bias).float()
    return scale, bias if bias.dim() == 3 else bias.unsqueeze(0)


def query_blocks(q: Tensor, k: Tensor, v: Tensor, q_offset: int, scale_band, bias_band: Tensor | None) -> Tensor:
    Tq = q.shape[2]
    if bias_band is None:
        scale_band, bias_band = block_bands(None, Tq, q_offset + Tq, q.device)
    block = bias_band.shape[1]
    recompute = torch.is_grad_enabled() and k.shape[2] >= RECOMPUTE_LENGTH
    q = q * q.shape[-1] ** -0.5
    outputs = []
    for start in range(0, Tq, block):
        stop = min(start + block, Tq)
        keys = q_offset + stop
        window = (slice(None), slice(block - (stop - start), None), slice(bias_band.shape[2] - keys, None))
        scale = scale_band[window] if isinstance(scale_band, Tensor) else scale_band
        arguments = (q[:, :, start:stop], k[:, :, :keys], v[:, :, :keys], scale, bias_band[window])
        outputs.append(checkpoint(one_block, *arguments, use_reentrant=False) if recompute else one_block(*arguments))
    return torch.cat(outputs, dim=2)


def one_block(q, k, v, scale, bias):  # q (B, H, block, D); k, v (B, H, keys, D); scale, bias (1 or H, block, keys)
    scores = upcast(q @ k.mT)
    logits = torch.addcmul(bias, scale, scores) if isinstance(scale, Tensor) else scale * scores + bias
    return logits.softmax(dim=-1).to(v.dtype) @ v


# ---- flex ------------------------------------------------------------------------------------------------------------


def flex_score_mod(method: Method, q_offset: int, context: ProcessGroup | None = None) -> Callable | None:
    if method.score_change is None:
        return None
    coefficients = method.score_change.coefficients
    if context is not None:
        first_head = context.rank() * method.num_heads // context.size()
        coefficients = lambda distance, head: method.score_change.coefficients(distance, head + first_head)

    def score_mod(score, batch, head, q_index, kv_index):
        # Clamped: diagonal tiles are evaluated above the diagonal too, where a NaN would survive in the gradient.
        distance = (q_index + q_offset - kv_index).clamp(min=0).float()
        scale, bias = coefficients(distance, head)
        return scale * score + bias

    return score_mod


def causal_block_mask(query_length: int, key_length: int, q_offset: int, device):
    """The causal BlockMask, built analytically: create_block_mask would materialise queries x keys."""
    first_query = q_offset + torch.arange(0, query_length, FLEX_BLOCK, device=device)  # of each block of queries
    last_query = (first_query + FLEX_BLOCK).clamp(max=q_offset + query_length) - 1
    num_key_blocks = -(-key_length // FLEX_BLOCK)
    seen = last_query // FLEX_BLOCK + 1  # blocks with any visible key; they come first
    full = ((first_query + 1) // FLEX_BLOCK).clamp(max=seen)  # blocks that every query of the block sees whole
    index = torch.arange(num_key_blocks, device=device).expand(len(first_query), -1)
    partial_index = (index + full.unsqueeze(-1)) % num_key_blocks  # the partial ones, first in their list
    as_int = lambda x: x[None, None].to(torch.int32).contiguous()  # (1, 1, ...)
    return BlockMask.from_kv_blocks(
        as_int(seen - full),
        as_int(partial_index),
        as_int(full),
        as_int(index),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda b, h, q_index, kv_index: q_index + q_offset >= kv_index,
        seq_lengths=(query_length, key_length),
    )


def compiled_flex(q: Tensor, k: Tensor, v: Tensor, **mods) -> Tensor:
    if q.device.type == "cpu" and k.shape[2] < FLEX_BLOCK:  # torch 2.13 reads past their end: NaN, now and then
        raise ValueError(f"FlexAttention on a CPU needs at least {FLEX_BLOCK} keys, got {k.shape[2]}: use auto")
    return inductor_flex(q, k, v, **mods)


# Never the silent L x L computation: with fullgraph, failing to compile (or doing so too often) is an error.
@functools.partial(torch.compile, dynamic=False, fullgraph=True)
def inductor_flex(*args, **kwargs):
    if not torch.compiler.is_compiling():
        raise RuntimeError("FlexAttention must be compiled, but torch.compile is switched off: use blocks or sdpa")
    return flex_attention(*args, **kwargs)


def flex(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    if q.device.type == "cpu" and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("FlexAttention has no backward pass on a CPU: use attention_backend auto or blocks")
    if torch.compiler.is_compiling() and q.device.type != "cpu":  # the whole model is being compiled
        return flex_attention(q, k, v, score_mod=plan.score_mod, block_mask=plan.block_mask)
    return flex_alone(q, k, v, plan)


# Never traced into a larger graph: there, torch 2.13's CPU kernel reads q, k, v that the same graph computes with wrong
# strides, and returns wrong numbers without a word (tests/test_attention.py looks whether it still does).
@torch.compiler.disable
def flex_alone(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    if q.device.type == "cpu":  # where flex refuses what requires a gradient even when none is computed
        q, k, v = q.detach(), k.detach(), v.detach()
    return compiled_flex(q, k, v, score_mod=plan.score_mod, block_mask=plan.block_mask)


# ---- the plain form --------------------------------------------------------------------------------------------------


def attention_logits(method: Method, q: Tensor, k: Tensor, target_length: int | None = None) -> Tensor:
    """a_t S + m_t for all pairs (paper, eq:def:L), and -inf above the diagonal: (B, H, T, T), at least float32.

    q, k (B, H, T, D) as in attend. Dense: for looking at and checking against, not for long sequences. ValueError for
    Infini-attention, which has no such logits.
    """
    check_shapes(method, q, k, k)
    if method.replacement is not None:
        raise ValueError(f"{method.name} has no attention logits: part of its output comes from a compressed memory")
    T = q.shape[2]
    if T != k.shape[2]:
        raise ValueError(f"attention logits are of all pairs: got {T} queries and {k.shape[2]} keys")
    plan = make_plan(method, T, T, target_length=target_length, device=q.device, backend="blocks")
    q, k = transform(method, upcast(q), upcast(k), plan)
    scores = q @ k.mT / q.shape[-1] ** 0.5  # (B, H, T, T)
    distance = torch.arange(T, device=q.device).unsqueeze(-1) - torch.arange(T, device=q.device)
    if method.score_change is not None:
        head = torch.arange(method.num_heads, device=q.device).view(-1, 1, 1)
        scale, bias = method.score_change.coefficients(distance.clamp(min=0).double(), head)
        scores = (scale * scores + bias).to(scores.dtype)
    return scores.masked_fill(distance < 0, -torch.inf)


def plain_attention(method: Method, q: Tensor, k: Tensor, v: Tensor, target_length: int | None = None) -> Tensor:
    """Attention as the formula says, dense and in float64: the reference of every backend. Shapes as in attend."""
    q, k, v = q.double(), k.double(), v.double()
    return attention_logits(method, q, k, target_length).softmax(dim=-1) @ v

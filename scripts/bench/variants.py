"""The ways to compute causal attention that scripts/bench/attention.py times: BACKEND:FORMULA[:DETAIL].

    plain   softmax of S
    si      scale-invariant, tau = 10
    alibi   S - slope t

None rotates q and k: what is timed is attention alone. A variant whose `make` raises does not run here.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from model.attention import Plan, make_plan
from model.backends import AUTOMATIC, BACKENDS
from model.backends import flex as flex_backend
from model.backends.base import Call
from model.kernels.distance import NOWHERE, closed_form
from model.methods import make_method
from model.methods.base import Method, upcast

METHODS = {"plain": "nope", "si": "scale_invariant_nope", "alibi": "alibi"}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v and output (B, H, T, D)


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def method(self, formula: str, **options) -> Method:
        shape = dict(num_heads=self.heads, head_dim=self.head_dim, train_length=self.length)
        return make_method(METHODS[formula], **shape, **options).to(self.device)

    def plan(self, method: Method, backend: str) -> Plan:
        return make_plan(method, self.length, self.length, device=self.device, dtype=self.dtype, backend=backend)


@dataclasses.dataclass(frozen=True)
class Variant:
    formula: str
    make: Callable[[Case], Attend]
    what: str
    off: str = ""  # the variant that is the same without the transform


def random_inputs(case: Case) -> list[Tensor]:
    """Return q, k, v and the gradient of the output (B, H, T, D), in memory (B, T, H, D) as the model has them."""
    generator = torch.Generator(case.device).manual_seed(0)
    shape = (case.batch, case.length, case.heads, case.head_dim)

    def draw() -> Tensor:
        return torch.randn(shape, device=case.device, generator=generator).to(case.dtype).transpose(1, 2)

    return [draw().requires_grad_() for _ in range(3)] + [draw()]


# ---- ours ------------------------------------------------------------------------------------------------------------


def on_backend(backend: str, formula: str, change: Callable[[Plan, Case], Plan] = lambda plan, case: plan, **options):
    """Run it by model/attention.py, without attend's conversions of q: a compiled model fuses them with what comes
    before."""

    def make(case: Case) -> Attend:
        plan = change(case.plan(case.method(formula, **options), backend), case)
        return functools.partial(BACKENDS[backend].run, prepared=plan.prepared)

    return make


def table_only(plan: Plan, case: Case) -> Plan:
    return dataclasses.replace(plan, prepared=dataclasses.replace(plan.prepared, far=NOWHERE))


def closed(plan: Plan, case: Case) -> Plan:
    return dataclasses.replace(plan, prepared=closed_form(10.0, case.length, case.device))


def learned_tau(case: Case) -> Attend:
    method = case.method("si", learn_tau=True)
    call, backend = case.plan(method, "triton").call, BACKENDS["triton"]

    def attend(q, k, v):
        return backend.run(q, k, v, prepared=backend.prepare(method.score_change, call))

    return attend


def compiled(make: Callable[[Case], Attend]):
    return lambda case: torch.compile(make(case), dynamic=False)


# ---- others ----------------------------------------------------------------------------------------------------------


def sdpa(backend: SDPBackend | None = None):
    def make(case: Case) -> Attend:
        plain = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        return sdpa_kernel(backend)(plain) if backend else plain

    return make


def sdpa_bias(case: Case) -> Attend:
    if case.length > 4096:
        raise ValueError("the bias is dense: up to length 4096 only")
    future = torch.ones(case.length, case.length, dtype=torch.bool, device=case.device).triu(1)
    bias = torch.zeros(case.length, case.length, dtype=case.dtype, device=case.device).masked_fill(future, -torch.inf)
    return functools.partial(F.scaled_dot_product_attention, attn_mask=bias)


def flash_attention_3(case: Case) -> Attend:
    from flash_attn_interface import flash_attn_func

    return tokens_first(flash_attn_func)


def flash_attention_4(case: Case) -> Attend:
    from flash_attn.cute import flash_attn_func

    return tokens_first(flash_attn_func)


def tokens_first(flash_attn_func) -> Attend:  # which takes and gives (B, T, H, D)
    def attend(q, k, v):
        o = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

    return attend


def dense(formula: str):
    """Compute all logits at once, in float32, and round the probabilities to v's dtype; a_t and m_t are tables
    (H, T, T)."""

    def make(case: Case) -> Attend:
        position = torch.arange(case.length, device=case.device)
        distance = position.unsqueeze(-1) - position  # (T, T)
        scale, bias = 1.0, torch.zeros((), dtype=torch.float64, device=case.device)
        if change := case.method(formula).score_change:
            head = torch.arange(case.heads, device=case.device).view(-1, 1, 1)
            scale, bias = change.coefficients(distance.clamp(min=0).double(), head)
        scale = torch.as_tensor(scale, dtype=torch.float32, device=case.device)
        bias = torch.where(distance < 0, -torch.inf, bias).float()

        def attend(q, k, v):
            scores = upcast(q) @ upcast(k).mT * case.head_dim**-0.5
            return torch.addcmul(bias, scale, scores).softmax(dim=-1).to(v.dtype) @ v

        return attend

    return make


def flex(formula: str, score_mod=None, block_mask: bool = True, **kernel_options):
    """Run FlexAttention with the method's own score_mod, or with score_mod(case)."""

    def make(case: Case) -> Attend:
        method = case.method(formula)
        call = Call(case.heads, case.head_dim, case.length, case.length, device=case.device, dtype=case.dtype)
        options = flex_backend.prepare(method.score_change, call)
        if score_mod:
            options["score_mod"] = score_mod(case)
        if not block_mask:
            del options["block_mask"]
        # Compiled here and not by model/attention.py, whose compile cache is for one score_mod a length.
        attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return functools.partial(attend, **options, kernel_options=kernel_options)

    return make


def one_table(case: Case):
    """Return the score_mod a (S - a), of one load: m is 1 - a^2, and the softmax ignores the 1."""
    a, _ = case.method("si").score_change.coefficients(torch.arange(case.length, device=case.device).double(), 0)
    a = a.float()

    def score_mod(score, batch, head, q_index, kv_index):
        at = a[(q_index - kv_index).clamp(min=0)]
        return at * (score - at)

    return score_mod


def as_written(score, batch, head, q_index, kv_index):
    """Compute the paper's formulas (eq:gaussian_at, eq:gaussian_mt) as they stand there."""
    log = torch.log((q_index - kv_index).clamp(min=0) / 10.0 + 1)
    return torch.sqrt(2 * log + 1) * score - 2 * log


def as_written_causal(score, batch, head, q_index, kv_index):
    changed = as_written(score, batch, head, q_index, kv_index)
    return torch.where(q_index >= kv_index, changed, -float("inf"))


# ---- all of them -----------------------------------------------------------------------------------------------------


CUDA = {  # when time runs out, the last go first
    "sdpa:cudnn": Variant("plain", sdpa(SDPBackend.CUDNN_ATTENTION), "torch's SDPA by cuDNN"),
    "sdpa:flash": Variant("plain", sdpa(SDPBackend.FLASH_ATTENTION), "torch's SDPA by FlashAttention-2"),
    "fa3": Variant("plain", flash_attention_3, "FlashAttention-3 (flash_attn_interface)"),
    "fa4": Variant("plain", flash_attention_4, "FlashAttention-4 (flash_attn.cute)"),
    "sdpa:bias": Variant("plain", sdpa_bias, "torch's SDPA with a dense additive bias, of 0 and -inf"),
    "triton:plain": Variant("plain", on_backend("triton", "plain"), "ours, causal"),
    "triton:si": Variant("si", on_backend("triton", "si"), "table, and cubics far away", off="triton:plain"),
    "triton:si:table": Variant("si", on_backend("triton", "si", table_only), "table everywhere", off="triton:plain"),
    "triton:si:closed": Variant("si", on_backend("triton", "si", closed), "logarithm and root", off="triton:plain"),
    "triton:si:learned": Variant("si", learned_tau, "a learned tau a head, from tables made anew", off="triton:plain"),
    "triton:alibi": Variant("alibi", on_backend("triton", "alibi"), "ALiBi", off="triton:plain"),
    "flex:plain": Variant("plain", flex("plain"), "FlexAttention, causal"),
    "flex:si": Variant("si", flex("si"), "closed form, x rsqrt(x) for the root", off="flex:plain"),
    "flex:si:table": Variant(
        "si", flex("si", one_table, fwd_num_stages=2, bwd_num_stages=2), "one table, a (S - a)", off="flex:plain"
    ),
    "flex:si:written": Variant("si", flex("si", lambda case: as_written), "the paper's formulas", off="flex:plain"),
    "flex:si:no_mask": Variant(
        "si",
        flex("si", lambda case: as_written_causal, block_mask=False),
        "the paper's formulas without a BlockMask, presumably the paper's way",
        off="flex:plain",
    ),
    "flex:alibi": Variant("alibi", flex("alibi"), "ALiBi", off="flex:plain"),
    "flex_flash:plain": Variant("plain", flex("plain", BACKEND="FLASH"), "FlexAttention by FlashAttention-4, causal"),
    "flex_flash:si": Variant("si", flex("si", BACKEND="FLASH"), "closed form", off="flex_flash:plain"),
}


def on_cpu(backend: str) -> dict[str, Variant]:
    plain = f"{backend}:plain"
    return {
        plain: Variant("plain", on_backend(backend, "plain"), f"ours, attention_backend {backend}, causal"),
        f"{backend}:si": Variant("si", on_backend(backend, "si"), "scale-invariant", off=plain),
        f"{backend}:alibi": Variant("alibi", on_backend(backend, "alibi"), "ALiBi", off=plain),
    }


OWN_ON_CPU = [backend for backend in BACKENDS if backend not in AUTOMATIC["cuda"]]  # those that train there
CPU = {
    "sdpa": Variant("plain", sdpa(), "torch's SDPA"),
    **{name: variant for backend in OWN_ON_CPU for name, variant in on_cpu(backend).items()},
    "blocks:si:compiled": Variant("si", compiled(on_backend("blocks", "si")), "by torch.compile", off="blocks:plain"),
    "dense:plain": Variant("plain", dense("plain"), "all logits at once, eager"),
    "dense:si": Variant("si", dense("si"), "scale-invariant", off="dense:plain"),
}
VARIANTS = CUDA | CPU


def default_variants(device: torch.device) -> list[str]:
    return list(CUDA if device.type == "cuda" else CPU)

"""The ways to compute causal attention that scripts/bench/attention.py times: BACKEND:FORMULA[:DETAIL].

    plain   softmax of S
    si      scale-invariant, tau = 10
    alibi   S - slope t
    fox     S + b_j, forgetting attention with gates of 1/2; its time includes the biases' gradient, not the gates
    window  S within 256 tokens
    sink    S and one logit more, without a value

None rotates q and k: what is timed is attention alone. A variant whose `make` raises does not run here.
"""

import dataclasses
import importlib
import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from errors import require
from model.attention import BACKENDS, Plan, make_plan, triton
from model.attention import flex as flex_backend
from model.attention.base import bound_products, extra_logits
from model.attention.triton.distance import NOWHERE, Coefficients
from model.methods import make_method
from model.methods.base import Method, upcast

METHODS = {"plain": "nope", "si": "scale_invariant_nope", "alibi": "alibi"}
EXTENDED = {"fox": "fox", "window": "rope+window", "sink": "p_rope+sink"}  # these without their rotation
OPTIONS = {"window": dict(window=256)}  # half of what the gate looks at
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v and output (B, H, T, D)


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def call(self) -> Plan:
        where = dict(device=self.device, dtype=self.dtype, product_bound=bound_products(self.head_dim, self.dtype))
        return Plan("", self.heads, self.head_dim, self.length, self.length, **where)

    def method(self, formula: str, **options) -> Method:
        shape = dict(num_heads=self.heads, head_dim=self.head_dim, train_length=self.length)
        options = OPTIONS.get(formula, {}) | options
        method = make_method((METHODS | EXTENDED)[formula], **shape, **options).to(self.device)
        method.rotation = None
        return method

    def layer_input(self) -> Tensor:
        """Return the x of methods that look at it, (B, T, C)."""
        return torch.zeros(self.batch, self.length, self.heads * self.head_dim, device=self.device)

    def extra_logits(self, method: Method) -> dict[str, Tensor]:
        """Return what a backend takes of a method beside a_t and m_t, as leaves with gradients."""
        of_tokens = None if method.key_bias is None else method.key_bias.of_tokens(self.layer_input())
        return {name: x.detach().requires_grad_() for name, x in extra_logits(method, of_tokens).items()}

    def plan(self, method: Method, backend: str) -> Plan:
        where = dict(device=self.device, dtype=self.dtype, backend=backend)
        return make_plan(method, self.length, self.length, normalised=True, **where)


@dataclasses.dataclass(frozen=True)
class Variant:
    formula: str  # of those above
    prepare: Callable[[Case, str], Attend]  # of case and formula
    what: str

    def make(self, case: Case) -> Attend:
        return self.prepare(case, self.formula)


def random_inputs(case: Case) -> list[Tensor]:
    """Return q, k, v and the gradient of the output (B, H, T, D), as the model has them: q and k normalised, in memory
    (B, T, H, D)."""
    generator = torch.Generator(case.device).manual_seed(0)
    shape = (case.batch, case.length, case.heads, case.head_dim)

    q, k, v, do = (torch.randn(shape, device=case.device, generator=generator) for _ in range(4))
    q, k = (F.rms_norm(x, (case.head_dim,)) for x in (q, k))
    *inputs, do = (x.to(case.dtype).transpose(1, 2) for x in (q, k, v, do))
    return [*(x.requires_grad_() for x in inputs), do]


# ---- ours ------------------------------------------------------------------------------------------------------------


def table_only(case: Case) -> Coefficients:
    """Return scale-invariant attention's a_t and m_t for the Triton kernel, all of them as tables."""
    return dataclasses.replace(triton.prepare(case.method("si").score_change, case.call), far=NOWHERE, line=NOWHERE)


def table_and_lines(case: Case) -> Coefficients:
    """Return the same with the table up to where lines begin: no cubics."""
    made = triton.prepare(case.method("si").score_change, case.call)
    return dataclasses.replace(made, far=made.line)


def online(case: Case, formula: str) -> Coefficients:
    """Return what the Triton kernel takes of a formula where q and k are not known to be normalised: with a running
    maximum (online softmax)."""
    return triton.prepare(case.method(formula).score_change, dataclasses.replace(case.call, product_bound=torch.inf))


def on_backend(case: Case, formula: str, backend: str, coefficients: Callable[[Case], object] | None = None) -> Attend:
    """Run it by model.attention, without attend's conversions of q, which a compiled model fuses with what comes
    before. coefficients: returns what the backend takes, where that is not what model.attention prepares."""
    method = case.method(formula)
    plan = case.plan(method, backend)  # or ValueError, where the backend cannot run
    prepared = coefficients(case) if coefficients else plan.prepared
    return partial(BACKENDS[backend].run, prepared=prepared, **case.extra_logits(method))


def compiled_blocks(case: Case, formula: str) -> Attend:
    return torch.compile(on_backend(case, formula, "blocks"), dynamic=False)


def learned_tau(case: Case, formula: str) -> Attend:
    method = case.method(formula, learn_tau=True)
    case.plan(method, "triton")  # or ValueError
    return lambda q, k, v: triton.run(q, k, v, prepared=triton.prepare(method.score_change, case.call))


# ---- others ----------------------------------------------------------------------------------------------------------


def sdpa(case: Case, formula: str, backend: SDPBackend | None = None) -> Attend:
    plain = partial(F.scaled_dot_product_attention, is_causal=True)
    return sdpa_kernel(backend)(plain) if backend else plain


def sdpa_bias(case: Case, formula: str) -> Attend:
    require(case.length <= 4096, "the bias is dense: up to length 4096 only")
    future = torch.ones(case.length, case.length, dtype=torch.bool, device=case.device).triu(1)
    bias = torch.zeros(case.length, case.length, dtype=case.dtype, device=case.device).masked_fill(future, -torch.inf)
    return partial(F.scaled_dot_product_attention, attn_mask=bias)


def flash_attention(case: Case, formula: str, module: str) -> Attend:
    """Run flash_attn_func of the module, which takes and gives (B, T, H, D)."""
    flash_attn_func = importlib.import_module(module).flash_attn_func

    def attend(q, k, v):
        o = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

    return attend


def dense(case: Case, formula: str) -> Attend:
    """Compute all logits at once, in float32, from tables of a_t and m_t (H, T, T); round the probabilities to v's
    dtype."""
    position = torch.arange(case.length, device=case.device)
    distance = position.unsqueeze(-1) - position  # (T, T)
    scale, bias = 1.0, torch.zeros((), dtype=torch.float64, device=case.device)
    method = case.method(formula)
    if change := method.score_change:
        head = torch.arange(case.heads, device=case.device).view(-1, 1, 1)
        scale, bias = change.coefficients(distance.clamp(min=0).double(), head)
    scale = torch.as_tensor(scale, dtype=torch.float32, device=case.device)
    hidden = distance < 0 if method.window is None else (distance < 0) | (distance >= method.window.window)
    bias = torch.where(hidden, -torch.inf, bias).float()
    extra = {name: x.detach() for name, x in case.extra_logits(method).items()}
    if "key_bias" in extra:
        bias = bias + extra["key_bias"].unsqueeze(-2)  # (B, H, T, T)

    def attend(q, k, v):
        scores = upcast(q) @ upcast(k).mT * case.head_dim**-0.5
        logits = torch.addcmul(bias, scale, scores)
        if "sink" not in extra:
            return logits.softmax(dim=-1).to(v.dtype) @ v
        sink = extra["sink"].view(-1, 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat((logits, sink), dim=-1).softmax(dim=-1)[..., :-1].to(v.dtype) @ v

    return attend


def flex(
    case: Case, formula: str, score_mod=None, block_mask: bool = True, backend: str = "flex", **kernel_options
) -> Attend:
    """Run FlexAttention as a backend does, with its own score_mod, or with score_mod(case)."""
    options = dict(case.plan(case.method(formula), backend).prepared)  # or ValueError, where it cannot run
    if score_mod:
        options["score_mod"] = score_mod(case)
    if not block_mask:
        del options["block_mask"]
    # Compiled here and not by model/attention/__init__.py, whose compile cache is for one score_mod a length.
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    options["kernel_options"] = options.get("kernel_options", {}) | kernel_options
    return partial(attend, **options)


def own_form(case: Case):
    """Return the score_mod that computes scale-invariant attention's a_t and m_t for each logit."""
    return flex_backend.make_score_mod(case.method("si").score_change, case.call)


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
    return torch.where(q_index >= kv_index, as_written(score, batch, head, q_index, kv_index), -float("inf"))


# ---- all of them -----------------------------------------------------------------------------------------------------

by_triton = partial(on_backend, backend="triton")
by_flash = partial(flex, backend="flex_flash")
CUDA = {  # when time runs out, the last go first
    "sdpa:cudnn": Variant("plain", partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION), "torch's SDPA by cuDNN"),
    "sdpa:flash": Variant(
        "plain", partial(sdpa, backend=SDPBackend.FLASH_ATTENTION), "torch's SDPA by FlashAttention-2"
    ),
    "fa3": Variant(
        "plain", partial(flash_attention, module="flash_attn_interface"), "FlashAttention-3 (flash_attn_interface)"
    ),
    "fa4": Variant("plain", partial(flash_attention, module="flash_attn.cute"), "FlashAttention-4 (flash_attn.cute)"),
    "sdpa:bias": Variant("plain", sdpa_bias, "torch's SDPA with a dense additive bias, of 0 and -inf"),
    "triton:plain": Variant("plain", by_triton, "ours, causal"),
    "triton:si": Variant("si", by_triton, "table, further away cubics, then lines"),
    "triton:si:lines": Variant("si", partial(by_triton, coefficients=table_and_lines), "table, far away lines"),
    "triton:si:table": Variant("si", partial(by_triton, coefficients=table_only), "table everywhere"),
    "triton:si:online": Variant("si", partial(by_triton, coefficients=partial(online, formula="si")), "online softmax"),
    "triton:si:learned": Variant("si", learned_tau, "a learned tau a head, from tables made anew"),
    "triton:alibi": Variant("alibi", by_triton, "ALiBi"),
    "flex:plain": Variant("plain", flex, "FlexAttention, causal"),
    "flex:si": Variant("si", flex, "closed form, x rsqrt(x) for the root"),
    "flex:si:table": Variant(
        "si", partial(flex, score_mod=one_table, fwd_num_stages=2, bwd_num_stages=2), "one table, a (S - a)"
    ),
    "flex:si:written": Variant("si", partial(flex, score_mod=lambda case: as_written), "the paper's formulas"),
    "flex:si:no_mask": Variant(
        "si",
        partial(flex, score_mod=lambda case: as_written_causal, block_mask=False),
        "the paper's formulas without a BlockMask, presumably the paper's way",
    ),
    "flex:alibi": Variant("alibi", flex, "ALiBi"),
    "flex_flash:plain": Variant("plain", by_flash, "FlexAttention by FlashAttention-4, causal"),
    "flex_flash:si": Variant("si", by_flash, "one table, a (S - a)"),
    "flex_flash:si:closed": Variant("si", partial(by_flash, score_mod=own_form), "closed form"),
    "flex_flash:alibi": Variant("alibi", by_flash, "ALiBi, a table a head"),
}
OWN_ON_CPU = ["cpu", "blocks"]
WHAT = dict(plain="ours, attention_backend {}, causal", si="scale-invariant", alibi="ALiBi")
CPU = {
    "sdpa": Variant("plain", sdpa, "torch's SDPA"),
    **{
        f"{backend}:{formula}": Variant(formula, partial(on_backend, backend=backend), what.format(backend))
        for backend, (formula, what) in itertools.product(OWN_ON_CPU, WHAT.items())
    },
    "cpu:fox": Variant("fox", partial(on_backend, backend="cpu"), "forgetting attention"),
    "cpu:window": Variant("window", partial(on_backend, backend="cpu"), "a window of 256 tokens"),
    "cpu:sink": Variant("sink", partial(on_backend, backend="cpu"), "a learned sink"),
    "blocks:si:compiled": Variant("si", compiled_blocks, "by torch.compile"),
    "dense:plain": Variant("plain", dense, "all logits at once, eager"),
    "dense:si": Variant("si", dense, "scale-invariant"),
}
VARIANTS = CUDA | CPU

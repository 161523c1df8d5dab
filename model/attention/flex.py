"""FlexAttention: PyTorch's compiler writes a_t S + m_t into the code of an attention kernel.

If m_t = 1 - a_t^2 and nothing is learned, as in scale-invariant attention, `flex` reads a_t from a table. The compiler
does not use the hardware's approximate logarithm and root. Without the table, logarithm and root would be most of the
kernel's instructions (results/speed/flex_code.md). All other a_t and m_t are evaluated at each logit. On a CPU `flex`
has no gradients. `flex` is always compiled, because its eager form computes all pairs of queries and keys.

`flex_flash` runs the kernels of FlashAttention-4 (package flash-attn-4) on Hopper and Blackwell. It reads a_t
and m_t from tables only. It sums dq over blocks of keys in no fixed order, so its backward pass is not deterministic.
"""

import math
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from errors import UserError
from model.attention.backend import Backend, score_functions
from model.attention.plan import LayerPlan
from model.methods.base import ScoreChange
from model.tensors import upcast

FLASH_QUERY_BLOCK = {9: 128, 10: 256, 11: 256}  # by compute capability: queries in a tile and in a block of the mask
LARGEST_QUERY_TILE = 256
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIMS = range(16, 129, 8)  # up to 128, a tile has as many keys as a block of the mask


class Flex(Backend):
    name = "flex"
    supported = ("key_bias", "window", "sink", "skip_first")
    masks_documents = True
    # Other tiles than torch's, as options of FlexKernelOptions with a prefix: dict(fwd_BLOCK_M=128, bwd_num_stages=3).
    # Options with a prefix win over options without, so they win over the num_stages that `prepare` sets.
    tiles: dict[str, int] = {}

    def unsupported(self, method, device, dtype):
        if method.replacement is not None:
            return f"FlexAttention computes only a softmax over changed scores, which {method.name} is not"
        if device.type == "cuda" and not find_spec("triton"):
            return "it is compiled by Triton, which is not installed"
        if device.type == "cpu" and method.sink:
            return "it has no sinks on a CPU, where PyTorch gives no log-sum-exp"
        return super().unsupported(method, device, dtype)

    def prepare(self, plan, score_change):
        """Return flex_attention's score_mod, block_mask and kernel_options."""
        from model.attention.flex_compiled import BLOCK, mask_options, plan_mask

        kernel_options, make_function = mask_options(plan), make_score_mod
        if score_change is not None and m_follows_from_a(*function_tables(score_change, plan)):
            make_function = make_table_score_mod
            # Each stage of the pipeline holds its part of the table in shared memory. Three stages leave 3 KB free on
            # an A100 and 2 KB on an H100, so key biases might not fit. By estimate, a load ends within an iteration.
            kernel_options["num_stages"] = 2
        if plan.query_length >= BLOCK:  # fewer queries run in another kernel, which these tiles do not fit
            kernel_options |= self.tiles
        score_mod = without_first_key(make_function(score_change, plan), score_change)
        return dict(score_mod=score_mod, block_mask=plan_mask(plan), kernel_options=kernel_options)

    def within_documents(self, plan):
        from model.attention.flex_compiled import mask_options, plan_mask

        kernel_options = plan.prepared["kernel_options"] | mask_options(plan)
        return plan.prepared | dict(block_mask=plan_mask(plan), kernel_options=kernel_options)

    def run(self, q, k, v, plan, *, score_change=None, key_bias=None, sink=None):
        from model.attention.flex_compiled import flex_attention, run_alone

        refuse_gradients_on_cpu(q, k, v, key_bias, sink)
        prepared = plan.prepared
        if score_change is not None and score_change.is_learned:
            score_mod = without_first_key(make_score_mod(score_change, plan), score_change)
            prepared = prepared | dict(score_mod=score_mod)
        prepared = add_extras(prepared, key_bias, sink)
        if torch.compiler.is_compiling() and q.device.type != "cpu":  # the whole model is being compiled
            output = flex_attention(q, k, v, **prepared)
        else:
            output = run_alone(q, k, v, prepared)
        return output if sink is None else add_sink(*output, sink)


def refuse_gradients_on_cpu(*tensors: Tensor | None):
    """Raise UserError if a gradient of these tensors would be computed on a CPU."""
    on_cpu = [x for x in tensors if x is not None and x.device.type == "cpu"]
    if torch.is_grad_enabled() and any(x.requires_grad for x in on_cpu):
        raise UserError("FlexAttention has no backward pass on a CPU. Use --attention_backend auto or blocks.")


def without_first_key(score_mod: Callable | None, score_change: ScoreChange | None) -> Callable | None:
    """Return the score_mod. If the score change skips the first key, the result does not change its scores."""
    if score_change is None or not score_change.skip_first:
        return score_mod

    def skipping(score, batch, head, q_index, kv_index):
        return torch.where(kv_index == 0, score, score_mod(score, batch, head, q_index, kv_index))

    return skipping


def function_tables(score_change: ScoreChange, plan: LayerPlan) -> Tensor:
    """Return a_t and m_t at all distances that a kernel can read, (2, 1 or H, T) float64 on the CPU.

    The last tile of queries may reach past the last query. A load of a masked lane is not always masked
    (pytorch#188178), so T covers that tile.
    """
    queries = math.ceil(plan.query_length / LARGEST_QUERY_TILE) * LARGEST_QUERY_TILE
    return score_functions(score_change, plan.num_heads, torch.arange(plan.q_offset + queries, device="cpu").double())


def make_score_mod(score_change: ScoreChange | None, plan: LayerPlan) -> Callable | None:
    """Return a score_mod that computes a_t S + m_t, or None if the scores stay S."""
    if score_change is None:
        return None
    q_offset = plan.q_offset

    def score_mod(score, batch, head, q_index, kv_index):
        # Tiles on the diagonal contain future keys. A NaN there would reach the gradient, hence the clamp.
        distance = (q_index + q_offset - kv_index).clamp(min=0).float()
        # After any arithmetic with `head`, the gradient of a learned parameter would not compile for CUDA.
        return score_change.change(score, distance, head)

    return score_mod


def add_extras(prepared: dict, key_bias: Tensor | None, sink: Tensor | None) -> dict:
    """Return flex_attention's arguments: score_mod adds key biases (B, H, Tk), and a sink requests the log-sum-exp."""
    from torch.nn.attention.flex_attention import AuxRequest

    if sink is not None:
        prepared = prepared | dict(return_aux=AuxRequest(lse=True))
    if key_bias is None:
        return prepared
    score_mod = prepared["score_mod"]

    def biased(score, batch, head, q_index, kv_index):
        if score_mod is not None:
            score = score_mod(score, batch, head, q_index, kv_index)
        return score + key_bias[batch, head, kv_index]

    return prepared | dict(score_mod=biased)


def add_sink(output: Tensor, aux, sink: Tensor) -> Tensor:
    """Return the output (B, H, Tq, D) of a softmax that includes the sink's logit. aux.lse excludes the sink."""
    weight_of_keys = torch.sigmoid(aux.lse - sink.unsqueeze(-1))  # (B, H, Tq)
    return (upcast(output) * weight_of_keys.unsqueeze(-1)).to(output.dtype)


# ---- FlashAttention-4 ------------------------------------------------------------------------------------------------


class FlexFlash(Flex):
    name = "flex_flash"
    masks_documents = False
    supported = ("window",)  # FlashAttention-4 has no gradient of a captured tensor (key bias) or a log-sum-exp (sink)

    def unsupported(self, method, device, dtype):
        if reason := super().unsupported(method, device, dtype):
            return reason
        if method.score_change is not None and method.score_change.is_learned:
            return f"it has no gradient of a learned score change, and {method.name} learns one"
        if device.type != "cuda":
            return f"it runs on CUDA, not on {device}"
        if torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] not in FLASH_QUERY_BLOCK:
            return "it needs a Hopper or Blackwell GPU of compute capability 9 to 11"
        if dtype not in FLASH_DTYPES or method.vector_dim not in FLASH_HEAD_DIMS:
            steps = f"{FLASH_HEAD_DIMS[0]} to {FLASH_HEAD_DIMS[-1]} in steps of {FLASH_HEAD_DIMS.step}"
            needs = f"float16 or bfloat16 and a head dimension {steps}"
            return f"it needs {needs}, not {dtype} and {method.vector_dim}"
        try:
            found = find_spec("flash_attn.cute")  # older packages of FlashAttention lack this part
        except ImportError:
            found = None
        return None if found else "the package flash-attn-4 is not installed (docs/kernels.md)"

    def prepare(self, plan, score_change):
        from model.attention.flex_compiled import plan_mask

        block_mask = plan_mask(plan, flash_query_block(plan.device))
        score_mod = make_table_score_mod(score_change, plan)
        return dict(score_mod=score_mod, block_mask=block_mask, kernel_options=dict(BACKEND="FLASH"))


def flash_query_block(device: torch.device) -> int:
    return FLASH_QUERY_BLOCK[capability(device)[0]]


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU. Without a GPU, it is Hopper's."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if on_gpu else (9, 0)


def m_follows_from_a(a: Tensor, m: Tensor) -> bool:
    """Return whether m = 1 - a^2. Then a S + m = a (S - a) + 1, and softmax ignores the 1, so a is enough."""
    difference = (m - (1 - a * a)).abs()
    return bool((difference <= 1e-12 * (1 + a * a)).all())


def make_table_score_mod(score_change: ScoreChange | None, plan: LayerPlan) -> Callable | None:
    """Return a score_mod that reads a_t and m_t from tables. If m = 1 - a^2, it reads only a: a S + m = a (S - a) + 1.

    Softmax ignores the 1, but a sink does not. The 1 is part of a fused multiply-add.
    """
    if score_change is None:
        return None
    functions = function_tables(score_change, plan)
    # (T,) if all heads agree, else (H, T). float() copies, because the compiler takes no part of a larger tensor.
    a, m = (x.squeeze(0).float().to(plan.device) for x in functions)
    by_head, q_offset = a.dim() > 1, plan.q_offset

    def one_table_mod(score, batch, head, q_index, kv_index):
        t = (q_index + q_offset - kv_index).clamp(min=0)  # tiles reach above the diagonal and past the last query
        scale = a[head, t] if by_head else a[t]
        return scale * (score - scale) + 1

    def two_table_mod(score, batch, head, q_index, kv_index):
        t = (q_index + q_offset - kv_index).clamp(min=0)
        return a[head, t] * score + m[head, t] if by_head else a[t] * score + m[t]

    return one_table_mod if m_follows_from_a(*functions) else two_table_mod

"""Cross-entropy of rows of logits in Triton, and in their place its gradient. A program owns a row.

It walks over the row once for the maximum and the sum of exponentials (the sum is rescaled when the maximum grows:
Milakov and Gimelshein 2018, arXiv 1805.02867) and, for the gradient, once more, which reads it again and writes it.
"""

import triton
import triton.language as tl
from torch import Tensor

from model.kernels.distance import LOG2E
from model.kernels.flash import on_its_gpu

BLOCK = 8192  # logits at a time; a thread has 8 of them, 16 bytes of bfloat16


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr, LOG2E: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # 65,536 rows of 50,304 are more than 2^31 logits
    logits += row * V
    target = tl.load(targets + row)
    target_logit = tl.load(logits + target).to(tl.float32)  # now, as it will be overwritten
    column = tl.arange(0, BLOCK)
    peak = float("-inf")
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits + start + column, mask=start + column < V, other=float("-inf")).to(tl.float32)
        new_peak = tl.maximum(peak, tl.max(x, 0))
        total = total * tl.exp2((peak - new_peak) * LOG2E) + tl.exp2((x - new_peak) * LOG2E)
        peak = new_peak
    total = tl.sum(total, 0)
    tl.store(losses + row, tl.log2(total) / LOG2E + (peak - target_logit))
    if GRADIENT:
        for start in range(0, V, BLOCK):
            seen = start + column < V
            x = tl.load(logits + start + column, mask=seen, other=float("-inf")).to(tl.float32)
            gradient = tl.exp2((x - peak) * LOG2E) / total - (start + column == target).to(tl.float32)
            tl.store(logits + start + column, gradient.to(logits.dtype.element_ty), mask=seen)


@on_its_gpu
def cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor, gradient: bool):
    """Set losses (R,) from logits (R, V), and the logits, if gradient, to softmax - onehot. V up to 2^31 - BLOCK.

    Logits float32, float16 or bfloat16, targets int64, losses float32, all contiguous; computed in float32.
    """
    assert logits.is_contiguous() and targets.is_contiguous() and losses.is_contiguous()
    rows, vocabulary = logits.shape
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    cross_entropy_kernel[(rows,)](
        logits, targets, losses, vocabulary,
        GRADIENT=gradient, BLOCK=block, LOG2E=LOG2E, num_warps=max(1, block // 256),
    )  # fmt: skip

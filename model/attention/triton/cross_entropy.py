"""Cross-entropy of rows of logits in Triton; its gradient replaces the logits. A program owns a row.

The first walk over the row computes the maximum and the sum of exponentials. The second reads the row again and writes
the gradient. In the first walk each thread keeps a maximum and a sum, which it rescales when the maximum grows (Milakov
and Gimelshein 2018, arXiv 1805.02867). Threads combine theirs once, at the end of the row.
"""

import triton
import triton.language as tl
from torch import Tensor

from model.attention.triton.distance import LOG2E
from model.attention.triton.flash import on_its_gpu

BLOCK = 8192  # logits at a time, of 1024 threads: two rows at once on an SM, which stay in L2 for the second walk
VECTOR = 16  # bytes that a thread loads at once, where rows begin at multiples of 16 bytes
LOWEST = -1e38  # the maximum before the first logit; finite, because its difference from itself must be 0


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, V,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, VECTORS: tl.constexpr, LOG2E: tl.constexpr,
    LOWEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # 65,536 rows of 50,304 are more than 2^31 logits
    logits += row * V
    target = tl.load(targets + row)
    target_logit = tl.load(logits + target).to(tl.float32)  # before the gradient overwrites it
    # (OWNERS, GROUP): a thread owns a group, of neighbours in memory if VECTORS, else of logits OWNERS apart.
    OWNERS: tl.constexpr = BLOCK // GROUP
    owner, member = tl.arange(0, OWNERS)[:, None], tl.arange(0, GROUP)[None, :]
    column = owner * GROUP + member if VECTORS else owner + OWNERS * member
    peak = tl.full([OWNERS], LOWEST, tl.float32)
    total = tl.zeros([OWNERS], tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits + start + column, mask=start + column < V, other=float("-inf")).to(tl.float32)
        new_peak = tl.maximum(peak, tl.max(x, 1))
        exponentials = tl.exp2((x - new_peak[:, None]) * LOG2E)
        total = total * tl.exp2((peak - new_peak) * LOG2E) + tl.sum(exponentials, 1)
        peak = new_peak
    row_peak = tl.max(peak, 0)
    log_total = tl.log2(tl.sum(total * tl.exp2((peak - row_peak) * LOG2E), 0))
    tl.store(losses + row, log_total / LOG2E + (row_peak - target_logit))
    if GRADIENT:
        for start in range(0, V, BLOCK):
            seen = start + column < V
            x = tl.load(logits + start + column, mask=seen, other=float("-inf")).to(tl.float32)
            p = tl.exp2((x - row_peak) * LOG2E - log_total)
            tl.store(logits + start + column, p.to(logits.dtype.element_ty), mask=seen)
        tl.debug_barrier()  # two threads write the target's gradient
        at_target = tl.exp2((target_logit - row_peak) * LOG2E - log_total) - 1
        tl.store(logits + target, at_target.to(logits.dtype.element_ty))


@on_its_gpu
def cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor, gradient: bool):
    """Set losses (R,) from logits (R, V). If gradient, set the logits to softmax - onehot. V is at most 2^31 - BLOCK.

    Logits are float32, float16 or bfloat16, targets int64, losses float32, all contiguous. The arithmetic is float32.
    """
    assert logits.is_contiguous() and targets.is_contiguous() and losses.is_contiguous()
    rows, vocabulary = logits.shape
    cross_entropy_kernel[(rows,)](
        logits, targets, losses, vocabulary, GRADIENT=gradient, **constants(vocabulary, logits.element_size())
    )


def constants(vocabulary: int, element_size: int) -> dict:
    """Return the constants and the number of warps for rows of so many logits, each of element_size bytes."""
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    group = min(block, VECTOR // element_size)
    vectors = vocabulary % 16 == 0  # Triton tells the compiler of V whether this holds
    return dict(
        BLOCK=block, GROUP=group, VECTORS=vectors, LOG2E=LOG2E, LOWEST=LOWEST, num_warps=max(1, block // 256)
    )  # fmt: skip

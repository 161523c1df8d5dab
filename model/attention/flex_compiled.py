"""The parts of FlexAttention that import PyTorch's compiler, which takes two seconds: flex.py imports them at use."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from errors import UserError
from model.attention.plan import LayerPlan

BLOCK = 128  # keys of a block of the mask, and queries where nothing else is asked for


def plan_mask(plan: LayerPlan, query_block: int = BLOCK) -> BlockMask:
    """Return the causal_block_mask of a plan."""
    lengths = plan.query_length, plan.key_length, plan.q_offset
    return causal_block_mask(*lengths, plan.device, query_block, window=plan.window, starts=plan.starts)


def causal_block_mask(
    query_length: int,
    key_length: int,
    q_offset: int,
    device,
    query_block: int = BLOCK,
    window: int | None = None,
    starts: Tensor | None = None,
) -> BlockMask:
    """Return the causal mask, which hides keys at a distance of `window` or more, too.

    It also hides the keys before starts (B, key_length) of the query's own token: see LayerPlan.within_documents. It is
    built analytically, since create_block_mask would materialise queries x keys.
    """
    window = key_length if window is None else min(window, key_length)
    first_query = q_offset + torch.arange(0, query_length, query_block, device=device)  # of each block of queries
    last_query = (first_query + query_block).clamp(max=q_offset + query_length) - 1
    first_key = torch.arange(0, key_length, BLOCK, device=device)  # of each block of keys

    # 1. The blocks of keys that any query of a block sees, and those that all of them see whole.
    first_query, last_query = first_query.unsqueeze(-1), last_query.unsqueeze(-1)
    seen = (first_key <= last_query) & (first_key + BLOCK > first_query - window + 1)
    full = (first_key + BLOCK - 1 <= first_query) & (first_key > last_query - window)
    if starts is not None:  # they never decrease, so the first query of a block sees the most
        starts = F.pad(starts.int(), (0, -query_length % query_block))  # the last tile reads past the last query
        seen = seen & (first_key + BLOCK > starts[:, first_query])
        full = full & (first_key >= starts[:, last_query])

    # 2. The same for a query and a key.
    def mask_mod(batch, head, q_index, kv_index):
        query = q_index + q_offset
        visible = query >= kv_index
        if window < key_length:
            visible = visible & (query - window < kv_index)
        return visible if starts is None else visible & (kv_index >= starts[batch, query])

    # 3. For each kind, each query block's number of key blocks, and a list that begins with them.
    counts_and_indices = []
    for blocks in (seen & ~full, full):
        blocks = blocks.view(-1, 1, *blocks.shape[-2:])  # (1 or B, 1, blocks of queries, blocks of keys)
        counts_and_indices += [blocks.sum(dim=-1), (~blocks).long().argsort(dim=-1, stable=True)]
    return BlockMask.from_kv_blocks(
        *(x.to(torch.int32).contiguous() for x in counts_and_indices),
        BLOCK_SIZE=(query_block, BLOCK),
        mask_mod=mask_mod,
        seq_lengths=(query_length, key_length),
    )


def mask_options(plan: LayerPlan) -> dict[str, bool]:
    """Return the kernel options that are true of causal_block_mask: see FlexKernelOptions in PyTorch.

    BLOCKS_ARE_CONTIGUOUS: each list of blocks is consecutive, so the kernel need not read it. A block of queries sees
    its own block of keys in part, and all blocks before it whole. A window adds another block in part, at its far end.

    ROWS_GUARANTEED_SAFE: each query sees a key of the first tile that the kernel reads, so its maximum is never -inf.
    All queries of a block see the first key of the block in part. A window or a document ends that, and so can a
    q_offset that is no multiple of a block. Fewer than 128 queries run in another kernel, whose thread blocks share the
    keys of a query. Key biases are finite, and a sink is added later, so neither matters.
    """
    holds = plan.window is None and plan.starts is None and plan.q_offset == 0 and plan.query_length >= BLOCK
    return dict(ROWS_GUARANTEED_SAFE=holds, BLOCKS_ARE_CONTIGUOUS=holds)


# torch 2.13's CPU kernel misreads the strides of q, k, v that the same graph computes and silently returns wrong
# numbers. So the call is never traced into a larger graph (tests/test_flex.py looks whether that is still so).
@torch.compiler.disable
def run_alone(q: Tensor, k: Tensor, v: Tensor, prepared: dict) -> Tensor:
    if q.device.type == "cpu":  # where flex refuses tensors that require a gradient, even when none is computed
        q, k, v = q.detach(), k.detach(), v.detach()
        if k.shape[2] < BLOCK:  # torch 2.13 reads past their end: NaN, now and then
            raise UserError(f"FlexAttention on a CPU needs at least {BLOCK} keys, but has {k.shape[2]}. Use auto.")
    # This is compiled for every length, and for every score_mod. Prompts of the needle task have dozens of lengths.
    limits = dict(recompile_limit=1024, accumulated_recompile_limit=1024, fail_on_recompile_limit_hit=True)
    with torch._dynamo.config.patch(limits):
        return inductor_flex(q, k, v, **prepared)


# With fullgraph, a failure to compile is an error, and never the silent L x L computation.
@functools.partial(torch.compile, dynamic=False, fullgraph=True)
def inductor_flex(*args, **kwargs):
    if not torch.compiler.is_compiling():
        raise RuntimeError("FlexAttention must be compiled, but torch.compile is switched off: use blocks or sdpa")
    return flex_attention(*args, **kwargs)

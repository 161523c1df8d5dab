"""Causal attention over L = a_t S + m_t in Triton: launches of the kernels of flash_kernels.py, and their autograd."""

import contextlib
import dataclasses
import functools

import torch
import triton
from torch import Tensor

from model.attention.base import MAX_LENGTH, heads_last
from model.attention.triton.distance import EVERYWHERE, LOG2E, REACH, STEP, Coefficients, product_scale
from model.attention.triton.flash_kernels import (
    delta_kernel,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from model.attention.triton.flash_tiles import INTERPRETED

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, warps and pipeline stages, of a kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


def choose_tiles(dtype: torch.dtype, block_d: int, capability: tuple[int, int], bounded: bool) -> dict[str, Tiles]:
    """Return the tiles of each kernel, by what they compile to (results/speed/kernel_code.md). Not timed yet.

    Up to head dimension 128, of those that fit shared memory, load ahead and spill next to nothing in a loop, the ones
    with the fewest instructions a logit.
    """
    if dtype == torch.float32:
        small = Tiles(32, 32, 4, 1) if block_d <= 128 else Tiles(16, 16, 4, 1)
        return dict(forward=small, query_gradient=small, key_gradient=small)
    if block_d > 128:
        return dict(forward=Tiles(64, 32, 4, 2), query_gradient=Tiles(64, 32, 4, 1), key_gradient=Tiles(32, 32, 4, 1))
    if block_d == 128 and capability[0] in (9, 10):  # 227 KiB of shared memory: Hopper, and Blackwell of data centres
        forward = Tiles(128, 128, 8, 2) if bounded else Tiles(128, 64, 8, 3)
        return dict(forward=forward, query_gradient=Tiles(128, 64, 8, 2), key_gradient=Tiles(32, 128, 8, 3))
    narrow = block_d <= 64
    forward, key_gradient = Tiles(128, 64, 4 if narrow else 8, 2), Tiles(64, 128 if narrow else 64, 8, 2)
    return dict(forward=forward, query_gradient=Tiles(64, 64, 4, 2), key_gradient=key_gradient)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients | None = None, *,
    q_offset: int = 0, key_bias: Tensor | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return causal attention (B, H, Tq, D) over a_t S + m_t, by make_coefficients; over S without coefficients.

    q (B, H, Tq, D), k and v (B, H, Tk, D); query i is at position q_offset + i, key j at j. key_bias (B, H, Tk) is
    added to the logits; sink (H,) is one more logit, without a value. With bounded coefficients the caller guarantees
    that |q.k| stays below their bound. Nothing bounds a key_bias, so it brings back the running maximum. Both passes
    repeat bit for bit.
    """
    c = coefficients or Coefficients(torch.empty(0, 1, k.shape[2] + 2 * REACH, device=q.device))
    check_inputs(q, k, v, c, q_offset, key_bias, sink)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if sink is not None and len(c.table) == 1:
        sink = sink - 1  # one function leaves out the 1 of all logits (distance.py)
    key_bias, sink = (None if x is None else (x.float() * LOG2E).contiguous() for x in (key_bias, sink))  # in bits
    window = 0 if c.window is None or c.window >= k.shape[2] else c.window
    functions = c.table, c.polynomials, c.tangent, list(c.degrees), c.far, c.line
    bounded = c.bounded and key_bias is None
    return forward_op(q, k, v, c.parameter, key_bias, sink, *functions, window, q_offset, bounded)[0]


def kernel_problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the kernels cannot run there, or None."""
    if device.type == "cuda":
        if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0 (A100) or newer"
    elif not INTERPRETED:
        return f"it runs on CUDA (on a CPU only interpreted, for tests, with TRITON_INTERPRET=1), not on {device}"
    if dtype not in DTYPES:
        return f"it takes float32, float16 and bfloat16, not {dtype}"
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"it covers head dimensions up to {MAX_HEAD_DIM}, not {head_dim}"
    return None


def check_inputs(q, k, v, c: Coefficients, q_offset: int, key_bias: Tensor | None, sink: Tensor | None):
    """Assert what `attend` and `prepare` guarantee: a kernel would read memory that belongs to other tensors."""
    (B, H, Tq, D), Tk = q.shape, k.shape[2]
    assert k.shape == v.shape == (B, H, Tk, D) and q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    assert kernel_problem(q.device, q.dtype, D) is None and Tk <= MAX_LENGTH and 0 <= q_offset <= Tk - Tq
    assert c.table.shape[1] in (1, H) and c.table.shape[2] >= Tk + 2 * REACH
    assert c.polynomials is None or c.q_offset == q_offset % STEP
    assert not (c.bounded and q.dtype == torch.float16)
    assert key_bias is None or (key_bias.shape, key_bias.device) == ((B, H, Tk), q.device)
    assert sink is None or (sink.shape, sink.device) == ((H,), q.device)


def on_its_gpu(operation):
    """Make the GPU of the first tensor the current one while an operation runs, because Triton launches there."""

    @functools.wraps(operation)
    def run(*args):
        with torch.cuda.device(args[0].device) if args[0].is_cuda else contextlib.nullcontext():
            return operation(*args)

    return run


@torch.library.custom_op("scale_invariant::flash_forward", mutates_args=())
@on_its_gpu
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, parameter: Tensor | None, key_bias: Tensor | None, sink: Tensor | None,
    table: Tensor, polynomials: Tensor | None, tangent: Tensor | None, degrees: list[int], far: int, line: int,
    window: int, q_offset: int, bounded: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output, and for each query the logarithm to base 2 of the sum of its exp2(logits), (B, H, Tq).

    key_bias (B, H, Tk) and sink (H,) are float32, contiguous and in bits; window 0 is none.
    """
    o, lse = empty_outputs(q)
    launch = Launch(q, k, v, table, polynomials, key_bias, degrees, far, line, window, q_offset, bounded)
    sink_or_any = table if sink is None else sink
    arguments = q, k, v, o, lse, table, launch.polynomials, launch.key_bias, sink_or_any, *strides(q, k, v, o)
    launch(forward_kernel, "forward", q.shape[2], arguments, BOUNDED=bounded, SINK=sink is not None)
    return o, lse


@forward_op.register_fake
def _(q, *args):
    return empty_outputs(q)


def empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:  # (B, H, Tq, D) and (B, H, Tq)
    return heads_last(q, q.new_empty), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("scale_invariant::flash_backward", mutates_args=())
@on_its_gpu
def backward_op(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, key_bias: Tensor | None, sink: Tensor | None,
    table: Tensor, polynomials: Tensor | None, tangent: Tensor | None, degrees: list[int], far: int, line: int,
    window: int, q_offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, of the parameter of each head, (H,), which are 0 without a tangent, and of
    key_bias and sink, which are empty without them."""
    if do.stride(-1) != 1:
        do = do.contiguous()
    dq, dk, dv, dparameter, dkey_bias = empty_gradients(q, k, v, tangent, key_bias)
    delta = torch.empty_like(lse)
    launch = Launch(q, k, v, table, polynomials, key_bias, degrees, far, line, window, q_offset)
    B, H, Tq, D = q.shape
    delta_kernel[(triton.cdiv(Tq, 64) * B * H,)](
        o, do, delta, *strides(o, do), H, Tq, HEAD_DIM=D, BLOCK_D=launch.block_d, QUERIES=64
    )
    rest = lse, delta, table, launch.polynomials, launch.key_bias
    row_sums = delta if key_bias is None else torch.empty_like(lse)  # the first is never written to
    learned = (table if tangent is None else tangent), dparameter
    arguments = q, k, v, do, dq, *rest, *learned, row_sums, *strides(q, k, v, do, dq)
    launch(query_gradient_kernel, "query_gradient", Tq, arguments, LEARNED=tangent is not None)
    arguments = q, k, v, do, dk, dv, *rest, dkey_bias, *strides(q, k, v, do, dk)
    launch(key_gradient_kernel, "key_gradient", k.shape[2], arguments)
    # The sink's probability times the gradient of its logit. Its value is 0, so that gradient is -delta.
    of_sink = None if sink is None else -torch.exp2(sink[:, None] - lse) * delta
    if key_bias is not None:
        # In exact arithmetic the gradients of a row's logits sum to 0. Rounding of o leaves a remainder, which
        # forgetting attention would add up over keys. So the remainder is subtracted at the diagonal.
        of_row = row_sums if sink is None else row_sums + of_sink
        dkey_bias[:, :, q_offset : q_offset + Tq] -= of_row / LOG2E
    dsink = lse.new_empty(0) if sink is None else of_sink.sum(dim=(0, 2)) / LOG2E
    return dq, dk, dv, dparameter.sum(dim=(0, 2)), dkey_bias, dsink


@backward_op.register_fake
def _(do, q, k, v, o, lse, key_bias, sink, table, polynomials, tangent, *args):
    *gradients, dparameter, dkey_bias = empty_gradients(q, k, v, tangent, key_bias)
    return *gradients, dparameter.sum(dim=(0, 2)), dkey_bias, lse.new_empty(0 if sink is None else q.shape[1])


def empty_gradients(q, k, v, tangent, key_bias):
    of_parameter = (0, q.shape[1], 0) if tangent is None else q.shape[:3]
    shapes = of_parameter, (0,) if key_bias is None else k.shape[:3]
    vectors = (heads_last(x, x.new_empty) for x in (q, k, v))
    return *vectors, *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)


def save_for_backward(ctx, inputs, output):
    q, k, v, _, *tensors = inputs[:9]
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.numbers = inputs[9:14]  # degrees, far, line, window, q_offset


def backward(ctx, do, _):
    *gradients, dparameter, dkey_bias, dsink = backward_op(do, *ctx.saved_tensors, *ctx.numbers)
    learned = zip((dparameter, dkey_bias, dsink), ctx.needs_input_grad[3:6])
    return *gradients, *(x if needed else None for x, needed in learned), *[None] * 9


forward_op.register_autograd(backward, setup_context=save_for_backward)


class Launch:
    """Launches the kernels of one call with the arguments that they share, and the code that the call needs."""

    def __init__(self, q, k, v, table, polynomials, key_bias, degrees, far, line, window, q_offset, bounded=False):
        B, H, Tq, D = q.shape
        functions = len(table)
        near = functions > 0 and far > EVERYWHERE
        reach = window or k.shape[2]  # of the tiles that need no mask
        has_far, has_line = (functions > 0 and first < reach for first in (far, line))
        self.block_d = max(16, triton.next_power_of_2(D))
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
        self.tiles = choose_tiles(q.dtype, self.block_d, capability, bounded)
        self.polynomials = table if polynomials is None else polynomials
        self.key_bias = table if key_bias is None else key_bias
        scale = product_scale(functions, D)
        self.batch_heads = B * H
        degree_a, degree_m = [*degrees, 0, 0][:2]
        self.common = (
            table.stride(0), head_stride(table), self.polynomials.stride(0), head_stride(self.polynomials),
            q_offset % STEP - REACH, far if near and has_far else 0, line if has_line else 0, scale,
        )  # fmt: skip
        self.lengths = (H, Tq, k.shape[2], q_offset)
        self.unit = scale / LOG2E  # of gradients: logits are in bits
        self.options = dict(
            FUNCTIONS=functions, DEGREE_A=degree_a, DEGREE_M=degree_m, NEAR=near, FAR=has_far, LINE=has_line,
            BIASED=key_bias is not None, WINDOW=window,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", STEP=STEP, HEAD_DIM=D, BLOCK_D=self.block_d,
        )  # fmt: skip

    def __call__(self, kernel, role: str, length: int, arguments: tuple, **options):
        """Launch the kernel of this role (a key of choose_tiles), whose programs share `length` queries or keys."""
        tiles = self.tiles[role]
        rows = tiles.keys if role == "key_gradient" else tiles.queries  # of a program
        unit = () if role == "forward" else (self.unit,)
        even = self.lengths[1] % tiles.queries == 0
        kernel[(triton.cdiv(length, rows) * self.batch_heads,)](
            *arguments, *self.common, *unit, *self.lengths,
            **self.options, **options, EVEN=even,
            QUERIES=tiles.queries, KEYS=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip


def strides(*tensors: Tensor) -> list[int]:
    """Return the strides of tensors (B, H, T, D) by batch, head and token, one tensor after the other."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def head_stride(x: Tensor) -> int:
    """Return the stride of the heads of x (n, H or 1, ...): 0 where one entry serves all."""
    return x.stride(1) if x.shape[1] > 1 else 0

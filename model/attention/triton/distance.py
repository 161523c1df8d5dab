"""a_h(t) and m_h(t) as the kernels of flash_kernels.py read them: a table by distance, and polynomials far away.

The logits in bits are  L log2(e) = A(t) qk + M(t)  with qk the product of query and key, A = a log2(e) / sqrt(d) and
M = m log2(e). Where m = 1 - a^2, as in scale-invariant attention, the softmax ignores the 1 and one function is enough:

    L log2(e) = b (qk sqrt(log2(e) / d) - b) + constant,    b = a sqrt(log2(e)).

A tile whose first query is D tokens after its first key has distances within REACH of D. From some D on, cubics
interpolate every function to the precision of the inputs; further away, lines do. Nearer tiles read the table at one
load a logit, and so do all tiles where a function is not smooth.
"""

import dataclasses
import math

import torch
from torch import Tensor

from model.attention.base import learned_parameters, one_function_is_enough
from model.methods.base import ScoreChange

REACH = 128  # tiles have at most this many queries and keys, so |t - D| < REACH
STEP = 16  # and a multiple of this many, so the D of all tiles are this far apart
NODES = {3: (-117, -49, 49, 117), 1: (-90, 90)}  # where cubics and lines meet their function: Chebyshev's, in tokens
TOLERANCE = {torch.float32: 2e-7, torch.float16: 1e-5, torch.bfloat16: 6e-5}  # |polynomial - f| / (1 + |f|)
LOG2E = math.log2(math.e)
NOWHERE, EVERYWHERE = 2**31 - 1, -(2**31)


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """One method's n functions: b alone, or A and M. The dimension of heads is 1 where all heads agree."""

    table: Tensor  # (n, H or 1, keys + 2 REACH) float32: at distances 0, 1, ...
    polynomials: Tensor | None = None  # (n, H or 1, windows, 4) float32; see fit_polynomials
    degrees: tuple[int, ...] = ()  # of each function's polynomials: 0 and 1 in t, 3 in t - D
    far: int = NOWHERE  # the first D from which the polynomials hold
    line: int = NOWHERE  # the first D from which the cubics are lines
    q_offset: int = 0  # position of the first query modulo STEP, which the polynomials are made for
    tangent: Tensor | None = None  # the derivatives of table by each head's parameter
    parameter: Tensor | None = None  # (H,): the learned parameter of tangent
    bounded: bool = False  # the softmax needs no running maximum; see is_bounded
    window: int | None = None  # keys at this distance, or further away, are hidden


def make_coefficients(
    change: ScoreChange | None, num_heads: int, head_dim: int, key_length: int, q_offset: int, dtype: torch.dtype,
    device, product_bound: float = math.inf,
) -> Coefficients:  # fmt: skip
    """Return the coefficients of `change` for queries from q_offset on, keys 0..key_length-1 and this dtype.

    change may have one learned parameter of one number a head; the kernel then computes its gradient. None: the logits
    are S. product_bound: an upper bound of |q.k|, from which `bounded` follows. Learned functions are never bounded.
    """
    if change is None:
        table = torch.empty(0, 1, key_length + 2 * REACH, device=device)
        return Coefficients(table, bounded=is_bounded(table, head_dim, product_bound, dtype))
    head = torch.arange(num_heads, device=device).unsqueeze(-1)  # (H, 1)
    distance = torch.arange(key_length + 2 * REACH, device=device).double()
    if learned := learned_parameters(change):
        ((name, parameter),) = learned.items()

        def functions(p):
            return to_bits(*torch.func.functional_call(change, {name: p}, (distance, head)), distance, head_dim)

        table, tangent = torch.func.jvp(functions, (parameter.detach(),), (torch.ones_like(parameter),))
        return Coefficients(table.float(), tangent=tangent.float(), parameter=parameter)
    a, m = change.coefficients(distance, head)
    table = to_bits(a, m, distance, head_dim, one_function_is_enough(a, m))
    polynomials = fit_polynomials(table, q_offset, TOLERANCE[dtype])
    bounded = is_bounded(table, head_dim, product_bound, dtype)
    return Coefficients(table.float().contiguous(), *polynomials, q_offset % STEP, bounded=bounded)


def to_bits(a: Tensor | float, m: Tensor | float, distance: Tensor, head_dim: int, one: bool = False) -> Tensor:
    """Return b, if `one` function is enough, or A and M: (n, H or 1, distances)."""
    functions = (a * LOG2E**0.5,) if one else (a * (LOG2E * head_dim**-0.5), m * LOG2E)
    functions = torch.stack(torch.broadcast_tensors(*map(torch.as_tensor, functions), distance)[:-1])
    return functions if functions.dim() == 3 else functions.unsqueeze(1)


def product_scale(functions: int, head_dim: int) -> float:
    """Return what the kernels multiply qk with, before these functions of the distance are applied."""
    return {0: LOG2E * head_dim**-0.5, 1: LOG2E**0.5 * head_dim**-0.5, 2: 1.0}[functions]


def is_bounded(table: Tensor, head_dim: int, product_bound: float, dtype: torch.dtype) -> bool:
    """Return whether exp2(logits) can be summed as they are, in float32, if |qk| <= product_bound at all distances.

    The logits of a distance are within bias -+ |slope| product_bound. The sum of the largest exponentials over all
    keys, times values up to 2^30, must stay below 2^127. Exponentials below 2^-126 are flushed to 0. Their sum must be
    less than 2^-24 of the exponential at distance 0, since every query sees its own key.

    table: (n, H or 1, keys + 2 REACH), see Coefficients. Never in float16, which has no such exponents.
    """
    largest = product_scale(len(table), head_dim) * product_bound
    smallest = -largest
    table = table[..., : table.shape[2] - 2 * REACH]
    if len(table):
        slope, bias = table if len(table) == 2 else (table[0], -table[0].square())
        reach = slope.abs() * largest
        largest, smallest = (bias + reach).max().item(), (bias - reach)[:, 0].min().item()
    keys = math.log2(table.shape[2])
    return dtype != torch.float16 and largest + keys + 30 < 127 and smallest - keys - 24 > -126


def window_starts(key_length: int, q_offset: int, device) -> Tensor:
    """Return all distances D of tiles that queries from q_offset on can have with key_length keys, from -REACH on."""
    return torch.arange(-REACH, key_length, STEP, device=device) + q_offset % STEP


def fit_polynomials(table: Tensor, q_offset: int, tolerance: float) -> tuple[Tensor, tuple[int, ...], int, int]:
    """Return polynomials, degrees, far and line of Coefficients, of functions given as a table (n, H, keys + 2 REACH).

    A function that is one line (a constant, ALiBi's m) has the same coefficients, in t, in all windows and is far
    everywhere. Any other has a cubic in t - D for each window D - REACH < t < D + REACH; where a line is enough for all
    functions, its last two coefficients are 0.
    """
    N = table.shape[2]
    D = window_starts(N - 2 * REACH, q_offset, table.device)  # (W,)
    cubics, lines, degrees, far, line = [], [], [], EVERYWHERE, EVERYWHERE
    for f in table:  # (H, N)
        ends = torch.stack([f[:, 0], (f[:, -1] - f[:, 0]) / (N - 1)], dim=-1).float()  # (H, 2)
        if is_near(ends.double() @ torch.stack([torch.ones(N), torch.arange(N)]).to(f), f, tolerance).all():
            degrees.append(int(ends[:, 1].any()))
            cubics.append(torch.nn.functional.pad(ends, (0, 2)).unsqueeze(1).expand(-1, len(D), -1))
            lines.append(cubics[-1])
        else:
            degrees.append(3)
            cubic, first = fit_windows(f, D, 3, tolerance)
            straight, first_line = fit_windows(f, D, 1, tolerance)
            cubics.append(cubic)
            lines.append(straight)
            far, line = max(far, first), max(line, first_line)
    line = max(far, line) if 3 in degrees else NOWHERE
    polynomials = torch.where((D >= line).unsqueeze(-1), torch.stack(lines), torch.stack(cubics))
    return polynomials, tuple(degrees), far, line


def fit_windows(f: Tensor, D: Tensor, degree: int, tolerance: float) -> tuple[Tensor, int]:
    """Return the polynomials in t - D of this degree, (H, W, 4), that meet f (H, distances) at each window's nodes,
    and the first D from which on all are within the tolerance."""
    nodes = torch.tensor(NODES[degree], device=f.device)
    x = torch.arange(1 - REACH, REACH, device=f.device)  # (2 REACH - 1,)
    t = D.unsqueeze(-1) + x  # (W, 2 REACH - 1)
    values = f[:, t.clamp(min=0)]  # (H, W, 2 REACH - 1)
    at_nodes = torch.linalg.inv(powers(nodes, degree))
    fitted = (values[..., nodes + REACH - 1] @ at_nodes.mT).float()  # (H, W, degree + 1)
    good = is_near(fitted.double() @ powers(x, degree).mT, values, tolerance) & (t >= 0)  # (H, W, 2 REACH - 1)
    return torch.nn.functional.pad(fitted, (0, 3 - degree)), start_of_good_tail(D, good.all(dim=-1).all(dim=0))


def powers(x: Tensor, degree: int) -> Tensor:
    """Return 1, x, ..., x^degree in float64, in a new last dimension."""
    return x.double().unsqueeze(-1) ** torch.arange(degree + 1, device=x.device)


def is_near(approximation: Tensor, f: Tensor, tolerance: float) -> Tensor:
    return (approximation - f).abs() <= tolerance * (1 + f.abs())


def start_of_good_tail(D: Tensor, good: Tensor) -> int:
    """Return the first D from which on all are good; NOWHERE without one."""
    after_bad = int((~good).nonzero().max()) + 1 if not good.all() else 0
    return int(D[after_bad]) if after_bad < len(D) else NOWHERE

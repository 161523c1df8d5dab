"""Our kernels: device code in Triton and C++, what launches it, and a check of a Triton kernel before its first use."""

from collections.abc import Callable, Iterable

from torch import Tensor


def compare(run: Callable[[], Iterable[Tensor]], exact: Callable[[], Iterable[Tensor]], tolerance: float) -> str | None:
    """Return how run() fails, or differs from exact() by more than a relative tolerance, or None."""
    try:
        results = run()
    except Exception as error:  # Triton's and CUDA's errors are of many kinds
        return f"failed its check with {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    error = max(((x - y).norm() / y.norm()).item() for x, y in zip(results, exact()))
    return None if error <= tolerance else f"failed its check: its numbers are wrong by {error:.1e}"


def heads_last(x: Tensor, make: Callable) -> Tensor:
    """Return memory for x (B, H, T, D), in it (B, T, H, D), as the projections before and after want it."""
    B, H, T, D = x.shape
    return make((B, T, H, D), dtype=x.dtype).transpose(1, 2)

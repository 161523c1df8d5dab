"""What the device is called and how fast it could be."""

from __future__ import annotations

import ctypes
import platform
import resource
import time

import torch

# Peak dense bf16 FLOP/s with float32 accumulation, from NVIDIA's data sheets and architecture white papers (which
# advertise twice as much, for 2:4 sparsity). The first name that the GPU's own name contains counts.
PEAK_BF16_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756.5e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3), in bytes


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str] | None:
    """The FLOP/s that model FLOPs utilisation (MFU) is a share of, and where that number comes from; None on a CPU.

    bfloat16 on a well-known GPU: the vendor's dense peak, so MFU compares across machines and papers. Any other GPU or
    dtype: the rate of one large matrix product, measured now in about 0.1 s; MFU then says how close the run comes to
    that product on this machine, and compares with nothing else. The cores of a CPU are often shared with others, whose
    work would move that number by more than it says.
    """
    if device.type == "cpu":
        return None
    if dtype == torch.bfloat16 and (published := published_peak(device_name(device))):
        return published, "published dense bfloat16 peak"
    return _matmul_rate(device, dtype), f"measured {str(dtype).removeprefix('torch.')} matmul"


def published_peak(gpu_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by the name that torch gives it; None when the table lacks it."""
    return next((flops for known, flops in PEAK_BF16_FLOPS.items() if known in gpu_name), None)


def _matmul_rate(gpu: torch.device, dtype: torch.dtype, n: int = 8192) -> float:
    """The best FLOP/s of (n, n) @ (n, n) over 0.1 s."""
    # A generator of its own: the run's random numbers must not depend on whether something was measured.
    generator = torch.Generator(gpu).manual_seed(0)
    a, b = torch.randn(2, n, n, device=gpu, dtype=dtype, generator=generator)
    best = float("inf")
    a @ b  # warm up
    end = time.perf_counter() + 0.1
    while best == float("inf") or time.perf_counter() < end:
        torch.cuda.synchronize(gpu)
        start = time.perf_counter()
        a @ b
        torch.cuda.synchronize(gpu)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def compile_problem(device: torch.device) -> str | None:
    """Why torch.compile does not work here (on a CPU it needs a C++ compiler and Python's headers), None if it does."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # anything from a missing compiler to an unsupported Python
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return None


def choose_compile(wanted: str, device: torch.device, world_size: int = 1) -> tuple[str | None, str]:
    """What to compile (model, blocks or None), and the words for the log; ValueError where `wanted` cannot be done."""
    if wanted == "off":
        return None, "off"
    if problem := compile_problem(device):
        if wanted == "auto":
            return None, f"off, as it does not work here ({problem})"
        raise ValueError(f"torch.compile does not work here ({problem}): use --compile off")
    if wanted == "auto":
        wanted = "blocks" if world_size > 1 and device.type == "cuda" else "model"
    return wanted, wanted


def keep_freed_memory() -> None:
    """Lets this process keep what it frees, for its next tensors, as PyTorch does on GPUs.

    glibc's malloc gives large blocks back, and a step on a CPU then gets the same pages from the system again and again
    (results/speed/cpu.md). Other libraries have their own ways and are left alone.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def rng_state() -> dict[str, torch.Tensor]:
    """Of this process's random number generators: the CPU's and, if there is one, its GPU's."""
    state = dict(cpu=torch.get_rng_state())
    return state | (dict(cuda=torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else {})


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


class AsyncScalars:
    """The numbers of a tensor, on their way to the host while the device goes on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.numbers = tensor.to("cpu", non_blocking=True)  # from CUDA: into pinned memory
        self.arrived, self.time = None, time.monotonic()
        if tensor.is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def wait(self) -> tuple[list[float], float]:
        """The numbers, and when they were there (or, if later, when this was called), on time.monotonic's clock."""
        if self.arrived is not None:
            self.arrived.synchronize()
            self.time = time.monotonic()
        return self.numbers.tolist(), self.time


def peak_memory(device: torch.device) -> int:
    """Most bytes held at once so far: by PyTorch's tensors on a GPU, by the whole process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB

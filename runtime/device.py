"""What the device is called and how fast it could be."""

import ctypes
import os
import platform
import re
import resource
import statistics
import time
from pathlib import Path

import torch

from configs.config import Config
from errors import require

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


def count_gpus() -> int:
    """Return how many GPUs torch can use. Raise ValueError for a GPU that it cannot use: the driver may be too old.

    Without this error, training would silently take the CPU. An empty CUDA_VISIBLE_DEVICES hides all GPUs on purpose,
    and torch's build for CPUs was somebody's choice.
    """
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    files = [str(path) for path in Path("/dev").glob("nvidia[0-9]*") if os.access(path, os.R_OK | os.W_OK)]
    unused = bool(files) and torch.version.cuda is not None and re.match(r"\s*(\d|GPU-|MIG-)", visible)
    advice = f"Update its driver, install a torch for an older CUDA than {torch.version.cuda}, or use --device cpu."
    require(not unused, f"{files[:1]} is a GPU that torch {torch.__version__} cannot use. {advice}")
    return 0


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype of the computation. Parameters are float32 whatever it is."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.dtype)


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str] | None:
    """Return the FLOP/s that model FLOPs utilisation (MFU) is a share of, and its source; None on a CPU.

    bfloat16 on a well-known GPU: the vendor's dense peak, so that MFU compares across machines and papers. Any other
    GPU or dtype: the rate of one large matrix product, measured now in about 0.1 s. A CPU's cores are often shared, and
    a measured rate would say little.
    """
    if device.type == "cpu":
        return None
    if dtype == torch.bfloat16 and (published := published_peak(device_name(device))):
        return published, "published dense bfloat16 peak"
    return matmul_rate(device, dtype), f"measured {str(dtype).removeprefix('torch.')} matmul"


def published_peak(gpu_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a GPU by the name that torch gives it; None when the table lacks it."""
    return next((flops for known, flops in PEAK_BF16_FLOPS.items() if known in gpu_name), None)


def matmul_rate(device: torch.device, dtype: torch.dtype, n: int = 8192, seconds: float = 0.1) -> float:
    """Return the FLOP/s of the product of two random (n, n) matrices, the median over so many seconds.

    Products of zeros would not do: they cost less power and run faster.
    """
    # A generator of its own: the run's random numbers must not depend on whether something was measured.
    generator = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, n, n, device=device, dtype=dtype, generator=generator)
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    times, end = [], time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < end:
        wait(device)
        began = time.perf_counter()
        a @ b
        wait(device)
        times.append(time.perf_counter() - began)
    return 2 * n**3 / statistics.median(times[3:])  # the first ones are slower


def compile_problem(device: torch.device) -> str | None:
    """Return why torch.compile does not work here (on a CPU it needs a C++ compiler and Python's headers), or None."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # anything from a missing compiler to an unsupported Python
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return None


def choose_compile(wanted: str, device: torch.device, world_size: int = 1) -> tuple[str | None, str]:
    """Return what to compile (model, blocks or None), and the words for the log that say why. Raise ValueError where
    `wanted` cannot be done."""
    if wanted == "off":
        return None, "off"
    if problem := compile_problem(device):
        if wanted == "auto":
            return None, f"off, as it does not work here ({problem})"
        raise ValueError(f"torch.compile does not work here ({problem}): use --compile off")
    if wanted == "auto":
        wanted = "blocks" if world_size > 1 and device.type == "cuda" else "model"
    return wanted, wanted


def fix_threads():
    """Make products on a CPU the same, bit for bit, from one start of this program to the next.

    oneMKL guarantees that only for a fixed number of threads and in a mode of its own (Intel, oneMKL Developer Guide,
    "Reproducibility Conditions"). By default it counts the cores at its first product.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO")  # read at the first product
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(wanted) if wanted.isdecimal() and int(wanted) > 0 else torch.get_num_threads())


def keep_freed_memory():
    """Make glibc's malloc keep freed memory for the next tensors, as PyTorch does on GPUs.

    By default it returns large blocks to the system, and every step asks for them again (results/speed/cpu.md).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def rng_state() -> dict[str, torch.Tensor]:
    """Return the state of the random number generators of this process: the CPU's and, if there is one, its GPU's."""
    state = dict(cpu=torch.get_rng_state())
    return state | (dict(cuda=torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else {})


def set_rng_state(state: dict[str, torch.Tensor]):
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


class AsyncScalars:
    """The numbers of a tensor, on their way to the host while the device goes on."""

    def __init__(self, tensor: torch.Tensor):
        self.numbers = tensor.to("cpu", non_blocking=True)  # from CUDA: into pinned memory
        self.arrived, self.time = None, time.monotonic()
        if tensor.is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def wait(self) -> tuple[list[float], float]:
        """Return the numbers, and when they were there (or, if later, when this was called), by time.monotonic."""
        if self.arrived is not None:
            self.arrived.synchronize()
            self.time = time.monotonic()
        return self.numbers.tolist(), self.time


def peak_memory(device: torch.device) -> int:
    """Return the most bytes held at once so far: by PyTorch's tensors on a GPU, by the whole process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB

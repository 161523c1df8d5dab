"""The device of a run: name, dtype, peak FLOP/s, compilation, threads, random numbers, memory."""

import ctypes
import os
import platform
import resource
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.torch_version import TorchVersion
from torch.utils.benchmark import Timer

from configs.config import Config

# Peak bfloat16 FLOP/s of dense products with float32 accumulation, from NVIDIA's data sheets and white papers. NVIDIA
# advertises twice as much, for 2:4 sparsity. The first entry whose name is part of the GPU's name is used.
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

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameter numbers of mallopt(3); the values are in bytes


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype of the computation. Parameters are always float32."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.dtype)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the device's peak FLOP/s, the denominator of model FLOPs utilisation (MFU).

    None: the dtype is not bfloat16, or the table lacks the device.
    """
    for known, flops in PEAK_BF16_FLOPS.items():
        if dtype == torch.bfloat16 and known in device_name(device):
            return flops
    return None


def matmul_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """Return the median FLOP/s of the product of two random (n, n) matrices.

    The matrices are random, because products of zeros cost less power and run faster.
    """
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    measured = timer.blocked_autorange(min_run_time=0.1)
    return 2 * n**3 / measured.median


def choose_ptxas(device: torch.device) -> tuple | None:
    """Make Triton use the newest installed ptxas for Hopper, unless TRITON_PTXAS_PATH names another ptxas.

    Return version and path of the ptxas for this GPU, or None without Triton. The search stays within PyTorch's major
    version of CUDA, because a driver loads code of newer minor versions, but not of newer major versions.
    """
    if not find_spec("triton"):
        return None
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.knobs import NvidiaTool

    major, minor = torch.cuda.get_device_capability(device)
    arch = 10 * major + minor
    if major == 9:
        cuda_major = str(torch.version.cuda).split(".")[0]
        tools = [get_ptxas(arch)]
        for folder in sys.path:
            for path in Path(folder).glob(f"nvidia/cu{cuda_major}/bin/ptxas"):
                tools.append(NvidiaTool.from_path(str(path)))
        newest = max(filter(None, tools), key=lambda tool: TorchVersion(tool.version))
        os.environ.setdefault("TRITON_PTXAS_PATH", newest.path)
    ptxas = get_ptxas(arch)
    return TorchVersion(ptxas.version), ptxas.path


def fix_threads():
    """Fix oneMKL's number of threads and reproducibility mode, so that each run computes the same bits on a CPU.

    By default oneMKL counts the cores at its first product. It guarantees the same bits only for a fixed number of
    threads and with MKL_CBWR set (Intel, oneMKL Developer Guide, "Reproducibility Conditions").
    """
    os.environ.setdefault("MKL_CBWR", "AUTO")  # oneMKL reads this at its first product
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(wanted) if wanted.isdecimal() and int(wanted) > 0 else torch.get_num_threads())


def keep_freed_memory():
    """Make glibc's malloc keep freed memory for the next tensors, as PyTorch does on GPUs.

    By default malloc returns large blocks to the system, and every step requests them again (results/speed/cpu.md).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def rng_state() -> dict:
    """Return the state of this process's random number generators: the CPU's, and the GPU's if one is in use."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict):
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: of PyTorch's tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB

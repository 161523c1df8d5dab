"""Joins the processes of a run: one with `python train_gpt.py`, N with `torchrun --nproc-per-node N train_gpt.py`."""

import os
import platform
import re
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch._inductor.config
import torch.distributed as dist

from errors import UserError, lacks_memory, require
from model.attention.sdpa import prefer_fast_sdpa
from runtime.device import choose_ptxas, fix_threads, keep_freed_memory

# Errors of gloo and NCCL about a rank that has died or does not answer.
LOST_RANK = r"(?i)gloo|nccl|connection|timed out|timeout|\bpeer\b|(?<!tl\.)store|broken pipe"


LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # variables that torchrun sets


@dataclass(frozen=True)
class Launch:
    """Numbers that torchrun gives to a process. A process without torchrun is the only one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def read_launch() -> Launch:
    """Return this process's numbers from the environment.

    Raise UserError for numbers that no launcher gives, such as a single variable that was left in a shell: this process
    would take itself for one of several, and would leave the work to ranks that do not exist.
    """
    numbers = {name: os.environ[name] for name in (*LAUNCHER, "LOCAL_WORLD_SIZE") if name in os.environ}
    if not numbers:
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        require(
            tasks == "1",
            f"srun started {tasks} tasks, and each of them would train alone. Start torchrun with srun (docs/train.md),"
            " or use --ntasks=1. For separate runs, unset SLURM_STEP_NUM_TASKS.",
        )
        return Launch()

    # MASTER_ADDR and MASTER_PORT are left to torch.distributed, which names a missing one.
    try:
        launch = Launch(*(int(numbers[name]) for name in LAUNCHER))
        possible = 0 <= launch.rank < launch.world_size and 0 <= launch.local_rank < launch.world_size
        possible = possible and int(numbers.get("LOCAL_WORLD_SIZE", 1)) > 0
    except (KeyError, ValueError):  # missing, or no number
        possible = False
    remedy = "Start several processes with torchrun, or unset RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE."
    require(possible, f"The environment has {numbers}, which no launcher gives. {remedy}")
    return launch


@dataclass(frozen=True)
class World:
    """This process's rank and device, and the number of processes. A single process has no process group."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: torch.Tensor):
        """Replace a tensor by its sum over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor)

    def gather(self, value) -> list:
        """Return the values of all ranks, on all ranks."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values


def start_processes(device: str, timeout: float = 600) -> World:
    """Join the other processes that torchrun started, and choose a device. device: "auto", "cpu" or "cuda".

    Collectives use gloo for CPU tensors and NCCL for CUDA tensors. So a collective on a CPU tensor never waits for the
    GPU. timeout: seconds to wait for the other ranks. Raise ValueError if there is no GPU for this process, and as
    read_launch does.
    """
    # 1. Read torchrun's numbers.
    launch = read_launch()
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise UserError("--device cuda needs a GPU, but torch finds none. Use --device cpu.")
    if gpus and launch.local_rank >= gpus:
        raise UserError(f"process {launch.local_rank + 1} has no GPU. Use --nproc_per_node={gpus}.")

    # 2. Set up the device and the compiler.
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:  # by default, every rank uses as many as the machine has
        workers = os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch._inductor.config.compile_threads = max(1, min(32, workers))
    chosen = torch.device("cuda", launch.local_rank) if gpus else torch.device("cpu")
    world = World(launch.rank, launch.world_size, chosen)
    if gpus:
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            # Blocks of a fixed size would leave unused gaps when the sequence length changes.
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        torch.cuda.set_device(chosen)
        prefer_fast_sdpa(chosen)
        choose_ptxas(chosen)
        # FlexAttention needs fused multiply-adds for its speed, and Triton 3.10 stops making them by default.
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    else:
        keep_freed_memory()
        fix_threads()

    # 3. Join the other processes.
    if world.world_size > 1:
        limit = timedelta(seconds=timeout)
        store, *_ = next(dist.rendezvous("env://", timeout=limit))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # After a restart, torch 2.13 hands out the same store, with the addresses of dead processes in it.
            store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpus else "cpu:gloo",
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=limit,
            device_id=chosen if gpus else None,  # NCCL connects now, not in the first backward pass
        )
    return world


def describe_failure(error: BaseException) -> tuple | None:
    """Return exit code and message for an error of a file, of memory or of a lost rank, or None for other errors."""
    if isinstance(error, OSError):
        return 2, str(error)
    reason = " ".join(str(error).split())[:300]
    several = dist.is_initialized() and dist.get_world_size() > 1
    rank = f"rank {dist.get_rank()} on {platform.node()}: " if several else ""
    if lacks_memory(error):
        return 2, f"{rank}out of memory ({reason}). Lower --micro_batch_tokens."
    if several and isinstance(error, RuntimeError) and re.search(LOST_RANK, reason):
        return 1, f"{rank}another rank died or hangs ({reason}). Read the output of the other ranks."
    return None

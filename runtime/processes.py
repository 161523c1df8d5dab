"""One process or many: `python train_gpt.py`, or `torchrun --nproc-per-node N train_gpt.py`."""

import os
import platform
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from errors import exit_on_user_error, require
from model.attention.sdpa import prefer_fast_sdpa
from runtime.device import count_gpus, fix_threads, keep_freed_memory

# How gloo and NCCL report a peer that is gone or silent.
LOST_RANK = r"(?i)gloo|nccl|connection|timed out|timeout|peer|store|broken pipe"


@dataclass(frozen=True)
class World:
    """This process among the others. A world of one has no process group."""

    rank: int
    local_rank: int  # rank among the processes of this machine
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensors: list[torch.Tensor]):
        """Replace tensors by their sums over all processes."""
        if self.world_size > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

    @classmethod
    def alone(cls, device: torch.device) -> Self:
        return cls(0, 0, 1, device)


def start_processes(device: str) -> World:
    """Join the other processes that torchrun started, if any, and take a device ("auto", "cpu" or "cuda").

    CPU tensors travel by gloo and CUDA tensors by nccl, so a collective on a CPU tensor never waits for the GPU.
    Raise ValueError (see `fail_together`) when there is no GPU for this process, or one that torch cannot use.
    """
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    gpus, problem = 0, None
    try:
        gpus = 0 if device == "cpu" else count_gpus()
    except ValueError as error:  # raised below, when the other ranks can be told
        problem = str(error)
    on_gpu = local_rank < gpus
    own_device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    world = World(rank, local_rank, world_size, own_device)
    if on_gpu:
        torch.cuda.set_device(own_device)
        prefer_fast_sdpa(own_device)
        # Our Triton kernels need fused multiply-adds, and Triton 3.10 stops making them by default.
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    else:
        keep_freed_memory()
        fix_threads()
    if world_size > 1:
        backend, store = "cpu:gloo,cuda:nccl" if on_gpu else "cpu:gloo", store_of_this_attempt()
        first_step = timedelta(minutes=30)  # it compiles, on one rank minutes longer than on another
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=first_step)
    machines.update(enumerate(gather(world, platform.node())))
    with fail_together(world):
        require(problem is None, problem)
        require(gpus or device != "cuda", "CUDA was asked for, but torch sees no GPU. Use --device cpu.")
        advice = f"Start torchrun with --nproc-per-node {gpus}."
        require(on_gpu or not gpus, f"There are more processes than GPUs on one machine. {advice}")
    return world


machines: dict[int, str] = {}  # rank -> host name, for the message about a lost rank


def with_machine(rank: int) -> str:
    """Return "rank 2", or "rank 2 (on node2)" where the ranks run on several machines."""
    return f"rank {rank} (on {machines[rank]})" if len({*machines.values()}) > 1 else f"rank {rank}"


def store_of_this_attempt(patience: float = 1800) -> dist.Store:
    """Return the store through which the processes exchange their addresses.

    After a restart, torchrun hands out the store of the attempt before, with the addresses of dead processes in it
    (torch 2.13). So rank 0 gives each attempt a name and waits until every rank has answered to it.

    Raise ValueError after `patience` seconds without the other ranks.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=patience)))
    name, end = uuid.uuid4().hex, time.monotonic() + patience
    with missing_ranks(patience):
        if rank == 0:
            store.set("attempt", name)
            answers = [store.get(f"{name} {other}").decode() for other in range(1, world_size)]
            store.set(f"{name} answers", " ".join(answers))
            return dist.PrefixStore(name, store)
        while time.monotonic() < end:
            attempt = store.get("attempt").decode()  # this may still be the name of the attempt before
            store.set(f"{attempt} {rank}", name)
            if store.check([f"{attempt} answers"]) and name in store.get(f"{attempt} answers").decode():
                return dist.PrefixStore(attempt, store)
            time.sleep(0.01)
        raise dist.DistStoreError


@contextmanager
def missing_ranks(seconds: float) -> Iterator[None]:
    """Turn a time-out of the store into a ValueError that says what to do."""
    try:
        yield
    except dist.DistStoreError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        advice = "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun may lose machines."
        raise ValueError(f"Not all ranks met at {address} in {seconds:.0f} s. {advice}") from error


@contextmanager
def fail_together(world: World) -> Iterator[None]:
    """Let every rank get past the end of a block of set-up, or every rank leave, when it fails on some of them.

    When a rank raises ValueError or OSError in the block, the main process prints the message (the lowest rank's, when
    several fail) and all exit with code 2. In a world of one the error passes to the caller as it is. Every rank must
    reach the end of the block, so no collective may stand inside it.
    """
    if world.world_size == 1:
        yield
        return
    error = None
    try:
        yield
    except (ValueError, OSError) as raised:
        error = str(raised)
    failures = [message for message in gather(world, error) if message is not None]
    if failures:
        if world.is_main:
            print(f"error: {failures[0]}", file=sys.stderr, flush=True)
        dist.barrier()  # torchrun kills the rest as soon as one process leaves: the message comes first
        stop_processes(world)
        raise SystemExit(2)


@contextmanager
def user_errors(world: World | None = None) -> Iterator[None]:
    """End the program with one line and exit code 2 for ValueError and OSError in this block, on all ranks of `world`.

    With a world, no collective may stand inside the block (see fail_together).
    """
    with exit_on_user_error(), fail_together(world) if world else nullcontext():
        yield


def gather(world: World, value: Any) -> list[Any]:
    """Return the values of all ranks, on all ranks."""
    values = [value]
    if world.world_size > 1:
        values *= world.world_size
        dist.all_gather_object(values, value)
    return values


def limit_waiting(world: World, seconds: float):
    """Let a rank wait so long for the others from now on; until then it is half an hour, for compilation."""
    if world.world_size > 1:
        for group in dist.distributed_c10d._world.pg_map:
            for device in group._device_types:
                # NCCL ends the process when its time is up: gloo, which tells us, has to be first.
                limit = timedelta(seconds=seconds * (1 if device.type == "cpu" else 2))
                group._get_backend(device)._set_default_timeout(limit)


@contextmanager
def exit_on_failure(advice: str = "Lower --micro_batch_tokens.") -> Iterator[None]:
    """End the process with one line when a file cannot be read or written, memory runs out, or ranks are lost."""
    try:
        yield
    except Exception as error:
        leave_on_failure(error, advice)
        raise


def leave_on_failure(error: BaseException, advice: str, before_exit: Callable[[], object] = lambda: None):
    """End the process with one line if the error is a file's (exit code 2), memory's (2) or a lost rank's (1).

    advice: what to do when memory runs out. before_exit: called before the process ends. Return for any other error.
    The exit skips Python's clean-up: wandb would fail on the same full disk, and collectives wait for lost ranks.
    """
    reason = " ".join(str(error).split())[:300]
    several = dist.is_initialized() and dist.get_world_size() > 1
    rank = f"{with_machine(dist.get_rank())}: " if several else ""
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in reason
    if isinstance(error, OSError):
        code, line = 2, str(error)
    elif out_of_memory:
        code, line = 2, f"{rank}out of memory ({reason}). {advice}"
    elif several and isinstance(error, RuntimeError) and re.search(LOST_RANK, reason):
        code, line = 1, f"{rank}another rank died or hangs ({reason}). See the output of the other ranks."
    else:
        return
    print(f"error: {line}", file=sys.stderr, flush=True)
    with suppress(OSError):
        before_exit()
    os._exit(code)


def stop_processes(world: World):
    """Leave the process group."""
    if world.world_size > 1:
        dist.destroy_process_group()

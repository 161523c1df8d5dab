"""One process or many: `python train_gpt.py`, or `torchrun --nproc-per-node N train_gpt.py`."""

import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from errors import require
from runtime.device import count_gpus, fix_threads, keep_freed_memory


@dataclass(frozen=True)
class World:
    """This process among the others. A world of one has no process group.

    context_size ranks in a row may share each sequence (model/context.py); together they count as one for the data.
    """

    rank: int
    local_rank: int  # rank among the processes of this machine
    world_size: int
    device: torch.device
    context_size: int = 1
    context: dist.ProcessGroup | None = None  # the ranks that share this rank's sequences

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.rank // self.context_size

    @property
    def data_size(self) -> int:
        return self.world_size // self.context_size

    def own_tokens(self, length: int) -> slice:
        """Return which tokens of a sequence this rank holds."""
        share = length // self.context_size
        first = self.rank % self.context_size * share
        return slice(first, first + share)

    def sum(self, tensors: list[torch.Tensor]):
        """Replace tensors by their sums over all processes."""
        if self.world_size > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

    @classmethod
    def alone(cls, device: torch.device) -> Self:
        return cls(0, 0, 1, device)


def start_processes(device: str, context_size: int = 1) -> World:
    """Join the other processes that torchrun started, if any, and take a device ("auto", "cpu" or "cuda").

    context_size: how many of them share a sequence.

    CPU tensors travel by gloo and CUDA tensors by nccl, so a collective on a CPU tensor never waits for the GPU.
    Raise ValueError (see `fail_together`) when there is no GPU for this process, or one that torch cannot use.
    """
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    gpus, problem = 0, None
    try:
        gpus = 0 if device == "cpu" else count_gpus()
    except ValueError as error:  # raised below, once the others can be told
        problem = str(error)
    on_gpu = local_rank < gpus
    own_device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    world = World(rank, local_rank, world_size, own_device, context_size)
    if on_gpu:
        torch.cuda.set_device(own_device)
        # Our Triton kernels count on fused multiply-adds, which Triton 3.9 warns that 3.10 will no longer make unasked.
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
        require(gpus or device != "cuda", "CUDA was asked for but torch sees no GPU: use --device cpu")
        mend = f"start torchrun with --nproc-per-node {gpus}"
        require(on_gpu or not gpus, f"more processes than GPUs on one machine: {mend}")
        words = f"context_parallel {context_size} does not divide the number of processes, {world_size}"
        require(world_size % context_size == 0, words)
    if context_size == 1:
        return world
    groups = [dist.new_group(range(first, first + context_size)) for first in range(0, world_size, context_size)]
    return replace(world, context=groups[world.data_rank])


machines: dict[int, str] = {}  # where each rank runs, for what is said about one that is lost


def with_machines(ranks: Iterable[int]) -> str:
    """Return the ranks in words, "rank 2, 3 (on node2)", with their machines where there are several."""
    ranks = list(ranks)
    words = f"rank {', '.join(map(str, ranks))}"
    names = dict.fromkeys(machines[rank] for rank in ranks if rank in machines)
    return f"{words} (on {', '.join(names)})" if len({*machines.values()}) > 1 else words


def store_of_this_attempt(patience: float = 1800) -> dist.Store:
    """Return what the processes tell one another their addresses through.

    After a restart torchrun gives them the store in which those of the attempt before it, who are gone, still stand
    (torch 2.13). So rank 0 gives each attempt a name, and waits until all ranks have answered to it.

    Where another machine has become the first one, torchrun may even send the ranks to the store of a machine that is
    no longer that. Raise ValueError, which says how to prevent it, after `patience` seconds without the others.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=patience)))
    own, end = uuid.uuid4().hex, time.monotonic() + patience
    with missing_ranks(patience):
        if rank == 0:
            store.set("attempt", own)
            answers = [store.get(f"{own} {other}").decode() for other in range(1, world_size)]
            store.set(f"{own} answers", " ".join(answers))
            return dist.PrefixStore(own, store)
        while time.monotonic() < end:
            attempt = store.get("attempt").decode()  # perhaps still that of before
            store.set(f"{attempt} {rank}", own)
            if store.check([f"{attempt} answers"]) and own in store.get(f"{attempt} answers").decode():
                return dist.PrefixStore(attempt, store)
            time.sleep(0.01)
        raise dist.DistStoreError


@contextmanager
def missing_ranks(seconds: float) -> Iterator[None]:
    """Raise ValueError where the store says that what was waited for has not come."""
    try:
        yield
    except dist.DistStoreError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        mend = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun may lose machines"
        raise ValueError(f"not all ranks met at {where} in {seconds:.0f} s: {mend}") from error


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
def exit_on_failure(
    advice: str = "lower --micro_batch_tokens, or share sequences between GPUs with --context_parallel",
    finish: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """End the process with one line when, in this block, a file cannot be read or written or memory runs out (exit code
    2; advice: what helps then), or when other ranks do not answer (1). finish: called before such an end."""
    try:
        yield
    except OSError as error:
        code, line = 2, str(error)  # in an orderly end, wandb would fail on the same full disk, with a hundred lines
    except (RuntimeError, MemoryError) as error:
        several = dist.is_initialized() and dist.get_world_size() > 1
        rank = f"{with_machines([dist.get_rank()])} is" if several else "it is"
        reason = " ".join(str(error).split())[:300]
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in reason:
            code, line = 2, f"{rank} out of memory ({reason}): {advice}"
        elif several and (silent := silent_ranks()):
            line = f"{rank} without an answer from {with_machines(silent)} ({reason}): "
            line += "it died or hangs; see what it said itself"
            code = 1  # and an orderly end would wait for the ranks that are gone
        else:
            raise
    else:
        return
    print(f"error: {line}", file=sys.stderr, flush=True)
    with suppress(OSError):
        finish()
    os._exit(code)


def silent_ranks(seconds: float = 5) -> list[int]:
    """Return the ranks that have not also found out within `seconds` that something is wrong, when something is.

    They tell one another through rank 0's machine. When that does not answer, rank 0 is what is lost.
    """
    store, silent = dist.distributed_c10d._get_default_store(), list(range(dist.get_world_size()))

    def ask():
        store.set(f"failed {dist.get_rank()}", "")
        end = time.monotonic() + seconds
        while silent and time.monotonic() < end:
            silent[:] = [rank for rank in silent if not store.check([f"failed {rank}"])]
            time.sleep(0.05)

    lost = []
    asking = threading.Thread(target=lambda: lost.extend(failed(ask)), daemon=True)  # of a cut cable it is not told
    asking.start()
    asking.join(2 * seconds)
    return [0] if lost or asking.is_alive() else silent


def failed(function: Callable) -> list[Exception]:
    """Call the function and return the error that it raised, if any."""
    try:
        function()
    except RuntimeError as error:
        return [error]
    return []


def stop_processes(world: World):
    """Leave the process group."""
    if world.world_size > 1:
        dist.destroy_process_group()

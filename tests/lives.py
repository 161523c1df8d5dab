"""Runs of train_gpt.py with a fault at a chosen call.

`server` starts a process that imports everything once, because imports take longer than the runs. It forks a process
for each run, or for each rank of a run. Under torchrun, `lives.py FAULT ARGUMENTS` is one rank.

A fault is a dict and happens before a call. "stage": an entry of STAGES. "count": number of the call, from 1. "do": a
key of ACTIONS. "rank": the rank, 0 if it is not given. "attempts": torchrun's attempts, from 0.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from commands import ROOT, environment

STAGES = "batch step validation log metrics comparison".split()
STAGES += [f"checkpoint {part}" for part in ("write", "fsync", "rename", "deletion")]

HOLDING = """  # Python runs this when it starts
import os, signal, sys, time
replace = os.replace

def hold(partial, path):
    replace(partial, path)
    stop = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    while str(path).endswith(".pt") and os.path.exists({file}) and not stop.signal_name:
        time.sleep(0.01)

if any("train_gpt.py" in word for word in sys.orig_argv):
    os.replace = hold
"""


def holding(folder, file="__file__"):
    """Return environment variables that make train_gpt.py wait after each checkpoint.

    They wait until they get a signal or `file` is gone. So a fault never comes too late, however slow the machine is.
    file: a Python expression; folder/sitecustomize.py unless given.
    """
    (folder / "sitecustomize.py").write_text(HOLDING.format(file=file))
    return dict(PYTHONPATH=str(folder))


def run_ranks(work, worlds, folder, *arguments):
    """Return what work(rank, world, *arguments) returns on each rank, by world size. The largest world is the first."""
    import torch
    from torch.multiprocessing import start_processes

    start_processes(be_rank, (work, worlds, folder, arguments), nprocs=max(worlds), start_method="fork")
    return {world: [torch.load(folder / f"{world}.{rank}.pt") for rank in range(world)] for world in worlds}


def be_rank(rank, work, worlds, folder, arguments):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    for world in sorted(worlds, reverse=True):
        if rank < world:
            dist.init_process_group("gloo", init_method=f"file://{folder}/group{world}", rank=rank, world_size=world)
            torch.save(work(rank, world, *arguments), folder / f"{world}.{rank}.pt")
            dist.barrier()
            dist.destroy_process_group()


@contextmanager
def server():
    """Start the server. Yield a function that makes it run train_gpt.py."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, __file__], cwd=ROOT, env=environment(), **pipes) as process:

        def live(argv, output, fault=None, processes=1, code=0):
            """Return the output of a run, which must exit with `code` (negative: the signal's number).

            processes: more than 1 run under torchrun's agent, whose exit code is 1 when a rank fails.
            """
            request = dict(argv=argv, output=str(output), fault=fault, processes=processes)
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            found, text = os.waitstatus_to_exitcode(int(process.stdout.readline())), Path(output).read_text()
            assert found == code, f"exit code {found}, not {code}:\n{text}"
            return text

        yield live


# ---- in the other process --------------------------------------------------------------------------------------------


def serve():
    import torch._dynamo  # noqa: F401 (optimizers import it)
    import torch.distributed.launcher.api  # noqa: F401

    import train_gpt  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        with open(request["output"], "w") as file:  # by way of cat: a full disk is one of the run alone
            output = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
        if (pid := os.fork()) == 0:
            for descriptor in (1, 2):
                os.dup2(output.stdin.fileno(), descriptor)
            output.stdin.close()
            leave(launch(request["argv"], request["fault"], request["processes"]))
        output.stdin.close()
        status = os.waitpid(pid, 0)[1]
        output.wait()
        print(status, flush=True)


def launch(argv, fault, processes):
    """Run the ranks as torchrun does, but in forks. Return torchrun's exit code, or of one process, its own."""
    if processes == 1:
        return live(argv, fault)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    address = dict(rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id=str(os.getpid()))
    config = LaunchConfig(1, 1, processes, max_restarts=0, start_method="fork", **address)
    try:
        elastic_launch(config, rank_of_several)(argv, fault)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def rank_of_several(argv, fault):
    if code := live(argv, fault):
        leave(code)


def leave(code):
    """End the process without Python's clean-up, which belongs to the server."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def live(argv, fault):
    """Run train_gpt.py in this process and return its exit code."""
    import train_gpt

    rank, attempt = (int(os.environ.get(name, 0)) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    if fault and rank == fault.get("rank", 0) and attempt in fault.get("attempts", [0]):
        install(fault)
    sys.argv = ["train_gpt.py", *argv]
    try:
        train_gpt.main()
    except SystemExit as error:
        return error.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    return 0


def install(fault):
    from data.loader import TrainLoader
    from measure.validation import Validation
    from optim.sharded import Optimizers
    from runtime import checkpoint, metrics, run, run_folder

    calls = 0

    def patch(stage, owner, name, counts=lambda *args: True):
        function = getattr(owner, name)

        def call(*args, **options):
            nonlocal calls
            if stage == fault["stage"] and counts(*args):
                calls += 1
                if calls == fault["count"]:
                    ACTIONS[fault["do"]](fault, *args)
            return function(*args, **options)

        setattr(owner, name, call)

    def of_a_checkpoint(*args):
        return any(".pt" in str(os.readlink(f"/proc/self/fd/{a}") if type(a) is int else a) for a in args)

    patch("batch", TrainLoader, "__next__")
    patch("step", Optimizers, "step")
    patch("validation", Validation, "token_losses")
    patch("log", run_folder, "append")
    patch("metrics", metrics, "append")
    patch("comparison", run, "require_same_parameters")
    patch("checkpoint write", checkpoint, "write_with_checksum")
    patch("checkpoint fsync", os, "fsync", of_a_checkpoint)
    patch("checkpoint rename", os, "replace", of_a_checkpoint)
    patch("checkpoint deletion", Path, "unlink", lambda path, **options: path.suffix == ".pt")


def poison(value):
    def do(fault, *args):
        from model.gpt import GPT

        forward = GPT.forward

        def poisoned(self, *args, **options):
            GPT.forward = forward
            loss = forward(self, *args, **options)
            if value != "gradient":
                return loss * float(value)
            loss.register_hook(lambda gradient: gradient * float("nan"))
            return loss

        GPT.forward = poisoned

    return do


def flip_bit(tensor, place):
    """Flip a bit of a contiguous tensor. place: number of the bit in memory, modulo their number."""
    import torch

    byte, bit = divmod(place % (8 * tensor.nbytes), 8)
    tensor.detach().view(-1).view(torch.uint8)[byte] ^= 1 << bit


def flip(fault, optimizers, *rest):
    """Flip one bit of the weights, at stage "comparison"."""
    flip_bit(optimizers.all_buckets()[1].params[0], fault["place"])


def use_memory(fault, *args):
    import torch

    torch.ones(2**46)


def hang(fault, *args):
    """Wait for ever. SIGTERM ends the process, because torchrun waits 30 s for a process that ignores it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(1e6)


def fill_disk(fault, *args):
    """Let every write beyond so many bytes of a file fail, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (fault["bytes"], resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def send(*numbers):
    return lambda fault, *args: [signal.raise_signal(number) for number in numbers]


ACTIONS = dict(
    kill=send(signal.SIGKILL),
    **{name: send(signal.Signals[name]) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")},
    twice=send(signal.SIGINT, signal.SIGINT),
    hang=hang,
    memory=use_memory,
    nan=poison("nan"),
    inf=poison("inf"),
    gradient=poison("gradient"),
    flip=flip,
    full=fill_disk,
)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        leave(live(sys.argv[2:], json.loads(sys.argv[1])))
    serve()

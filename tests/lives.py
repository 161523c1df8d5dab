"""Runs of train_gpt.py to which something happens at a chosen moment.

`python tests/lives.py` reads lives as lines of JSON, {"argv": ..., "fault": ..., "output": file}, forks a process for
each (the imports are done by then) and answers, when it has ended, with its exit status. As a script under
torchrun it is one life: `lives.py FAULT train_gpt's arguments`.

A fault is {"stage": one of STAGES, "count": which time it is entered, "do": one of ACTIONS, "moment": 0 to 1, where in
the stage, "rank": only there, "seconds": long a stage takes at most, "disk_seconds": that each checkpoint takes longer
to write, on any rank}. It happens in the stage, at latest at its end.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAGES = [
    "step", "validation", "log write", "metrics write", "checkpoint write", "fsync of the checkpoint",
    "rename of the checkpoint", "fsync of its folder", "deletion of an older one",
]  # fmt: skip


HOLDING = """  # Python runs this when it starts
import os, signal, sys, time
replace = os.replace

def hold(partial, path):
    replace(partial, path)
    stop = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    while str(path).endswith(".pt") and os.path.exists({file}) and not stop.signal_name:
        time.sleep(0.01)

if any("{part}" in word for word in sys.orig_argv):
    os.replace = hold
"""


def holding(folder, part="train_gpt.py", file="__file__"):
    """A variable of the environment. The commands under it of which a word has this part stop and wait after a
    checkpoint, before the next, until they are told to end, or killed, or a file is gone: on a busy machine too they
    cannot be further than a test thinks. file: its name, in Python; folder/sitecustomize.py unless given."""
    (folder / "sitecustomize.py").write_text(HOLDING.format(part=part, file=file))
    return dict(PYTHONPATH=str(folder))


class Lives:
    """Starts them, from tests: `with Lives() as lives: pid = lives.start(...); lives.wait(pid)`."""

    def __enter__(self):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
        environment |= dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.server = subprocess.Popen([sys.executable, __file__], cwd=ROOT, env=environment, text=True, **pipes)
        return self

    def __exit__(self, *exception):
        self.server.stdin.close()
        self.server.wait(600)

    def live(self, argv, output, fault=None):
        """Exit code (negative: the signal's number) and what was said."""
        words = dict(argv=[str(word) for word in argv], output=str(output), fault=fault or {})
        self.server.stdin.write(json.dumps(words) + "\n")
        self.server.stdin.flush()
        return os.waitstatus_to_exitcode(int(self.server.stdout.readline())), Path(output).read_text()


# ---- in the other process --------------------------------------------------------------------------------------------


def serve():
    import torch._dynamo  # noqa: F401 (what optimizers import takes longer than a life)

    import train_gpt  # noqa: F401

    for line in sys.stdin:
        words = json.loads(line)
        if (pid := os.fork()) == 0:
            output = os.open(words["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            live(words["argv"], words["fault"])
        print(os.waitpid(pid, 0)[1], flush=True)


def live(argv, fault):
    import train_gpt
    from runtime import checkpoint

    if seconds := fault and fault.get("disk_seconds"):
        write = checkpoint.write_with_checksum
        checkpoint.write_with_checksum = lambda *args: (time.sleep(seconds), write(*args))
    if fault and int(os.environ.get("RANK", 0)) == fault.get("rank", 0) and is_due(fault):
        install(fault)
    sys.argv = ["train_gpt.py", *argv]
    code = 0
    try:
        train_gpt.main()
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_due(fault):
    """Whether this attempt of torchrun, one after each restart, is one that the fault names."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) in fault.get("attempts", [0])


def install(fault):
    import train_gpt
    from runtime import checkpoint, metrics, run_folder, validation

    saver = None  # the thread that saves a checkpoint, while it does
    syncs = 0
    save, fsync, replace, unlink = checkpoint.save_checkpoint, os.fsync, os.replace, Path.unlink

    savers, begin = [], checkpoint.BackgroundSaver.save

    def begun(saver, *args, **kwargs):
        savers.append(saver)
        begin(saver, *args, **kwargs)

    checkpoint.BackgroundSaver.save = begun

    def saving():
        return saver == threading.get_ident()

    def saved(*args, **kwargs):
        nonlocal saver, syncs
        saver, syncs = threading.get_ident(), 0
        try:
            return save(*args, **kwargs)
        finally:
            saver = None

    def synced(descriptor):
        nonlocal syncs
        syncs += saving()
        name = {1: "fsync of the checkpoint", 2: "fsync of its folder"}.get(syncs) if saving() else None
        return within(name, lambda: fsync(descriptor))

    checkpoint.save_checkpoint = saved
    os.fsync = synced
    os.replace = lambda *paths: within("rename of the checkpoint" if saving() else None, lambda: replace(*paths))
    Path.unlink = lambda path, missing_ok=False: within(
        "deletion of an older one" if saving() and path.suffix == ".pt" else None, lambda: unlink(path, missing_ok)
    )
    write = checkpoint.torch.save
    checkpoint.torch.save = lambda *args, **kwargs: within(
        "checkpoint write" if saving() else None, lambda: write(*args, **kwargs)
    )
    for module, name in ((run_folder, "log write"), (metrics, "metrics write")):
        module.append = staged(name, module.append)
    made = []  # steps
    one_step = staged("step", train_gpt.train_step)
    train_gpt.train_step = lambda *args: (one_step(*args), made.append(1))[0]
    validation.Validation.losses = staged("validation", validation.Validation.losses)
    compare = train_gpt.require_same_parameters

    def compared(optimizers, *rest):
        install.optimizers = optimizers
        return within("comparison", lambda: compare(optimizers, *rest))

    train_gpt.require_same_parameters = compared
    entered = 0

    def within(name, function):
        nonlocal entered
        if name != fault["stage"]:
            return function()
        entered += 1
        if entered != fault["count"]:
            return function()
        done = threading.Event()

        def happen():
            if not done.is_set():
                done.set()
                if fault["stage"] in ("step", "comparison"):  # of which it is known what is saved by then
                    for one in savers[-1:]:
                        one.finish()
                before = len(made)
                ACTIONS[fault["do"]](fault)
                print(f"\nit happened after {before} to {len(made)} steps")

        if fault.get("moment", 0) == 0:
            happen()
        else:
            threading.Timer(fault["moment"] * fault.get("seconds", 0.02), happen).start()
        try:
            return function()
        finally:
            happen()

    install.within = within


def staged(name, function):
    return lambda *args, **kwargs: install.within(name, lambda: function(*args, **kwargs))


def use_memory(fault):
    import torch

    torch.ones(2**46)


def poison(value):
    def do(fault):
        from model.gpt import GPT

        forward, calls = GPT.forward, []

        def poisoned(self, *args, **kwargs):
            loss = forward(self, *args, **kwargs)
            calls.append(1)
            if len(calls) > 1 or loss.dim():
                return loss
            if value == "gradient":
                loss.register_hook(lambda gradient: gradient * float("nan"))
                return loss
            return loss * float(value)

        GPT.forward = poisoned

    return do


def flip(fault):
    """One bit of the weights."""
    import torch

    parameter = install.optimizers.all_buckets()[fault["bucket"]].params[0]
    parameter.detach().view(torch.int32).flatten()[fault["bit"]] ^= 1 << fault["bit"]


def fill_disk(fault):
    """But for some bytes."""
    with open(Path(fault["disk"]) / "filler", "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(max(0, file.tell() - fault["leave"]))


def make_read_only(fault):
    for place in fault["places"]:
        subprocess.run(["mount", "--bind", place, place], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)


ACTIONS = dict(
    kill=lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    SIGTERM=lambda fault: os.kill(os.getpid(), signal.SIGTERM),
    SIGINT=lambda fault: os.kill(os.getpid(), signal.SIGINT),
    SIGUSR1=lambda fault: os.kill(os.getpid(), signal.SIGUSR1),
    twice=lambda fault: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)],
    hang=lambda fault: time.sleep(1e6),
    memory=use_memory,
    nan=poison("nan"),
    inf=poison("inf"),
    gradient=poison("gradient"),
    flip=flip,
    full=fill_disk,
    read_only=make_read_only,
)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        live(sys.argv[2:], json.loads(sys.argv[1]))
    serve()

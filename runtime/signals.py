"""A request to stop: SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 end a run after the step under way, with a checkpoint."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress

import psutil
import torch
import torch.distributed as dist

from runtime.processes import World

INTERRUPTED = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again later"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def exit_code() -> int:
    """Return INTERRUPTED, so that Slurm or a shell can start the run again, or 0 under torchrun.

    torchrun takes every other code for a failure, and would start the processes again itself.
    """
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else INTERRUPTED


class StopRequest:
    """Receives the signals within `with StopRequest() as stop:`.

    Until `can_save` is set, a signal ends this process and its children at once. A second Ctrl-C does so at any time.
    mark: called with the signal's name before such an end, to record in the run folder why the run is not finished.
    """

    def __init__(self):
        self.signal_name: str | None = None  # the signal that was received
        self.can_save = False
        self.mark: Callable[[str], object] = lambda name: None

    def __enter__(self):
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object):
        again = number == signal.SIGINT and self.signal_name == "SIGINT"
        self.signal_name = signal.Signals(number).name
        if again or not self.can_save:
            with suppress(OSError):
                self.mark(self.signal_name)
            for process in psutil.Process().children(recursive=True):  # compilers among them
                with suppress(psutil.Error):  # it has ended meanwhile
                    process.kill()
            if again:
                os._exit(130)
            os.write(2, f"{self.signal_name}: stopped; there was nothing to save\n".encode())
            os._exit(exit_code())

    def is_set(self, world: World) -> bool:
        """Return whether any rank has received a signal. All ranks must ask the same number of times."""
        received = torch.tensor(int(self.signal_name is not None))  # on the CPU, so that nobody waits for a GPU
        if world.world_size > 1:
            dist.all_reduce(received, op=dist.ReduceOp.MAX)
        return bool(received)

"""A request to stop: SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 end a run after the step under way, with a checkpoint."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress

import psutil
import torch
import torch.distributed as dist

from configs.interrupt import SIGNALS, leave
from runtime.processes import World


class StopRequest:
    """Receives the signals within `with StopRequest() as stop:`. Until `can_save` is set there is nothing to save, and
    a signal ends this process, and all that it has started, at once; so does a second Ctrl-C at any time.

    mark: called before such an end with the signal's name, to leave word for those who ask why the run is not finished.
    """

    def __init__(self):
        self.signal_name: str | None = None  # of the signal that was received
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
            kill_descendants()
            if again:
                os._exit(130)
            leave(number, frame)

    def is_set(self, world: World) -> bool:
        """Return whether any rank has received a signal. All ranks must ask the same number of times."""
        received = torch.tensor(int(self.signal_name is not None))  # on the CPU, so that nobody waits for a GPU
        if world.world_size > 1:
            dist.all_reduce(received, op=dist.ReduceOp.MAX)
        return bool(received)


def kill_descendants():
    """End all processes that this one has started, and theirs: compilers among them."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # ended meanwhile
            process.kill()

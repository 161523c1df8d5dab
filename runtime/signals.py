"""Being told to stop. SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 end a run after the step under way, with a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from configs.interrupt import SIGNALS, leave
from runtime.processes import World


class StopRequest:
    """Hears the signals within `with StopRequest() as stop:`. Until `holds` is set there is nothing to save, and a
    signal ends this process, and all that it has started, at once; so does a second Ctrl-C at any time.

    mark: called before such an end with the signal's name, to leave word for those who ask why the run is not finished.
    """

    def __init__(self) -> None:
        self.heard: str | None = None  # the signal's name
        self.holds = False
        self.mark: Callable[[str], object] = lambda name: None

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: object) -> None:
        again = number == signal.SIGINT and self.heard == "SIGINT"
        self.heard = signal.Signals(number).name
        if again or not self.holds:
            with suppress(OSError):
                self.mark(self.heard)
            kill_descendants()
            if again:
                os._exit(130)
            leave(number, frame)

    def agreed(self, world: World) -> bool:
        """Whether any rank has heard a signal. All ranks must ask the same number of times."""
        if world.world_size == 1:
            return self.heard is not None
        heard = torch.tensor(int(self.heard is not None))  # on the CPU, so that nobody waits for a GPU
        dist.all_reduce(heard, op=dist.ReduceOp.MAX)
        return bool(heard)


def kill_descendants() -> None:
    """Ends all processes that this one has started, and theirs: compilers among them."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()  # the name before it may hold anything
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    waiting = [os.getpid()]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            waiting.append(pid)
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

"""Turns SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP (of a closed terminal) into a request to stop.

The run then saves a checkpoint and stops after the current step.
"""

import os
import signal
from contextlib import suppress

import psutil
import torch

from runtime.processes import World

INTERRUPTED = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again later"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def exit_code() -> int:
    """Return INTERRUPTED, so that Slurm or a shell can restart the run; under torchrun return 0.

    torchrun treats every code except 0 as a failure, and may restart the processes itself.
    """
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else INTERRUPTED


class StopRequest:
    """Receives the signals within `with StopRequest() as stop:`.

    Until `can_save` is set, a signal ends this process and its children at once. A second Ctrl-C always ends them.
    mark: called with the signal's name before the processes end, so that the run folder records the reason.
    """

    def __init__(self):
        self.signal_name = None  # of the last received signal
        self.can_save = False
        self.mark = lambda name: None

    def __enter__(self):
        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [number for number in SIGNALS if number != signal.SIGHUP or not under_nohup]
        self._previous_handlers = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *exception: object):
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object):
        second_ctrl_c = number == signal.SIGINT and self.signal_name == "SIGINT"
        self.signal_name = signal.Signals(number).name
        if second_ctrl_c or not self.can_save:
            with suppress(OSError):
                self.mark(self.signal_name)
            for process in psutil.Process().children(recursive=True):  # such as compile workers
                with suppress(psutil.Error):  # the child has just ended by itself
                    process.kill()
            if second_ctrl_c:
                os._exit(130)  # 128 + SIGINT, as in shells
            os.write(2, f"{self.signal_name}: this process had finished no step, so it saved no checkpoint\n".encode())
            os._exit(exit_code())

    def is_set(self, world: World) -> bool:
        """Return whether any rank has received a signal. All ranks must call this equally often."""
        received = torch.tensor(int(self.signal_name is not None))  # on the CPU, so that no rank waits for its GPU
        world.sum(received)
        return bool(received)

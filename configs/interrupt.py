"""A signal, Ctrl-C above all, while a command starts: importing PyTorch takes seconds. A line, and no traceback.

This imports nothing, so that it can stand above all other imports.
"""

import os
import signal
import sys

INTERRUPTED = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again later"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def exit_code() -> int:
    """Return INTERRUPTED, so that Slurm or a shell can start the run again; 0 under torchrun, which makes a failure of
    every other code (and would start the processes again itself)."""
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else INTERRUPTED


def leave_on_signals():
    """Let SIGNALS end this process at once, with exit_code(): for a run that has nothing to save yet."""
    for number in SIGNALS:
        signal.signal(number, leave)


def leave(number: int, frame: object):
    os.write(2, f"{signal.Signals(number).name}: stopped; there was nothing to save\n".encode())
    os._exit(exit_code())


def exit_on_ctrl_c():
    """Let Ctrl-C end this program with a word: at once while it imports, which C++ code does not survive an exception
    in; later as KeyboardInterrupt, after which the program puts its files in order. Exit code 130 in a shell."""
    show = sys.excepthook

    def on_interrupt(number, frame):
        if hasattr(sys.modules["__main__"], "main"):  # which stands below the imports
            raise KeyboardInterrupt
        os.write(2, b"interrupted\n")
        os._exit(130)

    def hook(kind, error, trace):
        if kind is KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        else:
            show(kind, error, trace)

    signal.signal(signal.SIGINT, on_interrupt)
    sys.excepthook = hook

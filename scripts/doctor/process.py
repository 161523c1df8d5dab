"""A part of the doctor in a process of its own: it may crash or hang, and what it found before is there."""

import dataclasses
import faulthandler
import importlib
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

from files import open_own
from scripts.doctor.findings import Finding, Settings, one_line


def run_part(name: str, functions: list[str], settings: Settings, seconds: float, log: Path) -> Iterator:
    """Yield what the functions yield, one after the other in a process, as it comes; at the end, as a finding, how that
    failed, if it did.

    functions: "module:name", of Settings. seconds: the process is killed after so many. log: for what it prints.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir=log.parent) as folder:
        settings = dataclasses.replace(settings, folder=str(Path(folder).resolve()))
        process = context.Process(target=in_process, args=(functions, settings, sender, str(log.resolve())))
        process.start()
        sender.close()  # ours; when the process ends, so does the pipe
        end = time.monotonic() + seconds
        try:
            while in_time := receiver.poll(max(0.0, end - time.monotonic())):
                try:
                    yield receiver.recv()
                except EOFError:
                    wait([process.sentinel], 10)
                    break
        finally:
            stop(process)
    if not in_time:
        advice = f"give it more time: --only {name} --minutes {2 * seconds / 60:.1f}"
        yield Finding("time", "slow", f"stopped after {seconds:.0f} s", advice)
    elif process.exitcode:
        yield Finding("process", "broken", describe_end(process.exitcode, log), f"see {log}; --only {name} repeats it")


def in_process(functions: list[str], settings: Settings, findings: Connection, log: str):
    """Run the functions, with what they print in a log, and send what they yield. An exception is a finding too."""
    os.setsid()  # with the processes that it starts it can be killed as one
    with open_own(Path(log), "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    faulthandler.enable()  # a crash in C++ says where
    try:
        for module, name in (function.split(":") for function in functions):
            for found in getattr(importlib.import_module(module), name)(settings):
                findings.send(found)
    except Exception as error:  # whatever it is, it is what was to be found
        traceback.print_exc()
        said = f"{type(error).__name__}: {one_line(error)}"
        findings.send(Finding("process", "broken", said, f"see {Path(log).name} for where it failed"))


def stop(process):
    """End a part, if it has not ended, and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet
        process.kill()
    process.join()


def describe_end(exit_code: int, log: Path) -> str:
    """Return how a process ended, and the last line that it printed."""
    how = f"exit code {exit_code}" if exit_code > 0 else f"killed by {signal.Signals(-exit_code).name}"
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"it ended with {how}" + (f": {one_line(last)}" if last else "")

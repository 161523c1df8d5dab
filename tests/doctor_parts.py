"""Parts of the doctor that end badly, for test_doctor.py. Without PyTorch: they begin at once."""

import os
import signal
import subprocess
import time
from pathlib import Path

from scripts.doctor.findings import Finding

GOOD = Finding("first", "OK", "it came")


def crashes(settings):
    yield GOOD
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(settings):
    yield GOOD
    raise RuntimeError("of\nits own")


def exits(settings):
    yield GOOD
    os._exit(3)


def hangs(settings):
    """Until its test has seen the process that it started."""
    child = subprocess.Popen(["sleep", "1000"])
    Path(settings.folder, "large").write_bytes(bytes(1000))
    yield Finding("child", "OK", str(child.pid))
    time.sleep(1000)

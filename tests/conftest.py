"""What all tests share: folders of runs, and the count of faults behind the promises (docs/reliability.md).

A test of a promise is marked `promise(number, "text")` and injects each fault within `with faults(kind):`. What raises
there is a fault that the program did not survive. `--long` injects many more of them, and ends with the table that
scripts/torture.sh prints.
"""

import collections
import os
import platform
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # as in other processes of the tests: the number of threads changes the last bits of sums
PROMISES = pytest.StashKey[dict]()
LONGEST = "machines flex_cuda faults train sweep outside rivals chain sanitize".split()


class Faults:
    """Faults injected for a promise by kind, and the number that were lost."""

    def __init__(self):
        self.injected, self.lost = collections.Counter(), 0

    @contextmanager
    def __call__(self, kind: str):
        self.injected[kind] += 1
        try:
            yield
        except BaseException:
            self.lost += 1
            raise


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="many more faults, and a table of them (scripts/torture.sh)")


def pytest_configure(config):
    config.stash[PROMISES] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Start the longest files first, so that the processes end together; a file's SLOW_FIXTURES make tests slow."""
    items.sort(key=lambda item: LONGEST.index(topic(item)) if topic(item) in LONGEST else len(LONGEST))
    for item in items:
        if set(item.fixturenames) & set(getattr(item.module, "SLOW_FIXTURES", ())):
            item.add_marker("slow")


def topic(item):
    return item.path.stem.removeprefix("test_")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Return a folder of shards. Tests only read it."""
    from test_train import make_data

    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """Return the run folder of an uninterrupted run. Tests only read it."""
    from test_train import train

    return train(data, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Return the run folder of a tiny model, beside its data. Tests only read it."""
    from tiny_run import train_tiny_run

    return train_tiny_run(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory):
    """Return a folder for fixtures that are `shared`, as tmp_path is for a test."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "runs/run")


@pytest.fixture
def threads():
    """Return torch.set_num_threads, which the end of the test takes back."""
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def long(request) -> bool:
    return request.config.getoption("--long")


@pytest.fixture
def faults(request) -> Faults:
    promise = request.node.get_closest_marker("promise").args
    return request.config.stash[PROMISES].setdefault(promise, Faults())


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--long") or not config.stash[PROMISES]:
        return
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    machine = f"{processor()}, {len(os.sched_getaffinity(0))} cores"
    terminalreporter.write_line(f"""# Faults injected, and what became of them

    bash scripts/torture.sh

Commit {commit}; torch {torch.__version__}, Python {platform.python_version()}, {machine}.
A fault is survived when the test's every check after it holds.

| | promise | faults injected | survived | lost |
|---:|---|---|---:|---:|""")
    for (number, text), faults in sorted(config.stash[PROMISES].items()):
        kinds = ", ".join(f"{count} {kind}" for kind, count in faults.injected.items())
        injected = faults.injected.total()
        survived = injected - faults.lost
        terminalreporter.write_line(f"| {number} | {text} | {injected}: {kinds} | {survived} | {faults.lost} |")


def processor() -> str:
    name = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return name[1] if name else platform.machine()

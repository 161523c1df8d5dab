"""Commands of this repository, called in this process or in a new one; waiting; files of JSON."""

import json
import os
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parents[1]
parametrize = pytest.mark.parametrize
slow = pytest.mark.slow  # not part of the quick form of the tests
fixture = pytest.fixture
shared = fixture(scope="module")  # by the tests of a file
promise = pytest.mark.promise  # of docs/reliability.md, see conftest.py
CORRUPTION = promise(12, "flipped bits in checkpoints and in the memory of a rank are found")
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def exit_code(main, argv):
    """Call a command's main with these arguments in sys.argv. Return the exit code."""
    with patch.object(sys, "argv", ["command", *map(str, argv)]):
        try:
            main()
        except SystemExit as end:
            return end.code or 0
    return 0


def succeeds(main, *argv):
    """Call a command's main, which must end with exit code 0."""
    assert exit_code(main, argv) == 0


def one_error(capsys):
    """Return the one line of error that a command has printed."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def fails(capsys, named, main, *argv):
    """Call a command's main, which must end with exit code 2 and name this in one line of error. Return the line."""
    assert exit_code(main, argv) == 2
    error = one_error(capsys)
    assert str(named) in error
    return error


def refuses(*named, error=ValueError):
    """Return a context that expects an error of one line with these patterns in it."""
    return pytest.raises(error, match="^" + "".join(f"(?=.*{part})" for part in named) + r"[^\n]*\Z")


def environment(**variables):
    """Return this process's variables without wandb's and torchrun's, with one thread and with these."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TORCHELASTIC_"))}
    return kept | dict(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", PYTHONPATH=str(ROOT)) | variables


def python(*argv, code=0, cwd=ROOT, timeout=1200, **variables):
    """Run a new process in the folder `cwd`, which must exit with `code`. Return the finished process."""
    command, env = [sys.executable, *map(str, argv)], environment(**variables)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def start(*argv, **variables):
    """Start a new process with pipes for its output."""
    command, env, pipe = [sys.executable, *map(str, argv)], environment(**variables), subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


@contextmanager
def full_disk(most):
    """Let every write beyond so many bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def table(names, text):
    """Parametrize a test with a text of one case a line. Bars separate the arguments of the test, all of them words."""
    cells = [line.split("|") for line in text.strip().splitlines()]
    return parametrize(names, [[*map(str.strip, row)] for row in cells])


def write_files(folder, files):
    """Write texts or bytes to paths in a folder. Return the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    """Return the bytes of all files by path. Of folders, and of locks, which name a process, only that they exist."""
    return {path: path.is_dir() or path.name == "lock" or path.read_bytes() for path in folder.rglob("*")}


@contextmanager
def unchanged(folder):
    """Expect that a block changes nothing in a folder."""
    before = contents(folder)
    yield
    assert contents(folder) == before


def wait_for(condition, seconds=600):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def rows_of(text):
    """Return the cells of the table rows of a text."""
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1]] for line in lines]


def read_json(path):
    return json.loads(path.read_text())


def read_lines(path):
    """Return the values of a file of JSON lines."""
    return [*map(json.loads, path.read_text().splitlines())]


def update_json(path, **fields):
    path.write_text(json.dumps(read_json(path) | fields))

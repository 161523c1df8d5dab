"""Commands of this repository, called in this process or in a new one; waiting; files of JSON."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def exit_code(main, argv):
    """Call a command's main with these arguments. Return the exit code."""
    try:
        main([*map(str, argv)])
    except SystemExit as end:
        return end.code or 0
    return 0


def here(main, *argv):
    """Call a command's main that reads sys.argv."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["command", *map(str, argv)])
        main()


def one_error(capsys):
    """Return the one line of error that a command has printed."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def fails(capsys, named, main, *argv):
    """Call a command's main, which must end with exit code 2 and one line of error with `named` in it."""
    assert exit_code(main, argv) == 2
    assert str(named) in one_error(capsys)


def refuses(*named, error=ValueError):
    """Return a context that expects an error of one line with these patterns in it."""
    return pytest.raises(error, match="^" + "".join(f"(?=.*{part})" for part in named) + r"[^\n]*\Z")


def python(*argv, threads=1, code=0, cwd=ROOT, timeout=300, **variables):
    """Run a new process in the folder `cwd`, which must exit with `code`. Return the finished process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environment |= dict(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE", **variables)
    command = [sys.executable, *map(str, argv)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds=600):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def read_json(path):
    return json.loads(path.read_text())


def update_json(path, **fields):
    path.write_text(json.dumps(read_json(path) | fields))

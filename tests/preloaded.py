"""Forks the Python commands that tests start from the process that starts them, which has imported PyTorch by then;
to import it anew for each would take a third of the suite's time.

A forked command has what a started one has: its words, environment, folder, descriptors, signals, streams, and copies
of this project's modules that are its own. What it starts is forked in the same way. As usual is started what another
program than this Python is, and a command whose environment differs in what libraries read when they are imported.
"""

import atexit
import faulthandler
import gc
import importlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PROJECT = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
LIBRARIES = ("torch._dynamo", "torch.distributed.launcher.api", "matplotlib.pyplot", "psutil", "tokenizers", "tqdm")
COMPILER = ("torch._inductor.compile_fx", "torch._inductor.codegen.cpp")
READ_AT_IMPORT = ("ATEN_", "CUDA_", "KMP_", "LD_", "MKL_", "PYTHONHASH", "TORCHINDUCTOR_", "TRITON_")

fork_exec = getattr(subprocess, "_fork_exec", None)  # what Popen calls in the end (Python 3.11 to 3.14)
kept = []  # what a forked process does not use: freed, it could close a descriptor that is another one by then


@contextmanager
def forking():
    """Let subprocess.Popen fork Python commands, here and in whatever is forked."""
    with popen_by(fork_or_exec):
        yield


def start_method():
    """Return how torch.multiprocessing makes the processes of a test: OpenMP's threads do not live on in a fork."""
    return "fork" if torch.get_num_threads() == 1 else "spawn"


def starting():
    """Let subprocess.Popen start every command as usual."""
    return popen_by(fork_exec)


@contextmanager
def popen_by(function):
    before = fork_exec and subprocess._fork_exec
    if fork_exec is not None:
        subprocess._fork_exec = function
    yield
    if fork_exec is not None:
        subprocess._fork_exec = before


def fork_or_exec(args, executables, close_fds, pass_fds, folder, environment, *rest):
    """Do what _posixsubprocess.fork_exec does, by a fork alone where that comes to the same."""
    words = [os.fsdecode(word) for word in args]
    if words[1:2] == ["-u"]:  # unbuffered, as torchrun wants it
        del words[1]
    variables = dict(os.environ)
    if environment is not None:
        variables = dict(os.fsdecode(entry).split("=", 1) for entry in environment)
    if not close_fds or not is_forkable(words, variables):
        return fork_exec(args, executables, close_fds, pass_fds, folder, environment, *rest)
    for library in LIBRARIES + COMPILER * bool({"model", "blocks"} & {*words}):  # of --compile
        importlib.import_module(library)
    if pid := os.fork():
        return pid
    code = 1
    try:
        become(words, variables, folder, pass_fds, *rest)
        code = run(words)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def is_forkable(words, variables):
    def read_at_import(values):
        return {k: v for k, v in values.items() if k.startswith(READ_AT_IMPORT) and k != "PYTHONPATH"}

    if torch.get_num_threads() > 1 or variables.get("OMP_NUM_THREADS") != "1":
        return False  # see start_method
    known = words[1:2] and (words[1] in ("-c", "-m") or not words[1].startswith("-"))
    known = known and not any("submitit" in word for word in words)  # which looks closely at how it was started
    return words[0] == sys.executable and known and read_at_import(variables) == read_at_import(os.environ)


def become(words, variables, folder, pass_fds, *rest):
    """Change this forked process to what a started one is before its first line."""
    stdin, _, _, stdout, _, stderr, _, failure, _, new_session, group = rest[:11]
    preexec = rest[15]
    if new_session:
        os.setsid()
    if group >= 0:
        os.setpgid(0, group)
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for descriptor, given in enumerate((stdin, stdout, stderr)):
        if given >= 0:
            os.dup2(given, descriptor)
    if folder is not None:
        os.chdir(folder)
    if preexec is not None:
        preexec()
    atexit._clear()
    gc.freeze()  # what the other process has made is not this one's to free: its threads are not here
    kept.extend((sys.stdin, sys.stdout, sys.stderr, dict(sys.modules)))
    keep = sorted({0, 1, 2, *pass_fds} - {failure})
    for low, high in zip(keep, [*keep[1:], os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        try:
            error = dict(buffering=1, errors="backslashreplace") if descriptor == 2 else {}
            stream = open(descriptor, mode, closefd=False, **error)
        except OSError:  # closed by preexec
            stream = None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(variables)
    be_new(words, variables)


def be_new(words, variables):
    """Give Python the state that it starts with, but for the libraries that it has."""
    importlib.reload(warnings)  # pytest has put others in place of its functions
    logging.root.handlers.clear()
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", []):
            if "stream" in vars(handler):  # that of logging's last resort is whatever sys.stderr is
                handler.stream = sys.stderr
    for name in list(sys.modules):
        if name.split(".")[0] in PROJECT | {"huggingface_hub", "sitecustomize"}:  # which reads HF_ENDPOINT and others
            del sys.modules[name]
    first = str(Path(words[1]).resolve().parent) if words[1] not in ("-c", "-m") else os.getcwd() * (words[1] == "-m")
    added = [folder for folder in variables.get("PYTHONPATH", "").split(os.pathsep) if folder]
    own = [folder for folder in sys.path if folder.startswith((sys.prefix, sys.base_prefix)) and folder != str(ROOT)]
    sys.path[:] = [first, *added, *own]
    sys.orig_argv = words
    if any((Path(folder) / "sitecustomize.py").exists() for folder in added):
        importlib.import_module("sitecustomize")


def run(words):
    """Run `python words...` and return its exit code."""
    kind, *words = words[1:]
    sys.argv = [kind, *words] if kind not in ("-c", "-m") else ["-c", *words[1:]]
    code = 0
    try:
        if kind == "-c":
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(words[0], "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as exit:
        code = exit.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return (code or 0) & 255

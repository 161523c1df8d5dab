"""Promise 9: a run asks nothing of the world around it, runs no code of strangers, and keeps keys to itself."""

import functools
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from test_data import exit_code
from test_train import ROOT, arguments, contents, here, make_data, train_here

import train_gpt
from configs.runs import Run
from data import shards
from data.tokenizer import load_tokenizer
from runtime.checkpoint import latest_checkpoint, list_checkpoints, load_checkpoint
from scripts import evaluate, report
from scripts.sweep.local import Attempt, record_outcome

pytestmark = [pytest.mark.promise(9, "no surprises from outside"), pytest.mark.slow]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    return train_here(data, tmp_path_factory.mktemp("finished"))


@pytest.fixture
def copied(finished, tmp_path):
    """That run, as if it had been interrupted."""
    folder = shutil.copytree(finished, tmp_path / "runs" / "run")
    (folder / "summary.json").unlink()
    return folder


# ---- network, prompts, writes ----------------------------------------------------------------------------------------

# Python runs this in every process before anything else: it writes down where files are made, changed or removed, and
# forbids all sockets but those between processes of this machine.
GUARD = """
import os, sys

log = os.open(os.environ["GUARD_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(log, b"/dev/null\\n")  # to say that it watches
CHANGES = {"os.mkdir": [0], "os.remove": [0], "os.rmdir": [0], "os.truncate": [0], "os.rename": [0, 1],
           "os.link": [1], "os.symlink": [1], "os.chmod": [0], "os.chown": [0], "os.utime": [0]}
NETWORK = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.connect", "socket.bind",
           "socket.sendto", "socket.sendmsg"}

def watch(event, args):
    probe = event == "socket.bind" and args[1][0] in ("::1", "127.0.0.1")  # urllib3 asks so for IPv6 when imported
    if event in NETWORK and getattr(args[0], "family", None) != 1 and not probe:
        os.write(log, f"NETWORK {event} {args}\\n".encode())
        raise PermissionError(f"{event} {args}: the network is not to be used")
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        paths = args[:1]
    elif event == "os.mkdir" and os.path.isdir(args[0]):  # which changes nothing
        return
    elif event in CHANGES:
        paths = [args[i] for i in CHANGES[event]]
        folder = args[-1] if event in ("os.remove", "os.rmdir") else -1
        if isinstance(folder, int) and folder >= 0:  # shutil.rmtree names what is in an open folder
            paths = [os.path.join(os.readlink(f"/proc/self/fd/{folder}"), paths[0])]
    else:
        return
    for path in paths:
        if not isinstance(path, int):
            os.write(log, f"{os.path.realpath(os.fsdecode(path))}\\n".encode())

sys.addaudithook(watch)
"""


def surroundings(folder: Path) -> dict[str, dict]:
    """Of a process: what its environment has of a home."""
    (folder / "file").write_text("a regular file")
    return {
        "HOME a file": dict(HOME=str(folder / "file")),
        "HOME missing": dict(HOME=str(folder / "missing")),
        "no HOME": {},
    }


def alone(folder: Path, home: dict, *words, code=0, **variables) -> set[Path]:
    """Runs a command without network and standard input; returns what it wrote outside the places that it may use."""
    places = [folder / name for name in ("runs", "temporary", "out")]
    for place in (*places, folder / "guard"):
        place.mkdir(exist_ok=True)
    (folder / "guard" / "sitecustomize.py").write_text(GUARD)
    log = folder / "guard" / "log"
    log.unlink(missing_ok=True)
    kept = {k: os.environ[k] for k in ("PATH", "LD_LIBRARY_PATH", "LANG", "VIRTUAL_ENV") if k in os.environ}
    kept |= dict(PYTHONPATH=str(folder / "guard"), GUARD_LOG=str(log), TMPDIR=str(folder / "temporary"))
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=kept | home | variables, stdout=subprocess.PIPE, timeout=300,
                          stderr=subprocess.PIPE, preexec_fn=lambda: os.close(0), text=True)  # fmt: skip
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    written = set(log.read_text().splitlines())
    assert not (calls := [line for line in written if line.startswith("NETWORK")]), calls
    assert written, "the guard did not watch"
    cache = Path(home["HOME"] if "HOME" in home else os.path.expanduser("~")) / ".cache" / "scale_invariant_attention"
    own = [*(place.resolve() for place in places), cache.resolve(), Path("/dev"), Path("/proc/self")]
    outside = {path for path in map(Path, written) if not any(path.is_relative_to(place) for place in own)}
    making = {path for path in outside if cache.is_relative_to(path)}  # the folders that the cache is in
    return {path for path in outside - making if "__pycache__" not in path.parts}  # Python's, beside each source file


def test_the_guard_sees_what_it_forbids(tmp_path):
    (tmp_path / "file").write_text("")
    code = "open({!r}, 'w'); import socket; s = socket.socket(socket.AF_UNIX)".format(str(tmp_path / "elsewhere"))
    assert alone(tmp_path, {}, "-c", code) == {tmp_path / "elsewhere"}
    with pytest.raises(AssertionError, match="not to be used"):
        alone(tmp_path, {}, "-c", "import socket; socket.create_connection(('127.0.0.1', 9))")


def test_nothing_is_written_outside_and_nobody_is_called(data, tmp_path, faults, long):
    runs = tmp_path / "runs"
    for number, (name, home) in enumerate(list(surroundings(tmp_path).items())[: None if long else 1]):
        name_of_run = dict(name=f"run{number}", steps=4, cooldown_steps=0, val_every=2, save_every=2)
        run = runs / name_of_run["name"]
        commands = [
            ["train_gpt.py", *arguments(data, runs, **name_of_run)],
            ["train_gpt.py", *arguments(data, runs, **name_of_run | dict(name=f"w{number}", wandb="offline"))],
            ["-m", "scripts.evaluate", run],
            ["-m", "scripts.report", run, "--out", tmp_path / "out" / "report.html"],
            ["-m", "data.shards", "verify", data],
        ]
        if long:
            commands += [
                ["train_gpt.py", *arguments(data, runs, **name_of_run, resume="auto")],
                ["train_gpt.py", *arguments(data, runs, **name_of_run | dict(name=f"o{number}", wandb="online"))],
                ["-m", "scripts.sweep", "table_losses", "--scale", "mini", "--runs-dir", runs, "--dry-run"],
                ["-m", "data.text", ROOT / "model", ROOT / "scripts", "--tokenizer", "bpe:300", "--suffixes", ".py",
                 "--out", tmp_path / "out" / f"text{number}", "--val-fraction", "0.3"],
            ]  # fmt: skip
        if long and number == 0:
            commands += [["train_gpt.py", *arguments(data, runs, **name_of_run | dict(name="c", compile="model"))]]
        for words in commands:
            with faults(f"commands alone ({name})"):
                assert alone(tmp_path, home, *words) == set(), words[:3]


# ---- files of strangers ----------------------------------------------------------------------------------------------


class Evil:
    """Runs a command, if it is unpickled."""

    def __init__(self, mark: Path, call=os.system):
        self.call, self.words = call, f"touch '{mark}'"
        if call is not os.system:
            self.words = f"open({str(mark)!r}, 'w')"

    def __reduce__(self):
        return self.call, (self.words,)


def replaced(path: Path, **entries):
    """The checkpoint there with other entries."""
    torch.save(load_checkpoint(path) | entries, path)


def as_tar(path: Path, evil):
    """What torch wrote before 0.1.10."""
    with tarfile.open(path, "w") as archive:
        for name in ("storages", "tensors", "pickle", "sys_info"):
            content = pickle.dumps(evil)
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


DISGUISES = {
    "a pickle": lambda path, evil: path.write_bytes(pickle.dumps(evil)),
    "a text pickle": lambda path, evil: path.write_bytes(pickle.dumps(evil, protocol=0)),
    "torch's archive": lambda path, evil: torch.save(evil, path),
    "torch's old format": lambda path, evil: torch.save(evil, path, _use_new_zipfile_serialization=False),
    "torch's oldest format": as_tar,
    "a numpy file": lambda path, evil: path.write_bytes(numpy_file(evil)),
    "the model": lambda path, evil: replaced(path, model=evil),
    "a weight": lambda path, evil: replaced(path, model={"head": evil}),
    "the optimizers": lambda path, evil: replaced(path, optimizers={"head": {"state": {0: evil}}}),
    "the step": lambda path, evil: replaced(path, step=evil),
    "the config": lambda path, evil: replaced(path, config={"seed": evil}),
    "an entry of no meaning": lambda path, evil: replaced(path, more=[{"x": (evil,)}]),
    "a key": lambda path, evil: replaced(path, more={evil: 0}),
    "a partial": lambda path, evil: replaced(path, more=functools.partial(evil.call, evil.words)),
}


def numpy_file(evil) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([evil], dtype=object), allow_pickle=True)
    return file.getvalue()


def refused(capsys, main, *words) -> str:
    """The one line of a command that refuses."""
    with pytest.raises(SystemExit) as exit:
        here(main, *words)
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("evaluating ")]
    assert exit.value.code == 2 and len(error) == 1 and error[0].startswith("error: "), error
    return error[0]


@pytest.mark.parametrize("call", [os.system, eval, exec], ids=lambda call: call.__name__)
@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_malicious_checkpoint_is_refused_and_does_not_run(disguise, call, data, copied, tmp_path, faults, capsys):
    mark = tmp_path / "mark"
    newest, older = list_checkpoints(copied / "checkpoints")
    older.unlink()  # what is no archive would count as damaged, and the one before it be taken
    DISGUISES[disguise](newest, Evil(mark, call))
    for command in ("resume", "resume by force", "evaluate"):
        folder = shutil.copytree(copied, tmp_path / command / "run")  # as pytest.raises keeps the lock of the first
        before = contents(folder)
        with faults("malicious checkpoints"):
            if command == "evaluate":
                error = refused(capsys, evaluate.main, folder, "--device", "cpu")
            else:
                words = arguments(data, folder.parent, resume="auto")
                error = refused(capsys, train_gpt.main, *words, *["--force"] * command.endswith("force"))
            assert "step_000020.pt" in error and not mark.exists()
            assert contents(folder) == before


def test_the_evil_one_works(tmp_path):
    """Unpickled by those who do not look, it does what it says: the tests above would see it."""
    for name, call in dict(system=os.system, eval=eval, exec=exec).items():
        torch.save(Evil(tmp_path / name, call), tmp_path / "file")
        torch.load(tmp_path / "file", weights_only=False)
        assert (tmp_path / name).exists()


ODD_CONFIGS = {
    "a list": "[]", "null": "null", "a number": "1e999", "no text": b"\x80\x04\x95\xff\xfe", "no JSON": "{",
    "empty": "", "deep": "[" * 100_000,
    "a pickle": pickle.dumps(Evil(Path("/nowhere"))),
    **{f"{field} {value}": {field: value} for field, value in dict(
        num_layers="2; import os", num_heads=2.0, method=["rope"], method_options=[], seed=None, model_dim=True,
        train_length=float("nan"), vocab_size=10**400, data_dir=7, val_lengths=["16"], adam_betas=[0.9], name=[],
        dtype="__import__('os')", attention_backend={}, device=[1]).items()},
    "an unknown method": dict(method="rope'); import os; ('"),
    "a nested option": dict(method_options=dict(tau=[3])),
    "an option like a shape": dict(method_options=dict(num_heads=2)),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD_CONFIGS)
def test_an_odd_config_is_refused_in_one_line(odd, copied, faults, capsys):
    path, content = copied / "config.json", ODD_CONFIGS[odd]
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with faults("odd configs"):
        refused(capsys, evaluate.main, copied, "--device", "cpu")


ODD_PROGRESS = [
    *({"step": step} for step in (10**9, -5, 2.5, 19, True, "20", [], float("nan"))),
    *({"seconds": seconds} for seconds in (-1.0, float("nan"), float("inf"), "x", None)),
    *({"skipped": skipped} for skipped in (-1, 2.5, 21, "x")),
    *({"validation": validation} for validation in (
        5, "x", {"step": 20}, {"step": 21, "val_loss": {}}, {"step": 2.5, "val_loss": {}}, {"step": 20, "val_loss": {}},
        {"step": 20, "val_loss": {}, "val_tokens": {}}, {"step": 20, "val_loss": {"16": 10**400}, "val_tokens": {}},
        {"step": 20, "val_loss": {"16": "x"}, "val_tokens": {}}, {"step": 20, "val_loss": 5, "val_tokens": {}},
    )),
    *({"rng": rng} for rng in (5, [5])),
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD_PROGRESS, ids=str)
def test_a_checkpoint_of_odd_progress_is_refused_in_one_line(odd, data, copied, tmp_path, faults, capsys):
    replaced(latest_checkpoint(copied / "checkpoints"), **odd)
    for command in ("resume", "resume by force"):
        folder = shutil.copytree(copied, tmp_path / command / "run")  # as pytest.raises keeps the lock of the first
        before = contents(folder)
        with faults("odd checkpoints"):
            words = [*arguments(data, folder.parent, resume="auto"), *["--force"] * command.endswith("force")]
            assert "step_000020.pt" in refused(capsys, train_gpt.main, *words)
            assert contents(folder) == before


@pytest.mark.parametrize("line", ["{}", "[]", "3", '{"step": "5"}', '{"step": 2.5}', "[" * 100_000, "\0\0"])
def test_odd_metrics_are_refused_in_one_line(line, data, copied, faults, capsys):
    path = copied / "metrics.jsonl"
    path.write_text(f"{line}\n{path.read_text()}")
    before = contents(copied)
    with faults("odd metrics"):
        error = refused(capsys, train_gpt.main, *arguments(data, copied.parent, resume="auto"))
        assert "metrics.jsonl, line 1 " in error
        assert contents(copied) == before


# ---- links -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def treasure(tmp_path):
    """Files of the user, in a place that is none of the run's."""
    folder = tmp_path / "treasure"
    folder.mkdir()
    for name in ("step_000001.pt", "step_000002.pt", "step_000003.pt.partial", "log.txt", "lock"):
        (folder / name).write_text(f"precious {name}")
    return folder


def link(path: Path, target: Path):
    """Puts a symbolic link where something of the run may have been."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


WRITTEN = ("lock", "log.txt", "metrics.jsonl", "config.json", "data.json", "summary.json", "interrupted")


@pytest.mark.parametrize("name", [*WRITTEN, *(f"{name}.partial" for name in WRITTEN[2:]), "checkpoints", "wandb"])
def test_a_run_folder_with_a_link_is_refused_and_what_it_leads_to_untouched(
    name, data, copied, treasure, faults, capsys
):
    before = contents(treasure), (treasure / "lock").read_text()
    link(copied / name, treasure if name in ("checkpoints", "wandb") else treasure / "log.txt")
    with faults("links in a run folder"):
        error = refused(capsys, train_gpt.main, *arguments(data, copied.parent, resume="auto"))
        assert f"{copied / name} is a symbolic link" in error
        assert (contents(treasure), (treasure / "lock").read_text()) == before


def test_wandb_writes_through_no_link(data, copied, treasure, faults, capsys):
    before = contents(treasure)
    (copied / "wandb").mkdir()
    link(copied / "wandb" / "cache", treasure)
    with faults("links in a run folder"):
        error = refused(capsys, train_gpt.main, *arguments(data, copied.parent, resume="auto", wandb="offline"))
        assert f"{copied / 'wandb/cache'} is a symbolic link" in error
        assert contents(treasure) == before and len([*treasure.iterdir()]) == 5


def test_evaluate_writes_through_no_link(copied, treasure, faults):
    before = contents(treasure)
    for name in ("evaluation.json.partial", "evaluation.json"):
        with faults("links in a run folder"):
            (treasure / "log.txt").write_text("{}")  # an evaluation of nothing
            before = contents(treasure)
            link(copied / name, treasure / "log.txt")
            here(evaluate.main, copied, "--device", "cpu")
            assert contents(treasure) == before
            path = copied / "evaluation.json"
            assert not path.is_symlink() and json.loads(path.read_text())["val_loss"]


@pytest.mark.parametrize("name", ["run.log", "run.failures.txt"])
def test_a_sweep_writes_through_no_link(name, copied, treasure, faults):
    before = contents(treasure)
    link(copied.parent / name, treasure / "log.txt")
    with faults("links beside a run folder"), pytest.raises(OSError, match=f"{name} is a symbolic link"):
        if name == "run.log":
            Attempt(Run("quickstart", dict(runs_dir=str(copied.parent), name=copied.name)), {}, 1)
        record_outcome(copied, 1, "an error")
    assert contents(treasure) == before


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "chain_train_000001.bin"])
@pytest.mark.parametrize("disguise", ["a pickle", "torch's archive", "a numpy file"])
def test_malicious_data_is_refused_and_does_not_run(name, disguise, data, tmp_path, faults, capsys):
    folder, mark = shutil.copytree(data, tmp_path / "data"), tmp_path / "mark"
    DISGUISES[disguise](folder / name, Evil(mark))
    with faults("malicious data"):
        if name == "tokenizer.json":
            with pytest.raises(ValueError, match="not a file of the tokenizers library"):
                load_tokenizer(folder / name)
        else:
            refused(capsys, train_gpt.main, *arguments(folder, tmp_path / "runs"))
            assert exit_code(shards.main, ["verify", str(folder)]) == 2
        assert not mark.exists()


def test_a_page_of_a_stranger_s_run_runs_no_script_of_it(copied, tmp_path, faults):
    script = "</script><script>alert('mine')</script><img src=x onerror=alert(1)>"
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | dict(group=script, tags=[script], data_dir=script)))
    with faults("scripts in a config"):
        here(report.main, copied, "--out", tmp_path / "report.html", "--title", script)
        page = (tmp_path / "report.html").read_text()
        assert "alert(" in page and "<script>alert" not in page and "<img src=x" not in page


# ---- keys ------------------------------------------------------------------------------------------------------------

KEYS = dict(
    WANDB_API_KEY="5ec7e7" * 6 + "5ec7", HF_TOKEN="hf_5ecretOfTheHub", HUGGING_FACE_HUB_TOKEN="hf_5ecretOfOld",
    AWS_SECRET_ACCESS_KEY="5ecretOfAmazon", GITHUB_TOKEN="ghp_5ecretOfGit",
)  # fmt: skip


def test_keys_reach_no_file_of_a_run(data, tmp_path, faults):
    fields = dict(steps=2, cooldown_steps=0, wandb="offline", attention_backend="blocks")
    with faults("runs with keys in the environment"):
        (tmp_path / "home").mkdir()
        home = dict(HOME=str(tmp_path / "home"))
        assert alone(tmp_path, home, "train_gpt.py", *arguments(data, tmp_path / "runs", **fields), **KEYS) == set()
        files = [p for place in ("runs", "temporary", "home") for p in (tmp_path / place).rglob("*") if p.is_file()]
        assert {".wandb", ".log", ".txt", ".pt", ".jsonl"} <= {path.suffix for path in files}
        for path in files:
            leaked = [name for name, key in KEYS.items() if key.encode() in path.read_bytes()]
            assert not leaked, f"{leaked} in {path}"

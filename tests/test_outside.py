"""A run asks nothing of the world around it, keeps keys to itself, and trains every configuration or refuses it."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, exit_code, one_error, promise, python, shared, slow, table, write_files
from test_methods import NAMES
from test_train import arguments, steps_and_validations
from wandb_stand_in import StandIn

import train_gpt
from configs.config import Config
from runtime.metrics import read_metrics

OUTSIDE = promise(9, "nothing is written elsewhere, and keys reach no file")
CONFIGS = promise(10, "every configuration trains or is refused")
WANDB = promise(13, "a network that is lost costs wandb's mirror nothing")


# Python runs this in every process before anything else. It logs where files are made, changed or removed. It forbids
# all sockets except between processes of this machine.
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
KEYS = dict(WANDB_API_KEY="5ec7e7" * 6 + "5ec7", HF_TOKEN="hf_5ecretOfTheHub", AWS_SECRET_ACCESS_KEY="5ecretOfAmazon")


def guarded(folder: Path, *command) -> set[Path]:
    """Run Python without network and standard input. Return the files that it wrote outside of the allowed places."""
    folder = folder.resolve()
    files = {"guard/sitecustomize.py": GUARD, "guard/log": ""}
    write_files(folder, files | dict.fromkeys(["runs/.x", "temporary/.x", "home/.x"], ""))
    kept = "PATH LD_LIBRARY_PATH LANG VIRTUAL_ENV".split()
    environment = KEYS | {name: os.environ[name] for name in kept if name in os.environ}
    folders = dict(PYTHONPATH="guard", GUARD_LOG="guard/log", TMPDIR="temporary", HOME="home")
    environment |= {name: f"{folder}/{path}" for name, path in folders.items()}
    options = dict(cwd=ROOT, env=environment, timeout=1200, text=True, stdin=subprocess.DEVNULL, capture_output=True)
    done = subprocess.run([sys.executable, *map(str, command)], **options)
    written = (folder / "guard/log").read_text().splitlines()
    calls = [line for line in written if line.startswith("NETWORK")]
    assert done.returncode == 0 and not calls and written, (calls, done.stdout[-2000:], done.stderr[-3000:])
    cache = folder / "home/.cache/scale_invariant_attention"
    may = f"{folder}/runs/", f"{folder}/temporary/", f"{cache}/", "/dev/", "/proc/self/"
    outside = {path for path in map(Path, written) if not f"{path}/".startswith(may)}
    outside -= {*cache.parents}
    return {path for path in outside if "__pycache__" not in path.parts}  # Python's, beside each source file


@slow
@OUTSIDE
def test_nothing_is_written_outside_nobody_is_called_and_keys_reach_no_file(data, tmp_path, faults):
    code = f"open({str(tmp_path / 'elsewhere')!r}, 'w')"
    assert guarded(tmp_path, "-c", code) == {(tmp_path / "elsewhere").resolve()}  # the guard sees it
    more = "--steps 4 --cooldown_steps 0 --val_every 2 --save_every 2 --wandb offline"
    train = "train_gpt.py", *arguments(data, tmp_path / "runs", more)
    for command in train, f"-m scripts.evaluate {tmp_path}/runs/run".split(), f"-m data.shards verify {data}".split():
        with faults("commands alone"):
            assert guarded(tmp_path, *command) == set(), command[:3]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "guard" not in path.parts]
    assert {".wandb", ".txt", ".pt", ".jsonl"} <= {path.suffix for path in files}
    assert not [path for path in files if any(key.encode() in path.read_bytes() for key in KEYS.values())]


EXTREMES = "many nan inf -inf -1 0 1.5 1e308 1e-320 1e400 2147483647 18446744073709551616 True None \x00 é ../x -- -"
EXTREMES = [*EXTREMES.split(" "), "", "a b", "9" * 400]
SIZES = "vocab_size num_layers num_heads model_dim steps val_tokens batch_tokens train_length val_lengths".split()


@shared
def place(shared_path):
    """A folder that runs are started in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(shared_path)
        patch.setenv("WANDB_MODE", "offline")
        patch.setattr(os, "_exit", sys.exit)
        yield shared_path


@pytest.fixture
def outcome_of(data, place, capsys):
    """Return a function from fields to "trained", "refused" (leaves nothing) or "stopped" (at a nonfinite step)."""

    def outcome_of(more):
        before = {*place.rglob("*")}
        argv = [*arguments(data, "runs", "--steps 2 --cooldown_steps 0"), *more]
        try:
            code = exit_code(train_gpt.main, argv)
            files = {path.name: path for path in {*place.rglob("*")} - before}
            if code == 0:
                steps, _ = steps_and_validations(files["metrics.jsonl"].parent)
                assert [r["step"] for r in steps] == [1, 2], more
                return "trained"
            assert code == 2 and one_error(capsys), more
            if "metrics.jsonl" in files:
                return "stopped"
            assert files.keys() <= {"runs"}, more
            return "refused"
        finally:
            shutil.rmtree(place / "runs", ignore_errors=True)
            capsys.readouterr()

    return outcome_of


@CONFIGS
@table("more, outcome", """
    --seed 18446744073709551616         | refused
    --keep 1{zeros}                     | refused
    --timeout 1e300                     | refused
    --name 1{zeros}                     | refused
    --muon_lr 1e300                     | refused
    --vocab_size 9223372036854775807    | refused
    --model_dim 9223372036854775804     | refused
    --num_layers 10000000000            | refused
    --batch_tokens 2000000000000        | refused
    --wandb online                      | refused
    --validate_as yarn                  | refused
    --attention_backend fast            | refused
    --method rope --method_options num_heads 3                                         | refused
    --method rope --method_options position_scale 0.5                                  | refused
    --method yarn --method_options base 1e-320                                         | refused
    --method rope_ntk --method_options stretch 1e300                                   | refused
    --method alibi --method_options slopes inf                                         | refused
    --method logn_rope --method_options init 1e39                                      | refused
    --method scale_invariant_rope --method_options tau 1e-320                          | refused
    --num_heads 1 --train_length 1 --batch_tokens 3 --val_lengths 1 2 --val_tokens 2   | trained
    --method rope --method_options base 18446744073709551616                           | trained
""")
def test_impossible_fields_are_refused_and_extreme_ones_are_not(more, outcome, outcome_of, faults, monkeypatch):
    if "online" in more:  # with a key that wandb's client refuses
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_API_KEY", "short")
    with faults("configurations"):
        assert outcome_of(more.format(zeros="0" * 400).split()) == outcome


@slow
@CONFIGS
def test_every_configuration_trains_or_is_refused_in_one_line(outcome_of, faults, long):
    rng, outcomes = random.Random(None if long else 0), set()
    fields = [name for name in Config.__dataclass_fields__ if name not in ("wandb", "compile", "device", "runs_dir")]
    for _ in range(400 if long else 40):
        more = ["--method", rng.choice(NAMES)]
        for field in rng.sample(fields, 1):
            value = rng.choice(EXTREMES)
            if not (field in SIZES and len(value) > 3 and value.isdigit()):  # that only costs memory or hours
                more += [f"--{field}", *value.split(" ")]
        with faults("configurations"):
            outcomes.add(outcome_of(more))
    assert {"trained", "refused"} <= outcomes


# The network is lost when the record of step 8 is written.
LOSING = """
import os, urllib.request
import train_gpt
from runtime.metrics import Metrics

write = Metrics.write

def losing(self, record):
    write(self, record)
    if record["step"] == 8:
        urllib.request.urlopen(os.environ["WANDB_BASE_URL"] + "/lose").close()

Metrics.write = losing
train_gpt.main()
"""


@slow
@WANDB
def test_a_run_goes_on_without_network_and_is_sent_later(data, faults, tmp_path):
    home = dict(HOME=str(tmp_path))
    with faults("network lost in a run"):
        argv = arguments(data, tmp_path / "runs", "--wandb online")
        with StandIn() as server:
            python("-c", LOSING, *argv, WANDB_FINISH_TIMEOUT="1", **home, **server.environment)
        run = tmp_path / "runs/run"
        assert (run / "summary.json").exists()
        (mirror,) = (run / "wandb").glob("run-*")
        command = f"wandb sync --no-skip-online {mirror}"
        assert command in (run / "log.txt").read_text()
        with StandIn() as server:
            python("-m", *command.split(), **home, **server.environment)
        records = read_metrics(run / "metrics.jsonl")
        there = {record["_step"]: record for record in server.history}
        assert sorted(there) == [*range(len(records))] and len(records) == 25
        for number, record in enumerate(records):
            assert there[number]["step"] == record["step"]
            assert there[number].get("train_loss") == record.get("train_loss")
            assert there[number].get("val_loss/64") == record.get("val_loss", {}).get("64")

"""data.download against a stand-in for the hub, through the hub's real client: right bytes, or one line of error."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from commands import ROOT, exit_code, fails, one_error, refuses
from hub_stand_in import serve
from test_data import flip, write_raw

from configs.presets import PRESETS, preset
from data import shards
from data.download import main
from data.needle import C4_FILES, fetch_c4
from data.shards import open_split
from data.sources import data_command
from data.text import prepare
from data.tokenizer import load_tokenizer

DOWNLOADS = pytest.mark.promise(6, "downloads are whole or refused")
NAMES = "fineweb_val_000000.bin fineweb_train_000001.bin fineweb_train_000002.bin".split()
PATHS = {name: f"/datasets/kjj0/fineweb10B-gpt2/resolve/main/{name}" for name in NAMES}
C4_PATH = "/datasets/allenai/c4/resolve/main/"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Serve shards and whatever a test adds, to this process, and by `environment` to others."""
    from huggingface_hub import constants

    with serve() as hub:
        for i, path in enumerate(PATHS.values()):
            tokens = np.random.default_rng(i).integers(0, 50257, 1000 + i)
            hub.served[path] = write_raw(tmp_path / "raw", tokens).read_bytes()
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("NO_PROXY", "*")
        hub.environment = dict(HF_ENDPOINT=hub.address, HF_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="0")
        yield hub


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def fineweb(out, num_shards):
    return exit_code(main, ["fineweb10B", "--shards", num_shards, "--out", out])


def assert_whole(hub, out, names):
    """Check that the folder has these shards of the hub and no others."""
    assert {path.name for path in out.iterdir()} - {".cache"} == {*names, "manifest.json"}
    assert all((out / name).read_bytes() == hub.served[PATHS[name]] for name in names)
    assert exit_code(shards.main, ["verify", out]) == 0


def test_download_gives_a_dataset_and_later_runs_fetch_the_missing_files(hub, out):
    assert fineweb(out, 1) == 0 and hub.fetched == NAMES[:2]
    assert len(open_split(out, "val", 50304)) == 1000 and len(open_split(out, "train", 50304)) == 1001
    assert_whole(hub, out, NAMES[:2])
    assert fineweb(out, 1) == fineweb(out, 2) == 0 and hub.fetched == NAMES
    (out / NAMES[0]).unlink()
    assert fineweb(out, 2) == 0 and hub.fetched == [*NAMES, NAMES[0]]
    (out / "manifest.json").unlink()  # as modded-nanogpt leaves a folder
    assert fineweb(out, 1) == 0 and hub.fetched == [*NAMES, NAMES[0]]
    assert_whole(hub, out, NAMES)


def hang_up(handler, data):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def half_a_body(handler, data):
    handler.send(200, data[: len(data) // 2], {"Content-Length": str(len(data))})
    hang_up(handler, data)


BAD_ANSWERS = {
    "hang up": hang_up,
    "half a body": half_a_body,
    "too short": lambda handler, data: handler.send(200, data[: len(data) // 2]),
    "flipped": lambda handler, data: handler.send(200, flip(data, 8 * 1500 + 3)),
    "error page": lambda handler, data: handler.send(200, b"<html>try again later</html>"),
    "unavailable": lambda handler, data: handler.send(503, b""),
}


@DOWNLOADS
@pytest.mark.parametrize("times", [1, 10**9])
@pytest.mark.parametrize("fault", [*BAD_ANSWERS, "other sha256", "not there"])
def test_bad_answers_end_in_the_right_bytes_or_an_error(hub, out, capsys, monkeypatch, faults, fault, times):
    """The first shard is there. Bad answers for the second leave it, and no bad second shard."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # of the client, before it tries again
    path = PATHS[NAMES[1]]
    good = hub.served.pop(path)
    assert fineweb(out, 1) == 2 and NAMES[1] in one_error(capsys)
    if fault != "not there":
        hub.served[path] = good
    if fault == "other sha256":
        hub.sha256[path] = "0" * 64
    hub.fault, hub.faults = BAD_ANSWERS.get(fault), times * (fault in BAD_ANSWERS)
    with faults(fault):
        if times == 1 and fault in ("hang up", "half a body"):  # the client tries again
            assert fineweb(out, 1) == 0
        else:
            fails(capsys, NAMES[1], main, "fineweb10B", "--shards", 1, "--out", out)
            assert not (out / NAMES[1]).exists() and open_split(out, "val", 50304)
        hub.served[path], hub.faults = good, 0  # the server is well again
        hub.sha256.clear()
        assert fineweb(out, 1) == 0 and hub.fetched.count(NAMES[0]) == 1
        assert_whole(hub, out, NAMES[:2])


@DOWNLOADS
@pytest.mark.slow
def test_a_killed_download_leaves_no_bad_shard_and_goes_on(hub, out, faults):
    stalled, released = threading.Event(), threading.Event()

    def stall_in_the_body(handler, data):
        handler.send(200, data[: len(data) // 2], {"Content-Length": str(len(data))})
        stalled.set()
        released.wait(600)

    command = [sys.executable, "-m", "data.download", "fineweb10B", "--shards", "1", "--out", str(out)]
    hub.fault, hub.faults = stall_in_the_body, 1
    with faults("killed in the body"):
        with subprocess.Popen(command, cwd=ROOT, env=os.environ | hub.environment) as process:
            assert stalled.wait(600)
            process.send_signal(signal.SIGKILL)
        released.set()
        with refuses(r"\bval\b"):
            open_split(out, "val", 50304)
        assert fineweb(out, 1) == 0
        assert_whole(hub, out, NAMES[:2])


@DOWNLOADS
def test_a_file_that_was_never_checked_is_refused_and_fetched_again(hub, out, faults):
    assert fineweb(out, 1) == 0
    with faults("unchecked file under a shard's name"):
        (out / NAMES[2]).write_bytes(flip(hub.served[PATHS[NAMES[2]]], 9000))
        with refuses(NAMES[2]):
            open_split(out, "train", 50304)
        assert fineweb(out, 2) == 0
        assert_whole(hub, out, NAMES)


def test_other_numbers_of_shards_and_folders_are_refused(tmp_path, capsys):
    options = "fineweb10B", "--out", tmp_path, "--shards"
    fails(capsys, 103, main, *options, 104)
    manifest = dict(tokenizer="gpt2", vocab_size=50257, source="kjj0/fineweb100B-gpt2", files={})
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    fails(capsys, "kjj0/fineweb100B-gpt2", main, *options, 1)


@pytest.mark.parametrize("name", PRESETS)
def test_the_presets_get_as_many_shards_as_they_read(name):
    config = preset(name)
    command, out = data_command(config.data_dir, config.steps * config.batch_tokens).split(" --out ")
    assert out == config.data_dir and "FILES" not in command
    shards = {"gpt_162m_4k": 25, "gpt_304m_4k": 101}
    if name in shards:
        assert command.endswith(f" --shards {shards[name]}") and command in (ROOT / "docs" / "train.md").read_text()


def test_c4_is_fetched_once(hub, tmp_path):
    hub.served[C4_PATH + C4_FILES["train"]] = b"a file"
    (path,) = {fetch_c4(tmp_path, "train") for _ in range(2)}
    assert path.read_bytes() == b"a file" and len(hub.fetched) == 1
    with refuses("c4-validation", error=OSError):
        fetch_c4(tmp_path, "val")


def test_tokenizers_come_from_the_hub(hub, tmp_path, out):
    (tmp_path / "text.txt").write_text("one line\nof many\n" * 50)
    prepare([tmp_path / "text.txt"], out, "bpe:300")
    hub.served["/me/model/resolve/main/tokenizer.json"] = (out / "tokenizer.json").read_bytes()
    hub.served["/me/model/resolve/main/tokenizer_config.json"] = b"{}"
    assert load_tokenizer("me/model").encode("many lines") == load_tokenizer(out).encode("many lines")
    with refuses("me/gone", error=OSError):
        load_tokenizer("me/gone")

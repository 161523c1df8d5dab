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
from commands import ROOT, exit_code, one_error
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
FINEWEB = "/datasets/kjj0/fineweb10B-gpt2/resolve/main"
NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
C4 = b"what the file holds"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Serve shards, C4 and whatever a test adds, to this process, and by `environment` to others."""
    from huggingface_hub import constants

    with serve() as hub:
        hub.tokens = {name: np.random.default_rng(i).integers(0, 50257, 1000 + i) for i, name in enumerate(NAMES)}
        for name, tokens in hub.tokens.items():
            hub.served[f"{FINEWEB}/{name}"] = write_raw(tmp_path / "raw", tokens).read_bytes()
        for name in C4_FILES.values():
            hub.served[f"/datasets/allenai/c4/resolve/main/{name}"] = C4
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("NO_PROXY", "*")
        hub.environment = dict(HF_ENDPOINT=hub.address, HF_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="0")
        yield hub


def fineweb(out, num_shards):
    return exit_code(main, ["fineweb10B", "--shards", num_shards, "--out", out])


def assert_whole(hub, out, names):
    """Check that the folder has these shards of the hub and no others."""
    assert {path.name for path in out.iterdir()} - {".cache"} == {*names, "manifest.json"}
    assert all((out / name).read_bytes() == hub.served[f"{FINEWEB}/{name}"] for name in names)
    assert exit_code(shards.main, ["verify", out]) == 0


def test_download_gives_a_dataset_and_later_runs_fetch_the_missing_files(hub, tmp_path):
    out = tmp_path / "out"
    assert fineweb(out, 1) == 0 and hub.fetched == NAMES[:2]
    for split, name in (("val", NAMES[0]), ("train", NAMES[1])):
        stream = open_split(out, split, 50304)
        np.testing.assert_array_equal(stream.read(0, len(stream)), hub.tokens[name])
    assert_whole(hub, out, NAMES[:2])
    assert fineweb(out, 1) == 0 and hub.fetched == NAMES[:2]
    assert fineweb(out, 2) == 0 and hub.fetched == NAMES
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
    "too short": lambda handler, data: handler.send(200, data[: len(data) // 2], {}),
    "flipped": lambda handler, data: handler.send(200, flip(data, 8 * 1500 + 3), {}),
    "error page": lambda handler, data: handler.send(200, b"<html>try again later</html>", {}),
    "unavailable": lambda handler, data: handler.send(503, b"", {}),
}


@DOWNLOADS
@pytest.mark.parametrize("times", [1, 10**9])
@pytest.mark.parametrize("fault", BAD_ANSWERS)
def test_bad_answers_end_in_the_right_bytes_or_an_error(hub, tmp_path, capsys, monkeypatch, faults, fault, times):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # of the client, before it tries again
    hub.fault, hub.faults, out = BAD_ANSWERS[fault], times, tmp_path / "out"
    with faults(fault):
        code = fineweb(out, 1)
        tried_again = times == 1 and fault in ("hang up", "half a body")
        assert code == (0 if tried_again else 2)
        assert tried_again or NAMES[0] in one_error(capsys)
        names = json.loads((out / "manifest.json").read_text())["files"]
        assert all((out / name).read_bytes() == hub.served[f"{FINEWEB}/{name}"] for name in names)
        hub.faults = 0
        assert fineweb(out, 1) == 0  # the server is well again
        assert_whole(hub, out, NAMES[:2])


@DOWNLOADS
@pytest.mark.parametrize("kind", ["other sha256", "not there"])
def test_a_wrong_file_is_named_and_the_ones_before_it_are_kept(hub, tmp_path, capsys, faults, kind):
    path = f"{FINEWEB}/{NAMES[1]}"
    good = hub.served[path]
    if kind == "other sha256":
        hub.sha256[path] = "0" * 64
    else:
        del hub.served[path]
    with faults(kind):
        assert fineweb(tmp_path / "out", 1) == 2 and NAMES[1] in one_error(capsys)
        assert not (tmp_path / "out" / NAMES[1]).exists()
        assert open_split(tmp_path / "out", "val", 50304).max_token is not None
        hub.served[path] = good
        hub.sha256.clear()
        assert fineweb(tmp_path / "out", 1) == 0 and hub.fetched.count(NAMES[0]) == 1
        assert_whole(hub, tmp_path / "out", NAMES[:2])


@DOWNLOADS
@pytest.mark.slow
def test_a_killed_download_leaves_no_bad_shard_and_goes_on(hub, tmp_path, faults):
    stalled, released = threading.Event(), threading.Event()

    def stall_in_the_body(handler, data):
        handler.send(200, data[: len(data) // 2], {"Content-Length": str(len(data))})
        stalled.set()
        released.wait(600)

    out = tmp_path / "out"
    command = [sys.executable, "-m", "data.download", "fineweb10B", "--shards", "1", "--out", str(out)]
    hub.fault, hub.faults = stall_in_the_body, 1
    with faults("killed in the body"):
        with subprocess.Popen(command, cwd=ROOT, env=os.environ | hub.environment) as process:
            assert stalled.wait(600)
            process.send_signal(signal.SIGKILL)
        released.set()
        with pytest.raises(ValueError, match=r"\bval\b"):
            open_split(out, "val", 50304)
        assert fineweb(out, 1) == 0
        assert_whole(hub, out, NAMES[:2])


@DOWNLOADS
def test_a_file_that_was_never_checked_is_refused_and_fetched_again(hub, tmp_path, faults):
    out = tmp_path / "out"
    assert fineweb(out, 1) == 0
    with faults("unchecked file under a shard's name"):
        (out / NAMES[2]).write_bytes(flip(hub.served[f"{FINEWEB}/{NAMES[2]}"], 9000))
        with pytest.raises(ValueError, match=NAMES[2]):
            open_split(out, "train", 50304)
        assert fineweb(out, 2) == 0
        assert_whole(hub, out, NAMES)


def test_other_numbers_of_shards_and_folders_are_refused(tmp_path, capsys):
    assert fineweb(tmp_path / "out", 104) == 2 and "103" in one_error(capsys)
    manifest = {"tokenizer": "gpt2", "vocab_size": 50257, "source": "kjj0/fineweb100B-gpt2", "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert fineweb(tmp_path, 1) == 2 and "kjj0/fineweb100B-gpt2" in one_error(capsys)


def test_the_presets_get_as_many_shards_as_they_read():
    commands = set()
    for name in PRESETS:
        config = preset(name)
        command = data_command(config.data_dir, config.steps * config.batch_tokens)
        assert f"--out {config.data_dir}" in command and "FILES" not in command
        commands.add(command.split(" --out ")[0])
    assert {f"python -m data.download fineweb10B --shards {n}" for n in (2, 25)} < commands
    page = (ROOT / "docs" / "train.md").read_text()
    assert all(command in page for command in commands if command.endswith((" 25", " 101")))


def test_c4_is_fetched_once(hub, tmp_path):
    (path,) = {fetch_c4(tmp_path / "c4", "train") for _ in range(2)}
    assert path.read_bytes() == C4 and len(hub.fetched) == 1
    del hub.served[f"/datasets/allenai/c4/resolve/main/{C4_FILES['val']}"]
    with pytest.raises(OSError, match="c4-validation"):
        fetch_c4(tmp_path / "c4", "val")


def test_tokenizers_come_from_the_hub(hub, tmp_path):
    prepare_file = tmp_path / "text.txt"
    prepare_file.write_text("one line\nof many\n" * 50)
    data = tmp_path / "data"
    prepare([prepare_file], data, "bpe:300")
    hub.served["/me/model/resolve/main/tokenizer.json"] = (data / "tokenizer.json").read_bytes()
    hub.served["/me/model/resolve/main/tokenizer_config.json"] = b"{}"
    model = load_tokenizer("me/model")
    assert model.name == "tokenizer.json" and model.encode("many lines") == load_tokenizer(data).encode("many lines")
    with pytest.raises(OSError, match="me/gone"):
        load_tokenizer("me/gone")

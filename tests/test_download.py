"""data.download against a stand-in for the hub, through the hub's real client: right bytes, or one line of error."""

import signal
import socket
import threading

import numpy as np
from commands import (
    ROOT,
    exit_code,
    fails,
    fixture,
    names,
    one_error,
    parametrize,
    promise,
    refuses,
    slow,
    start,
    succeeds,
    write_files,
)
from hub_stand_in import serve
from test_data import flip, write_raw

from configs.presets import PRESETS, preset
from data.download import main
from data.needle import C4_FILES, fetch_c4
from data.shards import main as verify
from data.shards import open_split
from data.sources import data_command
from data.text import prepare
from data.tokenizer import load_tokenizer

DOWNLOADS = promise(6, "downloads are whole or refused")
NAMES = VAL, FIRST, SECOND = "fineweb_val_000000.bin fineweb_train_000001.bin fineweb_train_000002.bin".split()
PATHS = {name: f"/datasets/kjj0/fineweb10B-gpt2/resolve/main/{name}" for name in NAMES}
C4_PATH = "/datasets/allenai/c4/resolve/main/"


@fixture
def hub(tmp_path, monkeypatch):
    """Serve shards and whatever a test adds, to this process, and by `environment` to others."""
    from huggingface_hub import constants

    with serve() as hub:
        for i, path in enumerate(PATHS.values()):
            tokens = np.random.default_rng(i).integers(0, 50257, 1000 + i)
            hub.served[path] = write_raw(tmp_path / "raw", tokens).read_bytes()
        template, cache = hub.address + "/{repo_id}/resolve/{revision}/{filename}", str(tmp_path / "cache")
        settings = dict(ENDPOINT=hub.address, HUGGINGFACE_CO_URL_TEMPLATE=template, HF_HUB_OFFLINE=False)
        for name, value in (settings | dict(HF_HUB_CACHE=cache)).items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("NO_PROXY", "*")
        hub.environment = dict(HF_ENDPOINT=hub.address, HF_HOME=cache, HF_HUB_OFFLINE="0")
        yield hub


def fineweb(out, num_shards):
    return exit_code(main, ["fineweb10B", "--shards", num_shards, "--out", out])


def assert_whole(hub, out, shards):
    """Check that the folder has these shards of the hub and no others."""
    assert {*names(out)} - {".cache"} == {*shards, "manifest.json"}
    assert all((out / name).read_bytes() == hub.served[PATHS[name]] for name in shards)
    succeeds(verify, "verify", out)


def test_download_gives_a_dataset_and_later_runs_fetch_the_missing_files(hub, out):
    assert fineweb(out, 1) == 0 and hub.fetched == NAMES[:2]
    assert len(open_split(out, "val", 50304)) == 1000 and len(open_split(out, "train", 50304)) == 1001
    assert_whole(hub, out, NAMES[:2])
    assert fineweb(out, 1) == fineweb(out, 2) == 0 and hub.fetched == NAMES
    (out / VAL).unlink()
    assert fineweb(out, 2) == 0 and hub.fetched == [*NAMES, VAL]
    (out / "manifest.json").unlink()  # as modded-nanogpt leaves a folder
    assert fineweb(out, 1) == 0 and hub.fetched == [*NAMES, VAL]
    assert_whole(hub, out, NAMES)
    (out / NAMES[2]).unlink()  # to free the disk
    assert fineweb(out, 1) == 0 and len(open_split(out, "train", 50304)) == 1001


def hang_up(handler, data):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def send_half(handler, data):
    handler.send(200, data[: len(data) // 2], {"Content-Length": str(len(data))})


def half_a_body(handler, data):
    send_half(handler, data)
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
@parametrize("times", [1, 10**9])
@parametrize("fault", [*BAD_ANSWERS, "other sha256", "not there"])
def test_bad_answers_end_in_the_right_bytes_or_an_error(hub, out, capsys, monkeypatch, faults, fault, times):
    """The first shard is there. Bad answers for the second leave it, and no bad second shard."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # of the client, before it tries again
    path = PATHS[FIRST]
    good = hub.served.pop(path)
    assert fineweb(out, 1) == 2 and FIRST in one_error(capsys)
    if fault != "not there":
        hub.served[path] = good
    if fault == "other sha256":
        hub.sha256[path] = "0" * 64
    hub.fault, hub.faults = BAD_ANSWERS.get(fault), times * (fault in BAD_ANSWERS)
    with faults(fault):
        if times == 1 and fault in ("hang up", "half a body"):  # the client tries again
            assert fineweb(out, 1) == 0
        else:
            assert fineweb(out, 1) == 2 and FIRST in one_error(capsys)
            assert not (out / FIRST).exists() and open_split(out, "val", 50304)
        hub.served[path], hub.faults = good, 0  # the server is well again
        hub.sha256.clear()
        assert fineweb(out, 1) == 0 and hub.fetched.count(VAL) == 1
        assert_whole(hub, out, NAMES[:2])


@DOWNLOADS
@slow
def test_a_killed_download_leaves_no_bad_shard_and_goes_on(hub, out, faults):
    stalled, released = threading.Event(), threading.Event()

    def stall_in_the_body(handler, data):
        send_half(handler, data)
        stalled.set()
        released.wait(600)

    argv = f"-m data.download fineweb10B --shards 1 --out {out}".split()
    hub.fault, hub.faults = stall_in_the_body, 1
    with faults("killed in the body"):
        with start(*argv, **hub.environment) as process:
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
        write_files(out, {SECOND: flip(hub.served[PATHS[SECOND]], 9000)})
        with refuses(SECOND):
            open_split(out, "train", 50304)
        assert fineweb(out, 2) == 0
        assert_whole(hub, out, NAMES)


def test_a_folder_of_other_shards_is_refused(tmp_path, capsys):
    manifest = '{"tokenizer": "gpt2", "vocab_size": 50257, "source": "kjj0/fineweb100B-gpt2", "files": {}}'
    write_files(tmp_path, {"manifest.json": manifest})
    fails(capsys, "kjj0/fineweb100B-gpt2", main, "fineweb10B", "--out", tmp_path, "--shards", 1)


@parametrize("name", PRESETS)
def test_the_presets_get_as_many_shards_as_they_read(name):
    config = preset(name)
    command, out = data_command(config.data_dir, config.steps * config.batch_tokens).split(" --out ")
    assert out == config.data_dir and "FILES" not in command
    if shards := dict(gpt_162m_4k=25, gpt_304m_4k=101).get(name):
        assert command.endswith(f" --shards {shards}") and command in (ROOT / "docs/train.md").read_text()


def test_c4_is_fetched_once(hub, tmp_path):
    hub.served[C4_PATH + C4_FILES["train"]] = b"a file"
    (path,) = {fetch_c4(tmp_path, "train") for _ in range(2)}
    assert path.read_bytes() == b"a file" and len(hub.fetched) == 1
    with refuses("c4-validation", error=OSError):
        fetch_c4(tmp_path, "val")


def test_tokenizers_come_from_the_hub(hub, tmp_path, out):
    write_files(tmp_path, {"text.txt": "one line\nof many\n" * 50})
    prepare([tmp_path / "text.txt"], out, "bpe:300")
    for name, content in {"tokenizer": (out / "tokenizer.json").read_bytes(), "tokenizer_config": b"{}"}.items():
        hub.served[f"/me/model/resolve/main/{name}.json"] = content
    assert load_tokenizer("me/model").encode("many lines") == load_tokenizer(out).encode("many lines")
    with refuses("me/gone", error=OSError):
        load_tokenizer("me/gone")

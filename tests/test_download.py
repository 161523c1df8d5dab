"""data.download against a stand-in for the hub, through the hub's real client: right bytes, or one line of error."""

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hub_stand_in import serve
from test_data import REPOSITORY, exit_code, flip, write_raw

from configs.presets import PRESETS, preset
from data import shards
from data.download import main
from data.needle import C4_FILES, fetch_c4
from data.shards import data_command, open_split
from data.tokenizer import load_tokenizer

DOWNLOADS = pytest.mark.promise(6, "downloads are whole or refused")
FINEWEB = "/datasets/kjj0/fineweb10B-gpt2/resolve/main"
NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
ROWS = [{"text": "short", "n": 1}, {"text": "a long one \U0001f600 " * 20, "n": 2}, {"text": "b " * 150, "n": 3}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Serve shards, C4 and whatever a test adds, to this process, and by `environment` to others."""
    from huggingface_hub import constants

    with serve() as hub:
        hub.tokens = {name: np.random.default_rng(i).integers(0, 50257, 1000 + i) for i, name in enumerate(NAMES)}
        for name, tokens in hub.tokens.items():
            hub.served[f"{FINEWEB}/{name}"] = write_raw(tmp_path / "raw", tokens).read_bytes()
        for name in C4_FILES.values():
            hub.served[f"/datasets/allenai/c4/resolve/main/{name}"] = gzip.compress(LINES)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("NO_PROXY", "*")
        hub.environment = dict(HF_ENDPOINT=hub.address, HF_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="0")
        yield hub


def one_error(capsys):
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


# ---- FineWeb ----


def fineweb(out, num_shards):
    return exit_code(main, ["fineweb10B", "--shards", num_shards, "--out", out])


def assert_whole(hub, out, names):
    """Check that the folder has these shards of the hub and nothing else."""
    assert {path.name for path in out.iterdir()} == {*names, "manifest.json"}
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
    assert_whole(hub, out, NAMES)


def hang_up(handler, data):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def half_a_body(handler, data):
    handler.send(200, data[: len(data) // 2], {"Content-Length": str(len(data))})
    hang_up(handler, data)


def too_short(handler, data):
    handler.send(200, data[: len(data) // 2], {})


def flipped(handler, data):
    handler.send(200, flip(data, 8 * 1500 + 3), {})


def error_page(handler, data):
    handler.send(200, b"<html>try again later</html>", {})


def unavailable(handler, data):
    handler.send(503, b"", {})


@DOWNLOADS
@pytest.mark.parametrize("times", [1, 10**9])
@pytest.mark.parametrize("fault", [hang_up, half_a_body, too_short, flipped, error_page, unavailable])
def test_bad_answers_end_in_the_right_bytes_or_an_error(hub, tmp_path, capsys, monkeypatch, faults, fault, times):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # of the client, before it tries again
    hub.fault, hub.faults, out = fault, times, tmp_path / "out"
    with faults(fault.__name__.replace("_", " ")):
        code = fineweb(out, 1)
        tried_again = times == 1 and fault in (hang_up, half_a_body)
        assert code == (0 if tried_again else 2)
        assert tried_again or NAMES[0] in one_error(capsys)
        assert all(path.read_bytes() == hub.served[f"{FINEWEB}/{path.name}"] for path in out.glob("*.bin"))
        hub.faults = 0
        assert fineweb(out, 1) == 0  # the server is well again
        assert_whole(hub, out, NAMES[:2])


@DOWNLOADS
@pytest.mark.parametrize("kind", ["pointer", "empty", "token outside the vocabulary", "other sha256", "not there"])
def test_a_wrong_file_is_named_and_the_ones_before_it_are_kept(hub, tmp_path, capsys, faults, kind):
    path = f"{FINEWEB}/{NAMES[1]}"
    wrong = {"pointer": b"version https://git-lfs.github.com/spec/v1\n", "empty": b""}
    wrong["token outside the vocabulary"] = write_raw(tmp_path / "raw", [1, 50257, 2]).read_bytes()
    good = hub.served[path]
    hub.served[path] = wrong.get(kind, good)
    if kind == "other sha256":
        hub.sha256[path] = "0" * 64
    if kind == "not there":
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
        with subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | hub.environment) as process:
            assert stalled.wait(600)
            process.send_signal(signal.SIGKILL)
        released.set()
        assert not list(out.glob("*.bin"))
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


@DOWNLOADS
def test_no_server_is_one_line(hub, tmp_path, capsys, monkeypatch, faults):
    from huggingface_hub import constants

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    with faults("no server"):
        assert fineweb(tmp_path / "out", 1) == 2 and NAMES[0] in one_error(capsys)
        with pytest.raises(OSError, match="c4-validation"):
            fetch_c4(tmp_path / "c4", "val")


def test_other_numbers_of_shards_and_folders_are_refused(tmp_path, capsys):
    assert exit_code(main, ["fineweb10B", "--shards", "104"]) == 2 and "103" in one_error(capsys)
    (tmp_path / "file").write_text("")
    assert fineweb(tmp_path / "file", 1) == 2 and "file" in one_error(capsys)
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
    page = (REPOSITORY / "docs" / "data.md").read_text()
    assert all(command in page for command in commands if command.endswith((" 25", " 101")))


# ---- text and C4 ----


def text(hub, out, name, data, *options, revision="main"):
    hub.served[f"/datasets/me/text/resolve/{revision}/{name}"] = data
    return exit_code(main, ["text", "me/text", name, "--out", out, *options])


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["test.jsonl", "deep/t-1.json.gz"])
def test_lines_become_text(hub, tmp_path, name):
    data = gzip.compress(LINES) if name.endswith(".gz") else LINES
    out, path = tmp_path / "out", tmp_path / "out" / f"{name.split('.')[0].replace('/', '-')}.jsonl"
    for _ in range(2):
        assert text(hub, out, name, data, "--min-characters", "100") == 0
    assert texts(path) == [row["text"] for row in ROWS[1:]] and len(hub.fetched) == 1
    assert {p.name for p in out.iterdir()} == {path.name, ".lock"}


def test_a_whole_file_of_a_branch_becomes_one_text(hub, tmp_path):
    data = b"Call me\nIshmael."
    assert text(hub, tmp_path, "book.txt", data, "--revision", "branch", revision="branch") == 0
    assert texts(tmp_path / "book.jsonl") == ["Call me\nIshmael."]


@DOWNLOADS
@pytest.mark.parametrize(
    ("name", "data", "options", "named"),
    [
        ("x.csv", b"a,b\n", [], "x.csv: line 1"),
        ("a.jsonl", LINES, ["--field", "content"], "a.jsonl: line 1: .*'content'"),
        ("b.jsonl", LINES, ["--min-characters", "9999"], "b.jsonl .*9999"),
        ("c.jsonl.gz", gzip.compress(LINES, mtime=0)[:-20], [], "c.jsonl.gz"),
        ("d.jsonl.gz", b"<html>not a gzip file</html>", [], "d.jsonl.gz"),
        ("e.jsonl.gz", flip(gzip.compress(LINES, mtime=0), 700), [], "e.jsonl.gz"),
    ],
)
def test_a_file_that_is_no_such_text_is_named(hub, tmp_path, capsys, faults, name, data, options, named):
    with faults("damaged or other text"):
        assert text(hub, tmp_path / "out", name, data, *options) == 2
        assert re.search(named, one_error(capsys))
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_c4_is_fetched_once_by_several_processes(hub, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        paths = {*pool.map(lambda i: fetch_c4(tmp_path / "c4", "train"), range(3))}
    (path,) = paths
    assert texts(path) == [row["text"] for row in ROWS] and len(hub.fetched) == 1


def test_a_models_tokenizer_comes_from_the_hub(hub, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        hub.served[f"/me/model/resolve/main/{name}"] = b"{}"
    with pytest.raises(ValueError, match="tokenizer.json"):  # this one is not good
        load_tokenizer("me/model")
    with pytest.raises(OSError, match="me/gone"):
        load_tokenizer("me/gone")

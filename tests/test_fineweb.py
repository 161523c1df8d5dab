"""data.fineweb against a local server that speaks the hub's few endpoints, through the real client in a subprocess."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from test_data import exit_code

from configs.presets import PRESETS, preset
from data.download import main, time_limit
from data.shards import data_command, open_split

REPOSITORY = Path(__file__).resolve().parents[1]
REPO_PATH = "datasets/kjj0/fineweb10B-gpt2"
NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]


class Hub(ThreadingHTTPServer):
    """Serves shards as the hub does: HEAD and GET of resolve are redirects with size and sha256, then comes the file.

    `fault(handler, data)` answers in its place: the next `times` requests of the method `stage`. (A GET that is
    redirected is one; the fault sits at its end.)
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        rng = np.random.default_rng(0)
        self.tokens = {name: rng.integers(0, 50257, 1000 + i) for i, name in enumerate(NAMES)}
        self.files, self.hashes, self.sizes = {}, {}, {}
        for name, tokens in self.tokens.items():
            self.publish(name, shard(tokens))
        self.requests = []  # (method, path)
        self.fault, self.stage, self.times = None, None, 0
        self.stalled, self.released = threading.Event(), threading.Event()

    def publish(self, name, data):
        self.files[name], self.hashes[name], self.sizes[name] = data, hashlib.sha256(data).hexdigest(), len(data)

    def fetched(self):
        return [Path(path).name for method, path in self.requests if method == "GET" and path.startswith("/lfs/")]

    def breaks(self, fault, stage="GET", times=10**9):
        self.fault, self.stage, self.times = fault, stage, times


def shard(tokens):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    return header.tobytes() + tokens.astype("<u2").tobytes()


class HubHandler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        folder, name = self.path.rsplit("/", 1)
        hub = self.server
        if not folder.startswith("/api"):  # what the client asks for on its own account
            hub.requests.append((self.command, self.path))
        if folder == f"/{REPO_PATH}/resolve/main" and name in hub.files:
            if self.command == "HEAD" and self.is_broken():
                return hub.fault(self, b"")
            linked = {"X-Linked-Etag": f'"{hub.hashes[name]}"', "X-Linked-Size": str(hub.sizes[name])}
            elsewhere = f"http://localhost:{hub.server_port}/lfs/{name}"  # another host than 127.0.0.1
            return self.reply(302, b"", linked | {"X-Repo-Commit": "1" * 40, "Location": elsewhere})
        if folder != "/lfs":
            return self.reply(404)
        if self.is_broken():
            return hub.fault(self, hub.files[name])
        data, range_ = hub.files[name], self.headers.get("Range")
        if range_:
            start = int(range_.removeprefix("bytes=").removesuffix("-"))
            return self.reply(206, data[start:], {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"})
        self.reply(200, data)

    do_GET = do_HEAD

    def do_CONNECT(self):
        self.server.requests.append((self.command, self.path))
        self.server.fault(self, b"")

    def is_broken(self):
        hub = self.server
        if hub.stage != self.command or not hub.times:
            return False
        hub.times -= 1
        return True

    def reply(self, status, data=b"", headers=None):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextmanager
def running_hub():
    with Hub() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()


@pytest.fixture
def hub():
    with running_hub() as server:
        yield server


def environment(tmp_path, endpoint):
    """Xet, the hub's other transport, would go around the server: it is switched off."""
    return os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def download(tmp_path, endpoint, shards, *options, **variables):
    command = [sys.executable, "-m", "data.fineweb", "10B", "--shards", str(shards), "--out", str(tmp_path / "out")]
    command += options
    variables = environment(tmp_path, endpoint) | variables
    return subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=300)


def down(handler, data):
    handler.reply(503)


def url(hub):
    return f"http://127.0.0.1:{hub.server_port}"


def assert_one_error_line(result):
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in result.stderr
    return errors[0]


def test_download_gives_a_dataset(tmp_path, hub):
    result = download(tmp_path, url(hub), 1)
    assert result.returncode == 0, result.stderr
    for split, name in (("val", NAMES[0]), ("train", NAMES[1])):
        stream = open_split(tmp_path / "out", split, 50304)
        np.testing.assert_array_equal(stream.read(0, len(stream)), hub.tokens[name])
        assert stream.max_token == hub.tokens[name].max()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["tokenizer"], manifest["vocab_size"]) == ("gpt2", 50257)
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == {
        name: hub.hashes[name] for name in NAMES[:2]
    }


def test_later_runs_fetch_only_what_is_missing(tmp_path, hub):
    assert download(tmp_path, url(hub), 1).returncode == 0
    hub.requests.clear()
    assert download(tmp_path, url(hub), 1).returncode == 0
    assert hub.requests == []
    assert download(tmp_path, url(hub), 2).returncode == 0
    assert hub.fetched() == NAMES[2:]
    (tmp_path / "out" / NAMES[0]).unlink()
    hub.requests.clear()
    assert download(tmp_path, url(hub), 2).returncode == 0
    assert hub.fetched() == NAMES[:1]


def test_file_with_a_wrong_hash_is_removed_and_named_and_what_came_before_is_kept(tmp_path, hub):
    good = hub.files[NAMES[1]]
    hub.files[NAMES[1]] = good[:1500] + bytes([good[1500] ^ 1]) + good[1501:]
    error = assert_one_error_line(download(tmp_path, url(hub), 1))
    assert NAMES[1] in error and "sha256" in error
    assert not (tmp_path / "out" / NAMES[1]).exists()
    assert open_split(tmp_path / "out", "val", 50304).max_token is not None  # already in the manifest
    hub.files[NAMES[1]] = good
    hub.requests.clear()
    assert download(tmp_path, url(hub), 1).returncode == 0
    assert hub.fetched() == NAMES[1:2]


def test_file_that_is_no_shard_is_removed_and_named(tmp_path, hub):
    hub.publish(NAMES[0], b"version https://git-lfs.github.com/spec/v1\n")
    error = assert_one_error_line(download(tmp_path, url(hub), 1))
    assert f"{NAMES[0]}: not a token shard" in error
    assert not (tmp_path / "out" / NAMES[0]).exists()


@pytest.mark.slow
def test_server_error_is_tried_three_times_and_one_line_says_so(tmp_path, hub):
    hub.breaks(down, "HEAD")
    result = download(tmp_path, url(hub), 1)
    assert "503" in assert_one_error_line(result)
    assert result.stderr.count("\n") == 3 and len(hub.requests) == 3
    assert result.stderr.count("trying again") == 2


def test_no_server_is_one_line_without_a_second_try(tmp_path):
    with Hub() as closed:
        endpoint = url(closed)
    result = download(tmp_path, endpoint, 1)
    assert "kjj0/fineweb10B-gpt2" in assert_one_error_line(result) and result.stderr.count("\n") == 1


def test_file_that_is_not_there_is_asked_for_once(tmp_path, hub):
    del hub.files[NAMES[0]]
    assert NAMES[0] in assert_one_error_line(download(tmp_path, url(hub), 1))
    assert len(hub.requests) == 1


def test_time_limit_ends_what_waits_for_ever_and_not_what_ends(tmp_path):
    with pytest.raises(TimeoutError, match="give it up: no end after 0.001 minutes"):
        with time_limit(0.001, "give it up"):
            threading.Event().wait()
    with time_limit(10, "give it up"):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_number_of_shards_is_checked(tmp_path, capsys):
    assert exit_code(main, ["10B", "--shards", "104", "--out", str(tmp_path)]) == 2
    assert "1 to 103" in capsys.readouterr().err


def test_a_file_is_no_folder_to_download_to(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert exit_code(main, ["10B", "--shards", "1", "--out", str(tmp_path / "file")]) == 2
    assert "is a file, not a data folder" in capsys.readouterr().err


def test_folder_of_other_data_is_refused(tmp_path, capsys):
    manifest = {"tokenizer": "gpt2", "vocab_size": 50257, "source": "kjj0/fineweb100B-gpt2", "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert exit_code(main, ["10B", "--out", str(tmp_path)]) == 2
    assert "kjj0/fineweb100B-gpt2" in capsys.readouterr().err


# ---- the command that gets what a run needs ----


def test_every_preset_of_ours_gets_as_many_shards_as_it_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where nothing is prepared yet
    commands = {}
    for name in PRESETS:
        config = preset(name)
        commands[name] = data_command(config.data_dir, config.steps * config.batch_tokens)
    paper = dict.fromkeys(("gpt_162m_4k", "gpt_162m_16k", "gpt_162m_64k"), "python -m data.fineweb 10B --shards 25")
    small = {name: "python -m data.fineweb 10B --shards 2" for name in ("small_4k", "small_16k", "small_64k")}
    small["small_304m"] = "python -m data.fineweb 10B --shards 2"
    large = dict(gpt_304m_4k="python -m data.fineweb 100B --shards 101")
    laptop = ("quickstart", "mini", "mini_1024", "mini_4096", "mini_large")
    ours = paper | small | large | dict.fromkeys(laptop, "bash scripts/quickstart.sh")
    assert {name: commands[name] for name in ours} == ours  # and any that a user adds
    page = (REPOSITORY / "docs" / "data.md").read_text()
    assert commands["gpt_162m_4k"] in page and commands["gpt_304m_4k"] in page
    assert commands["gpt_162m_4k"] in (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize(
    ("tokens", "shards"), [(0, 1), (1, 1), (10**8, 1), (10**8 + 1, 2), (103 * 10**8, 103), (10**12, 103)]
)
def test_shards_are_whole_and_those_of_the_set(tokens, shards):
    assert data_command(Path("data/fineweb10B"), tokens) == f"python -m data.fineweb 10B --shards {shards}"


def test_the_command_is_for_the_folder_where_it_is(tmp_path):
    command = data_command(tmp_path / "my disk" / "fineweb100B", 1)
    assert command == f"python -m data.fineweb 100B --shards 1 --out '{tmp_path}/my disk/fineweb100B'"
    assert data_command(tmp_path / "books", 1).endswith(f"--tokenizer gpt2 --out {tmp_path}/books")
    (tmp_path / "quickstart").mkdir()
    for name in ("text_train_000001.bin", "tokenizer.json"):
        (tmp_path / "quickstart" / name).write_text("")
    more = f"--tokenizer {tmp_path}/quickstart/tokenizer.json --out {tmp_path}/quickstart-more"
    assert data_command(tmp_path / "quickstart", 1) == f"python -m data.text FILES... {more}"

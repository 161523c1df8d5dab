"""data.fineweb against a local server that speaks the hub's few endpoints, through the real client in a subprocess."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest

from data.fineweb import main
from data.shards import open_split

REPOSITORY = Path(__file__).resolve().parents[1]
REPO_PATH = "datasets/kjj0/fineweb10B-gpt2"
NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]


class Hub(ThreadingHTTPServer):
    """Serves shards as the hub does: POST paths-info for the hashes, HEAD and GET resolve for the files."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        rng = np.random.default_rng(0)
        self.tokens = {name: rng.integers(0, 50257, 1000 + i) for i, name in enumerate(NAMES)}
        self.files = {name: shard(tokens) for name, tokens in self.tokens.items()}
        self.hashes = {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}
        self.down = False
        self.requests = []  # (method, path)

    def fetched(self):
        return [Path(path).name for method, path in self.requests if method == "GET" and "/resolve/" in path]


def shard(tokens):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    return header.tobytes() + tokens.astype("<u2").tobytes()


class HubHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        names = parse_qs(body)["paths"]
        self.server.requests.append(("POST", self.path))
        if self.server.down or self.path != f"/api/{REPO_PATH}/paths-info/main":
            return self.reply(503)
        infos = [
            {
                "type": "file",
                "path": name,
                "size": len(self.server.files[name]),
                "oid": "0" * 40,
                "lfs": {"oid": self.server.hashes[name], "size": len(self.server.files[name]), "pointerSize": 134},
            }
            for name in names
        ]
        self.reply(200, json.dumps(infos).encode(), {"Content-Type": "application/json"})

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        folder, name = self.path.rsplit("/", 1)
        self.server.requests.append((self.command, self.path))
        if self.server.down or folder != f"/{REPO_PATH}/resolve/main":
            return self.reply(503)
        headers = {"ETag": f'"{self.server.hashes[name]}"', "X-Repo-Commit": "1" * 40}
        self.reply(200, self.server.files[name], headers)

    def reply(self, status, data=b"", headers=None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    with Hub() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()


def download(tmp_path, endpoint, shards):
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    command = [sys.executable, "-m", "data.fineweb", "10B", "--shards", str(shards), "--out", str(tmp_path / "out")]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)


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
    hub.files[NAMES[0]] = b"version https://git-lfs.github.com/spec/v1\n"
    hub.hashes[NAMES[0]] = hashlib.sha256(hub.files[NAMES[0]]).hexdigest()
    error = assert_one_error_line(download(tmp_path, url(hub), 1))
    assert f"{NAMES[0]}: not a token shard" in error
    assert not (tmp_path / "out" / NAMES[0]).exists()


def test_server_error_is_one_line(tmp_path, hub):
    hub.down = True
    result = download(tmp_path, url(hub), 1)
    assert "503" in assert_one_error_line(result)
    assert result.stderr.count("\n") == 1


def test_no_server_is_one_line(tmp_path):
    with Hub() as closed:
        endpoint = url(closed)
    result = download(tmp_path, endpoint, 1)
    assert "kjj0/fineweb10B-gpt2" in assert_one_error_line(result)
    assert result.stderr.count("\n") == 1


def test_number_of_shards_is_checked(tmp_path, capsys):
    assert main(["10B", "--shards", "104", "--out", str(tmp_path)]) == 2
    assert "1 to 103" in capsys.readouterr().err


def test_folder_of_other_data_is_refused(tmp_path, capsys):
    manifest = {"tokenizer": "gpt2", "vocab_size": 50257, "source": "kjj0/fineweb100B-gpt2", "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert main(["10B", "--out", str(tmp_path)]) == 2
    assert "kjj0/fineweb100B-gpt2" in capsys.readouterr().err

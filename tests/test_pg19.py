"""data.pg19 against a local server for the list on the hub and for the books, through the hub's real client."""

import hashlib
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIST = "/datasets/deepmind/pg19/resolve/main/data/validation_files.txt"
BOOKS = {"validation/7.txt": b"Call me Ishmael.", "validation/8.txt": "Ligne \u00e9trange".encode() * 1000}


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.server.requests.append((self.command, self.path))
        data = self.server.files.get(self.path)
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Length", len(data or b""))
        if data is not None:
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", "1" * 40)
        self.end_headers()
        if data is not None and self.command == "GET":
            self.wfile.write(data)

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files = {LIST: "\n".join(BOOKS).encode()} | {f"/site/{name}": text for name, text in BOOKS.items()}
    server.requests = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def download(server, out):
    """What it prints, or its exit status and the last line of its errors."""
    done = run(server, out)
    return done.stdout if done.returncode == 0 else (done.returncode, done.stderr.splitlines()[-1])


def run(server, out, site=None):
    address = f"http://127.0.0.1:{server.server_port}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= dict(HF_ENDPOINT=address, HF_HOME=str(out.parent / "cache"), HF_HUB_DISABLE_TELEMETRY="1")
    environment |= dict(NO_PROXY="*", no_proxy="*")
    command = [sys.executable, "-m", "data.pg19", "--out", str(out), "--site", site or f"{address}/site"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def test_the_books_are_fetched_once(server, tmp_path):
    out = tmp_path / "pg19"
    assert download(server, out) == f"{out}: 2 books, 0 MB\n"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {Path(n).name: x for n, x in BOOKS.items()}
    (out / "7.txt").unlink()
    server.requests.clear()
    download(server, out)
    assert [path for _, path in server.requests if path.startswith("/site/")] == ["/site/validation/7.txt"]
    assert (out / "7.txt").read_bytes() == BOOKS["validation/7.txt"]


@pytest.mark.slow
def test_a_book_that_is_gone_is_one_line(server, tmp_path):
    del server.files["/site/validation/8.txt"]
    code, error = download(server, tmp_path / "pg19")
    assert code == 2 and error.startswith("error: cannot fetch validation/8.txt of PG-19") and "404" in error
    assert [path.name for path in (tmp_path / "pg19").iterdir()] == ["7.txt"]


@pytest.mark.parametrize("site", ["http://nowhere.invalid", "http://127.0.0.1:9"])
def test_books_without_a_network_are_one_line_without_a_second_try(server, tmp_path, site):
    done = run(server, tmp_path / "pg19", site)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: cannot fetch validation/7.txt of PG-19 from http://")


@pytest.mark.parametrize("listed", ["", "../../etc/passwd", "validation/7.txt\n<html>"])
def test_a_list_that_is_none_is_refused(server, tmp_path, listed):
    server.files[LIST] = listed.encode()
    code, error = download(server, tmp_path / "pg19")
    assert code == 2 and "not a list of books" in error and list((tmp_path / "pg19").iterdir()) == []

"""data.hub against a local server, through the hub's real client: files of every kind, and what is wrong with one."""

import gzip
import json
import sys
import threading
from http.server import ThreadingHTTPServer

import pytest
from test_pg19 import Handler

from data.hub import main
from data.shards import open_split
from data.text import prepare

ROWS = [{"text": "short", "n": 1}, {"text": "a long one \U0001f600 " * 20, "n": 2}, {"text": "b " * 150, "n": 3}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.fixture
def fetch(tmp_path, monkeypatch, capsys):
    """Runs the command on files of a data set: what it says, or the line that it fails with."""
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.requests = {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv("NO_PROXY", "*")

    def fetch(*words, revision="main", **files):
        for name, data in files.items():
            server.files[f"/datasets/me/text/resolve/{revision}/{name}"] = data
        server.requests.clear()
        try:
            main(["me/text", *words, "--out", str(tmp_path / "out")])
        except SystemExit as end:
            assert end.code == 2
            (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
            return line
        return capsys.readouterr().out

    fetch.server, fetch.out = server, tmp_path / "out"
    yield fetch
    server.shutdown()
    server.server_close()


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["test.jsonl", "deep/t-1.json.gz"])
def test_lines_become_text_that_can_be_prepared(fetch, name):
    data = gzip.compress(LINES.encode()) if name.endswith(".gz") else LINES.encode()
    said = fetch(name, "--min-characters", "100", **{name: data})
    path = fetch.out / f"{name.split('.')[0].replace('/', '-')}.jsonl"
    assert texts(path) == [row["text"] for row in ROWS[1:]] and said.startswith(f"{path}: 2 documents, ")
    assert "already there" in fetch(name) and not fetch.server.requests
    assert [p.name for p in fetch.out.iterdir()] == [path.name]
    prepare([fetch.out], fetch.out / "data", "bpe:300", val_fraction=0.5)
    assert len(open_split(fetch.out / "data", "val", 300)) > 0


def test_parquet_becomes_text(fetch, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pip install -r requirements-extras.txt")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "t.parquet")
    data = (tmp_path / "t.parquet").read_bytes()
    fetch("t.parquet", "--documents", "2", "--revision", "branch", revision="branch", **{"t.parquet": data})
    assert texts(fetch.out / "t.jsonl") == [row["text"] for row in ROWS[:2]]
    assert "no column 'content', but text, n" in fetch("u.parquet", "--field", "content", **{"u.parquet": data})
    assert "column 'n' holds other than text" in fetch("v.parquet", "--field", "n", **{"v.parquet": data})
    assert fetch("w.parquet", **{"w.parquet": b"PAR1 nothing"}).startswith("error: ")


def test_a_whole_file_can_be_one_document(fetch):
    fetch("book.txt", **{"book.txt": b"Call me\nIshmael."})
    assert texts(fetch.out / "book.jsonl") == ["Call me\nIshmael."]


def test_what_is_wrong_with_a_file_is_one_line(fetch, monkeypatch):
    assert "x.csv cannot be read" in fetch("x.csv") and "x.parquet.gz" in fetch("x.parquet.gz")
    assert "cannot fetch gone.jsonl of me/text" in fetch("gone.jsonl")
    assert "a.jsonl, line 1: not a JSON object" in fetch("a.jsonl", "--field", "content", **{"a.jsonl": LINES.encode()})
    said = fetch("b.jsonl", "--min-characters", "9999", **{"b.jsonl": LINES.encode()})
    assert "b.jsonl of me/text has no document of 9999 characters" in said
    assert "is damaged" in fetch("c.jsonl.gz", **{"c.jsonl.gz": gzip.compress(LINES.encode())[:-20]})
    assert "--documents" in fetch("a.jsonl", "--documents", "0")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install -r requirements-extras.txt" in fetch("t.parquet", **{"t.parquet": b"PAR1"})
    assert not list(fetch.out.glob("*"))

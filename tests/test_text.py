"""data.text and data.tokenizer: which documents become which tokens, on real tokenizers trained here."""

import gzip
import io
import json
import os
import shutil
import sys
from functools import partial

import numpy as np
import pytest
import tiktoken
from commands import exit_code, fails, parametrize, refuses, shared, succeeds, table, unchanged, write_files
from tokenizers import Tokenizer, models

from data.documents import REPLACED, DocumentReader
from data.shards import open_split, tokenizer_of
from data.text import main, prepare
from data.tokenizer import END_OF_TEXT, PIECE_CHARACTERS, load_tokenizer

WORDS = "shore,lamp,winter,of,the,a,quiet,caf\u00e9,\u4e2d\u6587,42,reads.,\n\n".split(",")
LONG = "of" * 1000  # 2 replaced bytes are accepted
KINDS = ".txt .TXT .jsonl .JSONL .ndjson .txt.gz .TXT.GZ .json.gz .jsonl.GZ .txt.zst .json.ZST .parquet .Parquet"
SPECIAL = "shore,it's,  ,\n\n,caf\u00e9 , \u4e2d\u6587,42,\t,\u00a0, \r\n,..., ".split(",")


def make_documents(count, seed=0):
    rng = np.random.default_rng(seed)
    return [f"Tale {i}: {' '.join(rng.choice(WORDS, rng.integers(1, 60)))}".strip() for i in range(count)]


def write_folder(folder, documents):
    """Write the documents as one-document files, a file with separators in a subfolder, and a .jsonl."""
    third = len(documents) // 3
    files = {f"{i}.txt": text for i, text in enumerate(documents[:third])}
    files["sub/many.txt"] = f"\n{END_OF_TEXT}\n".join(documents[third : 2 * third])
    write_files(folder, files)
    write_lines(folder / "crawl.jsonl", documents[2 * third :])
    return folder


def write_lines(path, texts, field="text"):
    lines = [json.dumps({"id": 1, field: text}) + "\n" for text in texts]
    path.write_text("".join(lines))


def read_documents(data_dir, split):
    """Return the texts of a split. An end-of-text token precedes each."""
    tokenizer = load_tokenizer(data_dir)
    stream = open_split(data_dir, split, tokenizer.vocab_size)
    nothing, *documents = tokenizer.decode(stream.read(0, len(stream)).tolist()).split(tokenizer.eot_text)
    assert nothing == ""
    return documents


def both_splits(data_dir):
    return [read_documents(data_dir, split) for split in ("train", "val")]


def assert_documents(data_dir, expected):
    train, val = both_splits(data_dir)
    assert sorted(train + val) == sorted(expected)
    return train, val


def shard_bytes(data_dir):
    return {path.name: path.read_bytes() for path in data_dir.glob("*.bin")}


prepare_320 = partial(prepare, tokenizer="bpe:320", val_fraction=0.2, shard_tokens=500)


@shared
def folder(shared_path):
    """Return a folder with 60 documents in `in`, which `out` has the shards of."""
    prepare_320([write_folder(shared_path / "in", make_documents(60))], shared_path / "out")
    return shared_path


def test_every_document_comes_back_once_in_another_order(folder):
    documents = make_documents(60)
    train, val = assert_documents(folder / "out", documents)
    assert 1 <= len(val) <= 30 and len(list((folder / "out").glob("*_train_*.bin"))) > 1
    places = list(map(documents.index, train))
    assert abs(np.corrcoef(places, range(len(places)))[0, 1]) < 0.5


def test_a_document_is_in_the_same_split_whatever_the_files(folder, tmp_path, out):
    prepare_320([write_folder(tmp_path / "in", make_documents(60)[::-1])], out)
    assert sorted(read_documents(out, "val")) == sorted(read_documents(folder / "out", "val"))


@parametrize("place", ["", "mine.json", "out/x.json", "data"])
def test_preparing_twice_or_with_the_trained_tokenizer_gives_the_same_bytes(folder, tmp_path, out, place):
    out.mkdir()
    trained = folder / "out/tokenizer.json"
    if place.endswith("json"):
        shutil.copy(trained, tmp_path / place)
    tokenizer = {"": "bpe:320", "data": folder / "out"}.get(place, tmp_path / place)
    prepare_320([folder / "in"], out, tokenizer=str(tokenizer))
    assert shard_bytes(out) == shard_bytes(folder / "out")
    assert (out / "tokenizer.json").read_bytes() == trained.read_bytes()


def test_tokenizer_is_trained_on_the_train_split_only(folder, tmp_path, out):
    train, val = both_splits(folder / "out")
    assert len(val) > 1
    prepare_320([write_folder(tmp_path / "less", [*train, val[0]])], out)  # without the other val documents
    assert (out / "tokenizer.json").read_text() == (folder / "out/tokenizer.json").read_text()


def read(*inputs, **options):
    reader = DocumentReader(inputs, **options)
    return sorted(reader), reader


def test_strange_bytes_and_empty_documents(tmp_path):
    strange = b"caf\xe9 \xff\nEOT\n \nEOT\nEOT\n".replace(b"EOT", END_OF_TEXT.encode())
    crlf = f"\ufeffone\r\n{END_OF_TEXT}\r\ntrue \ufffd\r\n"
    write_files(tmp_path, {"bytes.txt": LONG.encode() + strange, "empty.txt": "", "crlf.txt": crlf})
    write_lines(tmp_path / "a.jsonl", ["", "half \ud83d pair", LONG])
    documents, reader = read(tmp_path)
    assert documents == sorted([f"{LONG}caf\ufffd \ufffd", "one", "true \ufffd", "half ? pair", LONG])
    assert reader.counts[REPLACED] == {tmp_path / "bytes.txt": 2, tmp_path / "a.jsonl": 1} and not reader.not_utf8


def pack(text, kind):
    """Return the content of a file of this kind, such as ".json.gz". A compressed one has two members."""
    if kind == ".parquet":
        parquet, sink = pytest.importorskip("pyarrow.parquet"), io.BytesIO()
        parquet.write_table(pytest.importorskip("pyarrow").table({"body": [text]}), sink)
        return sink.getvalue()
    if ".txt" not in kind:
        text = json.dumps({"url": "x", "body": text}) + "\n"
    if kind.endswith(".gz"):
        compress = gzip.compress
    elif kind.endswith(".zst"):
        compress = partial(pytest.importorskip("pyarrow").compress, codec="zstd", asbytes=True)
    else:
        compress = bytes  # as it is
    return compress(text[:9].encode()) + compress(text[9:].encode())


@parametrize("kind", KINDS.split())
def test_every_kind_of_file_is_read_in_a_folder_and_by_name(tmp_path, kind):
    content, path = pack("some text", kind.lower()), tmp_path / f"c4-train.00000{kind}"
    path.write_bytes(content)
    for place in tmp_path, path:
        documents, reader = read(place, field="body")
        assert documents == ["some text"] and reader.counts == {"documents": {kind.lower(): 1}, REPLACED: {}}
    if kind.lower().endswith(("gz", "zst", "parquet")):
        path.write_bytes(content[:-4])
        with refuses(kind):
            read(path)


def test_what_a_folder_leaves_out_is_counted(tmp_path, capsys, monkeypatch):
    write_files(tmp_path, dict.fromkeys("a.md b.md c.json d.txt.xz in/e.txt README".split(), "x"))
    (tmp_path / "linked").symlink_to(tmp_path / "in")
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "locked")
    documents, reader = read(tmp_path)
    assert documents == ["x"]
    assert reader.counts["left out"] == {".md": 2, ".json": 1, ".xz": 1, "": 1, "linked or locked folders": 2}
    reader.report()
    assert "2 .md" in capsys.readouterr().out


def test_rows_without_a_text_are_refused_or_counted(tmp_path):
    rows = ["1", "null", "{", '{"text": null}', '{"text": 5}', '{"body": "x"}', "", '{"text": "fine"}']
    write_files(tmp_path, {"a.jsonl": "\n".join(rows)})
    (tmp_path / "b.parquet").write_bytes(pack("row", ".parquet"))  # in another field
    for path in tmp_path.iterdir():
        with refuses(rf"{path.name}: line 1:", "--skip-bad"):
            read(path)
    documents, reader = read(tmp_path, skip_bad=True)
    assert documents == ["fine"] and reader.counts["bad rows"] == {tmp_path / "a.jsonl": 6, tmp_path / "b.parquet": 1}


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name in write_files(tmp_path, {"a.txt.zst": "x", "b.parquet": "x"}).iterdir():
        with refuses(name.name, "pip install pyarrow"):
            read(name)


def test_named_files_and_options(tmp_path, out):
    write_lines(tmp_path / "lines.json", map(str, range(20)), "body")
    write_files(tmp_path, {"in/sub/found.txt": "found", "note.md": "a note", "bad.json": "null"})
    inputs = [tmp_path / name for name in ("in", "note.md", "lines.json", "bad.json")]
    succeeds(main, *inputs, *f"--field body --skip-bad --val-fraction 0.3 --tokenizer bpe:300 --out {out}".split())
    assert_documents(out, ["found", "a note", *map(str, range(20))])


@parametrize("count, fraction", [(1, 0.05), (1, 0.9), (3, 0.05)])
def test_few_documents_are_cut_at_the_ends_of_lines(tmp_path, out, count, fraction):
    novels = {}
    for i in range(count):
        words = np.random.default_rng(i).choice(WORDS[:8], (400, 9))
        novels[f"{i}.txt"] = "\n".join(f"{i}.{number} {' '.join(line)}" for number, line in enumerate(words))
    prepare([write_files(tmp_path, novels)], out, "bpe:300", val_fraction=fraction)
    for novel, train, val in zip(novels.values(), *map(sorted, both_splits(out)), strict=True):
        assert f"{train}\n{val}" == novel
        assert len(val) / len(novel) == pytest.approx(fraction, rel=0.05)


def test_tokenizer_round_trip_and_special_tokens(folder):
    tokenizer = load_tokenizer(folder / "out")
    text = f"  bytes never seen: \U0001f600 {END_OF_TEXT} in the text\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot == 0 and 0 not in ids and max(ids) < tokenizer.vocab_size <= 320


def test_a_long_document_has_the_tokens_that_the_library_gives_the_whole(tmp_path, out):
    text = "".join(np.random.default_rng(0).choice(SPECIAL, 3 * PIECE_CHARACTERS)).strip()
    prepare([write_files(tmp_path, {"a.txt": text}) / "a.txt"], out, "bpe:400", val_fraction=0.01)
    (train,) = read_documents(out, "train")
    assert text.startswith(train) and len(train) > 2 * PIECE_CHARACTERS
    expected = Tokenizer.from_file(str(out / "tokenizer.json")).encode(train).ids
    stream = open_split(out, "train", 400)
    assert stream.read(0, len(stream)).tolist() == [0, *expected]
    assert load_tokenizer(out).encode(train) == expected


def test_limits_in_a_tokenizer_file_cut_no_document(folder, tmp_path):
    tokenizer = Tokenizer.from_file(str(folder / "out/tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "cut.json"))
    text = "the quiet lamp of winter"
    assert load_tokenizer(tmp_path / "cut.json").encode(text) == load_tokenizer(folder / "out").encode(text)


def test_a_models_first_token_begins_each_document_and_its_files_are_kept(folder, tmp_path, out):
    trained = (folder / "out/tokenizer.json").read_text()
    config = {"tokenizer_config.json": '{"bos_token": {"content": "<s>"}}'}
    write_files(tmp_path, config | {"tokenizer.json": trained.replace(END_OF_TEXT, "<s>")})
    for tokenizer in (tmp_path, out):  # of the model, and already there
        prepare_320([folder / "in"], out, tokenizer=str(tokenizer))
        assert load_tokenizer(out).eot == 0 and both_splits(out) == both_splits(folder / "out")
        for path in out.glob("*.bin"):
            path.unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
    with refuses("endoftext"):
        load_tokenizer(tmp_path)


def test_gpt2_is_tiktokens(tmp_path, out, monkeypatch):
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"li": 256, b"ne": 257}
    encoding = tiktoken.Encoding("gpt2", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 258})
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {"gpt2": encoding})
    prepare([write_files(tmp_path, {"text.txt": "one line\nof many\n" * 50})], out, "gpt2")
    gpt2 = load_tokenizer(out)
    assert tokenizer_of(out) == "gpt2" and not (out / "tokenizer.json").exists()
    assert gpt2.encode("a line") == [97, 32, 256, 257] and gpt2.decode([97, 32, 256, 257]) == "a line"
    tokens = open_split(out, "train", gpt2.vocab_size).read(0, 6).tolist()
    assert tokens[0] == gpt2.eot == 258 and gpt2.decode(tokens) == f"{END_OF_TEXT}one line"


def test_gpt2_without_a_network_is_refused_in_one_line(tmp_path, out, monkeypatch, capsys):
    write_files(tmp_path, {"a.txt": "text"})
    proxies = dict.fromkeys("HTTPS_PROXY https_proxy ALL_PROXY all_proxy".split(), "http://127.0.0.1:9")
    for name, value in (proxies | dict(NO_PROXY="", no_proxy="", TIKTOKEN_CACHE_DIR=str(tmp_path / "cache"))).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    fails(capsys, "TIKTOKEN_CACHE_DIR", main, tmp_path / "a.txt", "--tokenizer", "gpt2", "--out", out)
    assert not out.exists()


@shared
def bad(folder):
    """Return a folder of files that cannot be read as text or as a tokenizer."""
    (folder / "bad/empty").mkdir(parents=True)
    return write_files(folder / "bad", {
        "bare.json": Tokenizer(models.BPE()).to_str(),  # without an end-of-text token
        "not.json": "[]",
        "a.jsonl": '{"text": "fine"}\n{"text": "cut\n',
        "deep.jsonl": '{"text": "fine"}\n' + "[" * 200_000,
        "a.parquet": b"PAR1\0\0",
        "utf16.txt": "text".encode("utf-16"),
        "latin1.txt": "\u00e9t\u00e9 \u00e0 la mer".encode("latin-1"),
        "gbk.jsonl": '{"text": "\u4e2d\u6587"}'.encode("gbk"),
        "rows.txt": '{"url": 1, "text": "prose?"}',
        "crc.txt.gz": gzip.compress(b"some text")[:-8] + bytes(8),
        "not.txt.gz": b"some text",
    })


@table("text, arguments, named", """
    in             | --val-fraction 0            | val-fraction
    in             | --val-fraction 1e-9         | val-fraction
    in             | --field nothing             | crawl.jsonl: line 1:
    in             | --tokenizer bpe:256         | bpe:256
    in             | --tokenizer bpe:70000       | 70000
    in             | --tokenizer gpt3            | gpt3
    in             | --tokenizer nowhere.json    | nowhere.json
    in             | --tokenizer {bad}/bare.json | bare.json
    in             | --tokenizer {bad}/not.json  | not.json
    nowhere        |                             | nowhere
    bad/empty      |                             | bad/empty
    bad/a.jsonl    |                             | a.jsonl: line 2:
    bad/deep.jsonl |                             | deep.jsonl: line 2:
    bad/a.parquet  |                             | a.parquet
    bad/utf16.txt  |                             | utf16.txt
    bad/latin1.txt |                             | latin1.txt
    bad/gbk.jsonl  |                             | gbk.jsonl
    bad/rows.txt   |                             | rows.txt
    bad/crc.txt.gz |                             | crc.txt.gz
    bad/not.txt.gz |                             | not.txt.gz
    in             | --copy-rows 1               | copy-rows
    in             | --copy-rows -0.1            | copy-rows
    in             | --copy-rows nan             | copy-rows
    in             | --copy-rows 0.5 --row-tokens 15 | row-tokens
    in             | --out {bad}/../out          | bad/../out
""")
def test_mistakes_are_one_line_and_write_nothing(folder, bad, out, capsys, text, arguments, named):
    """The last one would replace shards."""
    options = f"--tokenizer bpe:300 --out {out} {arguments}".format(bad=bad).split()
    with unchanged(folder):
        fails(capsys, named, main, folder / text, *options)
    assert not any(out.glob("*"))


def test_an_unknown_option_is_refused(folder, out):
    assert exit_code(main, [folder / "in", "--tokenizer=bpe:300", "--vocab=300", f"--out={out}"]) == 2
    assert not out.exists()

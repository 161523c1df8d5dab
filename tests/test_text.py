"""data.text: which documents become which tokens, on real tokenizers trained here."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.shards import open_split
from data.text import END_OF_TEXT, load_tokenizer, main, prepare

REPOSITORY = Path(__file__).resolve().parents[1]


def make_documents(count, seed=0):
    rng = np.random.default_rng(seed)
    words = ["shore", "lamp", "winter", "of", "the", "a", "quiet", "caf\u00e9", "\u4e2d\u6587", "42,", "reads.", "\n\n"]
    return [f"Tale {i}: " + " ".join(rng.choice(words, rng.integers(1, 60))).strip() for i in range(count)]


def write_folder(folder, documents):
    """The documents as one-document files, a file with separators in a subfolder, and a .jsonl."""
    (folder / "sub").mkdir(parents=True)
    third = len(documents) // 3
    for i, text in enumerate(documents[:third]):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    joined = f"\n{END_OF_TEXT}\n".join(documents[third : 2 * third])
    (folder / "sub" / "many.txt").write_text(joined, encoding="utf-8")
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(documents[2 * third :])]
    (folder / "crawl.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def read_documents(data_dir, split):
    """Decodes a split and cuts it at the end-of-text token, which must precede every document."""
    tokenizer = load_tokenizer(data_dir)
    stream = open_split(data_dir, split, tokenizer.vocab_size)
    tokens = stream.read(0, len(stream))
    starts = np.flatnonzero(tokens == tokenizer.eot)
    assert starts[0] == 0
    return [tokenizer.decode(part[1:].tolist()) for part in np.split(tokens, starts[1:])]


def shard_bytes(data_dir):
    return {path.name: path.read_bytes() for path in data_dir.glob("*.bin")}


def test_every_document_comes_back_once(tmp_path):
    documents = make_documents(60)
    prepare([write_folder(tmp_path / "in", documents)], tmp_path / "out", "bpe:300", val_fraction=0.2, shard_tokens=500)
    train, val = (read_documents(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(documents)
    assert 1 <= len(val) <= 30 and len(list((tmp_path / "out").glob("*_train_*.bin"))) > 1


def test_train_order_is_not_the_order_of_the_files(tmp_path):
    documents = make_documents(60)
    prepare([write_folder(tmp_path / "in", documents)], tmp_path / "out", "bpe:300", val_fraction=0.2)
    ranks = [documents.index(text) for text in read_documents(tmp_path / "out", "train")]
    assert abs(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1]) < 0.5


def test_a_document_is_in_the_same_split_whatever_the_files(tmp_path):
    documents = make_documents(60)
    write_folder(tmp_path / "a", documents)
    write_folder(tmp_path / "b", documents[::-1])
    for name in "ab":
        prepare([tmp_path / name], tmp_path / f"out_{name}", "bpe:300", val_fraction=0.2)
    val_a, val_b = (read_documents(tmp_path / f"out_{name}", "val") for name in "ab")
    assert sorted(val_a) == sorted(val_b)


def test_preparing_twice_gives_the_same_bytes(tmp_path):
    write_folder(tmp_path / "in", make_documents(40))
    for name in "ab":
        prepare([tmp_path / "in"], tmp_path / name, "bpe:320", val_fraction=0.2)
    assert shard_bytes(tmp_path / "a") == shard_bytes(tmp_path / "b")
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_tokenizer_is_trained_on_the_train_split_only(tmp_path):
    documents = make_documents(40)
    write_folder(tmp_path / "all", documents)
    prepare([tmp_path / "all"], tmp_path / "a", "bpe:320", val_fraction=0.2)
    train = read_documents(tmp_path / "a", "train")
    val = read_documents(tmp_path / "a", "val")
    write_folder(tmp_path / "less", [*train, *val[:1]])  # all val documents but one are gone: nothing may change
    prepare([tmp_path / "less"], tmp_path / "b", "bpe:320", val_fraction=0.2)
    assert len(val) > 1
    vocabularies = [json.loads((tmp_path / name / "tokenizer.json").read_text())["model"]["vocab"] for name in "ab"]
    assert vocabularies[0] == vocabularies[1]


def test_tokenizer_file_is_used_and_copied(tmp_path):
    write_folder(tmp_path / "in", make_documents(40))
    prepare([tmp_path / "in"], tmp_path / "a", "bpe:320", val_fraction=0.2)
    trained = shutil.copy(tmp_path / "a" / "tokenizer.json", tmp_path / "mine.json")
    prepare([tmp_path / "in"], tmp_path / "b", str(trained), val_fraction=0.2)
    assert shard_bytes(tmp_path / "a") == shard_bytes(tmp_path / "b")
    assert load_tokenizer(tmp_path / "b").encode("lamp") == load_tokenizer(trained).encode("lamp")


def test_tokenizer_round_trip_and_special_tokens(tmp_path):
    write_folder(tmp_path / "in", make_documents(40))
    prepare([tmp_path / "in"], tmp_path / "out", "bpe:320", val_fraction=0.2)
    tokenizer = load_tokenizer(tmp_path / "out")
    text = f"  bytes never seen: \U0001f600 {END_OF_TEXT} in the text\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot == 0 and 0 not in ids and max(ids) < tokenizer.vocab_size <= 320


def test_strange_bytes_and_empty_documents(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "bytes.txt").write_bytes(b"caf\xe9 \xff" + f"\n{END_OF_TEXT}\n \n{END_OF_TEXT}\n{END_OF_TEXT}\n".encode())
    (folder / "empty.txt").write_bytes(b"")
    (folder / "crlf.txt").write_bytes(f"one\r\n{END_OF_TEXT}\r\ntwo\r\n".encode())
    lines = ['{"text": ""}', "", r'{"text": "half \ud83d pair"}', *(json.dumps({"text": f"n {i}"}) for i in range(20))]
    (folder / "a.jsonl").write_text("\n".join(lines))
    prepare([folder], tmp_path / "out", "bpe:300", val_fraction=0.3)
    found = read_documents(tmp_path / "out", "train") + read_documents(tmp_path / "out", "val")
    expected = ["caf\ufffd \ufffd", "one", "two", "half ? pair", *(f"n {i}" for i in range(20))]
    assert sorted(found) == sorted(expected)


def test_suffixes_field_and_exclude(tmp_path):
    folder = write_folder(tmp_path / "in", make_documents(9))
    kept = [f"note {i}" for i in range(20)]
    for i, text in enumerate(kept):
        (folder / "sub" / f"{i}.md").write_text(text)
    (folder / "drafts").mkdir()
    (folder / "drafts" / "draft.md").write_text("a draft")
    (folder / "LICENSE.md").write_text("all rights")
    (tmp_path / "named.jsonl").write_text('{"body": "named file", "text": 1}\n')
    arguments = [str(folder), str(tmp_path / "named.jsonl"), "--suffixes", ".md", "--field", "body"]
    arguments += ["--exclude", "LICENSE.md", "drafts", "--val-fraction", "0.3", "--name", "notes"]
    assert main([*arguments, "--tokenizer", "bpe:300", "--out", str(tmp_path / "out")]) == 0
    found = read_documents(tmp_path / "out", "train") + read_documents(tmp_path / "out", "val")
    assert sorted(found) == sorted([*kept, "named file"])
    assert (tmp_path / "out" / "notes_val_000000.bin").exists()


def test_report_counts_documents_tokens_and_bytes(tmp_path, capsys):
    prepare([write_folder(tmp_path / "in", make_documents(60))], tmp_path / "out", "bpe:300", val_fraction=0.2)
    lines = capsys.readouterr().out.splitlines()
    for line, split in zip(lines, ("train", "val"), strict=True):
        texts = read_documents(tmp_path / "out", split)
        tokens = len(open_split(tmp_path / "out", split, 300))
        ratio = sum(len(text.encode()) for text in texts) / tokens
        assert line == f"{split}: {len(texts)} documents, {tokens:,} tokens, {ratio:.2f} bytes per token"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer", "bpe:300", "--val-fraction", "0"], "fell into val"),
        (["--tokenizer", "bpe:300", "--val-fraction", "1"], "fell into train"),
        (["--tokenizer", "bpe:300", "--field", "nothing"], r"crawl.jsonl: line 1: .*'nothing'"),
        (["--tokenizer", "bpe:256"], "from 257 to 65536"),
        (["--tokenizer", "bpe:many"], "bpe:many"),
        (["--tokenizer", "gpt3"], "unknown tokenizer 'gpt3'"),
        (["--tokenizer", "nowhere.json"], "nowhere.json: no such"),
        (["--tokenizer", "gpt2:nowhere"], "nowhere"),
        (["--tokenizer", "bpe:300", "--suffixes", ".rst"], "no files .*.rst"),
        (["--tokenizer", "bpe:300", "--shard-tokens", "0"], "shard_tokens is 0"),
    ],
)
def test_mistakes_are_one_line_and_write_no_shards(tmp_path, capsys, arguments, message):
    folder = write_folder(tmp_path / "in", make_documents(12))
    assert main([str(folder), *arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error)
    assert not list((tmp_path / "out").glob("*.bin"))


def test_wrong_places_are_one_line_before_a_tokenizer_is_fetched(tmp_path, capsys):
    folder = write_folder(tmp_path / "in", make_documents(12))
    (tmp_path / "file").write_text("")
    places = {(folder, tmp_path / "file"): "file: is a file, not a data folder"}
    places[tmp_path / "nowhere", tmp_path / "out"] = "nowhere: no such file or folder"
    for (source, out), says in places.items():
        assert main([str(source), "--tokenizer", "gpt2:absent", "--out", str(out)]) == 2
        assert says in capsys.readouterr().err


def test_prepared_folder_is_not_overwritten(tmp_path):
    write_folder(tmp_path / "in", make_documents(40))
    prepare([tmp_path / "in"], tmp_path / "out", "bpe:300", val_fraction=0.2)
    before = shard_bytes(tmp_path / "out")
    with pytest.raises(ValueError, match="already has shards"):
        prepare([tmp_path / "in"], tmp_path / "out", "bpe:310", val_fraction=0.2)
    assert shard_bytes(tmp_path / "out") == before


def test_bad_json_is_named_by_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "cut\n')
    with pytest.raises(ValueError, match="a.jsonl: line 2: not a JSON object"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", "bpe:300")


def test_tokenizer_file_without_end_of_text_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "bare.json"))
    (tmp_path / "not.json").write_text("[]")
    with pytest.raises(ValueError, match="bare.json: .*no token"):
        load_tokenizer(tmp_path / "bare.json")
    with pytest.raises(ValueError, match="not.json: not a file of the tokenizers library"):
        load_tokenizer(tmp_path / "not.json")


def test_tokenizer_file_with_truncation_cuts_no_document(tmp_path):
    from tokenizers import Tokenizer

    write_folder(tmp_path / "in", make_documents(40))
    prepare([tmp_path / "in"], tmp_path / "out", "bpe:300", val_fraction=0.2)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "cut.json"))
    text = "the quiet lamp of winter"
    assert load_tokenizer(tmp_path / "cut.json").encode(text) == load_tokenizer(tmp_path / "out").encode(text)


def test_gpt2_without_network_says_what_to_do(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    closed = {name: "http://127.0.0.1:9" for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")}
    environment = os.environ | closed | {"TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"), "NO_PROXY": "", "no_proxy": ""}
    command = [sys.executable, "-m", "data.text", str(tmp_path / "a.txt"), "--tokenizer", "gpt2"]
    command += ["--out", str(tmp_path / "out")]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "TIKTOKEN_CACHE_DIR" in result.stderr and "gpt2:DIR" in result.stderr

"""data.text and data.tokenizer: which documents become which tokens, on real tokenizers trained here."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from commands import exit_code, one_error

from data.shards import open_split, tokenizer_of
from data.text import main, prepare
from data.tokenizer import END_OF_TEXT, PIECE_CHARACTERS, load_tokenizer


def make_documents(count, seed=0):
    rng = np.random.default_rng(seed)
    words = ["shore", "lamp", "winter", "of", "the", "a", "quiet", "caf\u00e9", "\u4e2d\u6587", "42,", "reads.", "\n\n"]
    return [f"Tale {i}: {' '.join(rng.choice(words, rng.integers(1, 60)))}".strip() for i in range(count)]


def write_folder(folder, documents):
    """Write the documents as one-document files, a file with separators in a subfolder, and a .jsonl."""
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
    """Return the texts of a split. An end-of-text token precedes each."""
    tokenizer = load_tokenizer(data_dir)
    stream = open_split(data_dir, split, tokenizer.vocab_size)
    tokens = stream.read(0, len(stream))
    starts = np.flatnonzero(tokens == tokenizer.eot)
    assert starts[0] == 0
    return [tokenizer.decode(part[1:].tolist()) for part in np.split(tokens, starts[1:])]


def both_splits(data_dir):
    return [read_documents(data_dir, split) for split in ("train", "val")]


def shard_bytes(data_dir):
    return {path.name: path.read_bytes() for path in data_dir.glob("*.bin")}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a folder with 60 documents in `in`, which `out` has the shards of."""
    folder = tmp_path_factory.mktemp("prepared")
    write_folder(folder / "in", make_documents(60))
    prepare([folder / "in"], folder / "out", "bpe:320", val_fraction=0.2, shard_tokens=500)
    return folder


def test_every_document_comes_back_once_in_another_order(prepared):
    documents = make_documents(60)
    train, val = both_splits(prepared / "out")
    assert sorted(train + val) == sorted(documents)
    assert 1 <= len(val) <= 30 and len(list((prepared / "out").glob("*_train_*.bin"))) > 1
    ranks = [documents.index(text) for text in train]
    assert abs(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1]) < 0.5


def test_a_document_is_in_the_same_split_whatever_the_files(prepared, tmp_path):
    write_folder(tmp_path / "in", make_documents(60)[::-1])
    prepare([tmp_path / "in"], tmp_path / "out", "bpe:320", val_fraction=0.2)
    assert sorted(read_documents(tmp_path / "out", "val")) == sorted(read_documents(prepared / "out", "val"))


def test_preparing_twice_or_with_the_trained_tokenizer_gives_the_same_bytes(prepared, tmp_path):
    (tmp_path / "d").mkdir()
    trained, inside = (tmp_path / name for name in ("mine.json", "d/x.json"))
    for copy in (trained, inside):
        shutil.copy(prepared / "out" / "tokenizer.json", copy)
    for name, tokenizer in (("a", "bpe:320"), ("b", str(trained)), ("c", str(prepared / "out")), ("d", str(inside))):
        prepare([prepared / "in"], tmp_path / name, tokenizer, val_fraction=0.2, shard_tokens=500)
        assert shard_bytes(tmp_path / name) == shard_bytes(prepared / "out")
        assert (tmp_path / name / "tokenizer.json").read_bytes() == Path(trained).read_bytes()


def test_tokenizer_is_trained_on_the_train_split_only(prepared, tmp_path):
    train, val = both_splits(prepared / "out")
    write_folder(tmp_path / "less", [*train, *val[:1]])  # all val documents but one are gone: nothing may change
    prepare([tmp_path / "less"], tmp_path / "out", "bpe:320", val_fraction=0.2)
    assert len(val) > 1
    folders = (prepared / "out", tmp_path / "out")
    vocabularies = [json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] for folder in folders]
    assert vocabularies[0] == vocabularies[1]


def test_strange_bytes_and_empty_documents(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "bytes.txt").write_bytes(b"caf\xe9 \xff" + f"\n{END_OF_TEXT}\n \n{END_OF_TEXT}\n{END_OF_TEXT}\n".encode())
    (folder / "empty.txt").write_bytes(b"")
    (folder / "crlf.txt").write_bytes(f"\ufeffone\r\n{END_OF_TEXT}\r\ntrue \ufffd\r\n".encode())
    lines = ['{"text": ""}', "", r'{"text": "half \ud83d pair"}', *(json.dumps({"text": f"n {i}"}) for i in range(20))]
    (folder / "a.jsonl").write_text("\n".join(lines))
    prepare([folder], tmp_path / "out", "bpe:300", val_fraction=0.3)
    expected = ["caf\ufffd \ufffd", "one", "true \ufffd", "half ? pair", *(f"n {i}" for i in range(20))]
    assert sorted(sum(both_splits(tmp_path / "out"), [])) == sorted(expected)


def test_named_files_and_field(tmp_path):
    folder = write_folder(tmp_path / "in", make_documents(9))
    (folder / "no.md").write_text("not of a suffix that folders are searched for")
    (tmp_path / "note.md").write_text("a note")
    texts = [f"line {i}" for i in range(20)]
    lines = "".join(json.dumps({"body": text, "text": 1}) + "\n" for text in texts)
    (tmp_path / "lines.json.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "crawl.jsonl").unlink()
    (folder / "packed.txt.gz").write_bytes(gzip.compress(b"packed"))
    inputs = [folder, tmp_path / "note.md", tmp_path / "lines.json.gz"]
    options = "--field body --val-fraction 0.3 --tokenizer bpe:300 --out"
    main([*map(str, inputs), *options.split(), str(tmp_path / "out")])
    expected = [*make_documents(9)[:6], "a note", "packed", *texts]
    assert sorted(sum(both_splits(tmp_path / "out"), [])) == sorted(expected)


@pytest.mark.parametrize(("count", "fraction"), [(1, 0.05), (1, 0.9), (3, 0.05)])
def test_few_documents_are_cut_at_the_ends_of_lines(tmp_path, count, fraction):
    novels = {}
    (tmp_path / "in").mkdir()
    for i in range(count):
        words = np.random.default_rng(i).choice(["shore", "lamp", "winter", "of", "the", "caf\u00e9"], (400, 9))
        novels[str(i)] = [f"{i}.{number} {' '.join(line)}" for number, line in enumerate(words)]
        (tmp_path / "in" / f"{i}.txt").write_text("\n".join(novels[str(i)]), encoding="utf-8")
    main([str(tmp_path / "in"), "--tokenizer=bpe:300", f"--out={tmp_path / 'out'}", f"--val-fraction={fraction}"])
    train, val = ({text.split(".")[0]: text for text in texts} for texts in both_splits(tmp_path / "out"))
    for name, lines in novels.items():
        assert f"{train[name]}\n{val[name]}".split("\n") == lines
        assert len(val[name]) / len("\n".join(lines)) == pytest.approx(fraction, rel=0.05)


def test_a_vocabulary_beyond_16_bits_is_refused_before_anything_is_written(prepared, tmp_path):
    with pytest.raises(ValueError, match="70000"):
        prepare([prepared / "in"], tmp_path / "out", "bpe:70000")
    assert not (tmp_path / "out").exists()


def test_tokenizer_round_trip_and_special_tokens(prepared):
    tokenizer = load_tokenizer(prepared / "out")
    text = f"  bytes never seen: \U0001f600 {END_OF_TEXT} in the text\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot == 0 and 0 not in ids and max(ids) < tokenizer.vocab_size <= 320


def test_a_long_document_has_the_tokens_that_the_library_gives_the_whole(tmp_path):
    from tokenizers import Tokenizer

    rng = np.random.default_rng(0)
    words = ["shore", "it's", "  ", "\n\n", "caf\u00e9 ", " \u4e2d\u6587", "42,", "\t", "\u00a0", " \r\n", "...", " "]
    text = "".join(rng.choice(words, 3 * PIECE_CHARACTERS)).strip()
    (tmp_path / "a.txt").write_text(text, newline="")
    prepare([tmp_path / "a.txt"], tmp_path / "out", "bpe:400", val_fraction=0.01)
    (train,) = read_documents(tmp_path / "out", "train")
    library = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    stream = open_split(tmp_path / "out", "train", 400)
    assert text.startswith(train) and len(train) > 2 * PIECE_CHARACTERS
    assert stream.read(0, len(stream)).tolist() == [0, *library.encode(train).ids]
    assert load_tokenizer(tmp_path / "out").encode(train) == library.encode(train).ids


def test_limits_in_a_tokenizer_file_cut_no_document(prepared, tmp_path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(prepared / "out" / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "cut.json"))
    text = "the quiet lamp of winter"
    assert load_tokenizer(tmp_path / "cut.json").encode(text) == load_tokenizer(prepared / "out").encode(text)


def test_a_models_first_token_begins_each_document_and_its_files_are_kept(prepared, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    settings = json.loads((prepared / "out" / "tokenizer.json").read_text())
    settings["added_tokens"][0]["content"] = "<s>"
    settings["model"]["vocab"]["<s>"] = settings["model"]["vocab"].pop(END_OF_TEXT)
    (model / "tokenizer.json").write_text(json.dumps(settings))
    (model / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    prepare([prepared / "in"], tmp_path / "out", str(model), val_fraction=0.2)
    assert load_tokenizer(tmp_path / "out").eot == 0 and (tmp_path / "out" / "tokenizer_config.json").exists()
    assert both_splits(tmp_path / "out") == both_splits(prepared / "out")
    for path in (tmp_path / "out").glob("*.bin"):
        path.unlink()
    prepare([prepared / "in"], tmp_path / "out", str(tmp_path / "out"), val_fraction=0.2)  # with the tokenizer there
    (model / "tokenizer_config.json").write_text('{"bos_token": null}')
    with pytest.raises(ValueError, match="endoftext"):
        load_tokenizer(model)


def test_gpt2_is_tiktokens(tmp_path, monkeypatch):
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"li": 256, b"ne": 257}
    encoding = tiktoken.Encoding("gpt2", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 258})
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {"gpt2": encoding})
    (tmp_path / "text.txt").write_text("one line\nof many\n" * 50)
    prepare([tmp_path / "text.txt"], tmp_path / "out", "gpt2")
    gpt2 = load_tokenizer(tmp_path / "out")
    assert gpt2.name == tokenizer_of(tmp_path / "out") == "gpt2" and not (tmp_path / "out" / "tokenizer.json").exists()
    assert gpt2.encode("a line") == [97, 32, 256, 257] and gpt2.decode([97, 32, 256, 257]) == "a line"
    stream = open_split(tmp_path / "out", "train", gpt2.vocab_size)
    assert gpt2.eot == 258 and gpt2.decode(stream.read(0, 8).tolist()).startswith(END_OF_TEXT + "one li")


def test_gpt2_without_a_network_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("text")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    arguments = [str(tmp_path / "a.txt"), "--tokenizer", "gpt2", "--out", str(tmp_path / "out")]
    assert exit_code(main, arguments) == 2
    assert "TIKTOKEN_CACHE_DIR" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments, named", [
    ("--tokenizer bpe:300 --val-fraction 0", "val-fraction"),
    ("--tokenizer bpe:300 --val-fraction 1e-9", "val-fraction"),
    ("--tokenizer bpe:300 --field nothing", "crawl.jsonl: line 1: "),
    ("--tokenizer bpe:256", "bpe:256"),
    ("--tokenizer gpt3", "gpt3"),
    ("--tokenizer nowhere.json", "nowhere.json"),
])
def test_mistakes_are_one_line_and_write_no_shards(prepared, tmp_path, capsys, arguments, named):
    assert exit_code(main, [prepared / "in", *arguments.split(), "--out", tmp_path / "out"]) == 2
    assert named in one_error(capsys)
    assert not list((tmp_path / "out").glob("*.bin"))


def test_bad_files_are_named_and_shards_are_not_replaced(prepared, tmp_path, capsys):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "bare.json"))  # without an end-of-text token
    (tmp_path / "not.json").write_text("[]")
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "cut\n')
    (tmp_path / "deep.jsonl").write_text('{"text": "fine"}\n' + "[" * 200_000)
    (tmp_path / "a.parquet").write_bytes(b"PAR1\0\0")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"some text")[:-9])
    (tmp_path / "empty").mkdir()
    before, text = shard_bytes(prepared / "out"), prepared / "in"
    for source, tokenizer, out, named in (
        (tmp_path / "nowhere", "bpe:300", tmp_path / "out", "nowhere"),
        (tmp_path / "empty", "bpe:300", tmp_path / "out", f"{tmp_path / 'empty'} "),
        (tmp_path / "a.jsonl", "bpe:300", tmp_path / "out", "a.jsonl: line 2: "),
        (tmp_path / "a.parquet", "bpe:300", tmp_path / "out", "a.parquet"),
        (tmp_path / "cut.txt.gz", "bpe:300", tmp_path / "out", "cut.txt.gz"),
        (tmp_path / "deep.jsonl", "bpe:300", tmp_path / "out", "deep.jsonl: line 2: "),
        (text, tmp_path / "bare.json", tmp_path / "out", "bare.json"),
        (text, tmp_path / "not.json", tmp_path / "out", "not.json"),
        (text, "bpe:300", prepared / "out", str(prepared / "out")),
    ):
        assert exit_code(main, [source, "--tokenizer", tokenizer, "--out", out]) == 2
        assert named in capsys.readouterr().err
    assert shard_bytes(prepared / "out") == before

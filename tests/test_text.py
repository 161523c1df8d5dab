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
from test_data import exit_code

from data.shards import open_split
from data.text import main, prepare
from data.tokenizer import END_OF_TEXT, PIECE_CHARACTERS, load_tokenizer

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
    main([*arguments, "--tokenizer", "bpe:300", "--out", str(tmp_path / "out")])
    found = read_documents(tmp_path / "out", "train") + read_documents(tmp_path / "out", "val")
    assert sorted(found) == sorted([*kept, "named file"])
    assert (tmp_path / "out" / "notes_val_000000.bin").exists()


def lines_of(number, count, seed=0):
    words = np.random.default_rng(seed).choice(["shore", "lamp", "winter", "of", "the", "quiet"], (count, 9))
    return [f"{number}.{i} {' '.join(line)}" for i, line in enumerate(words)]


@pytest.mark.parametrize("fraction", [0.05, 0.9])
@pytest.mark.parametrize("count", [1, 2, 13])
def test_few_documents_are_cut_at_the_ends_of_lines(tmp_path, capsys, count, fraction):
    novels = {str(i): lines_of(i, 400, i) for i in range(count)}
    (tmp_path / "in").mkdir()
    for name, lines in novels.items():
        (tmp_path / "in" / f"{name}.txt").write_text("\n".join(lines))
    out = tmp_path / "out"
    main([str(tmp_path / "in"), "--tokenizer", "bpe:300", "--out", str(out), f"--val-fraction={fraction}"])
    said = capsys.readouterr().out.splitlines()
    assert f"each is cut, the last {100 * fraction:g} % of it are val" in said[0]
    assert [line.split(",")[0] for line in said[1:]] == [f"{x}: {count} cut documents" for x in ("train", "val")]
    train, val = ({x.split(".")[0]: x for x in read_documents(out, split)} for split in ("train", "val"))
    for name, lines in novels.items():
        assert f"{train[name]}\n{val[name]}".split("\n") == lines
        assert len(val[name]) / len("\n".join(lines)) == pytest.approx(fraction, rel=0.05)


def test_one_line_is_cut_at_a_word_and_one_word_anywhere(tmp_path):
    for name, text in dict(line="winter lamp " * 300, word="winterlamp" * 300).items():
        (tmp_path / name).write_text(text)
        prepare([tmp_path / name], tmp_path / f"{name}-out", "bpe:300")
        train, val = (read_documents(tmp_path / f"{name}-out", split)[0] for split in ("train", "val"))
        assert (train + " " * (name == "line") + val) == text.strip()
        assert 0.04 < len(val) / len(text) <= 0.05


def test_records_of_jsonl_are_cut_too_and_those_too_short_are_in_train_alone(tmp_path):
    texts = ["\n".join(lines_of(i, 300)) for i in (1, 2, 4)] + ["short"]  # none drawn into val
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", "bpe:300")
    train, val = (read_documents(tmp_path / "out", split) for split in ("train", "val"))
    assert (len(train), len(val)) == (4, 3) and "short" in train
    assert {f"{a}\n{b}" for a in train for b in val} >= set(texts[:3])


def test_a_document_is_drawn_whole_where_the_draw_gives_both_splits_some(tmp_path, capsys):
    documents = make_documents(12)
    prepare([write_folder(tmp_path / "in", documents)], tmp_path / "out", "bpe:300", val_fraction=0.3)
    train, val = (read_documents(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(documents) and train and val
    assert "cut" not in capsys.readouterr().out


def test_a_long_document_has_the_tokens_that_the_library_gives_the_whole(tmp_path):
    from tokenizers import Tokenizer

    rng = np.random.default_rng(0)
    words = ["shore", "it's", "  ", "\n\n", "caf\u00e9 ", " \u4e2d\u6587", "42,", "\t", "\u00a0", " \r\n", "...", " "]
    text = "".join(rng.choice(words, PIECE_CHARACTERS)).strip()
    assert len(text) > 2 * PIECE_CHARACTERS
    (tmp_path / "a.txt").write_text(text, newline="")
    prepare([tmp_path / "a.txt"], tmp_path / "out", "bpe:400", val_fraction=0.01)
    (train,) = read_documents(tmp_path / "out", "train")
    library = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    stream = open_split(tmp_path / "out", "train", 400)
    assert text.startswith(train) and len(train) > 2 * PIECE_CHARACTERS
    assert stream.read(0, len(stream)).tolist() == [0, *library.encode(train).ids]
    assert load_tokenizer(tmp_path / "out").encode(train) == library.encode(train).ids


def test_one_long_line_takes_little_memory(tmp_path):
    """The tokenizers library takes 160 bytes for each that it gets at once: 0.7 GB for 4 MB."""
    line = " ".join(np.random.default_rng(0).choice(make_documents(50), 30_000)).replace("\n", " ")[:4_000_000]
    (tmp_path / "line.txt").write_text(line)
    code = "import re, sys; from data.text import main; main(sys.argv[1:]);"
    code += r"print(re.search(r'VmHWM:\s+(\d+) kB', open('/proc/self/status').read())[1])"
    command = [sys.executable, "-c", code, str(tmp_path / "line.txt"), "--tokenizer", "bpe:500"]
    command += ["--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert len(line) == 4_000_000 and int(done.stdout.splitlines()[-1]) < 350_000


def test_what_is_not_utf8_is_warned_of_by_file_and_count(tmp_path, capsys):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_bytes("na\u00efve caf\u00e9 ".encode("latin-1") * (10 + i) + b"end")
    (tmp_path / "good.txt").write_text("a true \ufffd, and caf\u00e9 " * 10, encoding="utf-8")
    prepare([tmp_path], tmp_path / "out", "bpe:300")
    *named, rest = capsys.readouterr().err.splitlines()
    assert [line.split(" are not")[0] for line in named] == [
        f"warning: {tmp_path / name}.txt: {count} characters" for name, count in (("0", 20), ("1", 22), ("2", 24))
    ]
    assert rest.startswith("warning: 2 more files: 54 characters are not UTF-8")


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
        (["--tokenizer", "bpe:300", "--val-fraction", "0"], "more than 0 and less than 1"),
        (["--tokenizer", "bpe:300", "--val-fraction", "1"], "more than 0 and less than 1"),
        (["--tokenizer", "bpe:300", "--val-fraction", "1e-9"], "12 documents are too little text to cut a val split"),
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
    assert exit_code(main, [str(folder), *arguments, "--out", str(tmp_path / "out")]) == 2
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
        assert exit_code(main, [str(source), "--tokenizer", "gpt2:absent", "--out", str(out)]) == 2
        assert says in capsys.readouterr().err


def test_data_folder_that_is_not_here_is_no_name_on_the_hub():
    with pytest.raises(ValueError, match="^data/gone is not here: run this where the data of the run is"):
        load_tokenizer(Path("data/gone"))


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


def test_json_nested_too_deeply_is_named_by_file_and_line(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + "[" * 200_000)
    assert exit_code(main, [str(tmp_path / "a.jsonl"), "--tokenizer", "bpe:300", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "a.jsonl: line 2: not a JSON object" in error and error.count("\n") == 1


def test_tokenizer_file_without_end_of_text_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "bare.json"))
    (tmp_path / "not.json").write_text("[]")
    with pytest.raises(ValueError, match="bare.json: .*no token"):
        load_tokenizer(tmp_path / "bare.json")
    with pytest.raises(ValueError, match="not.json: not a file of the tokenizers library"):
        load_tokenizer(tmp_path / "not.json")


def test_tokenizer_file_with_a_pattern_that_finds_no_end_is_named(tmp_path):
    """Its library gives up a match after ten million steps, with a panic; its own lines come before ours."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    write_folder(tmp_path / "in", make_documents(40))
    (tmp_path / "in" / "a.txt").write_text("a" * 50 + "!")
    prepare([tmp_path / "in"], tmp_path / "out", "bpe:300", val_fraction=0.2)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    tokenizer.save(str(tmp_path / "hostile.json"))
    command = [sys.executable, "-m", "data.text", str(tmp_path / "in"), "--tokenizer", str(tmp_path / "hostile.json")]
    command += ["--out", str(tmp_path / "no"), "--val-fraction", "0.2"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"error: {tmp_path / 'hostile.json'}: this tokenizer cannot encode the text (Onig: ")
    assert not list((tmp_path / "no").glob("*.bin*"))


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

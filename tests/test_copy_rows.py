"""Copy rows: which rows repeat a segment, and which text stands in the others."""

import numpy as np
import pytest
from commands import exit_code
from test_text import make_documents, shard_bytes, write_folder

from data.copy_rows import rows
from data.python_source import write_folders
from data.shards import open_split, read_manifest
from data.text import main, prepare

TEXT = np.random.default_rng(5).zipf(1.3, 60_000).clip(max=999).astype(np.uint16)  # no natural row repeats itself
LENGTHS = [(64, 64 * 400), (256, None)]


def segment_length(row):
    """Return the length of the shortest segment of 8 tokens to half a row that the row repeats, or None."""
    lengths = range(8, len(row) // 2 + 1)
    return next((n for n in lengths if np.array_equal(row[n:], row[:-n])), None)


def test_rows_repeat_a_segment_or_are_pieces_of_the_text():
    found = list(rows(TEXT, 0.5, LENGTHS))
    sizes = [len(row) for row in found]
    assert sizes[:400] == [64] * 400 and set(sizes[400:]) == {256}
    copies = [(row, n) for row in found if (n := segment_length(row))]
    natural = [row for row in found if not segment_length(row)]
    text = TEXT.tobytes()
    places = np.array([text.find(row.tobytes()) // TEXT.itemsize for row in natural])
    assert places.min() >= 0 and len(TEXT) <= sum(map(len, natural)) < len(TEXT) + 256
    assert np.corrcoef(places, np.arange(len(places)))[0, 1] == pytest.approx(0, abs=0.2)  # in no order
    assert places.mean() == pytest.approx(len(TEXT) / 2, rel=0.15)  # from all of the text
    assert len(copies) / len(found) == pytest.approx(0.5, abs=0.05)

    halves = np.log([n for row, n in copies if len(row) == 256])
    assert {8, 32} <= {n for row, n in copies if len(row) == 64}  # the shortest and the longest
    assert halves.mean() == pytest.approx(np.log([8, 129]).mean(), abs=0.15)  # log-uniform
    is_piece = [text.find(row[:n].tobytes()) >= 0 for row, n in copies]
    assert np.mean(is_piece) == pytest.approx(0.5, abs=0.07)
    drawn = np.concatenate([row[:n] for (row, n), piece in zip(copies, is_piece) if not piece])
    for token in (1, 2):  # by frequency: zipf's first tokens are 25 % and 10 % of the text
        assert np.mean(drawn == token) == pytest.approx(np.mean(TEXT == token), abs=0.03)


@pytest.mark.parametrize("share", [0, 0.1, 0.9])
def test_the_share_is_the_one_that_was_asked_for(share):
    found = list(rows(TEXT, share, [(64, None)]))
    assert np.mean([segment_length(row) is not None for row in found]) == pytest.approx(share, abs=0.03)


def test_prepared_train_split_holds_the_rows_of_the_natural_split(tmp_path, capsys):
    source = write_folder(tmp_path / "in", make_documents(150))
    options = ["--tokenizer", "bpe:300", "--val-fraction", "0.2"]
    rows_of = ["--copy-rows", "0.5", "--row-tokens", "32"]
    folders = [tmp_path / name for name in ("natural", "a", "b")]
    for folder, more in zip(folders, ([], rows_of, rows_of)):
        main([str(source), *options, *more, "--out", str(folder)])
    natural, copied = (open_split(folder, "train", 300) for folder in folders[:2])
    text = natural.read(0, len(natural))
    expected = np.concatenate(list(rows(text, 0.5, [(32, None)])))
    np.testing.assert_array_equal(copied.read(0, len(copied)), expected)
    assert 1.5 < len(copied) / len(natural) < 2.5
    assert shard_bytes(folders[1]) == shard_bytes(folders[2])
    vals = [open_split(folder, "val", 300) for folder in folders[:2]]
    assert vals[0].fingerprint() == vals[1].fingerprint()
    recorded = {"share": 0.5, "row_lengths": [[32, None]], "seed": 0}
    assert [read_manifest(folder).get("copy_rows") for folder in folders] == [None, recorded, recorded]
    assert sorted(path.name for path in folders[1].iterdir() if path.suffix not in (".bin", ".json")) == []


@pytest.mark.parametrize("arguments", [
    "--copy-rows 1 --row-tokens 64",
    "--copy-rows -0.1 --row-tokens 64",
    "--copy-rows nan --row-tokens 64",
    "--copy-rows 0.5 --row-tokens 15",
    "--copy-rows 0.5 --row-tokens many",
    "--copy-rows 0.5 --row-tokens 1000000",
])
def test_a_mistake_is_named_and_writes_no_shards(tmp_path, capsys, arguments):
    source = write_folder(tmp_path / "in", make_documents(40))
    argv = [str(source), "--tokenizer", "bpe:300", "--val-fraction", "0.2", "--out", str(tmp_path / "out")]
    assert exit_code(main, [*argv, *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and ("copy-rows" in error or "row-tokens" in error or "segments" in error)
    assert not list((tmp_path / "out").glob("*.bin*"))


def test_a_folder_of_source_is_a_document(tmp_path):
    sources = {
        "lib/b.py": "b", "lib/a.py": "a", "lib/a.txt": "no", "lib/json/tests/x.py": "no", "lib/json/tool/m.py": "tool",
        "lib/json/__init__.py": "json", "lib/empty/__init__.py": "\n", "other/json/__init__.py": "other caf\u00e9",
    }  # fmt: skip
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    roots = [tmp_path / "lib", tmp_path / "other"]
    for out in ("one", "two"):
        assert write_folders(roots, tmp_path / out) == 4
    written = {path.name: path.read_text(encoding="utf-8") for path in sorted((tmp_path / "one").iterdir())}
    assert list(written.values()) == ["a\n\n\nb\n", "json\n", "tool\n", "other caf\u00e9\n"]
    assert written == {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "two").iterdir()}
    assert prepare([tmp_path / "one"], tmp_path / "shards", "bpe:260", val_fraction=0.4)["files"]

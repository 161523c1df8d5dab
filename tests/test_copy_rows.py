"""Copy rows: which rows repeat a segment, and which text stands in the others."""

import numpy as np
from commands import parametrize, refuses, shared, succeeds, write_files
from pytest import approx
from test_text import make_documents, shard_bytes, write_folder

from data.copy_rows import rows
from data.python_source import write_folders
from data.shards import open_split, read_manifest
from data.text import main, prepare

TEXT = np.random.default_rng(5).zipf(1.3, 60_000).clip(max=999).astype(np.uint16)  # no natural row repeats itself


def segment_length(row):
    """Return the length of the shortest segment of 8 tokens to half a row that the row repeats, or None."""
    lengths = range(8, len(row) // 2 + 1)
    return next((n for n in lengths if np.array_equal(row[n:], row[:-n])), None)


def place(tokens):
    """Return the first place of tokens in TEXT, or a negative number."""
    return TEXT.tobytes().find(tokens.tobytes()) // TEXT.itemsize


@shared
def found():
    """Return the copy rows, their segments' lengths, and the other rows: 400 rows of 64 tokens, then rows of 256."""
    lengths = [(64, 64 * 400), (256, None)]
    found = [(row, segment_length(row)) for row in rows(TEXT, 0.5, lengths)]
    assert [len(row) for row, _ in found] == [64] * 400 + [256] * (len(found) - 400)
    copies = [(row, n) for row, n in found if n]
    assert len(copies) / len(found) == approx(0.5, abs=0.05)
    return copies, [row for row, n in found if not n]


def test_natural_rows_are_pieces_from_all_of_the_text_in_no_order(found):
    _, natural = found
    places = list(map(place, natural))
    assert min(places) >= 0 and len(TEXT) <= sum(map(len, natural)) < len(TEXT) + 256
    for part in np.array_split(places, 2):
        assert np.mean(part) == approx(len(TEXT) / 2, rel=0.2)


def test_segments_are_half_pieces_and_half_drawn_by_frequency_of_log_uniform_length(found):
    copies, _ = found
    assert {8, 32} <= {n for row, n in copies if len(row) == 64}  # the shortest and the longest
    logarithms = np.log([n for row, n in copies if len(row) == 256])
    assert logarithms.mean() == approx(np.log([8, 129]).mean(), abs=0.15)
    drawn = [row[:n] for row, n in copies if place(row[:n]) < 0]
    pieces = [place(row[:n]) for row, n in copies if place(row[:n]) >= 0]
    assert np.mean(pieces) == approx(len(TEXT) / 2, rel=0.15)
    assert len(drawn) / len(copies) == approx(0.5, abs=0.07)
    for token in (1, 2):  # zipf's first tokens are 25 % and 10 % of the text
        assert np.mean(np.concatenate(drawn) == token) == approx(np.mean(TEXT == token), abs=0.03)


@parametrize("share", [0, 0.1, 0.9])
def test_the_share_is_the_one_that_was_asked_for(share):
    copies = list(map(segment_length, rows(TEXT, share, [(64, None)])))
    assert 1 - copies.count(None) / len(copies) == approx(share, abs=0.03)


def test_prepared_train_split_holds_the_rows_of_the_natural_split(tmp_path):
    source = write_folder(tmp_path / "in", make_documents(150))

    def make(name, *options):
        succeeds(main, source, "--tokenizer=bpe:300", "--val-fraction=0.2", f"--out={tmp_path / name}", *options)
        return tmp_path / name

    options = "--copy-rows=0.5", "--row-tokens=32"
    natural, copied, again = make("natural"), make("a", *options), make("b", *options)
    text, mixed = (open_split(out, "train", 300) for out in (natural, copied))
    expected = np.concatenate(list(rows(text.read(0, len(text)), 0.5, [(32, None)])))
    np.testing.assert_array_equal(mixed.read(0, len(mixed)), expected)
    assert shard_bytes(copied) == shard_bytes(again)
    assert open_split(natural, "val", 300).fingerprint() == open_split(copied, "val", 300).fingerprint()
    assert read_manifest(copied)["copy_rows"] == {"share": 0.5, "row_lengths": [[32, None]], "seed": 0}
    assert "copy_rows" not in read_manifest(natural)


def test_a_row_is_no_longer_than_the_text():
    with refuses("row-tokens"):
        next(rows(TEXT, 0.5, [(10**6, None)]))


def test_a_folder_of_source_is_a_document(tmp_path, out):
    sources = {
        "lib/b.py": "b",
        "lib/a.py": "a",
        "lib/a.txt": "no",
        "lib/json/tests/x.py": "no",
        "lib/json/tool/m.py": "tool",
        "lib/json/__init__.py": "json",
        "lib/empty/__init__.py": "\n",
        "other/json/__init__.py": "other caf\u00e9",
    }
    write_files(tmp_path, sources)
    write_folders([tmp_path / "lib", tmp_path / "other"], out)
    written = [path.read_text() for path in sorted(out.iterdir())]
    assert written == ["a\n\n\nb\n", "json\n", "tool\n", "other caf\u00e9\n"]
    assert prepare([out], tmp_path / "shards", "bpe:260", val_fraction=0.4)["files"]

"""Shards and loader: the format byte for byte, damage that is found, and the tokens of each step."""

import math
import os
import signal
from contextlib import closing, suppress

import numpy as np
import pytest
import torch
from commands import (
    exit_code,
    fails,
    names,
    parametrize,
    promise,
    python,
    read_json,
    refuses,
    slow,
    succeeds,
    table,
    write_files,
)
from numpy.testing import assert_array_equal
from tokenizers import Tokenizer, models

from configs.config import Config, batch_order
from data.loader import TrainLoader, check_validation
from data.shard_writer import ShardWriter
from data.shards import TokenStream, describe_shard, main, open_split, sha256_of, tokenizer_of
from data.sources import data_command

BAD_DATA = promise(5, "bad data is found")
VOCAB = 50257
NAMES = FIRST, SECOND, _, VAL = "x_train_000001.bin x_train_000002.bin x_train_000003.bin x_val_000000.bin".split()


def write_raw(path, tokens):
    """Write a shard from the description of the format, not with the code under test."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return path


def make_stream(folder, *sizes):
    """Return a stream over shards of these sizes, and its tokens."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, sum(sizes))
    parts = np.split(tokens, np.cumsum(sizes)[:-1])
    paths = [write_raw(folder / f"x_train_{i:06d}.bin", part) for i, part in enumerate(parts, 1)]
    return TokenStream(paths, {path.name: describe_shard(path) for path in paths}), tokens


def tokens_from(tokens, start, count):
    return tokens.take(range(start, start + count), mode="wrap")


def write_dataset(folder, num_train=250, tokenizer="gpt2"):
    """Write shards of 100 tokens of both splits and a manifest; return the tokens of the splits."""
    rng = np.random.default_rng(1)
    train, val = rng.integers(0, VOCAB, num_train), rng.integers(0, VOCAB, 50)
    write_files(folder, {"tokenizer.json": "a tokenizer"})
    with ShardWriter(folder, "x", tokenizer=tokenizer, vocab_size=VOCAB, shard_tokens=100) as writer:
        for piece in np.array_split(train, 7):
            writer.write("train", piece)
        writer.write("val", val)
        writer.close()
    return train, val


def flip(data, bit):
    data = bytearray(data)
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


# ---- format and writer ----


def test_writer_cuts_documents_into_shards_of_the_format_that_open_split_reads(tmp_path):
    train, val = write_dataset(tmp_path)
    assert names(tmp_path) == ["manifest.json", "tokenizer.json", *NAMES]
    for name, part in zip(NAMES, (train[:100], train[100:200], train[200:], val)):
        assert (tmp_path / name).read_bytes() == write_raw(tmp_path / "expected", part).read_bytes()
    manifest = read_json(tmp_path / "manifest.json")
    assert (manifest["vocab_size"], manifest["files"][SECOND]["max_token"]) == (VOCAB, train[100:200].max())
    for split, tokens in (("train", train), ("val", val)):
        stream = open_split(tmp_path, split, VOCAB)
        assert_array_equal(stream.read(0, len(stream)), tokens)
        with refuses("vocab_size", VOCAB):
            open_split(tmp_path, split, tokens.max())


def test_bytes_reach_the_disk_before_names_and_the_manifest_before_the_shards(tmp_path, monkeypatch):
    """A kill cannot show a missing fsync, so the test checks the order of the calls."""
    synced, renamed = set(), []
    fsync, replace = os.fsync, os.replace

    def record_sync(file):
        synced.add(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    def check_and_replace(source, target):
        assert str(source) in synced
        assert not renamed or str(tmp_path) in synced  # the manifest's name, before the first shard's
        renamed.append(target.name)
        replace(source, target)
        if target.name in (VAL, "manifest.json"):
            synced.discard(str(tmp_path))

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", check_and_replace)
    write_dataset(tmp_path)
    assert renamed == ["manifest.json", *NAMES] and str(tmp_path) in synced


def test_failed_or_killed_writer_leaves_nothing_that_looks_like_data(tmp_path):
    writer = ShardWriter(tmp_path, "x", tokenizer="t", vocab_size=300, shard_tokens=10)
    with pytest.raises(KeyboardInterrupt), writer:
        writer.write("train", np.arange(25))
        assert names(tmp_path) == [".incoming"]
        raise KeyboardInterrupt
    assert names(tmp_path) == []


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
import numpy as np
from data.shard_writer import ShardWriter
replace, calls = os.replace, []
def replace_or_die(*names):
    calls.append(names)
    if len(calls) > int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)
os.replace = replace_or_die
with ShardWriter(Path(sys.argv[1]), "x", tokenizer="gpt2", vocab_size=50257, shard_tokens=100) as writer:
    writer.write("train", np.arange(250))
    writer.close()
"""


@BAD_DATA
@slow
@parametrize("renames", [0, 2])
def test_writer_killed_while_it_names_shards_is_refused_and_can_be_repeated(tmp_path, faults, renames):
    with faults("writer killed"):
        python("-c", KILLED_WRITER, tmp_path, renames, code=-signal.SIGKILL)
        with refuses("x_train_00000[23].bin" if renames else r"\btrain\b"):
            open_split(tmp_path, "train", VOCAB)
        write_dataset(tmp_path)
        succeeds(main, "verify", tmp_path)


def test_writer_refuses_a_vocabulary_that_does_not_fit(tmp_path):
    with refuses("65537"):
        ShardWriter(tmp_path, "x", tokenizer="t", vocab_size=65537)


# ---- stream ----


def test_read_crosses_shards_and_wraps_without_open_files(tmp_path):
    stream, tokens = make_stream(tmp_path, 5, 1, 17, 8)
    before = len(os.listdir("/proc/self/fd"))
    for start in range(70):
        for count in (1, 7, 31, 80):  # 80: more than twice around
            assert_array_equal(stream.read(start, count), tokens_from(tokens, start, count))
    assert len(os.listdir("/proc/self/fd")) == before


@BAD_DATA
@table("position, shard, place", """
    4  | 1 | 4
    5  | 2 | 0
    6  | 3 | 0
    22 | 3 | 16
    23 | 1 | 0
""")
def test_a_token_outside_the_vocabulary_is_named_by_file_and_place(tmp_path, faults, position, shard, place):
    stream, tokens = make_stream(tmp_path, 5, 1, 17)
    position = int(position)
    token = tokens[position % 23]
    with faults("token outside the vocabulary"), refuses(rf"_00000{shard}\.bin\D+\b{place}\b", rf"\b{token}\b"):
        stream.read(position, 1, token)


def test_fingerprint_follows_the_content_of_the_shards_that_a_run_reads(tmp_path):
    def stream(name, num_train):
        write_dataset(tmp_path / name, num_train)
        return open_split(tmp_path / name, "train", VOCAB)

    few, again, more = stream("few", 200), stream("again", 200), stream("more", 300)
    assert few.fingerprint() == again.fingerprint() == few.fingerprint(199) == more.fingerprint(199)
    assert few.fingerprint(99) == more.fingerprint(99) != few.fingerprint(100)  # token 100 is the last target
    assert few.fingerprint(200) != more.fingerprint(200)  # the first wraps around


# ---- opening a folder ----


@table("folder, tokens, vocab_size, command", f"""
    fineweb10B | {10**12} | {VOCAB} | data.download fineweb10B --shards 103 --out fineweb10B
    taught     | 1        | 1024    | data.python_source taught --out taught
    my books   | 1        | {VOCAB} | data.text FILES... --tokenizer gpt2 --out 'my books'
    my books   | 1        | 1024    | data.text FILES... --tokenizer bpe:1024 --out 'my books'
""")
def test_a_data_folder_has_a_command_that_makes_it(tmp_path, folder, tokens, vocab_size, command):
    assert data_command(folder, int(tokens), int(vocab_size)) == f"python -m {command}"
    with refuses(command):
        open_split(tmp_path / folder, "train", int(vocab_size), command)


def test_the_tokenizer_is_told_by_its_name_or_by_its_file(tmp_path):
    assert tokenizer_of(tmp_path) is None
    write_dataset(tmp_path, tokenizer="tokenizer.json")
    assert tokenizer_of(tmp_path) == sha256_of(tmp_path / "tokenizer.json")
    write_dataset(tmp_path / "gpt2")  # with a tokenizer.json of an earlier text
    assert tokenizer_of(tmp_path / "gpt2") == "gpt2"


# ---- damage: a file of write_dataset and its change. `verify` finds all, opening finds all but UNSEEN. ----

DAMAGE = {
    "truncated": (FIRST, lambda data: data[:-2]),
    "appended": (VAL, lambda data: data + b"\0\0"),
    "no shard": (FIRST, lambda data: b"version https://git-lfs.github.com/spec/v1\n"),
    "header cut": (FIRST, lambda data: data[:8]),
    "other version": (FIRST, lambda data: data[:4] + b"\2" + data[5:]),
    "no tokens": (FIRST, lambda data: data[:8] + bytes(1016)),
    "shorter than in the manifest": (FIRST, lambda data: data[:8] + b"\x63\0\0\0" + data[12:-2]),
    "missing": (SECOND, None),
    "stray": ("x_val_000007.bin", lambda data: b"x"),
    "changed tokenizer": ("tokenizer.json", lambda data: flip(data, 9)),
    "missing tokenizer": ("tokenizer.json", None),
    "missing manifest": ("manifest.json", None),
    "other sha256": ("manifest.json", lambda data: data.replace(b'"sha256": "', b'"sha256": "0', 1)),
    "other tokens": ("manifest.json", lambda data: data.replace(b'"tokens": 1', b'"tokens": 2', 1)),
    "other max_token": ("manifest.json", lambda data: data.replace(b'"max_token": ', b'"max_token": 1', 1)),
}
UNSEEN = "changed tokenizer, missing tokenizer, other sha256, other max_token"


def opens(folder):
    """Return True if both splits can be opened. Any error but ValueError and OSError is raised."""
    with suppress(ValueError, OSError):
        return all(len(open_split(folder, split, VOCAB)) for split in ("train", "val"))


@BAD_DATA
@parametrize("kind", DAMAGE)
def test_damage_is_found_and_named(tmp_path, capsys, faults, kind):
    write_dataset(tmp_path, tokenizer="tokenizer.json")
    succeeds(main, "verify", tmp_path)
    assert opens(tmp_path)
    name, change = DAMAGE[kind]
    path = tmp_path / name
    with faults(kind):
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(path.read_bytes() if path.exists() else b""))
        error = fails(capsys, "", main, "verify", tmp_path)
        assert name in error or name == "manifest.json" and FIRST in error
        assert kind in UNSEEN or not opens(tmp_path)


@table("largest, tokenizer, vocab_size", """
    50256 |                  | 50257
    50257 |                  |
    299   |                  |
    299   | tokens           | 300
    300   | tokens           |
    299   | not a tokenizer  |
""")
def test_shards_of_another_program_are_described_or_refused(tmp_path, capsys, largest, tokenizer, vocab_size):
    for name in "x_train.bin", "x_val_000000.bin":  # one as llm.c writes it
        write_raw(tmp_path / name, [0, int(largest)])
    if tokenizer:
        library = Tokenizer(models.WordLevel({str(i): i for i in range(300)}))
        write_files(tmp_path, {"tokenizer.json": library.to_str() if tokenizer == "tokens" else tokenizer})
    if vocab_size:
        succeeds(main, "describe", tmp_path)
        assert read_json(tmp_path / "manifest.json")["vocab_size"] == int(vocab_size)
        assert open_split(tmp_path, "train", int(vocab_size)).read(0, 2).tolist() == [0, int(largest)]
    fails(capsys, tmp_path, main, "describe", tmp_path)  # only once
    assert (tmp_path / "manifest.json").exists() == bool(vocab_size)


def test_files_that_resemble_shards_are_left_alone(tmp_path):
    write_dataset(tmp_path)
    expected = open_split(tmp_path, "train", VOCAB).fingerprint()
    write_files(tmp_path, dict.fromkeys(["x_train_000001 (1).bin", "x_train_000009.bin~", "weights.bin"], "stray"))
    (tmp_path / "x_train_000009.bin").mkdir()
    succeeds(main, "verify", tmp_path)
    assert open_split(tmp_path, "train", VOCAB).fingerprint() == expected


def test_a_folder_without_shards_of_a_split_is_told_their_names(tmp_path, capsys):
    for name in "train.bin", "x_val_000000.bin":
        write_raw(tmp_path / name, [1])
    fails(capsys, "x_train_000001.bin", main, "describe", tmp_path)
    with refuses("x_train_000001.bin"):
        open_split(tmp_path, "train", VOCAB)


@BAD_DATA
def test_every_bit_of_a_shard_counts(tmp_path, faults, long):
    write_dataset(tmp_path)
    path = tmp_path / VAL
    good = path.read_bytes()
    succeeds(main, "verify", tmp_path)
    for bit in range(0, 8 * len(good), 1 if long else 301):
        with faults("flipped bit"):
            path.write_bytes(flip(good, bit))
            assert exit_code(main, ["verify", tmp_path]) == 2, bit


# ---- training loader ----


def load(stream, **options):
    options = dict(batch_tokens=120, length=3, micro_batch_tokens=12, vocab_size=VOCAB) | options
    if not callable(length := options["length"]):
        options["length"] = lambda step: length
    return closing(TrainLoader(stream, **options))


@parametrize("length", [1, 15, lambda step: step % 4 + 2])
@parametrize("ranks", [1, 2, 5, 8])
@parametrize("largest", [1, 3])
@parametrize("step", [0, 1, 3, 50])  # crosses shards, wraps in the middle of step 3, wraps many times
def test_a_step_is_a_slice_of_the_stream_for_any_length_and_number_of_ranks(tmp_path, length, step, ranks, largest):
    stream, tokens = make_stream(tmp_path, 101, 7, 230, 59)
    width = length(step) if callable(length) else length
    sizes = dict(length=length, micro_batch_tokens=largest * width, start_step=step, world_size=ranks)
    batches, shares = [], []
    for rank in range(ranks):
        with load(stream, rank=rank, **sizes) as loader:
            micro_batches = next(loader)
        shares.append(sum(len(inputs) for inputs, _ in micro_batches))
        assert len(micro_batches) == math.ceil(shares[-1] / largest)  # as few as possible
        batches += micro_batches
    assert max(shares) - min(shares) <= 1
    inputs, targets = map(torch.cat, zip(*batches))
    assert inputs.dtype == torch.int64 and inputs.shape == targets.shape == (120 // width, width)
    assert_array_equal(inputs.ravel(), tokens_from(tokens, 120 * step, 120))
    assert_array_equal(targets.ravel(), tokens_from(tokens, 120 * step + 1, 120))


def test_steps_follow_each_other_and_begin_at_any_token(tmp_path):
    stream, tokens = make_stream(tmp_path, 40, 33)
    with load(stream, batch_tokens=12, start_step=2, first_token=7) as loader:
        inputs = [micro_batch[0] for _ in range(9) for micro_batch in next(loader)]
    assert_array_equal(torch.cat(inputs).ravel(), tokens_from(tokens, 31, 9 * 12))


def test_a_data_seed_changes_the_order_of_batches_of_one_length(tmp_path):
    settings = dict(steps=20, cooldown_steps=0, batch_tokens=12, train_length=6, length_schedule=(2, 4, 3, 7))
    orders = [batch_order(Config(**settings, data_seed=seed)) for seed in range(4)]
    assert orders[0] == [*range(20)] and len({*map(tuple, orders)}) == 4
    for order in orders:
        for first, last in ((0, 4), (4, 11), (11, 20)):  # the steps of one length
            assert sorted(order[first:last]) == [*range(first, last)]
    stream, tokens = make_stream(tmp_path, 40, 33)
    with load(stream, batch_tokens=12, start_step=18, order=orders[1]) as loader:
        inputs = [torch.cat([micro_batch[0] for micro_batch in next(loader)]).ravel() for _ in range(3)]
    for batch, number in zip(inputs, [*orders[1][18:], 20], strict=True):  # beyond the run, in the text's order
        assert_array_equal(batch, tokens_from(tokens, 12 * number, 12))


@parametrize("length, world_size", [(25, 1), (30, 8)])
def test_indivisible_step_is_refused(tmp_path, length, world_size):
    stream, _ = make_stream(tmp_path, 40)
    with refuses(length):
        load(stream, length=length, world_size=world_size)


def test_an_error_of_the_reading_thread_is_raised_by_its_step(tmp_path):
    stream, tokens = make_stream(tmp_path, 40, 60)
    stream.paths[1].write_bytes(stream.paths[1].read_bytes()[:-40])
    with load(stream, batch_tokens=60) as loader:
        next(loader)
        with refuses("x_train_000002.bin"):
            next(loader)
    with load(stream, batch_tokens=60, vocab_size=tokens[:61].max()) as loader, refuses("vocab_size"):
        next(loader)


# ---- validation ----


def test_validation_check_names_the_largest_valid_number_for_all_lengths(tmp_path):
    stream, _ = make_stream(tmp_path, 240)
    check_validation(stream, [4, 16, 10], 160)
    for val_tokens in (240, 100, 0):  # no token left for the last target; no multiple of 16; nothing
        with refuses(f"val_tokens {val_tokens}", 160):
            check_validation(stream, [4, 16, 10], val_tokens)

"""Shards and loader: the format byte for byte, the checks before a run, and which tokens a step sees."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from data.loader import TrainLoader, check_validation, validation_batches
from data.shard_writer import ShardWriter
from data.shards import TokenStream, main, open_split, read_header, shard_paths, tokenizer_of

REPOSITORY = Path(__file__).resolve().parents[1]
VOCAB = 50257
NAMES = ["x_train_000001.bin", "x_train_000002.bin", "x_train_000003.bin", "x_val_000000.bin"]  # of write_dataset


def exit_code(command, words):
    """That of a command called with these words."""
    try:
        command(words)
    except SystemExit as end:
        return end.code
    return 0


def write_raw(path, tokens, magic=20240520, version=1, count=None):
    """A shard written from the description of the format, not with the code under test."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return path


def make_stream(folder, sizes, seed=0):
    """A stream over shards of these sizes, and its tokens."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, sum(sizes))
    parts = np.split(tokens, np.cumsum(sizes)[:-1])
    paths = [write_raw(folder / f"x_train_{i:06d}.bin", part) for i, part in enumerate(parts, 1)]
    return TokenStream(paths), tokens


def write_dataset(folder, shard_tokens=100, num_train=250, num_val=50, vocab_size=VOCAB):
    """A prepared folder: shards of both splits and a manifest; returns the tokens of the splits."""
    rng = np.random.default_rng(1)
    train, val = rng.integers(0, vocab_size, num_train), rng.integers(0, vocab_size, num_val)
    writer = ShardWriter(folder, "x", tokenizer="gpt2", vocab_size=vocab_size, shard_tokens=shard_tokens)
    for piece in np.array_split(train, 7):
        writer.write("train", piece)
    writer.write("val", val)
    writer.close()
    return train, val


# ---- shards: format and writer ----


def test_writer_cuts_documents_into_shards_of_the_format(tmp_path):
    train, val = write_dataset(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", *NAMES]
    for name, part in zip(NAMES, (train[:100], train[100:200], train[200:], val)):
        expected = write_raw(tmp_path / "expected", part).read_bytes()
        assert (tmp_path / name).read_bytes() == expected


def test_manifest_describes_every_shard(tmp_path):
    train, _ = write_dataset(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["tokenizer"], manifest["vocab_size"], len(manifest["files"])) == ("gpt2", VOCAB, 4)
    entry = manifest["files"]["x_train_000002.bin"]
    assert (entry["tokens"], entry["max_token"]) == (100, train[100:200].max())


def test_unfinished_writer_leaves_nothing_that_looks_like_data(tmp_path):
    writer = ShardWriter(tmp_path, "x", tokenizer="gpt2", vocab_size=VOCAB, shard_tokens=10)
    writer.write("train", np.arange(25))
    assert not list(tmp_path.glob("*.bin")) and not (tmp_path / "manifest.json").exists()


def test_bytes_reach_the_disk_before_names_and_names_before_the_writer_is_done(tmp_path, monkeypatch):
    calls = []  # a kill cannot show a missing fsync, so the order of the calls is what is checked
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda source, to: (calls.append((str(source), str(to))), replace(source, to)))
    write_dataset(tmp_path)
    renames = [call for call in calls if type(call) is tuple]
    assert [to for _, to in renames] == [str(tmp_path / name) for name in ("manifest.json", *NAMES)]
    for rename in renames:
        assert rename[0] in calls[: calls.index(rename)]
    assert str(tmp_path) in calls[calls.index(renames[0]) : calls.index(renames[1])]
    assert calls[-1] == str(tmp_path)


def test_failed_writer_takes_its_files_away_and_the_next_one_those_of_a_killed_one(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with ShardWriter(tmp_path, "x", tokenizer="t", vocab_size=300, shard_tokens=10) as writer:
            writer.write("train", np.arange(25))
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x_train_000009.bin.tmp").write_bytes(b"left")
    write_dataset(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


def test_writer_refuses_tokens_outside_the_vocabulary(tmp_path):
    writer = ShardWriter(tmp_path, "x", tokenizer="t", vocab_size=300)
    with pytest.raises(ValueError, match="token 300 .*vocabulary of 300"):
        writer.write("val", [5, 300, 7])


def test_writer_refuses_vocabularies_beyond_uint16(tmp_path):
    with pytest.raises(ValueError, match="65537"):
        ShardWriter(tmp_path, "x", tokenizer="t", vocab_size=65537)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-2], "truncated"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + b"\0\0", "overlong"),
        (lambda data: b"", "not a token shard"),
        (lambda data: b"#!/bin/sh\necho this is no shard\n", "not a token shard"),
        (lambda data: data[:4] + b"\2" + data[5:], "version 2"),
        (lambda data: data[:8] + bytes(1016), "no tokens"),
    ],
)
def test_bad_shard_is_named(tmp_path, change, message):
    path = write_raw(tmp_path / "x_train_000001.bin", range(37))
    assert read_header(path) == 37
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"x_train_000001.bin: .*{message}"):
        read_header(path)


def test_splits_are_told_apart_by_the_end_of_the_name(tmp_path):
    write_raw(tmp_path / "a_val_b_train_000001.bin", [1])
    assert [len(shard_paths(tmp_path, split)) for split in ("train", "val")] == [1, 0]


# ---- stream ----


def test_read_crosses_shards_and_wraps(tmp_path):
    stream, tokens = make_stream(tmp_path, (5, 1, 17, 8))
    assert len(stream) == 31
    for start in range(0, 70):
        for count in (1, 7, 31, 80):  # 80: more than twice around
            expected = tokens[np.arange(start, start + count) % 31]
            np.testing.assert_array_equal(stream.read(start, count), expected)


def test_a_token_outside_the_vocabulary_is_named_by_file_and_place(tmp_path):
    stream, tokens = make_stream(tmp_path, (5, 1, 17))
    for position, place in {4: (1, 4), 5: (2, 0), 6: (3, 0), 22: (3, 16), 23: (1, 0)}.items():
        token = tokens[position % 23]
        says = f"x_train_00000{place[0]}.bin: token {place[1]} is {token}, outside the vocabulary of {token}"
        with pytest.raises(ValueError, match=says):
            stream.read(position, 1, token)


def test_fingerprint_follows_content_not_place(tmp_path):
    prints = []
    for folder, num_train in (("a", 250), ("b", 250), ("c", 251)):
        write_dataset(tmp_path / folder, num_train=num_train)
        prints.append(open_split(tmp_path / folder, "train", VOCAB).fingerprint())
    assert prints[0] == prints[1] != prints[2]


def test_fingerprint_sees_one_changed_token_through_the_manifest(tmp_path):
    prints = []
    for token in (3, 4):
        writer = ShardWriter(tmp_path / str(token), "x", tokenizer="t", vocab_size=9)
        writer.write("train", [1, 2, token])
        writer.close()
        prints.append(open_split(tmp_path / str(token), "train", 9).fingerprint())
    assert prints[0] != prints[1]


def test_fingerprint_of_a_run_is_of_the_shards_that_it_reads(tmp_path):
    for folder, num_train in (("few", 200), ("more", 300)):  # shards of 100 tokens, the same random numbers
        write_dataset(tmp_path / folder, num_train=num_train)
    few, more = (open_split(tmp_path / folder, "train", VOCAB) for folder in ("few", "more"))
    np.testing.assert_array_equal(few.read(0, 200), more.read(0, 200))
    assert few.fingerprint(199) == more.fingerprint(199) == few.fingerprint()
    assert few.fingerprint(99) == more.fingerprint(99) != few.fingerprint(100)  # token 100 is the last target
    assert few.fingerprint(200) != more.fingerprint(200)  # here it wraps around, there it does not
    assert few.fingerprint(10**9) == few.fingerprint()


def test_fingerprint_without_a_manifest_tells_files_of_the_same_names_and_sizes(tmp_path):
    prints = []
    for folder, token in (("a", 3), ("b", 4), ("c", 3)):
        (tmp_path / folder).mkdir()
        write_raw(tmp_path / folder / "x_train_000001.bin", [1, 2, token])
        prints.append(open_split(tmp_path / folder, "train", 9).fingerprint())
    assert prints[0] == prints[2] != prints[1]


def test_many_shards_need_no_open_files(tmp_path):
    resource = pytest.importorskip("resource")
    stream, tokens = make_stream(tmp_path, (2,) * 200)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        np.testing.assert_array_equal(stream.read(0, 400), tokens)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ---- open_split ----


def test_open_split_reads_what_was_written(tmp_path):
    train, val = write_dataset(tmp_path)
    for split, tokens in (("train", train), ("val", val)):
        stream = open_split(tmp_path, split, VOCAB)
        np.testing.assert_array_equal(stream.read(0, len(stream)), tokens)
        assert stream.max_token == tokens.max()


def test_open_split_works_without_manifest(tmp_path):
    train, _ = write_dataset(tmp_path)
    (tmp_path / "manifest.json").unlink()
    stream = open_split(tmp_path, "train", VOCAB)
    assert len(stream) == len(train) and stream.max_token is None


def test_missing_folder_says_how_to_get_the_data(tmp_path):
    with pytest.raises(ValueError, match="no such data folder; get it with `python -m data.text .*nowhere`"):
        open_split(tmp_path / "nowhere", "train", VOCAB)
    with pytest.raises(ValueError, match="get it with `python -m data.fineweb 100B --shards 101 --out .*100B`"):
        open_split(tmp_path / "fineweb100B", "train", VOCAB, 10_900 * 917_504)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file, not a data folder"):
        open_split(tmp_path / "file", "train", VOCAB)


def test_missing_split_is_named(tmp_path):
    write_raw(tmp_path / "x_train_000001.bin", [1])
    with pytest.raises(ValueError, match="no val shards"):
        open_split(tmp_path, "val", VOCAB)


def test_small_vocabulary_is_refused_before_training(tmp_path):
    train, _ = write_dataset(tmp_path)
    open_split(tmp_path, "train", train.max() + 1)
    with pytest.raises(ValueError, match=f"token {train.max()}, outside the model's vocabulary of {train.max()}"):
        open_split(tmp_path, "train", train.max())


def test_shard_missing_from_the_folder_is_named(tmp_path):
    write_dataset(tmp_path)
    (tmp_path / "x_train_000002.bin").unlink()
    with pytest.raises(ValueError, match="x_train_000002.bin missing"):
        open_split(tmp_path, "train", VOCAB)


def test_shard_missing_from_the_manifest_is_named(tmp_path):
    write_dataset(tmp_path)
    write_raw(tmp_path / "x_train_000009.bin", [1])
    with pytest.raises(ValueError, match="x_train_000009.bin not in manifest.json"):
        open_split(tmp_path, "train", VOCAB)
    open_split(tmp_path, "val", VOCAB)


def test_shard_of_another_size_than_in_the_manifest_is_named(tmp_path):
    write_dataset(tmp_path)
    write_raw(tmp_path / "x_train_000003.bin", range(49))
    with pytest.raises(ValueError, match="x_train_000003.bin: 49 tokens where manifest.json has 50"):
        open_split(tmp_path, "train", VOCAB)


def test_bad_last_shard_is_found_at_the_start(tmp_path):
    write_dataset(tmp_path)
    path = tmp_path / "x_train_000003.bin"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="x_train_000003.bin: truncated"):
        open_split(tmp_path, "train", VOCAB)


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, "9" * 5000, "\0" * 700], ids=len)
def test_broken_manifest_is_named(tmp_path, text):
    write_dataset(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="manifest.json: not valid JSON"):
        open_split(tmp_path, "train", VOCAB)


@pytest.mark.parametrize("has_sha256", [True, False])
def test_the_tokenizer_is_told_by_its_name_or_by_its_file(tmp_path, has_sha256):
    tokenizers = []
    for folder, text in (("a", "one"), ("b", "two"), ("c", "one")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text(text)
        with ShardWriter(tmp_path / folder, "x", tokenizer="tokenizer.json", vocab_size=9) as writer:
            manifest = writer.close()
        if not has_sha256:  # as manifests once were
            del manifest["tokenizer_sha256"]
            (tmp_path / folder / "manifest.json").write_text(json.dumps(manifest))
        tokenizers.append(tokenizer_of(tmp_path / folder))
    assert tokenizers[0] == tokenizers[2] != tokenizers[1]
    write_dataset(tmp_path / "gpt2")
    assert tokenizer_of(tmp_path / "gpt2") == "gpt2" and tokenizer_of(tmp_path) is None


# ---- python -m data.shards verify ----


def test_verify_accepts_good_data(tmp_path, capsys):
    write_dataset(tmp_path)
    assert exit_code(main, ["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(": ok\n") == 4


def test_verify_names_flipped_missing_and_extra_files(tmp_path, capsys):
    write_dataset(tmp_path)
    flipped = tmp_path / "x_train_000001.bin"
    data = bytearray(flipped.read_bytes())
    data[1100] ^= 1
    flipped.write_bytes(data)
    (tmp_path / "x_val_000000.bin").unlink()
    write_raw(tmp_path / "x_train_000004.bin", [1])
    assert exit_code(main, ["verify", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    for problem in ("000001.bin (sha256 differs)", "val_000000.bin (missing)", "000004.bin (not in the manifest)"):
        assert problem in error
    assert "000002" not in error


def test_verify_without_manifest_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder, says in ((".", "nothing to verify against"), ("nowhere", "no such data folder"), ("file", "is a file")):
        assert exit_code(main, ["verify", str(tmp_path / folder)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and says in error


# ---- training loader ----


def step_sequences(stream, step, world_size, **options):
    """Inputs and targets of a step over all ranks and micro-batches, in order."""
    batches, length = [], options["length"]
    options["micro_batch_tokens"] = options.pop("micro_batch_size") * length
    for rank in range(world_size):
        kwargs = options | {"start_step": step, "rank": rank, "world_size": world_size, "vocab_size": VOCAB}
        with TrainLoader(stream, **kwargs) as loader:
            batches += next(loader)
    assert all(inputs.shape == (options["micro_batch_tokens"] // length, length) for inputs, _ in batches)
    return (torch.cat(tensors).numpy() for tensors in zip(*batches))


@pytest.mark.parametrize("length", [1, 3, 15])
@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (8, 1)])
def test_step_is_a_slice_of_the_stream(tmp_path, length, world_size, micro_batch_size):
    batch_tokens = 120
    stream, tokens = make_stream(tmp_path, (101, 7, 230, 59))
    options = {"batch_tokens": batch_tokens, "length": length, "micro_batch_size": micro_batch_size}
    for step in (0, 1, 3, 50):  # crosses shards, wraps in the middle of step 3, wraps many times
        expected = tokens[np.arange(step * batch_tokens, (step + 1) * batch_tokens + 1) % len(tokens)]
        inputs, targets = step_sequences(stream, step, world_size, **options)
        np.testing.assert_array_equal(inputs.ravel(), expected[:-1])
        np.testing.assert_array_equal(targets.ravel(), expected[1:])


def test_steps_follow_each_other_and_resume_anywhere(tmp_path):
    stream, tokens = make_stream(tmp_path, (40, 33))
    options = {"batch_tokens": 12, "length": 6, "micro_batch_tokens": 6, "vocab_size": VOCAB}
    with TrainLoader(stream, **options) as loader:
        steps = [torch.cat([inputs for inputs, _ in next(loader)]) for _ in range(9)]
    np.testing.assert_array_equal(torch.cat(steps).ravel(), tokens[np.arange(9 * 12) % 73])
    with TrainLoader(stream, **options, start_step=5) as loader:
        for step in steps[5:]:
            assert torch.equal(torch.cat([inputs for inputs, _ in next(loader)]), step)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_length_may_change_between_steps_and_the_tokens_of_a_step_stay(tmp_path, world_size):
    stream, tokens = make_stream(tmp_path, (101, 70))
    lengths = {0: 3, 1: 3, 2: 6, 3: 12}
    for step, length in lengths.items():
        parts = []
        for rank in range(world_size):
            options = dict(batch_tokens=48, length=lengths.get, micro_batch_tokens=12, vocab_size=VOCAB)
            options |= dict(start_step=step, rank=rank, world_size=world_size, prefetch=1)
            with TrainLoader(stream, **options) as loader:
                batches = next(loader)
            assert all(inputs.shape == (12 // length, length) for inputs, _ in batches)
            parts += [inputs for inputs, _ in batches]
        np.testing.assert_array_equal(torch.cat(parts).ravel(), tokens[np.arange(step * 48, step * 48 + 48) % 171])


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_prefetch_changes_nothing(tmp_path, prefetch):
    stream, tokens = make_stream(tmp_path, (40, 33))
    with TrainLoader(
        stream, batch_tokens=10, length=5, micro_batch_tokens=10, vocab_size=VOCAB, prefetch=prefetch
    ) as loader:
        inputs = torch.cat([next(loader)[0][0] for _ in range(8)])
    np.testing.assert_array_equal(inputs.ravel(), tokens[np.arange(80) % 73])


def test_micro_batches_are_int64(tmp_path):
    stream, _ = make_stream(tmp_path, (40,))
    with TrainLoader(stream, batch_tokens=12, length=3, micro_batch_tokens=6, vocab_size=VOCAB) as loader:
        assert {tensor.dtype for batch in next(loader) for tensor in batch} == {torch.int64}


@pytest.mark.parametrize(
    ("batch_tokens", "length", "world_size", "message"),
    [
        (100, 30, 1, "100 is not a multiple of the sequence length 30"),
        (100, 25, 8, r"more processes \(8\) than sequences in a step \(4"),
    ],
)
def test_indivisible_step_is_refused(tmp_path, batch_tokens, length, world_size, message):
    stream, _ = make_stream(tmp_path, (40,))
    sizes = {"batch_tokens": batch_tokens, "length": length, "micro_batch_tokens": length}
    with pytest.raises(ValueError, match=message):
        TrainLoader(stream, **sizes, world_size=world_size, vocab_size=VOCAB)


@pytest.mark.parametrize("sequences, world_size", [(5, 2), (8, 3), (7, 7), (128, 24), (9, 4)])
def test_shares_that_differ_are_the_step_together(tmp_path, sequences, world_size):
    stream, tokens = make_stream(tmp_path, (40, 33))
    parts = []
    for rank in range(world_size):
        sizes = dict(batch_tokens=sequences * 3, length=3, micro_batch_tokens=9, vocab_size=VOCAB)
        with TrainLoader(stream, **sizes, rank=rank, world_size=world_size, start_step=2) as loader:
            parts.append(torch.cat([inputs for inputs, _ in next(loader)]))
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1 and sum(counts) == sequences
    wanted = tokens[np.arange(2 * sequences * 3, 3 * sequences * 3) % len(tokens)]
    np.testing.assert_array_equal(torch.cat(parts).ravel(), wanted)


def test_token_outside_the_vocabulary_is_named_by_the_step_that_meets_it(tmp_path):
    tokens = np.zeros(100, int)
    tokens[77] = 300
    first = write_raw(tmp_path / "x_train_000001.bin", tokens[:60])
    second = write_raw(tmp_path / "x_train_000002.bin", tokens[60:])
    stream = TokenStream([first, second])
    with TrainLoader(stream, batch_tokens=20, length=10, micro_batch_tokens=20, vocab_size=300) as loader:
        for _ in range(3):
            next(loader)
        with pytest.raises(ValueError, match="x_train_000002.bin: token 17 is 300, outside the vocabulary of 300"):
            next(loader)


def test_shard_cut_during_the_run_is_named(tmp_path):
    stream, _ = make_stream(tmp_path, (50, 50))
    stream.paths[1].write_bytes(stream.paths[1].read_bytes()[:-40])
    with TrainLoader(stream, batch_tokens=40, length=10, micro_batch_tokens=40, vocab_size=VOCAB) as loader:
        next(loader)
        with pytest.raises(ValueError, match="x_train_000002.bin: it has changed since it was opened"):
            next(loader)


def test_close_ends_the_thread_in_mid_run(tmp_path):
    stream, _ = make_stream(tmp_path, (50,))
    before = threading.active_count()
    loader = TrainLoader(stream, batch_tokens=50, length=10, micro_batch_tokens=50, vocab_size=VOCAB, prefetch=50)
    next(loader)
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before


def test_process_that_forgets_the_loader_ends(tmp_path):
    path = write_raw(tmp_path / "x_train_000001.bin", range(50))
    code = (
        "from data.loader import TrainLoader; from data.shards import TokenStream; "
        f"stream = TokenStream([{str(path)!r}]); "
        "loader = TrainLoader(stream, batch_tokens=4, length=2, micro_batch_tokens=2, vocab_size=50); "
        "next(loader); raise SystemExit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=600).returncode == 7


# ---- validation ----


@pytest.mark.parametrize("length", [1, 4, 20])
@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_validation_counts_each_target_once(tmp_path, length, world_size, micro_batch_size):
    stream, tokens = make_stream(tmp_path, (70, 12, 39))  # 121: the last sequence's last target is the last token
    options = {"length": length, "val_tokens": 120, "micro_batch_size": micro_batch_size, "vocab_size": VOCAB}
    num_sequences = 120 // length
    inputs, targets = (np.full((num_sequences, length), -1) for _ in range(2))
    for rank in range(world_size):
        batches = list(validation_batches(stream, **options, rank=rank, world_size=world_size))
        if batches:
            mine = np.arange(rank, num_sequences, world_size)
            inputs[mine], targets[mine] = (torch.cat(tensors).numpy() for tensors in zip(*batches))
            assert max(len(batch) for batch, _ in batches) <= micro_batch_size
    np.testing.assert_array_equal(inputs.ravel(), tokens[:120])
    np.testing.assert_array_equal(targets.ravel(), tokens[1:121])


def test_validation_repeats_itself(tmp_path):
    stream, _ = make_stream(tmp_path, (64,))
    options = {"length": 9, "val_tokens": 63, "micro_batch_size": 4, "vocab_size": VOCAB}
    passes = [torch.cat([inputs for inputs, _ in validation_batches(stream, **options)]) for _ in range(2)]
    assert torch.equal(*passes)


def test_validation_check_names_the_largest_valid_number_for_all_lengths(tmp_path):
    stream, _ = make_stream(tmp_path, (240,))
    check_validation(stream, [4, 16, 10], 160)
    for val_tokens in (240, 100, 0):  # no token left for the last target; no multiple of 16; nothing
        with pytest.raises(ValueError, match="hold 240 tokens, the largest valid val_tokens is 160"):
            check_validation(stream, [4, 16, 10], val_tokens)


def test_validation_names_a_token_outside_the_vocabulary(tmp_path):
    stream = TokenStream([write_raw(tmp_path / "x_val_000000.bin", [1, 2, 3, 9, 5])])
    with pytest.raises(ValueError, match="x_val_000000.bin: token 3 is 9"):
        list(validation_batches(stream, length=2, val_tokens=4, micro_batch_size=1, vocab_size=9))

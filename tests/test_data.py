"""Shards and loader: the format byte for byte, damage that is found, and the tokens of each step."""

import json
import os
import re
import signal
from contextlib import closing

import numpy as np
import pytest
import torch
from commands import exit_code, python

from data.loader import TrainLoader, check_validation
from data.shard_writer import ShardWriter
from data.shards import TokenStream, describe_shard, main, open_split, tokenizer_of
from data.sources import data_command

BAD_DATA = pytest.mark.promise(5, "bad data is found")
VOCAB = 50257
NAMES = ["x_train_000001.bin", "x_train_000002.bin", "x_train_000003.bin", "x_val_000000.bin"]  # of write_dataset


def write_raw(path, tokens, magic=20240520, version=1, count=None):
    """Write a shard from the description of the format, not with the code under test."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return path


def make_stream(folder, sizes, seed=0):
    """Return a stream over shards of these sizes, and its tokens."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, sum(sizes))
    parts = np.split(tokens, np.cumsum(sizes)[:-1])
    paths = [write_raw(folder / f"x_train_{i:06d}.bin", part) for i, part in enumerate(parts, 1)]
    return TokenStream(paths, {path.name: describe_shard(path) for path in paths}), tokens


def write_dataset(folder, num_train=250, tokenizer="gpt2"):
    """Write shards of 100 tokens of both splits and a manifest; return the tokens of the splits."""
    rng = np.random.default_rng(1)
    train, val = rng.integers(0, VOCAB, num_train), rng.integers(0, VOCAB, 50)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer == "tokenizer.json":
        (folder / tokenizer).write_bytes(b"a tokenizer")
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", *NAMES]
    for name, part in zip(NAMES, (train[:100], train[100:200], train[200:], val)):
        assert (tmp_path / name).read_bytes() == write_raw(tmp_path / "expected", part).read_bytes()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["tokenizer"], manifest["vocab_size"], sorted(manifest["files"])) == ("gpt2", VOCAB, NAMES)
    entry = manifest["files"]["x_train_000002.bin"]
    assert (entry["tokens"], entry["max_token"]) == (100, train[100:200].max())
    for split, tokens in (("train", train), ("val", val)):
        stream = open_split(tmp_path, split, VOCAB)
        np.testing.assert_array_equal(stream.read(0, len(stream)), tokens)
        assert stream.max_token == tokens.max()
        with pytest.raises(ValueError, match=f"vocab_size.* {VOCAB}"):
            open_split(tmp_path, split, tokens.max())


def test_bytes_reach_the_disk_before_names_and_the_manifest_before_the_shards(tmp_path, monkeypatch):
    """A kill cannot show a missing fsync, so the test checks the order of the calls."""
    calls = []
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


def test_failed_or_killed_writer_leaves_nothing_that_looks_like_data(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with ShardWriter(tmp_path, "x", tokenizer="t", vocab_size=300, shard_tokens=10) as writer:
            writer.write("train", np.arange(25))
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    unfinished = ShardWriter(tmp_path, "x", tokenizer="t", vocab_size=300, shard_tokens=10)
    unfinished.write("train", np.arange(25))
    assert not [*tmp_path.glob("*.bin*"), *tmp_path.glob("manifest*")]
    write_dataset(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", *NAMES]


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
@pytest.mark.slow
@pytest.mark.parametrize("renames", [0, 2])
def test_writer_killed_while_it_names_shards_is_refused_and_can_be_repeated(tmp_path, faults, renames):
    with faults("writer killed"):
        python("-c", KILLED_WRITER, tmp_path, renames, code=-signal.SIGKILL)
        with pytest.raises(ValueError, match="x_train_00000[23].bin" if renames else r"\btrain\b"):
            open_split(tmp_path, "train", VOCAB)
        write_dataset(tmp_path)
        assert exit_code(main, ["verify", tmp_path]) == 0


def test_writer_refuses_a_vocabulary_that_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="65537"):
        ShardWriter(tmp_path, "x", tokenizer="t", vocab_size=65537)


# ---- stream ----


def test_read_crosses_shards_and_wraps_without_open_files(tmp_path):
    stream, tokens = make_stream(tmp_path, (5, 1, 17, 8))
    assert len(stream) == 31
    before = len(os.listdir("/proc/self/fd"))
    for start in range(0, 70):
        for count in (1, 7, 31, 80):  # 80: more than twice around
            np.testing.assert_array_equal(stream.read(start, count), tokens[np.arange(start, start + count) % 31])
    assert len(os.listdir("/proc/self/fd")) == before


@BAD_DATA
def test_a_token_outside_the_vocabulary_is_named_by_file_and_place(tmp_path, faults):
    stream, tokens = make_stream(tmp_path, (5, 1, 17))
    for position, (shard, place) in {4: (1, 4), 5: (2, 0), 6: (3, 0), 22: (3, 16), 23: (1, 0)}.items():
        token = tokens[position % 23]
        named = rf"x_train_00000{shard}\.bin\D+\b{place}\b.*\b{token}\b"
        with faults("token outside the vocabulary"), pytest.raises(ValueError, match=named):
            stream.read(position, 1, token)
    outside = int(np.argmax(tokens))
    named = r"{}\D+\b{}\b".format(*stream.file_and_index(outside))
    loading = dict(batch_tokens=22, length=11, micro_batch_tokens=22, vocab_size=tokens.max())
    with closing(TrainLoader(stream, **loading)) as loader, pytest.raises(ValueError, match=named):
        next(loader)


def test_fingerprint_follows_the_content_of_the_shards_that_a_run_reads(tmp_path):
    streams = {}
    for folder, num_train in (("few", 200), ("again", 200), ("more", 300)):
        write_dataset(tmp_path / folder, num_train)
        streams[folder] = open_split(tmp_path / folder, "train", VOCAB)
    few, again, more = streams.values()
    np.testing.assert_array_equal(few.read(0, 200), more.read(0, 200))
    assert few.fingerprint() == again.fingerprint() == few.fingerprint(199) == more.fingerprint(199)
    assert few.fingerprint(99) == more.fingerprint(99) != few.fingerprint(100)  # token 100 is the last target
    assert few.fingerprint(200) != more.fingerprint(200)  # the first wraps around


# ---- opening a folder ----


@pytest.mark.parametrize("folder, tokens, vocab_size, command", [
    ("fineweb10B", 10**12, VOCAB, "data.download fineweb10B --shards 103 --out"),
    ("taught", 1, 1024, "data.python_source taught --out"),
    ("my books", 1, VOCAB, "data.text FILES... --tokenizer gpt2 --out"),
    ("my books", 1, 1024, "data.text FILES... --tokenizer bpe:1024 --out"),
])
def test_missing_data_names_the_command_that_gets_it(tmp_path, folder, tokens, vocab_size, command):
    assert re.search(f"{command} '?{tmp_path}/{folder}", data_command(tmp_path / folder, tokens, vocab_size))
    with pytest.raises(ValueError, match="the remedy"):
        open_split(tmp_path / folder, "train", vocab_size, "the remedy")


def test_the_tokenizer_is_told_by_its_name_or_by_its_file(tmp_path):
    tokenizers = []
    for folder, text in (("a", "one"), ("b", "two"), ("c", "one")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text(text)
        with ShardWriter(tmp_path / folder, "x", tokenizer="tokenizer.json", vocab_size=9) as writer:
            writer.close()
        tokenizers.append(tokenizer_of(tmp_path / folder))
    assert tokenizers[0] == tokenizers[2] != tokenizers[1]
    write_dataset(tmp_path / "gpt2")
    assert tokenizer_of(tmp_path / "gpt2") == "gpt2" and tokenizer_of(tmp_path) is None


# ---- damage: a file of write_dataset, its change, and whether opening finds it; `verify` finds all of them ----


def altered(key, value):
    """Return a change of a manifest's first entry."""

    def change(data):
        manifest = json.loads(data)
        manifest["files"][NAMES[0]][key] = value
        return json.dumps(manifest).encode()

    return change


DAMAGE = {
    "truncated": (NAMES[0], lambda data: data[:-2], True),
    "appended": (NAMES[3], lambda data: data + b"\0\0", True),
    "no shard": (NAMES[0], lambda data: b"version https://git-lfs.github.com/spec/v1\n", True),
    "other version": (NAMES[0], lambda data: data[:4] + b"\2" + data[5:], True),
    "no tokens": (NAMES[0], lambda data: data[:8] + bytes(1016), True),
    "shorter than in the manifest": (NAMES[0], lambda data: data[:8] + b"\x63\0\0\0" + data[12:-2], True),
    "flipped bit": (NAMES[1], lambda data: flip(data, 8 * 1100), False),
    "zeroed bytes": (NAMES[3], lambda data: data[:1030] + bytes(10) + data[1040:], False),
    "missing": (NAMES[1], None, True),
    "stray": ("x_val_000007.bin", lambda data: b"x", True),
    "changed tokenizer": ("tokenizer.json", lambda data: flip(data, 9), False),
    "missing tokenizer": ("tokenizer.json", None, False),
    "missing manifest": ("manifest.json", None, True),
    "cut manifest": ("manifest.json", lambda data: data[:300], True),
    "other sha256": ("manifest.json", altered("sha256", "0" * 64), False),
    "other tokens": ("manifest.json", altered("tokens", 101), True),
    "other max_token": ("manifest.json", altered("max_token", 1), False),
}


def refused(folder):
    """Return whether a split cannot be opened; any error but ValueError and OSError is raised."""
    for split in ("train", "val"):
        try:
            open_split(folder, split, VOCAB)
        except (ValueError, OSError):
            return True
    return False


@BAD_DATA
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_named(tmp_path, capsys, faults, kind):
    write_dataset(tmp_path, tokenizer="tokenizer.json")
    assert exit_code(main, ["verify", tmp_path]) == 0 and not refused(tmp_path)
    name, change, opening_fails = DAMAGE[kind]
    path = tmp_path / name
    with faults(kind):
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(path.read_bytes() if path.exists() else b""))
        capsys.readouterr()
        assert exit_code(main, ["verify", tmp_path]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        assert name in error or name == "manifest.json" and NAMES[0] in error
        assert refused(tmp_path) or not opening_fails


def test_shards_of_another_program_are_described_once(tmp_path):
    write_dataset(tmp_path)
    made = (tmp_path / "manifest.json").read_bytes()
    assert exit_code(main, ["describe", tmp_path]) == 2 and (tmp_path / "manifest.json").read_bytes() == made
    expected = open_split(tmp_path, "train", VOCAB).fingerprint()
    (tmp_path / "manifest.json").unlink()
    assert exit_code(main, ["describe", tmp_path]) == 0
    assert open_split(tmp_path, "train", VOCAB).fingerprint() == expected
    assert exit_code(main, ["describe", tmp_path / "nowhere"]) == 2


@BAD_DATA
def test_every_bit_of_a_shard_counts(tmp_path, faults, long):
    with ShardWriter(tmp_path, "x", tokenizer="gpt2", vocab_size=VOCAB) as writer:
        writer.write("val", np.arange(20))
        writer.close()
    path = tmp_path / NAMES[3]
    good = path.read_bytes()
    for bit in range(0, 8 * len(good), 1 if long else 301):
        with faults("flipped bit"):
            path.write_bytes(flip(good, bit))
            assert exit_code(main, ["verify", tmp_path]) == 2, bit
    path.write_bytes(good)
    assert exit_code(main, ["verify", tmp_path]) == 0
    assert exit_code(main, ["verify", tmp_path / "nowhere"]) == 2


# ---- training loader ----


def check_step(stream, tokens, step, world_size, batch_tokens, **options):
    """Check inputs and targets of a step over all ranks and micro-batches, in order: they are a slice of the tokens.

    Return the shapes of all micro-batches, and the number of sequences of each rank.
    """
    batches, sequences = [], []
    for rank in range(world_size):
        options |= dict(start_step=step, rank=rank, world_size=world_size, vocab_size=VOCAB)
        with closing(TrainLoader(stream, batch_tokens=batch_tokens, **options)) as loader:
            batches += (share := next(loader))
        sequences.append(sum(len(inputs) for inputs, _ in share))
    inputs, targets = (torch.cat([tensor.ravel() for tensor in tensors]).numpy() for tensors in zip(*batches))
    expected = tokens[np.arange(step * batch_tokens, (step + 1) * batch_tokens + 1) % len(tokens)]
    np.testing.assert_array_equal(inputs, expected[:-1])
    np.testing.assert_array_equal(targets, expected[1:])
    return {tuple(x.shape) for x, _ in batches}, sequences


@pytest.mark.parametrize("length", [1, 3, 15])
@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (8, 1)])
def test_step_is_a_slice_of_the_stream(tmp_path, length, world_size, micro_batch_size):
    stream, tokens = make_stream(tmp_path, (101, 7, 230, 59))
    sizes = dict(batch_tokens=120, length=length, micro_batch_tokens=micro_batch_size * length)
    for step in (0, 1, 3, 50):  # crosses shards, wraps in the middle of step 3, wraps many times
        assert check_step(stream, tokens, step, world_size, **sizes)[0] == {(micro_batch_size, length)}


def test_steps_follow_each_other_and_resume_anywhere(tmp_path):
    stream, tokens = make_stream(tmp_path, (40, 33))
    sizes = dict(batch_tokens=12, length=6, micro_batch_tokens=6, vocab_size=VOCAB)
    with closing(TrainLoader(stream, **sizes)) as loader:
        steps = [torch.cat([inputs for inputs, _ in next(loader)]) for _ in range(9)]
    assert steps[0].dtype == torch.int64
    np.testing.assert_array_equal(torch.cat(steps).ravel(), tokens[np.arange(9 * 12) % 73])
    with closing(TrainLoader(stream, start_step=5, **sizes)) as loader:
        for step in steps[5:]:
            assert torch.equal(torch.cat([inputs for inputs, _ in next(loader)]), step)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_length_may_change_between_steps_and_the_tokens_of_a_step_stay(tmp_path, world_size):
    stream, tokens = make_stream(tmp_path, (101, 70))
    lengths = {0: 3, 1: 3, 2: 6, 3: 12}
    for step, length in lengths.items():
        sizes = dict(batch_tokens=48, length=lengths.get, micro_batch_tokens=12)
        assert check_step(stream, tokens, step, world_size, **sizes)[0] == {(12 // length, length)}


@pytest.mark.parametrize("sequences, world_size", [(5, 2), (8, 3), (7, 7), (128, 24), (9, 4)])
def test_shares_that_differ_are_the_step_together(tmp_path, sequences, world_size):
    stream, tokens = make_stream(tmp_path, (40, 33))
    sizes = dict(batch_tokens=sequences * 3, length=3, micro_batch_tokens=9)
    _, counts = check_step(stream, tokens, 2, world_size, **sizes)
    assert max(counts) - min(counts) <= 1 and sum(counts) == sequences


def test_a_tokenizer_file_of_an_earlier_text_is_not_this_texts(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with ShardWriter(tmp_path, "text", tokenizer="gpt2", vocab_size=9) as writer:
        writer.write("train", [1])
        writer.close()
    assert tokenizer_of(tmp_path) == "gpt2"


@pytest.mark.parametrize(("length", "world_size"), [(30, 1), (25, 8)])
def test_indivisible_step_is_refused(tmp_path, length, world_size):
    stream, _ = make_stream(tmp_path, (40,))
    sizes = dict(batch_tokens=100, length=length, micro_batch_tokens=length, world_size=world_size)
    with pytest.raises(ValueError, match=f"{length}"):
        TrainLoader(stream, vocab_size=VOCAB, **sizes)


def test_an_error_of_the_reading_thread_is_raised_by_its_step(tmp_path):
    stream, _ = make_stream(tmp_path, (50, 50))
    stream.paths[1].write_bytes(stream.paths[1].read_bytes()[:-40])
    with closing(TrainLoader(stream, batch_tokens=40, length=10, micro_batch_tokens=40, vocab_size=VOCAB)) as loader:
        next(loader)
        with pytest.raises(ValueError, match="x_train_000002.bin"):
            next(loader)


# ---- validation ----


def test_validation_check_names_the_largest_valid_number_for_all_lengths(tmp_path):
    stream, _ = make_stream(tmp_path, (240,))
    check_validation(stream, [4, 16, 10], 160)
    for val_tokens in (240, 100, 0):  # no token left for the last target; no multiple of 16; nothing
        with pytest.raises(ValueError, match=f"val_tokens {val_tokens}.*160"):
            check_validation(stream, [4, 16, 10], val_tokens)

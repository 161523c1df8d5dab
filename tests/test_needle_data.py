"""data.needle: examples from real shards, text files and a stand-in for the hub, with a tokenizer trained here."""

import gzip
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from data.needle import CITIES, NEEDLE, Example, Haystack, NeedleTask, needle_text, oracle_accuracy, score
from data.shard_writer import ShardWriter
from data.text import prepare
from data.tokenizer import END_OF_TEXT, load_tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]


def make_documents(count, seed=0):
    rng = np.random.default_rng(seed)
    words = ["shore", "lamp", "winter", "of", "the", "a", "caf\u00e9", "42,", "is.", "\n\n"]
    texts = []
    for i in range(count):
        rare = map(chr, rng.integers(0x4E00, 0x9FA6, 5))  # too rare for a token of their own
        texts.append(f"Tale {i}: " + " ".join(rng.choice([*words, *rare], rng.integers(1, 120))).strip())
    return texts


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "tales.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in make_documents(150)))
    return path


@pytest.fixture(scope="module")
def data_dir(text_file):
    prepare([text_file], text_file.parent / "data", "bpe:400", val_fraction=0.3, shard_tokens=3000)
    return text_file.parent / "data"


@pytest.fixture(scope="module")
def tokenizer(data_dir):
    return load_tokenizer(data_dir)


@pytest.fixture(scope="module")
def haystack(data_dir, tokenizer):
    return Haystack.from_shards(data_dir, "train", tokenizer)


def documents(haystack, tokenizer):
    """All of them as texts, each of which the end-of-text token must precede."""
    tokens = [haystack.document(i) for i in range(haystack.num_documents)]
    assert all((ids == tokenizer.eot).tolist() == [True] + [False] * (len(ids) - 1) for ids in tokens)
    return [tokenizer.decode(ids[1:].tolist()) for ids in tokens]


def without_needles(example, tokenizer):
    """The haystack, and where in it each needle went."""
    tokens, gaps = example.tokens[: example.response_start - len(tokenizer.encode("\n"))], []
    for city, number, position in list(zip(example.cities, example.numbers, example.positions))[::-1]:
        needle = tokenizer.encode(needle_text(city, number))
        assert tokens[position : position + len(needle)].tolist() == needle
        tokens = np.delete(tokens, np.arange(position, position + len(needle)))
        gaps = [position, *(gap - len(needle) for gap in gaps)]
    return tokens, gaps


def assert_uniform(counts):
    """Chi-squared, at a level that one in a thousand uniform samples fails (Wilson and Hilferty's approximation)."""
    freedom = len(counts) - 1
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3


# ---- haystacks ----


def test_shard_documents_are_those_that_were_prepared(data_dir, tokenizer):
    assert len(list(data_dir.glob("*_train_*.bin"))) > 1  # documents run over the borders of shards
    found = [documents(Haystack.from_shards(data_dir, split, tokenizer), tokenizer) for split in ("train", "val")]
    assert sorted(found[0] + found[1]) == sorted(make_documents(150))


def test_text_documents_are_split_as_in_shards(text_file, data_dir, tokenizer):
    for split in ("train", "val"):
        text = Haystack.from_text([text_file], split, tokenizer, 0.3)
        shards = Haystack.from_shards(data_dir, split, tokenizer)
        assert documents(text, tokenizer) == documents(shards, tokenizer)


def test_sample_is_distinct_documents_with_the_last_one_cut(haystack, tokenizer):
    known = [haystack.document(i).tolist() for i in range(haystack.num_documents)]
    tokens = haystack.sample(4321, np.random.default_rng(1))
    assert len(tokens) == 4321
    *whole, last = [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == tokenizer.eot)[1:])]
    indices = [known.index(part) for part in whole]
    assert len(set(indices)) == len(indices) > 20 and indices != sorted(indices)
    assert any(part[: len(last)] == last for i, part in enumerate(known) if i not in indices)


def test_sample_can_take_every_token_and_no_more(haystack):
    total = sum(len(haystack.document(i)) for i in range(haystack.num_documents))
    assert len(haystack.sample(total, np.random.default_rng(0))) == total
    with pytest.raises(ValueError, match=f"the train haystack has {total} tokens where {total + 1} are needed"):
        haystack.sample(total + 1, np.random.default_rng(0))


def test_documents_are_drawn_evenly():
    haystack = Haystack("train", 37, lambda i: np.array([0, i]))
    rng = np.random.default_rng(2)
    assert_uniform(np.bincount([haystack.sample(2, rng)[1] for _ in range(2000)], minlength=37))


def test_documents_of_a_long_shard(tmp_path, tokenizer):
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 20_000, 250)  # some 2.5M tokens
    tokens = [np.append(tokenizer.eot, rng.integers(1, tokenizer.vocab_size, length)) for length in lengths]
    writer = ShardWriter(tmp_path, "long", tokenizer="tokenizer.json", vocab_size=tokenizer.vocab_size)
    writer.write("val", np.concatenate(tokens))
    writer.close()
    haystack = Haystack.from_shards(tmp_path, "val", tokenizer)
    assert haystack.num_documents == 250
    assert all((haystack.document(i) == tokens[i]).all() for i in range(250))


def test_shards_without_end_of_text_are_refused(tmp_path, tokenizer):
    writer = ShardWriter(tmp_path, "bare", tokenizer="tokenizer.json", vocab_size=tokenizer.vocab_size)
    writer.write("train", np.arange(1, 200))
    writer.close()
    with pytest.raises(ValueError, match=r"no end-of-text token \(0\) in the train shards"):
        Haystack.from_shards(tmp_path, "train", tokenizer)


# ---- examples ----


def test_cities_are_69_and_distinct():
    assert len(CITIES) == len(set(CITIES)) == 69


def test_example_does_not_depend_on_the_others(data_dir, tokenizer, haystack):
    task = NeedleTask(tokenizer, haystack, 501, seed=3)
    examples = [task.example(i) for i in range(6)]
    again = NeedleTask(load_tokenizer(data_dir), Haystack.from_shards(data_dir, "train", tokenizer), 501, seed=3)
    for i in (5, 0, 3):
        other = again.example(i)
        np.testing.assert_array_equal(other.tokens, examples[i].tokens)
        assert other.positions == examples[i].positions and other.response == examples[i].response
    inputs, _, _ = task.batch([4, 1])
    np.testing.assert_array_equal(inputs, [examples[4].tokens[:-1], examples[1].tokens[:-1]])


def test_seed_split_length_and_index_change_the_needles(data_dir, tokenizer, haystack):
    val = Haystack.from_shards(data_dir, "val", tokenizer)
    responses = [
        NeedleTask(tokenizer, haystack, 500).example(0).response,
        NeedleTask(tokenizer, haystack, 500).example(1).response,
        NeedleTask(tokenizer, haystack, 500, seed=1).example(0).response,
        NeedleTask(tokenizer, haystack, 501).example(0).response,
        NeedleTask(tokenizer, val, 500).example(0).response,
    ]
    assert len(set(responses)) == len(responses)


@pytest.mark.parametrize("length", [211, 257, 1000, 1023, 4096])
def test_example_is_haystack_needles_and_response_of_exact_length(tokenizer, haystack, length):
    task = NeedleTask(tokenizer, haystack, length)
    for index in range(5):
        example = task.example(index)
        assert len(example.tokens) == length + 1
        assert len(set(example.cities)) == len(example.numbers) == len(example.positions) == 3
        prompt, response = np.split(example.tokens, [example.response_start])
        assert response.tolist() == [*tokenizer.encode(example.response), tokenizer.eot]
        assert tokenizer.decode(prompt[-1:].tolist()) == "\n"
        hay, gaps = without_needles(example, tokenizer)
        assert 0 <= gaps[0] and gaps == sorted(gaps) and gaps[-1] <= len(hay)
        starts = np.flatnonzero(hay == tokenizer.eot)
        known = {haystack.document(i).tobytes() for i in range(haystack.num_documents)}
        parts = np.split(hay.astype("<u2"), starts[1:])
        assert all(part.tobytes() in known for part in parts[:-1])
        assert any(document.startswith(parts[-1].tobytes()) for document in known)


def test_needles_are_verbatim_in_the_decoded_prompt_in_order(tokenizer, haystack):
    task = NeedleTask(tokenizer, haystack, 333)
    cut = 0
    for index in range(100):
        example = task.example(index)
        prompt = tokenizer.decode(example.tokens[: example.response_start].tolist())
        assert NEEDLE.findall(prompt) == [(city, str(n)) for city, n in zip(example.cities, example.numbers)]
        assert all(needle_text(city, n) in prompt for city, n in zip(example.cities, example.numbers))
        cut += "\ufffd" in prompt
    assert cut > 0  # some needle went between the bytes of a character


def test_mask_is_on_the_response_and_its_end_only(tokenizer, haystack):
    task = NeedleTask(tokenizer, haystack, 301)
    inputs, targets, mask = task.batch(range(12))
    assert inputs.shape == targets.shape == mask.shape == (12, 301)
    assert (inputs.dtype, targets.dtype, mask.dtype) == (np.int64, np.int64, bool)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    for index in range(12):
        response = task.example(index).response
        assert targets[index][mask[index]].tolist() == [*tokenizer.encode(response), tokenizer.eot]
        assert tokenizer.decode(targets[index].tolist()).endswith("\n" + response + END_OF_TEXT)
        assert (np.diff(mask[index].astype(int)) >= 0).all()  # off, then on to the end
    assert len(set(mask.sum(axis=1))) > 1  # responses of different lengths


def test_needles_numbers_and_cities_are_uniform(tokenizer, haystack):
    task = NeedleTask(tokenizer, haystack, 1500)
    places, digits, cities = [], [], []
    for index in range(300):
        example = task.example(index)
        assert len(set(example.cities)) == 3
        hay, gaps = without_needles(example, tokenizer)
        places += [gap / (len(hay) + 1) for gap in gaps]
        digits += [number // 10**6 - 1 for number in example.numbers]
        cities += [CITIES.index(city) for city in example.cities]
    assert_uniform(np.histogram(places, bins=12, range=(0, 1))[0])
    assert_uniform(np.bincount(digits, minlength=9))
    assert_uniform(np.bincount(cities, minlength=69))


def test_least_length_holds_every_example(tokenizer, haystack):
    with pytest.raises(ValueError, match="length 10 is too short for 3 needles and the response: use") as error:
        NeedleTask(tokenizer, haystack, 10)
    least = int(str(error.value).split()[-3])
    with pytest.raises(ValueError, match=f"use {least} or more"):
        NeedleTask(tokenizer, haystack, least - 1)
    task = NeedleTask(tokenizer, haystack, least)
    assert all(len(task.example(i).tokens) == least + 1 for i in range(200))


# ---- scoring ----

EXAMPLE = Example(np.zeros(1), 0, ("Oslo", "Cape Town", "Lima"), (1234567, 7654321, 1000000), (0, 1, 2))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Oslo=1234567;Cape Town=7654321;Lima=1000000", [True, True, True]),
        ("Oslo=1234567;Cape Town=7654321;Lima=1000000<|endoftext|>;Rome=1", [True, True, True]),
        ("Oslo=1234567;Cape Town=7654321<|endoftext|>;Lima=1000000", [True, True, False]),
        ("Cape Town=7654321;Oslo=1234567;Lima=1000000", [False, False, True]),
        ("Oslo=1234568;Cape=7654321;Lima=1000000", [False, False, True]),
        ("Oslo=12345678;Cape Town=765432;lima=1000000", [False, False, False]),
        ("Oslo=1234567;;Lima=1000000;Rome=5555555", [True, False, True]),
        ("Oslo=1234567Cape Town=7654321;Lima=1000000", [False, False, False]),
        ("", [False, False, False]),
        (";;;;\ufffd=;=\n", [False, False, False]),
    ],
)
def test_score(text, right):
    assert score(text, EXAMPLE) == right


@pytest.mark.parametrize("length", [211, 2048])
def test_perfect_copier_is_always_right(tokenizer, haystack, length):
    assert oracle_accuracy(NeedleTask(tokenizer, haystack, length), 50) == 1


def test_perfect_copier_is_misled_by_needles_in_the_haystack(tmp_path, tokenizer):
    path = tmp_path / "needles.txt"
    path.write_text(
        f"\n{END_OF_TEXT}\n".join("Once," + needle_text("Atlantis", i) + "." for i in range(10**6, 10**6 + 100))
    )
    task = NeedleTask(tokenizer, Haystack.from_text([path], "train", tokenizer), 500)
    assert oracle_accuracy(task, 20) < 0.9


# ---- C4, through the real client in a subprocess ----


class Hub(ThreadingHTTPServer):
    """Serves two small files of C4 where the hub has them."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.texts = {
            "c4-train.00000-of-01024": make_documents(30, 1),
            "c4-validation.00000-of-00008": make_documents(10, 3),
        }
        self.files = {
            f"/datasets/allenai/c4/resolve/main/en/{name}.json.gz": gzip.compress(
                "".join(json.dumps({"text": text, "url": "none"}) + "\n" for text in texts).encode()
            )
            for name, texts in self.texts.items()
        }
        self.fetched = []


class HubHandler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        data = self.server.files.get(self.path, b"")
        self.send_response(200 if data else 404)
        for key, value in {
            "ETag": f'"{len(data):040x}"',
            "X-Repo-Commit": "1" * 40,
            "Content-Length": len(data),
        }.items():
            self.send_header(key, str(value))
        self.end_headers()
        return data

    def do_GET(self):
        if self.path in self.server.files:
            self.server.fetched.append(self.path)
        self.wfile.write(self.do_HEAD())

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    with Hub() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()


def c4_documents(hub, tmp_path, data_dir, *splits, **variables):
    """Opens splits one after the other; the documents of each, or the text of the OSError."""
    result = open_c4(hub, tmp_path, data_dir, *splits, **variables)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def open_c4(hub, tmp_path, data_dir, *splits, **variables):
    program = f"""
import json
from data.needle import Haystack
from data.tokenizer import load_tokenizer
tokenizer = load_tokenizer({str(data_dir)!r})
for split in {splits!r}:
    try:
        haystack = Haystack.from_c4({str(tmp_path / "c4")!r}, split, tokenizer)
        documents = [tokenizer.decode(haystack.document(i).tolist()) for i in range(haystack.num_documents)]
        print(json.dumps(documents))
    except OSError as error:
        print(json.dumps(str(error)))
"""
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    command = [sys.executable, "-c", program]
    environment |= variables
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)


def test_c4_gives_the_documents_of_its_own_splits_and_fetches_a_file_once(hub, tmp_path, data_dir):
    train, val, again = c4_documents(hub, tmp_path, data_dir, "train", "val", "val")
    assert [train, val] == [[END_OF_TEXT + text for text in texts] for texts in hub.texts.values()] and again == val
    assert hub.fetched == list(hub.files)
    left = [path.name for path in (tmp_path / "c4").rglob("c4-*") if path.suffix in (".jsonl", ".gz", ".tmp")]
    assert sorted(left) == sorted(f"{name}.jsonl" for name in hub.texts)


@pytest.mark.slow
def test_of_processes_that_need_c4_at_once_one_fetches_it(hub, tmp_path, data_dir):
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(c4_documents, hub, tmp_path, data_dir, "train", "val") for _ in range(3)]
    both = [[END_OF_TEXT + text for text in texts] for texts in hub.texts.values()]
    assert all(a.result() == both for a in asked) and sorted(hub.fetched) == sorted(hub.files)


def test_damaged_c4_file_is_named_and_removed(hub, tmp_path, data_dir):
    (path, good), *_ = hub.files.items()
    damaged = good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 255]) + good[len(good) // 2 + 1 :]
    for bad in (damaged, good[:10] + b"\xff" * 90, good[:-50], b"<html>not a gzip file</html>"):
        hub.files[path] = bad
        (error,) = c4_documents(hub, tmp_path, data_dir, "train")
        assert "c4-train.00000-of-01024.json.gz: damaged" in error and "\n" not in error
        assert not [path for path in (tmp_path / "c4").rglob("c4-*") if path.suffix in (".jsonl", ".gz", ".tmp")]
    hub.files[path] = good
    (train,) = c4_documents(hub, tmp_path, data_dir, "train")
    assert len(train) == 30


@pytest.mark.slow
def test_c4_without_the_hub_is_one_line(hub, tmp_path, data_dir):
    hub.files.clear()
    (error,) = c4_documents(hub, tmp_path, data_dir, "val")
    assert "cannot fetch c4-validation.00000-of-00008" in error and "hub" in error and "\n" not in error


@pytest.mark.parametrize(
    "network",
    [{}, {"HF_ENDPOINT": "http://nowhere.invalid", "NO_PROXY": "*", "no_proxy": "*"}, {"HF_HUB_OFFLINE": "1"}],
    ids=["refused", "name", "told"],
)
def test_c4_without_a_network_is_one_line_without_a_second_try(tmp_path, data_dir, network):
    with Hub() as closed:
        pass
    result = open_c4(closed, tmp_path, data_dir, "val", **network)
    assert result.returncode == 0 and result.stderr == ""
    (error,) = result.stdout.splitlines()
    assert "cannot fetch c4-validation.00000-of-00008 of allenai/c4 from the Hugging Face hub" in error

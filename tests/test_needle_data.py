"""data.needle: examples from real shards and text files, with a tokenizer trained here."""

import gzip
import json

import numpy as np
import pytest
from test_text import make_documents
from test_train import write_shards

from data import needle
from data.needle import C4_FILES, CITIES, Example, Haystack, NeedleTask, needle_text, score
from data.text import prepare
from data.tokenizer import END_OF_TEXT, load_tokenizer


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "tales.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in make_documents(400)))
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
    """Return all documents as texts; the end-of-text token must precede each."""
    tokens = [haystack.document(i) for i in range(haystack.num_documents)]
    assert all((ids == tokenizer.eot).tolist() == [True] + [False] * (len(ids) - 1) for ids in tokens)
    return [tokenizer.decode(ids[1:].tolist()) for ids in tokens]


def without_needles(example, tokenizer):
    """Return the haystack, and the position of each needle in it."""
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


def test_documents_of_shards_are_the_ones_that_were_prepared(data_dir, tokenizer):
    assert len(list(data_dir.glob("*_train_*.bin"))) > 1  # documents run over the borders of shards
    found = [documents(Haystack.from_shards(data_dir, split, tokenizer), tokenizer) for split in ("train", "val")]
    assert sorted(sum(found, [])) == sorted(make_documents(400))


def test_documents_of_c4_are_the_lines_of_its_file(tmp_path, text_file, tokenizer):
    path = tmp_path / C4_FILES["val"]
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(text_file.read_bytes()))
    assert documents(Haystack.from_c4(tmp_path, "val", tokenizer), tokenizer) == make_documents(400)


def test_sample_is_distinct_documents_with_the_last_one_cut(haystack, tokenizer):
    known = [haystack.document(i).tolist() for i in range(haystack.num_documents)]
    tokens = haystack.sample(4321, np.random.default_rng(1))
    assert len(tokens) == 4321
    *whole, last = [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == tokenizer.eot)[1:])]
    indices = [known.index(part) for part in whole]
    assert len(set(indices)) == len(indices) > 20 and indices != sorted(indices)
    assert any(part[: len(last)] == last for i, part in enumerate(known) if i not in indices)

    total = sum(map(len, known))
    assert len(haystack.sample(total, np.random.default_rng(0))) == total
    with pytest.raises(ValueError, match=f"{total} of {total + 1} tokens"):
        haystack.sample(total + 1, np.random.default_rng(0))


def test_documents_are_drawn_evenly():
    haystack = Haystack("train", 37, lambda i: np.array([0, i]))
    rng = np.random.default_rng(2)
    assert_uniform(np.bincount([haystack.sample(2, rng)[1] for _ in range(2000)], minlength=37))


def test_the_haystack_is_the_first_tokens_of_a_folder(data_dir, tokenizer, haystack, monkeypatch, tmp_path):
    monkeypatch.setattr(needle, "HAYSTACK_TOKENS", 1000)
    first = Haystack.from_shards(data_dir, "train", tokenizer)
    parts = [[*source.document(i)] for source in (first, haystack) for i in range(first.num_documents)]
    assert parts[: first.num_documents - 1] == parts[first.num_documents : -1]
    assert sum(map(len, parts[: first.num_documents])) == 1000
    write_shards(tmp_path, np.arange(1, 200), tokenizer="tokenizer.json", vocab_size=tokenizer.vocab_size)
    with pytest.raises(ValueError, match="end-of-text"):
        Haystack.from_shards(tmp_path, "train", tokenizer)


def test_an_example_depends_on_seed_split_length_and_index_alone(data_dir, tokenizer, haystack):
    task = NeedleTask(tokenizer, haystack, 501, seed=3)
    examples = [task.example(i) for i in range(6)]
    again = NeedleTask(load_tokenizer(data_dir), Haystack.from_shards(data_dir, "train", tokenizer), 501, seed=3)
    for i in (5, 0, 3):
        other = again.example(i)
        np.testing.assert_array_equal(other.tokens, examples[i].tokens)
        assert other.positions == examples[i].positions and other.response == examples[i].response
    np.testing.assert_array_equal(task.batch([4, 1])[0], [examples[4].tokens[:-1], examples[1].tokens[:-1]])
    val = Haystack.from_shards(data_dir, "val", tokenizer)
    responses = {
        NeedleTask(tokenizer, haystack, 500).example(0).response,
        NeedleTask(tokenizer, haystack, 500).example(1).response,
        NeedleTask(tokenizer, haystack, 500, seed=1).example(0).response,
        NeedleTask(tokenizer, haystack, 501).example(0).response,
        NeedleTask(tokenizer, val, 500).example(0).response,
    }
    assert len(responses) == 5


@pytest.mark.parametrize("length", [211, 1000, 4096])
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


def test_places_numbers_and_the_69_cities_are_uniform(tokenizer, haystack):
    assert len(CITIES) == len(set(CITIES)) == 69
    task = NeedleTask(tokenizer, haystack, 1500)
    places, digits, cities = [], [], []
    for index in range(300):
        example = task.example(index)
        hay, gaps = without_needles(example, tokenizer)
        places += [gap / (len(hay) + 1) for gap in gaps]
        digits += [number // 10**6 - 1 for number in example.numbers]
        cities += [CITIES.index(city) for city in example.cities]
    assert_uniform(np.histogram(places, bins=12, range=(0, 1))[0])
    assert_uniform(np.bincount(digits, minlength=9))
    assert_uniform(np.bincount(cities, minlength=69))


EXAMPLE = Example(np.zeros(1), 0, ("Oslo", "Cape Town", "Lima"), (1234567, 7654321, 1000000), (0, 1, 2))


@pytest.mark.parametrize("text, right", [
    ("Oslo=1234567;Cape Town=7654321;Lima=1000000", [True, True, True]),
    ("Oslo=1234567;Cape Town=7654321;Lima=1000000<|endoftext|>;Rome=1", [True, True, True]),
    ("Oslo=1234567;Cape Town=7654321<|endoftext|>;Lima=1000000", [True, True, False]),
    ("Cape Town=7654321;Oslo=1234567;Lima=1000000", [False, False, True]),
    ("Oslo=1234568;Cape=7654321;Lima=1000000", [False, False, True]),
    ("Oslo=12345678;Cape Town=765432;lima=1000000", [False, False, False]),
    ("Oslo=1234567Cape Town=7654321;Lima=1000000", [False, False, False]),
])
def test_score(text, right):
    assert score(text, END_OF_TEXT, EXAMPLE) == score(text.replace(END_OF_TEXT, "<s>"), "<s>", EXAMPLE) == right

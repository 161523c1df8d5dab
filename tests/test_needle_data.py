"""data.needle: examples from real shards and text files, with a tokenizer trained here."""

import gzip

import numpy as np
import pytest
from commands import refuses
from test_text import make_documents, write_lines
from test_train import write_shards

from data import needle
from data.needle import C4_FILES, CITIES, Example, Haystack, NeedleTask, needle_text, score
from data.text import prepare
from data.tokenizer import END_OF_TEXT, load_tokenizer


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("needle")
    write_lines(folder / "tales.jsonl", make_documents(400))
    prepare([folder / "tales.jsonl"], folder, "bpe:400", val_fraction=0.3, shard_tokens=3000)
    return folder


@pytest.fixture(scope="module")
def tokenizer(data_dir):
    return load_tokenizer(data_dir)


@pytest.fixture(scope="module")
def train(data_dir, tokenizer):
    return Haystack.from_shards(data_dir, "train", tokenizer)


@pytest.fixture(scope="module")
def val(data_dir, tokenizer):
    return Haystack.from_shards(data_dir, "val", tokenizer)


def documents(haystack):
    return [haystack.document(i).tolist() for i in range(haystack.num_documents)]


def texts(haystack, tokenizer):
    """Return all documents as texts; the end-of-text token must precede each, and be nowhere else."""
    parts = documents(haystack)
    assert all(ids[0] == tokenizer.eot and ids.count(tokenizer.eot) == 1 for ids in parts)
    return [tokenizer.decode(ids[1:]) for ids in parts]


def take_needles_out(example, tokenizer):
    """Return the haystack, and the position of each needle in it."""
    tokens = example.tokens[: example.response_start - len(tokenizer.encode("\n"))].tolist()
    gaps = []
    for city, number, position in zip(example.cities, example.numbers, example.positions):
        needle = tokenizer.encode(needle_text(city, number))
        gap = position - len(example.tokens[: example.response_start - 1]) + len(tokens)
        assert tokens[gap : gap + len(needle)] == needle
        del tokens[gap : gap + len(needle)]
        gaps.append(gap)
    return tokens, gaps


def split_documents(tokens, tokenizer):
    starts = np.flatnonzero(np.equal(tokens, tokenizer.eot))
    assert starts[0] == 0
    return [part.tolist() for part in np.split(tokens, starts[1:])]


def assert_uniform(counts):
    """Chi-squared, at a level that one in a thousand uniform samples fails (Wilson and Hilferty's approximation)."""
    freedom = len(counts) - 1
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3


def test_documents_of_shards_are_the_ones_that_were_prepared(data_dir, train, val, tokenizer):
    assert len(list(data_dir.glob("*_train_*.bin"))) > 1  # documents run over the borders of shards
    assert sorted(texts(train, tokenizer) + texts(val, tokenizer)) == sorted(make_documents(400))


def test_documents_of_c4_are_the_lines_of_its_file(tmp_path, data_dir, tokenizer):
    path = tmp_path / C4_FILES["val"]
    path.parent.mkdir()
    path.write_bytes(gzip.compress((data_dir / "tales.jsonl").read_bytes()))
    assert texts(Haystack.from_c4(tmp_path, "val", tokenizer), tokenizer) == make_documents(400)


def test_sample_is_distinct_documents_with_the_last_one_cut(train, tokenizer):
    known = documents(train)
    tokens = train.sample(4321, np.random.default_rng(1))
    *whole, last = split_documents(tokens, tokenizer)
    indices = list(map(known.index, whole))
    assert len(tokens) == 4321 and len(set(indices)) == len(indices) > 20 and indices != sorted(indices)
    assert any(part[: len(last)] == last for i, part in enumerate(known) if i not in indices)

    total = sum(map(len, known))
    assert len(train.sample(total, np.random.default_rng(0))) == total
    with refuses(f"{total} of {total + 1} tokens"):
        train.sample(total + 1, np.random.default_rng(0))


def test_documents_are_drawn_evenly():
    haystack = Haystack("train", 37, lambda i: np.array([0, i]))
    rng = np.random.default_rng(2)
    assert_uniform(np.bincount([haystack.sample(2, rng)[1] for _ in range(2000)], minlength=37))


def test_the_haystack_is_the_first_tokens_of_a_folder(data_dir, tokenizer, train, monkeypatch, tmp_path):
    monkeypatch.setattr(needle, "HAYSTACK_TOKENS", 1000)
    found = sum(documents(Haystack.from_shards(data_dir, "train", tokenizer)), [])
    assert found == sum(documents(train), [])[:1000]
    write_shards(tmp_path, np.arange(1, 200), tokenizer="tokenizer.json", vocab_size=tokenizer.vocab_size)
    with refuses("end-of-text"):
        Haystack.from_shards(tmp_path, "train", tokenizer)


def test_an_example_depends_on_seed_split_length_and_index_alone(data_dir, tokenizer, train, val):
    again = Haystack.from_shards(data_dir, "train", load_tokenizer(data_dir))
    tasks = NeedleTask(tokenizer, train, 501, seed=3), NeedleTask(tokenizer, again, 501, seed=3)
    for i in (5, 0, 3):
        first, second = (task.example(i) for task in tasks)
        np.testing.assert_array_equal(first.tokens, second.tokens)
        assert first.positions == second.positions and first.response == second.response
    tasks = [(train, 500, 0), (train, 500, 1), (train, 501, 0), (val, 500, 0)]
    examples = [NeedleTask(tokenizer, text, length, seed=seed).example(0) for text, length, seed in tasks]
    examples.append(NeedleTask(tokenizer, train, 500).example(1))
    assert len({example.response for example in examples}) == 5


@pytest.mark.parametrize("length", [211, 1000, 4096])
def test_an_example_is_haystack_needles_and_response_of_exact_length(tokenizer, train, length):
    known = documents(train)
    for index in range(5):
        example = NeedleTask(tokenizer, train, length).example(index)
        assert len(example.tokens) == length + 1 and len(set(example.cities)) == len(example.numbers) == 3
        prompt, response = np.split(example.tokens, [example.response_start])
        assert response.tolist() == [*tokenizer.encode(example.response), tokenizer.eot]
        assert tokenizer.decode(prompt[-1:]) == "\n"
        hay, gaps = take_needles_out(example, tokenizer)
        assert 0 <= gaps[0] and gaps == sorted(gaps) and gaps[-1] <= len(hay)
        *whole, last = split_documents(hay, tokenizer)
        assert all(part in known for part in whole)
        assert any(part[: len(last)] == last for part in known)


def test_mask_is_on_the_response_and_its_end_only(tokenizer, train):
    task = NeedleTask(tokenizer, train, 301)
    inputs, targets, mask = task.batch(range(12))
    assert (inputs.dtype, targets.dtype, mask.dtype) == (np.int64, np.int64, bool)
    for index, row in enumerate(mask):
        example = task.example(index)
        np.testing.assert_array_equal([*inputs[index], targets[index, -1]], example.tokens)
        np.testing.assert_array_equal(targets[index], example.tokens[1:])
        assert targets[index][row].tolist() == [*tokenizer.encode(example.response), tokenizer.eot]
        assert (np.diff(row.astype(int)) >= 0).all()  # off, then on to the end
    assert len(set(mask.sum(axis=1))) > 1  # responses of different lengths


def test_places_numbers_and_the_69_cities_are_uniform(tokenizer, train):
    task = NeedleTask(tokenizer, train, 1500)
    places, digits, cities = [], [], []
    for example in map(task.example, range(300)):
        hay, gaps = take_needles_out(example, tokenizer)
        places += [gap / (len(hay) + 1) for gap in gaps]
        digits += [number // 10**6 - 1 for number in example.numbers]
        cities += map(CITIES.index, example.cities)
    assert_uniform(np.histogram(places, bins=12, range=(0, 1))[0])
    assert_uniform(np.bincount(digits, minlength=9))
    assert_uniform(np.bincount(cities, minlength=69))


@pytest.mark.parametrize("text, right", [
    ("Oslo=1234567;Cape Town=7654321;Lima=1000000", [True, True, True]),
    ("Oslo=1234567;Cape Town=7654321;Lima=1000000<eot>;Rome=1", [True, True, True]),
    ("Oslo=1234567;Cape Town=7654321<eot>;Lima=1000000", [True, True, False]),
    ("Cape Town=7654321;Oslo=1234567;Lima=1000000", [False, False, True]),
    ("Oslo=1234568;Cape=7654321;Lima=1000000", [False, False, True]),
    ("Oslo=12345678;Cape Town=765432;lima=1000000", [False, False, False]),
    ("Oslo=1234567Cape Town=7654321;Lima=1000000", [False, False, False]),
])
def test_score(text, right):
    numbers = 1234567, 7654321, 1000000
    example = Example(np.zeros(1), 0, cities=("Oslo", "Cape Town", "Lima"), numbers=numbers, positions=(0, 1, 2))
    for eot in (END_OF_TEXT, "<s>"):
        assert score(text.replace("<eot>", eot), eot, example) == right

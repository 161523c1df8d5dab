"""data.needle: examples from real shards and text files, with a tokenizer trained here."""

import gzip
from types import SimpleNamespace

import numpy as np
from commands import parametrize, refuses, shared, table, write_files
from numpy.testing import assert_array_equal
from scipy.stats import chisquare
from test_text import make_documents, write_lines
from test_train import write_shards

from data import needle
from data.needle import C4_FILES, CITIES, Example, Haystack, NeedleTask, needle_text, score
from data.text import prepare
from data.tokenizer import END_OF_TEXT, load_tokenizer


@shared
def data(shared_path):
    """Return shards of 400 documents, with their folder, tokenizer, and haystacks of both splits."""
    write_lines(shared_path / "tales.jsonl", make_documents(400))
    prepare([shared_path / "tales.jsonl"], shared_path, "bpe:400", val_fraction=0.3, shard_tokens=3000)
    tokenizer = load_tokenizer(shared_path)
    train, val = (Haystack.from_shards(shared_path, split, tokenizer) for split in ("train", "val"))
    return SimpleNamespace(folder=shared_path, tokenizer=tokenizer, train=train, val=val)


def documents(haystack):
    return [haystack.document(i).tolist() for i in range(haystack.num_documents)]


def texts(haystack, tokenizer):
    """Return all documents as texts; the end-of-text token must precede each, and be nowhere else."""
    parts = documents(haystack)
    assert all(ids[0] == tokenizer.eot and ids.count(tokenizer.eot) == 1 for ids in parts)
    return [tokenizer.decode(ids[1:]) for ids in parts]


def split_haystack(tokens, known, eot):
    """Split tokens of a haystack into the numbers of its whole documents. The last part may be cut."""
    starts = np.flatnonzero(np.equal(tokens, eot))
    assert starts[0] == 0
    *whole, last = (part.tolist() for part in np.split(tokens, starts[1:]))
    assert any(part[: len(last)] == last for part in known)
    return list(map(known.index, whole))


def take_needles_out(example, tokenizer):
    """Return the haystack, and the position of each needle in it."""
    tokens = example.tokens[: example.response_start - len(tokenizer.encode("\n"))].tolist()
    gaps, length = [], len(tokens)
    for city, number, position in zip(example.cities, example.numbers, example.positions):
        needle = tokenizer.encode(needle_text(city, number))
        gaps.append(position - length + len(tokens))  # the needles before are gone
        place = slice(gaps[-1], gaps[-1] + len(needle))
        assert tokens[place] == needle
        del tokens[place]
    return tokens, gaps


def assert_uniform(counts):
    """Chi-squared, at a level that one in a thousand uniform samples fails."""
    assert chisquare(counts).pvalue > 0.001


def test_documents_of_shards_are_the_ones_that_were_prepared(data):
    assert len(list(data.folder.glob("*_train_*.bin"))) > 1  # documents run over the borders of shards
    assert sorted(texts(data.train, data.tokenizer) + texts(data.val, data.tokenizer)) == sorted(make_documents(400))


def test_documents_of_c4_are_the_lines_of_its_file(tmp_path, data):
    write_files(tmp_path, {C4_FILES["val"]: gzip.compress((data.folder / "tales.jsonl").read_bytes())})
    assert texts(Haystack.from_c4(tmp_path, "val", data.tokenizer), data.tokenizer) == make_documents(400)


def test_a_sample_has_at_most_all_tokens(data):
    rng, total = np.random.default_rng(1), sum(map(len, documents(data.train)))
    assert len(data.train.sample(total, rng)) == total
    with refuses(f"{total} of {total + 1} tokens"):
        data.train.sample(total + 1, rng)


def test_documents_are_drawn_evenly():
    haystack = Haystack("train", 37, lambda i: np.array([0, i]))
    rng = np.random.default_rng(2)
    assert_uniform(np.bincount([haystack.sample(2, rng)[1] for _ in range(2000)], minlength=37))


def test_the_haystack_is_the_first_tokens_of_a_folder(data, monkeypatch, tmp_path):
    monkeypatch.setattr(needle, "HAYSTACK_TOKENS", 1000)
    found = Haystack.from_shards(data.folder, "train", data.tokenizer)
    assert sum(documents(found), []) == sum(documents(data.train), [])[:1000]
    write_shards(tmp_path, np.arange(1, 200), tokenizer="tokenizer.json", vocab_size=400)
    with refuses("end-of-text"):
        Haystack.from_shards(tmp_path, "train", data.tokenizer)


def test_an_example_depends_on_seed_split_length_and_index_alone(data):
    def make(haystack=data.train, length=500, seed=0, index=0):
        task = NeedleTask(data.tokenizer, haystack, length, seed=seed)
        task.example(9)  # the examples before do not matter
        return task.example(index).tokens.tolist()

    again = Haystack.from_shards(data.folder, "train", data.tokenizer)
    assert make(again, index=5) == make(index=5)
    examples = make(), make(data.val), make(length=501), make(seed=1), make(index=1)
    assert len({str(example[-30:]) for example in examples}) == 5


@parametrize("length", [211, 1000, 4096])
def test_an_example_is_haystack_needles_and_response_of_exact_length(data, length):
    known = documents(data.train)
    for index in range(5):
        example = NeedleTask(data.tokenizer, data.train, length).example(index)
        assert len(example.tokens) == length + 1
        prompt, response = np.split(example.tokens, [example.response_start])
        assert response.tolist() == [*data.tokenizer.encode(example.response), data.tokenizer.eot]
        assert data.tokenizer.decode(prompt[-1:]) == "\n"
        hay, gaps = take_needles_out(example, data.tokenizer)
        assert 0 <= gaps[0] and gaps == sorted(gaps) and gaps[-1] <= len(hay)
        indices = split_haystack(hay, known, data.tokenizer.eot)
        assert len(set(indices)) == len(indices) and (indices != sorted(indices) or length < 1000)


def test_mask_is_on_the_response_and_its_end_only(data):
    task = NeedleTask(data.tokenizer, data.train, 301)
    batch = task.batch(range(12))
    assert [x.dtype for x in batch] == [np.int64, np.int64, bool]
    for example, inputs, targets, mask in zip(map(task.example, range(12)), *batch, strict=True):
        assert_array_equal(inputs, example.tokens[:-1])
        assert_array_equal(targets, example.tokens[1:])
        assert_array_equal(targets[mask], example.tokens[example.response_start :])
    assert len(set(batch[2].sum(axis=1))) > 1  # responses of different lengths


def test_places_numbers_and_the_69_cities_are_uniform(data):
    task = NeedleTask(data.tokenizer, data.train, 1500)
    places, digits, cities = [], [], []
    for example in map(task.example, range(300)):
        hay, gaps = take_needles_out(example, data.tokenizer)
        places += [12 * gap // (len(hay) + 1) for gap in gaps]
        digits += [number // 10**6 - 1 for number in example.numbers]
        cities += map(CITIES.index, example.cities)
        assert len(set(example.cities)) == len(example.numbers) == 3
    for drawn, count in ((places, 12), (digits, 9), (cities, 69)):
        assert_uniform(np.bincount(drawn, minlength=count))


@table("text, right", """
    Oslo=1234567;Cape Town=7654321;Lima=1000000             | 111
    Oslo=1234567;Cape Town=7654321;Lima=1000000<eot>;Rome=1 | 111
    Oslo=1234567;Cape Town=7654321<eot>;Lima=1000000        | 110
    Cape Town=7654321;Oslo=1234567;Lima=1000000             | 001
    Oslo=1234568;Cape=7654321;Lima=1000000                  | 001
    Oslo=12345678;Cape Town=765432;lima=1000000             | 000
    Oslo=1234567Cape Town=7654321;Lima=1000000              | 000
""")
def test_score(text, right):
    numbers = 1234567, 7654321, 1000000
    example = Example(np.zeros(1), 0, cities=("Oslo", "Cape Town", "Lima"), numbers=numbers, positions=(0, 1, 2))
    for eot in (END_OF_TEXT, "<s>"):
        assert score(text.replace("<eot>", eot), eot, example) == [digit == "1" for digit in right]

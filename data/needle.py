"""The needle-in-a-haystack task (paper, section 5 and appendix): remember three numbers in a long text.

    <|endoftext|>text ... text
    The special magic Lisbon number is 4071832.
    text ... <|endoftext|>text ... (two more needles)
    Lisbon=4071832;Oslo=9120045;Cairo=1548872<|endoftext|>

The model predicts the last line, the response. It has the needles in order of appearance. The haystack is first cut to
its length. Then each needle goes to a uniformly random place between two haystack tokens, so needles do not overlap.

The paper leaves more open, and these choices are ours. A needle has a newline on both sides. The response is tokenised
by itself after one newline, ends with <|endoftext|>, and counts to the length. A question does not come before it.
Cities are distinct within an example. Numbers are uniform over all numbers of seven digits. The optimizers begin anew.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.documents import DocumentReader
from data.download import fetch
from data.shards import open_split
from data.tokenizer import Tokenizer
from errors import UserError, require

CITIES = (
    "Accra, Amsterdam, Antwerp, Athens, Bangkok, Barcelona, Beijing, Berlin, Bogota, Boston, "
    "Brussels, Bucharest, Budapest, Cairo, Cape Town, Chicago, Copenhagen, Dakar, Delhi, Dubai, "
    "Dublin, Edinburgh, Geneva, Hanoi, Havana, Helsinki, Hong Kong, Istanbul, Jakarta, Johannesburg, "
    "Karachi, Kyoto, Lagos, Lima, Lisbon, London, Los Angeles, Madrid, Manila, Melbourne, "
    "Mexico City, Milan, Montreal, Moscow, Mumbai, Nairobi, Naples, New York, Osaka, Oslo, "
    "Paris, Prague, Riga, Rome, San Francisco, Santiago, Seattle, Seoul, Shanghai, Singapore, "
    "Stockholm, Sydney, Taipei, Tokyo, Toronto, Vancouver, Vienna, Warsaw, Zurich"
).split(", ")
NEEDLES = 3  # in an example
SEPARATOR = "\n"
HAYSTACK_TOKENS = 2**28  # limit of the tokens in memory; the paper's 300 steps need 79 M
C4 = Path("data/c4")  # download folder
C4_FILES = {"train": "en/c4-train.00000-of-01024.json.gz", "val": "en/c4-validation.00000-of-00008.json.gz"}


def needle_text(city: str, number: int) -> str:
    return f"\nThe special magic {city} number is {number}.\n"


def response_text(needles: Iterable[tuple[str, int]]) -> str:
    return ";".join(f"{city}={number}" for city, number in needles)


# ---- haystacks ----


@dataclass(frozen=True)
class Haystack:
    """Documents around the needles. document(i) returns an end-of-text token and the tokens of document i."""

    split: str  # "train" or "val"
    num_documents: int
    document: Callable[[int], np.ndarray]

    @classmethod
    def from_shards(cls, data_dir: Path, split: str, tokenizer: Tokenizer) -> "Haystack":
        """Return the documents in a folder's first 2^28 tokens. Raise ValueError for bad shards or no end-of-text."""
        stream = open_split(data_dir, split, tokenizer.vocab_size)
        tokens = stream.read(0, min(len(stream), HAYSTACK_TOKENS))
        starts = np.flatnonzero(tokens == tokenizer.eot)  # (documents,)
        require(len(starts), f"{data_dir}: no end-of-text token in the {split} shards. Prepare the data again.")
        documents = np.split(tokens, starts)[1:]
        return cls(split, len(documents), lambda index: documents[index])

    @classmethod
    def from_c4(cls, folder: Path, split: str, tokenizer: Tokenizer) -> "Haystack":
        """Return the documents in the first file of a split of C4 (en), the paper's haystack. OSError: see fetch_c4."""
        texts = [*DocumentReader([fetch_c4(folder, split)])]

        def document(index: int) -> np.ndarray:
            return np.array([tokenizer.eot, *tokenizer.encode(texts[index])])

        return cls(split, len(texts), document)

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return `count` tokens of distinct random documents, the last one cut. Raise ValueError if there are fewer."""
        parts = [np.empty(0, np.int64)]
        missing = count
        drawn = set()  # documents
        while missing > 0:
            if len(drawn) == self.num_documents:
                raise UserError(
                    f"the {self.split} haystack has {count - missing} of {count} tokens. "
                    "Use more text or a shorter length."
                )
            index = int(rng.integers(self.num_documents))
            if index in drawn:
                continue
            drawn.add(index)
            part = self.document(index)[:missing]
            parts.append(part)
            missing -= len(part)
        return np.concatenate(parts)  # (count,)


def fetch_c4(folder: Path, split: str) -> Path:
    """Return the first file of a split of C4 (en), after a download if needed (320 MB, 40 MB). OSError: see fetch."""
    path = folder / C4_FILES[split]
    return path if path.exists() else fetch("allenai/c4", C4_FILES[split], folder)


# ---- examples ----


@dataclass(frozen=True)
class Example:
    """One prompt and its response. Cities, numbers and positions are in order of appearance."""

    tokens: np.ndarray  # (length + 1,) int64; the last token, end-of-text, is only a target
    response_start: int  # tokens[:response_start] is the prompt with its final separator
    cities: tuple[str, ...]
    numbers: tuple[int, ...]
    positions: tuple[int, ...]  # token index at which each needle starts

    @property
    def response(self) -> str:
        return response_text(zip(self.cities, self.numbers))


@dataclass(frozen=True)
class NeedleTask:
    """An endless, indexed set of examples. An example depends on seed, split, length, index, tokenizer and haystack.

    length: tokens of the model's input. The end-of-text token after them is only a target, so that inputs have the
    shape of a training sequence.
    """

    tokenizer: Tokenizer
    haystack: Haystack
    length: int
    seed: int = 0

    def example(self, index: int) -> Example:
        """Return example `index`. Raise ValueError if the haystack or the length has too few tokens."""
        # 1. Draw the needles.
        is_val = int(self.haystack.split == "val")
        rng = np.random.default_rng([self.seed, is_val, self.length, index])
        cities = tuple(CITIES[i] for i in rng.choice(len(CITIES), NEEDLES, replace=False))
        numbers = tuple(rng.integers(10**6, 10**7, NEEDLES).tolist())
        texts = [*map(needle_text, cities, numbers), SEPARATOR, response_text(zip(cities, numbers))]
        *needles, separator, response = self.tokenizer.encode_batch(texts)

        # 2. Draw the haystack, and cut it where the needles go.
        haystack_length = self.length - sum(map(len, [*needles, separator, response]))
        require(haystack_length > 0, f"length {self.length} has no space for a haystack. Use {2 * self.length}.")
        haystack = self.haystack.sample(haystack_length, rng)
        gaps = np.sort(rng.integers(0, haystack_length, NEEDLES, endpoint=True))  # gap g is before haystack token g
        first, *rest = np.split(haystack, gaps)

        # 3. Join the parts.
        parts = [first]
        positions = []
        for needle, text in zip(needles, rest):
            positions.append(sum(map(len, parts)))
            parts += [needle, text]
        parts += [separator, response, [self.tokenizer.eot]]
        tokens = np.concatenate(parts).astype(np.int64)  # (length + 1,)
        return Example(tokens, self.length - len(response), cities, numbers, tuple(positions))

    def batch(self, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs and targets, (B, length) int64, and the mask of targets in the response, (B, length) bool."""
        examples = list(map(self.example, indices))
        tokens = np.stack([example.tokens for example in examples])  # (B, length + 1)
        starts = np.array([example.response_start for example in examples])  # (B,)
        mask = np.arange(1, self.length + 1) >= starts[:, None]  # (B, length); target t is token t + 1
        return tokens[:, :-1], tokens[:, 1:], mask


# ---- scoring ----


def score(text: str, eot_text: str, example: Example) -> list[bool]:
    """Return for each needle whether a decoded response, up to `eot_text`, has its city and number in order."""
    answers = text.split(eot_text)[0].split(";")
    answers += [""] * (len(example.cities) - len(answers))
    return [answer.strip() == wanted for answer, wanted in zip(answers, example.response.split(";"))]

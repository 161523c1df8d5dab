"""Loads the tokenizer of GPT-2, of a file or of a Hugging Face model, and trains new tokenizers."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tiktoken
import tokenizers

from data.download import model_file
from data.shards import TOKENIZER_CONFIG, TOKENIZER_FILE, read_manifest
from errors import UserError, require
from files import naming

END_OF_TEXT = "<|endoftext|>"
PIECE_CHARACTERS = 1 << 15
PIECE = re.compile(rf"(?s).{{1,{PIECE_CHARACTERS}}}(?:\Z|(?<=\S)(?=[ \n]))|.{{1,{PIECE_CHARACTERS}}}")


class Tokenizer:
    """Encodes and decodes text. Names of special tokens in a text are encoded as plain text.

    file: a file of the tokenizers library. eot: id of the token before each document. eot_text: its text, END_OF_TEXT
    or the bos_token in the tokenizer_config.json of the same folder.
    """

    name = TOKENIZER_FILE  # in the manifest

    def __init__(self, file: Path):
        """Raise ValueError if the file is not a tokenizer, or if it lacks the token before documents."""
        # 1. Load the file, without its model's limits.
        require(file.is_file(), f"{file}: no such tokenizer file. Run this on the machine that has the data.")
        try:
            self._library = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{file}: not a file of the tokenizers library ({error}). Use another file.") from error
        self._library.no_truncation()  # a file may set its model's maximum length, which would cut documents
        self._library.no_padding()
        self._library.encode_special_tokens = True

        # 2. Find the token before documents.
        config = file.with_name(TOKENIZER_CONFIG)
        token = json.loads(config.read_text()).get("bos_token") if config.exists() else None
        self.eot_text = token["content"] if isinstance(token, dict) else token or END_OF_TEXT
        self.eot = self._library.token_to_id(self.eot_text)
        remedy = f"Name its token before documents in a {TOKENIZER_CONFIG} beside it, as bos_token."
        require(self.eot is not None, f"{file}: has no token {self.eot_text}. {remedy}")
        self.file = file
        self.vocab_size = max(self._library.get_vocab().values()) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts, in parallel."""
        return [encoding.ids for encoding in self._library.encode_batch_fast(texts, add_special_tokens=False)]

    def encode(self, text: str) -> list[int]:
        return [token for piece in pieces(text) for token in self.encode_batch([piece])[0]]

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(ids, skip_special_tokens=False)


class GPT2Tokenizer(Tokenizer):
    """Encodes and decodes text as GPT-2, by tiktoken."""

    name = "gpt2"

    def __init__(self):
        """Raise OSError if the vocabulary can be neither downloaded nor found in TIKTOKEN_CACHE_DIR."""
        try:
            self._library = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:
            problem = f"cannot download the gpt2 tokenizer ({type(error).__name__})"
            raise OSError(f"{problem}. Check the network, or set TIKTOKEN_CACHE_DIR to a cache that has it.") from error
        self.eot = self._library.eot_token
        self.eot_text = END_OF_TEXT
        self.vocab_size = self._library.n_vocab

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._library.encode_ordinary_batch(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids))


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load "gpt2", a tokenizers FILE.json, or the tokenizer of a data folder or a Hugging Face model (folder or name).

    Raise OSError if a download fails, and ValueError if there is no such tokenizer.
    """
    path = Path(spec)
    manifest = read_manifest(path) or {} if path.is_dir() else {}
    if spec == "gpt2" or manifest.get("tokenizer") == "gpt2":
        return GPT2Tokenizer()
    if path.is_dir():
        return Tokenizer(path / TOKENIZER_FILE)
    if path.suffix == ".json":
        return Tokenizer(path)
    if isinstance(spec, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and not path.exists():
        model_file(spec, TOKENIZER_CONFIG)  # into the same folder of the cache
        return Tokenizer(model_file(spec, TOKENIZER_FILE))
    raise UserError(
        f"{str(spec)!r}: no such tokenizer here. Use gpt2, a FILE.json, a data folder, or a model's folder or hub name."
    )


def pieces(text: str) -> Iterator[str]:
    """Yield pieces of at most PIECE_CHARACTERS, because the library needs 160 bytes of memory per character.

    A piece ends before the white space after a word. GPT-2's tokenizer and our BPE also split there, so the pieces
    have the same tokens as the whole text. Other tokenizers may give other tokens around the cuts.
    """
    return (match[0] for match in PIECE.finditer(text))


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path):
    """Train and save a byte-level BPE with end-of-text as token 0. Short texts give fewer than `vocab_size` tokens."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes, so that every text can be encoded
    smallest = len(alphabet) + 1
    require(smallest <= vocab_size <= 2**16, f"bpe:{vocab_size}: out of range. Use a size from {smallest} to {2**16}.")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    library.train_from_iterator(itertools.chain.from_iterable(map(pieces, texts)), trainer)
    with naming("write", path):
        library.save(str(path))

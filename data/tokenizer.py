"""Load the tokenizer of GPT-2, of a file or of a Hugging Face model, and train new ones."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.download import model_file
from data.shards import TOKENIZER_FILE, read_manifest
from errors import UserError, require

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_CONFIG = "tokenizer_config.json"  # beside a model's tokenizer.json
PIECE_CHARACTERS = 1 << 18  # the tokenizers library takes 160 bytes of memory for each character of a text


@dataclass(frozen=True)
class Tokenizer:
    """Holds what the project needs of a tokenizer, whichever library runs it."""

    name: str  # in the manifest: "gpt2", or TOKENIZER_FILE
    vocab_size: int
    eot: int  # id of the end-of-text token
    encode_batch: Callable[[list[str]], list[list[int]]]  # special tokens in the text are plain text
    decode: Callable[[Sequence[int]], str]
    file: Path | None = None

    def encode(self, text: str) -> list[int]:
        return [token for piece in pieces(text) for token in self.encode_batch([piece])[0]]


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load "gpt2", a tokenizers FILE.json, or the tokenizer of a data folder or a Hugging Face model (folder or name).

    OSError if files cannot be fetched; ValueError if there is no such tokenizer.
    """
    path = Path(spec)
    if spec == "gpt2":
        return _load_gpt2()
    if path.is_dir():
        manifest = read_manifest(path)
        is_gpt2 = manifest and manifest["tokenizer"] == "gpt2"
        return _load_gpt2() if is_gpt2 else _load_file(path / TOKENIZER_FILE)
    if isinstance(spec, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and not path.exists():
        model_file(spec, TOKENIZER_CONFIG)  # into the same folder of the cache
        return _load_file(model_file(spec, TOKENIZER_FILE))
    names = "gpt2, a FILE.json, a data folder, or a model's folder or name on the hub"
    require(path.suffix == ".json", f"{str(spec)!r}: no such tokenizer here. Use {names}.")
    return _load_file(path)


def _load_gpt2() -> Tokenizer:
    import tiktoken

    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        advice = "Check the network, or set TIKTOKEN_CACHE_DIR to a cache that has it."
        raise OSError(f"cannot download the gpt2 tokenizer ({type(error).__name__}). {advice}") from error
    return Tokenizer("gpt2", gpt2.n_vocab, gpt2.eot_token, gpt2.encode_ordinary_batch, gpt2.decode)


def _load_file(path: Path) -> Tokenizer:
    import tokenizers

    require(path.is_file(), f"{path}: no such tokenizer file. Run this on the machine that has the data.")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{path}: not a file of the tokenizers library ({error}). Use another.") from error
    separator = _first_token(path)
    eot = tokenizer.token_to_id(separator)
    require(eot is not None, f"{path}: has no token {separator}. Use another tokenizer.")
    tokenizer.no_truncation()  # a file may carry its model's maximum length, which would cut documents
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True

    def encode_batch(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    return Tokenizer(TOKENIZER_FILE, max(tokenizer.get_vocab().values()) + 1, eot, encode_batch, decode, file=path)


def _first_token(path: Path) -> str:
    """Return the token before each document: END_OF_TEXT, or the model's bos_token if its configuration is there."""
    config = path.with_name(TOKENIZER_CONFIG)
    if not config.exists():
        return END_OF_TEXT
    token = json.loads(config.read_text()).get("bos_token")
    token = token["content"] if isinstance(token, dict) else token
    require(isinstance(token, str), f"{config}: names no bos_token. Use another tokenizer.")
    return token


def pieces(text: str) -> Iterator[str]:
    """Yield pieces of a text, of at most PIECE_CHARACTERS, to be encoded one by one.

    A piece ends before the white space after a word. The pattern of words of GPT-2's and of our own tokenizers ends
    there too, so the tokens are those of the whole text. Tokens of other tokenizers may differ around the cuts.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        last = start + PIECE_CHARACTERS
        ends = (i for i in range(last, start, -1) if text[i] in " \n" and not text[i - 1].isspace())
        end = next(ends, last)
        yield text[start:end]
        start = end
    yield text[start:]


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE with end of text as token 0, of `vocab_size` if the text allows that, and save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes, so that nothing is unknown
    smallest = len(alphabet) + 1
    possible = smallest <= vocab_size <= 2**16
    require(possible, f"bpe:{vocab_size}: no such vocabulary. Use a size from {smallest} to {2**16}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    tokenizer.save(str(path))

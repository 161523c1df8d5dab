"""The files of models of Hugging Face's that text is prepared with."""

import json
from pathlib import Path

from data.fineweb import ask_hub
from errors import require

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_CONFIG = "tokenizer_config.json"  # beside a model's tokenizer.json


def model_file(model: str | Path, name: str) -> Path:
    """Return where a file of a model is, which is a folder or a name on the hub. OSError where it cannot be had."""
    if Path(model).is_dir():
        require((Path(model) / name).is_file(), f"{model} has no {name}")
        return Path(model) / name
    from huggingface_hub import hf_hub_download

    return Path(ask_hub(f"{name} of {model}", hf_hub_download, str(model), name))


def first_token(path: Path) -> str:
    """Return the token that begins a document: that of the model's, where one stands beside its tokenizer.json."""
    config = path.with_name(TOKENIZER_CONFIG)
    if not config.exists():
        return END_OF_TEXT
    try:
        token = json.loads(config.read_text())["bos_token"]
        token = token["content"] if isinstance(token, dict) else token
    except (ValueError, RecursionError, TypeError, LookupError):
        token = None
    require(isinstance(token, str), f"{config}: names no bos_token, which would stand before each document")
    return token

"""Names the command that makes a data folder: a download of FineWeb, Python source, or files of the user."""

import math
import shlex
from pathlib import Path

from data.shards import GPT2_VOCAB

FINEWEB_SHARDS = {"fineweb10B": 103, "fineweb100B": 1030}  # Keller Jordan's training shards of 100 M tokens
SHARD_TOKENS = 100_000_000


def data_command(folder: Path, tokens: int, vocab_size: int = GPT2_VOCAB) -> str:
    """Return the command that fills a data folder. Of FineWeb, it takes at least `tokens` tokens, or all tokens."""
    name = Path(folder).name
    out = f"--out {shlex.quote(str(folder))}"
    if name in FINEWEB_SHARDS:
        shards = max(1, math.ceil(tokens / SHARD_TOKENS))
        return f"python -m data.download {name} --shards {min(shards, FINEWEB_SHARDS[name])} {out}"
    if name in ("taught", "mini", "far"):
        return f"python -m data.python_source {name} {out}"
    tokenizer = "gpt2" if vocab_size >= GPT2_VOCAB else f"bpe:{vocab_size}"
    return f"python -m data.text FILES... --tokenizer {tokenizer} {out}"

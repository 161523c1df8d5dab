"""Continues a text with a trained run.

    python -m scripts.generate runs/NAME "def main("
    python -m scripts.generate runs/NAME "def main(" --max-new-tokens 4000 --temperature 0.8 --top-p 0.95 --seed 1
    python -m scripts.generate runs/NAME                         asks for one prompt after another
    python -m scripts.generate runs/NAME < prompts.txt           a prompt a line

The continuation goes to standard output as it comes, what it took to standard error. It begins where a document begins
and ends where the model ends it. Decoding is exact at any length (model/decoding.py); NTK and YaRN scale to the whole
length asked for, prompt and continuation. The same seed draws the same text on the same machine.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from data.shards import tokenizer_of
from data.tokenizer import Tokenizer, load_tokenizer
from errors import exit_on_user_error, require
from model.attention.base import MAX_LENGTH
from model.decoding import decode, sample
from model.gpt import GPT
from runtime.processes import exit_on_failure, start_processes
from scripts.evaluate import load_run
from scripts.shared.runs import StoredRun, read_run

INCOMPLETE = "\ufffd"  # what the bytes of a character decode to as long as some are missing


@exit_on_failure("lower --max-new-tokens")
def main():
    with exit_on_user_error():
        args = read_arguments()
        device = start_processes(args.device).device
        _, model = load_run(args.run, device)
        tokenizer = tokenizer_of_run(read_run(args.run), args.tokenizer)
        generator = torch.Generator().manual_seed(args.seed)
        interactive = args.prompt is None
        for prompt in read_prompts() if interactive else [args.prompt]:
            try:
                continue_text(model, tokenizer, prompt, args, generator)
            except KeyboardInterrupt:  # ends the continuation, not the conversation
                print(flush=True)
                if not interactive:
                    sys.exit(130)


def read_arguments() -> argparse.Namespace:
    """Return the command line. ValueError for numbers out of range."""
    parser = argparse.ArgumentParser(prog="python -m scripts.generate", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("prompt", nargs="?", help="the text to continue (default: lines of the standard input)")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="(default: 200)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (default: 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest of this share")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (default: 0)")
    parser.add_argument("--tokenizer", metavar="SPEC", help="where the run's data folder is gone: as in data.text")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    require(1 <= args.max_new_tokens <= MAX_LENGTH, f"--max-new-tokens must be from 1 to {MAX_LENGTH}")
    require(0 <= args.temperature < float("inf"), f"--temperature must be 0 or more, got {args.temperature}")
    require(args.top_k is None or args.top_k >= 1, f"--top-k must be at least 1, got {args.top_k}")
    require(0 < args.top_p <= 1, f"--top-p must be above 0 and at most 1, got {args.top_p}")
    require(abs(args.seed) < 2**63, f"--seed must have less than 64 bits, got {args.seed}")
    return args


def tokenizer_of_run(run: StoredRun, spec: str | None) -> Tokenizer:
    """Return the tokenizer that a run was trained with, by default that of its data folder.

    ValueError for one with more tokens than the model, and for a folder that holds other text by now.
    """
    data_dir, known = run.config.data_dir, run.data.get("tokenizer")
    if spec is None and known == "gpt2":
        spec = "gpt2"
    if spec is None:
        here = tokenizer_of(Path(data_dir))
        gone = f"{data_dir}, whose tokenizer {run.path} was trained with, is not here: name it with --tokenizer"
        require(here, gone)
        other = f"{data_dir} has another tokenizer now than when {run.path} was trained: name its own with --tokenizer"
        require(known in (None, here), other)
    tokenizer = load_tokenizer(spec or data_dir)
    words = f"{tokenizer.vocab_size} tokens, {run.path} has {run.config.vocab_size}: name its own with --tokenizer"
    require(tokenizer.vocab_size <= run.config.vocab_size, f"the tokenizer {spec or data_dir} has {words}")
    return tokenizer


def read_prompts() -> Iterator[str]:
    """Yield the lines of the standard input until it ends, asking for each where a person types them."""
    while True:
        if sys.stdin.isatty():
            print("prompt> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.rstrip("\n")


class TextStream:
    """Turns tokens into text as they come: what a token adds may depend on the one before it, and a character may take
    several tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self.decode = tokenizer.decode
        self.printed, self.waiting = [], []  # the last tokens of which the text was returned, those of which it was not

    def add(self, token: int) -> str:
        """Return the text that the token completes."""
        self.waiting.append(token)
        text = self.rest()
        if text.endswith(INCOMPLETE) and len(self.waiting) <= 4:  # no character has more bytes
            return ""
        self.printed, self.waiting = self.waiting, []
        return text

    def rest(self) -> str:
        """Return the text of the tokens that still wait."""
        return self.decode(self.printed + self.waiting)[len(self.decode(self.printed)) :]


def continue_text(
    model: GPT, tokenizer: Tokenizer, prompt: str, args: argparse.Namespace, generator: torch.Generator
) -> None:
    """Print the prompt and its continuation, token by token, and then how many there were and how fast they came.

    ValueError for more tokens than attention covers.
    """
    before = [tokenizer.eot, *tokenizer.encode(prompt)]  # a document begins so in training
    length = len(before) + args.max_new_tokens
    many = f"{len(before)} tokens of prompt and {args.max_new_tokens} new ones are more than the {MAX_LENGTH} that"
    require(length <= MAX_LENGTH, f"{many} attention covers: lower --max-new-tokens")

    def choose(logits):  # the vocabulary may be padded: those tokens stand for nothing
        how = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, generator=generator)
        return sample(logits[:, : tokenizer.vocab_size], **how)

    print(prompt, end="", flush=True)
    began, new, first = time.monotonic(), 0, None
    text = TextStream(tokenizer)
    for token in decode(model, torch.tensor([before]), args.max_new_tokens, choose=choose):
        first = first or time.monotonic()
        if token.item() == tokenizer.eot:
            break
        new += 1
        print(text.add(token.item()), end="", flush=True)
    print(text.rest(), flush=True)
    ended = time.monotonic()
    rate = f", {(new - 1) / (ended - first):,.0f} tokens/s" if new > 1 else ""
    said = f"[{len(before)} tokens read in {first - began:.2f} s, {new} written in {ended - first:.2f} s{rate}]"
    print(said, file=sys.stderr)


if __name__ == "__main__":
    main()

"""Continues a text with a trained run.

    python -m scripts.generate runs/NAME "def main("
    python -m scripts.generate runs/NAME "def main(" --max-new-tokens 4000 --temperature 0.8 --top-p 0.95 --seed 1

The continuation goes to standard output as it comes, the speed to standard error. It begins where a document begins and
ends where the model ends it. Decoding is exact at any length (model/decoding.py). NTK and YaRN scale to the length of
prompt and continuation. A seed draws the same text again on the same machine.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
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

INCOMPLETE = "\ufffd"  # the text of a character's bytes as long as some are missing


@exit_on_failure("lower --max-new-tokens")
@exit_on_user_error()
def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m scripts.generate", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="(default: 200)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (default: 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest of this share")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--tokenizer", metavar="SPEC", help="if the run's data folder is gone: as in data.text")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args(argv)
    require(args.max_new_tokens >= 1, "--max-new-tokens must be at least 1")
    possible = args.temperature >= 0 and (args.top_k is None or args.top_k >= 1) and 0 < args.top_p <= 1
    require(possible, "--temperature must be at least 0, --top-k at least 1, and --top-p in (0, 1]")
    run = read_run(args.run)
    _, model = load_run(run.path, start_processes(args.device).device)
    continue_text(model, tokenizer_of_run(run, args.tokenizer), args)


def tokenizer_of_run(run: StoredRun, spec: str | None) -> Tokenizer:
    """Return the tokenizer of `spec`, or else of the run's data folder. Raise ValueError if it cannot be the run's."""
    data_dir, trained_with = run.config.data_dir, run.data.get("tokenizer")
    if spec is None and trained_with != "gpt2":
        found = tokenizer_of(Path(data_dir))
        same = found and trained_with in (None, found)
        require(same, f"{data_dir} does not have the tokenizer of {run.path}. Name the run's with --tokenizer.")
    tokenizer = load_tokenizer(spec or ("gpt2" if trained_with == "gpt2" else data_dir))
    fits = tokenizer.vocab_size <= run.config.vocab_size
    require(fits, f"the tokenizer has {tokenizer.vocab_size} tokens, more than the model. Name the run's --tokenizer.")
    return tokenizer


def continue_text(model: GPT, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Print the prompt and its continuation, token by token, and then how many tokens came how fast.

    Raise ValueError for more tokens than attention covers.
    """
    generator = torch.Generator().manual_seed(args.seed)
    tokens = [tokenizer.eot, *tokenizer.encode(args.prompt)]  # documents begin so in training
    length = len(tokens) + args.max_new_tokens
    require(length <= MAX_LENGTH, f"{length} tokens are more than attention covers. Lower --max-new-tokens.")

    def choose(logits):  # the vocabulary may be padded; tokens beyond the tokenizer's have no text
        logits = logits[:, : tokenizer.vocab_size]
        return sample(logits, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, generator=generator)

    times = [time.monotonic()]  # the start, then that of each token

    def new_tokens():
        for token in decode(model, torch.tensor([tokens]), args.max_new_tokens, choose=choose):
            times.append(time.monotonic())
            if token.item() == tokenizer.eot:
                return
            yield token.item()

    print(args.prompt, end="", flush=True)
    for text in text_pieces(new_tokens(), tokenizer):
        print(text, end="", flush=True)
    print(flush=True)
    start, first, last, count = times[0], times[1], times[-1], len(times) - 1
    rate = f", {(count - 1) / (last - first):,.0f} tokens/s" if count > 1 else ""
    print(f"[{len(tokens)} tokens read in {first - start:.2f} s, {count} chosen{rate}]", file=sys.stderr)


def text_pieces(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of tokens in whole characters. The text of a token may depend on the token before it."""
    printed, waiting = [], []
    for token in tokens:
        waiting.append(token)
        text = tokenizer.decode(printed + waiting)[len(tokenizer.decode(printed)) :]
        if not text.endswith(INCOMPLETE):
            yield text
            printed, waiting = waiting, []
    if waiting:
        yield tokenizer.decode(printed + waiting)[len(tokenizer.decode(printed)) :]


if __name__ == "__main__":
    main()

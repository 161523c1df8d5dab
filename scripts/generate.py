"""Continues a text with a trained run.

    python -m scripts.generate runs/NAME "def main("
    python -m scripts.generate runs/NAME "def main(" --max-new-tokens 4000 --temperature 0.8 --top-k 50 --seed 1

The continuation comes token by token. It begins where a document begins and ends where the model ends it. Decoding is
exact at any length (model/decoding.py). NTK and YaRN scale to the length of prompt and continuation. A seed draws the
same text again on the same machine.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from data.tokenizer import Tokenizer, load_tokenizer
from errors import exit_on_user_error, require
from model.attention.base import MAX_LENGTH
from model.decoding import decode, sample
from runtime.processes import start_processes
from scripts.evaluate import check_tokenizer, load_run
from scripts.shared.runs import StoredRun, read_run

INCOMPLETE = "\ufffd"  # the text of a character's bytes as long as some are missing


@exit_on_user_error()
def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m scripts.generate", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="(default: 200)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (default: 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args(argv)
    possible = args.temperature >= 0 and (args.top_k is None or args.top_k >= 1)
    require(possible, "--temperature must be at least 0, and --top-k at least 1")
    run = read_run(args.run)
    _, model = load_run(run.path, start_processes(args.device).device)
    tokenizer = tokenizer_of_run(run)
    tokens = [tokenizer.eot, *tokenizer.encode(args.prompt)]  # documents begin so in training
    fits = 1 <= args.max_new_tokens <= MAX_LENGTH - len(tokens)
    require(fits, f"--max-new-tokens must be at least 1, and at most {MAX_LENGTH} with the prompt")
    generator = torch.Generator().manual_seed(args.seed)

    def choose(logits):  # the vocabulary may be padded; tokens beyond the tokenizer's have no text
        logits = logits[:, : tokenizer.vocab_size]
        return sample(logits, temperature=args.temperature, top_k=args.top_k, generator=generator)

    print(args.prompt, end="", flush=True)
    new = decode(model, torch.tensor([tokens]), args.max_new_tokens, choose=choose)
    for text in text_pieces(map(torch.Tensor.item, new), tokenizer):
        print(text, end="", flush=True)
    print()


def tokenizer_of_run(run: StoredRun) -> Tokenizer:
    """Return the tokenizer that a run was trained with. ValueError if its data folder has another one now."""
    if run.data.get("tokenizer") == "gpt2":
        return load_tokenizer("gpt2")
    data_dir = Path(run.config.data_dir)
    check_tokenizer(run, data_dir)
    return load_tokenizer(data_dir)


def text_pieces(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of tokens up to the end of the document, in whole characters."""
    read, printed = [], ""
    for token in itertools.takewhile(lambda token: token != tokenizer.eot, tokens):
        read.append(token)
        text = tokenizer.decode(read)
        if not text.endswith(INCOMPLETE):
            yield text[len(printed) :]
            printed = text
    yield tokenizer.decode(read)[len(printed) :]


if __name__ == "__main__":
    main()

"""Continues a text with a trained run.

    python -m scripts.generate runs/NAME "def main("
    python -m scripts.generate runs/NAME "def main(" --max-new-tokens 4000 --temperature 0.8 --top-k 50 --seed 1

The text is printed token by token. The prompt is the beginning of a document, and generation stops at the end of that
document. Decoding is exact at any length (model/decoding.py). NTK and YaRN scale to the length of prompt and
continuation. The same seed gives the same text on the same machine.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from data.tokenizer import Tokenizer
from errors import exit_on_user_error, require
from model.attention.plan import MAX_LENGTH
from model.decoding import decode, sample
from runtime.processes import start_processes
from scripts.shared.arguments import Parser
from scripts.shared.runs import load_run, read_run, tokenizer_of_run

INCOMPLETE = "\ufffd"  # decoded text of a character whose bytes are not complete


@exit_on_user_error()
def main():
    # 1. The arguments.
    parser = Parser("python -m scripts.generate", __doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder")
    add("prompt", help="text to continue")
    add("--max-new-tokens", type=int, default=200, metavar="N", help="most new tokens (default: 200)")
    add("--temperature", type=float, default=1.0, help="0 takes the most likely token (default: 1)")
    add("--top-k", type=int, metavar="K", help="draw from the K most likely tokens (default: all)")
    add("--seed", type=int, default=0, help="seed of the drawn tokens (default: 0)")
    parser.add_device()
    args = parser.parse_args()
    require(args.temperature >= 0, f"--temperature {args.temperature} is negative. Use 0 or more.")
    is_unicode = args.prompt == args.prompt.encode(errors="replace").decode()  # Python takes any bytes
    require(is_unicode, "the prompt is not UTF-8. Convert it with `iconv -f ENCODING -t UTF-8`.")
    require(args.top_k is None or args.top_k >= 1, f"--top-k {args.top_k} leaves no token. Use 1 or more.")

    # 2. The model and the prompt.
    run = read_run(args.run)
    _, model = load_run(run.path, start_processes(args.device).device)
    tokenizer = tokenizer_of_run(run)
    tokens = [tokenizer.eot, *tokenizer.encode(args.prompt)]  # in training, every document begins with this token
    most = MAX_LENGTH - len(tokens)
    require(1 <= args.max_new_tokens <= most, f"--max-new-tokens {args.max_new_tokens} is wrong. Use 1 to {most:,}.")
    generator = torch.Generator().manual_seed(args.seed)

    def choose(logits):  # the model's vocabulary may be padded with tokens that have no text
        logits = logits[:, : tokenizer.vocab_size]
        return sample(logits, temperature=args.temperature, top_k=args.top_k, generator=generator)

    # 3. The text, piece by piece.
    print(args.prompt, end="", flush=True)
    new = decode(model, torch.tensor([tokens]), args.max_new_tokens, choose=choose)
    for text in text_pieces(tokens, map(torch.Tensor.item, new), tokenizer):
        print(text, end="", flush=True)
    print()


def text_pieces(prompt: list[int], tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of the tokens up to the end of the document. Every piece ends with a whole character."""
    read, printed = [*prompt], tokenizer.decode(prompt)
    for token in itertools.takewhile(lambda token: token != tokenizer.eot, tokens):
        read.append(token)
        text = tokenizer.decode(read)
        if not text.endswith(INCOMPLETE):
            yield text[len(printed) :]
            printed = text
    yield tokenizer.decode(read)[len(printed) :]


if __name__ == "__main__":
    main()

"""Measures the copy gain of a Llama model with a method, at several distances, in one forward pass of a long text.

    python results/smollm2/copy_gain.py smollm2 scale_invariant_rope --text dorrit.txt --method_options skip_first True
    python results/smollm2/copy_gain.py runs/continued/NAME/model stored --text bleak_house.txt --tokens 16384

The method `stored` is the one that the model was trained with.
Pairs of equal spans, 32 random tokens each, replace a part of the text. The second span of each pair is in the last
4,096 tokens. The command prints a line of copy_gain.jsonl, without the name that the figure shows.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configs.command_line import option_value
from data.tokenizer import load_tokenizer
from scripts.hf.convert import convert
from scripts.hf.load import load_model
from scripts.hf.training import WithLoss

SPAN, END = 32, 4096  # tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("method")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--spans", type=int, default=4, help="pairs at each distance")
    parser.add_argument("--distances", type=int, nargs="+", default=[128, 1024, 4096, 8192, 16_384, 24_576, 32_000])
    parser.add_argument("--method_options", nargs="*", default=[])
    arguments = parser.parse_args()

    names, values = arguments.method_options[::2], arguments.method_options[1::2]
    options = dict(zip(names, map(option_value, values), strict=True))
    model = load_model(arguments.model)
    if arguments.method != "stored":
        model = convert(model, arguments.method, **options)
    model = WithLoss(model)
    text = load_tokenizer(arguments.model).encode(arguments.text.read_text())
    tokens = torch.tensor(text[: arguments.tokens + 1])
    pairs = place_pairs(arguments.tokens, arguments.distances, arguments.spans)
    text_positions = torch.ones(arguments.tokens, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for starts in pairs.values():
        for first, second in starts:
            span = tokens[torch.randint(len(tokens), (SPAN,), generator=generator)]
            for start in (first, second):
                tokens[start : start + SPAN] = span
                text_positions[start - 1 : start + 2 * SPAN] = False
    with torch.inference_mode():
        losses = model(tokens[None, :-1], tokens[None, 1:], per_token=True)[0]  # of tokens 1, 2, ...

    def span_loss(start: int) -> float:  # without the first token, which is at random in both spans
        return losses[start : start + SPAN - 1].mean().item()

    gains = {d: torch.tensor([span_loss(a) - span_loss(b) for a, b in starts]) for d, starts in pairs.items()}
    octaves = [(2**n, 2 ** (n + 1)) for n in range(9, 30) if 2**n < arguments.tokens]
    text_loss = {f"{a}-{b}": losses[a:b][text_positions[a:b]].mean().item() for a, b in octaves}
    record = dict(
        method=arguments.method, method_options=options, tokens=arguments.tokens, spans=arguments.spans,
        text_loss=rounded(text_loss, 4), copy_gain=rounded({d: gain.mean() for d, gain in gains.items()}, 3),
        copy_gain_error=rounded({d: gain.std() / len(gain) ** 0.5 for d, gain in gains.items()}, 3),
    )  # fmt: skip
    print(json.dumps(record))


def place_pairs(tokens: int, distances: list[int], spans: int) -> dict[int, list[tuple[int, int]]]:
    """Return the first positions of the two spans of each pair, by the tokens between the spans. No spans overlap."""
    generator, free, pairs = torch.Generator().manual_seed(0), torch.ones(tokens, dtype=torch.bool), {}
    for distance in sorted(distances, reverse=True):
        pairs[distance] = []
        while len(pairs[distance]) < spans:
            second = int(torch.randint(tokens - END, tokens - SPAN, (), generator=generator))
            first = second - SPAN - distance
            spaces = [slice(start, start + SPAN) for start in (first, second)]
            if first > 0 and all(free[space].all() for space in spaces):
                for space in spaces:
                    free[space] = False
                pairs[distance].append((first, second))
    return pairs


def rounded(numbers: dict, digits: int) -> dict:
    return {key: round(float(number), digits) for key, number in numbers.items()}


if __name__ == "__main__":
    main()

"""Keeps the losses of runs of `far` on other text: a line of other_texts.jsonl for each run and text.

    python -m data.text books/ --tokenizer data/far/tokenizer.json --val-fraction 0.9 --out data/books_for_far
    python -m scripts.evaluate RUNS --data data/books_for_far --lengths 512 2048 8192 --val-tokens 262144
    python -m results.far.other_texts RUNS

The books and the documentation of the first lines were not recorded. results/growth/README.md names the handbook and
the novel. A line has the fingerprint of its text. It replaces the line of the same run and text. The text's name is
that of its folder, up to the first "_".
"""

import functools
import json
import sys
from pathlib import Path

from scripts.keep import write_lines

FILE = Path(__file__).with_suffix(".jsonl")
KEPT = ("text", "val_tokens", "val_loss", "val_loss_by_position")


@functools.cache
def read_lines() -> dict[tuple[str, str], dict]:
    """Return the kept lines by run and text."""
    if not FILE.exists():
        return {}
    lines = map(json.loads, FILE.read_text().splitlines())
    return {(line["name"], line["on"]): line for line in lines}


def losses(name: str) -> dict[str, float]:
    """Return the losses of a run in nats a token, by text and sequence length, such as "books 8192"."""
    found = {}
    for (run, text), line in read_lines().items():
        if run == name:
            found |= {f"{text} {length}": loss for length, loss in line["val_loss"].items()}
    return found


def main():
    lines = read_lines()
    for folder in map(Path, sys.argv[1:]):
        for path in sorted(folder.glob("evaluation_*.json")):
            result = json.loads(path.read_text())
            text = Path(result["data"]).name.split("_")[0]
            kept = {key: result[key] for key in KEPT}
            lines[folder.name, text] = {"name": folder.name, "on": text} | kept
    write_lines(FILE, [lines[key] for key in sorted(lines)])


if __name__ == "__main__":
    main()

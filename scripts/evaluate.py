"""Validation losses and copy gain of trained runs, from their latest checkpoints.

    python -m scripts.evaluate runs/quickstart-*/
    python -m scripts.evaluate runs/a runs/b --lengths 4096 16384 65536 262144 --val-tokens 10485760
    python -m scripts.evaluate runs/a runs/b --data data/books       on other text, of the same tokenizer
    python -m scripts.evaluate runs/rope --as rope_ntk yarn          its weights as methods that train identically
    python -m scripts.evaluate runs/a runs/b --copy 128 1024         also their copy gain (see runtime/copy_gain.py)

The command prints Markdown tables. RUN/evaluation.json has the numbers, and the losses by position. All lengths see the
same tokens, by default those of the run's own validation. --data reads the val split of another folder, at most as many
tokens. The numbers on other text are in RUN/evaluation_FINGERPRINT.json.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from configs.config import Config
from data.shards import TokenStream, open_split, tokenizer_of
from errors import exit_on_user_error, require
from files import replace_text, to_json
from runtime.build import build_model
from runtime.checkpoint import latest_checkpoint, load_checkpoint
from runtime.copy_gain import KINDS
from runtime.device import compute_dtype
from runtime.processes import World, start_processes
from runtime.validation import Validation
from scripts.shared.runs import StoredRun, join, read_run, stored_config
from scripts.shared.tables import loss_table, markdown_table


def load_run(folder: Path, device: torch.device) -> tuple[Config, torch.nn.Module]:
    """Return the configuration of a run and its model with the weights of the latest checkpoint."""
    config = stored_config(folder)
    checkpoint = latest_checkpoint(folder / "checkpoints")
    require(checkpoint, f"{folder} has no checkpoint. Train the run first.")
    model = build_model(config, compute_dtype(config, device)).to(device)
    model.load_state_dict(load_checkpoint(checkpoint)["model"])
    return config, model


def open_own_text(run: StoredRun) -> TokenStream:
    """Return the validation text of a run. Raise ValueError if its data folder holds another text now."""
    config = run.config
    stream = open_split(config.data_dir, "val", config.vocab_size)
    same = run.data.get("validation") in (None, stream.fingerprint(config.val_tokens))
    message = f"{config.data_dir} does not hold the validation text of {run.path}"
    require(same, f"{message}. Restore it, or evaluate on other text with --data {config.data_dir}.")
    return stream


def check_tokenizer(run: StoredRun, data: Path):
    """Raise ValueError unless the text of this folder was prepared with the tokenizer of the run."""
    other, own = tokenizer_of(data), run.data.get("tokenizer")
    require(own and own == other, f"{data} has tokenizer {other}, {run.path} has {own}. Use data of its tokenizer.")


def evaluate(
    folder: Path, world: World, *, lengths: Sequence[int] | None = None, tokens: int | None = None,
    data: Path | None = None, methods: Sequence[str] = (), gaps: Sequence[int] = (),
) -> dict:  # fmt: skip
    """Return and store the result of Validation.losses (nats a token) of one run, with its name, method, train_length,
    data folder and fingerprint of the text.

    lengths, tokens: default to the run's. data: a folder of other text. methods: also run the weights as these.
    gaps: for copy gain, in tokens.
    """
    config, model = load_run(folder, world.device)
    run, lengths = read_run(folder), tuple(lengths or config.val_lengths)
    stream = open_own_text(run) if data is None else open_split(data, "val", config.vocab_size)
    # --data may name the run's own text.
    is_own = data is None or stream.fingerprint(config.val_tokens) == run.data.get("validation")
    if not is_own:
        check_tokenizer(run, data)
    if tokens is None:
        unit = math.lcm(*lengths)
        tokens = config.val_tokens if is_own else min(config.val_tokens, len(stream) - 1) // unit * unit
    methods = tuple(dict.fromkeys((*config.validate_as, *methods)))
    config = dataclasses.replace(
        config, val_lengths=lengths, val_tokens=tokens, val_copy_gaps=tuple(gaps), validate_as=methods
    )
    validation = Validation(config, model, stream, world)
    gains = validation.copy_gains() if gaps else {}
    result = {
        "step": latest_checkpoint(folder / "checkpoints").stem, "name": folder.name, "method": config.method,
        "train_length": config.train_length, "text": stream.fingerprint(), "data": str(data or config.data_dir),
        **validation.losses(dict.fromkeys(lengths, tokens)), **gains,
    }  # fmt: skip
    store(folder / ("evaluation.json" if is_own else f"evaluation_{result['text']}.json"), result)
    return result


def store(path: Path, result: dict):
    """Write the result. Other lengths and gaps in the file stay if checkpoint and number of tokens are the same."""
    old = json.loads(path.read_text()) if path.exists() else {}
    same = old.get("step") == result["step"] and {*old["val_tokens"].values()} == {*result["val_tokens"].values()}
    replace_text(path, to_json(join(old, result) if same else result) + "\n")


def copy_table(results: list[dict]) -> str:
    """Return one row a run and kind of span, one column a gap: the copy gain with its standard error."""
    gaps = sorted({gap for r in results for gap in r["copy_gain"]["random"]}, key=int)
    rows = [["run", "spans", *gaps]]
    for kind in KINDS:
        for r in results:
            gains, errors = r["copy_gain"][kind], r["copy_gain_error"][kind]
            rows.append([r["name"], kind, *(f"{gains[g]:.2f} ± {errors[g]:.2f}" if g in gains else "" for g in gaps)])
    return markdown_table(rows)


@exit_on_user_error()
def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m scripts.evaluate", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    add("--lengths", nargs="+", type=int, help="sequence lengths (default: those of the run)")
    add("--val-tokens", type=int, help="tokens at each length (default: as many as the run used)")
    add("--data", type=Path, metavar="DIR", help="a data folder of other text (default: the run's own)")
    add("--as", nargs="+", default=[], metavar="METHOD", dest="methods", help="run the weights as these methods too")
    add("--copy", nargs="+", default=[], type=int, metavar="GAP", help="copy gain at these gaps, in tokens")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args(argv)
    world, rows, copied = start_processes(args.device), [], []
    for folder in args.runs:
        result = evaluate(
            folder, world, lengths=args.lengths, tokens=args.val_tokens, data=args.data, methods=args.methods,
            gaps=args.copy,
        )  # fmt: skip
        others = result.get("val_loss_as", {}).items()
        rows += [result, *(result | {"name": f"{folder.name} as {m}", "val_loss": loss} for m, loss in others)]
        copied += [result] if "copy_gain" in result else []
    print(loss_table(rows))
    if copied:
        print(f"\nCopy gain in nats a token, by the tokens between the copies:\n\n{copy_table(copied)}")


if __name__ == "__main__":
    main()

"""Measures validation losses, copy gain and far gain of trained runs, from their latest checkpoints.

    python -m scripts.evaluate runs/quickstart-*/
    python -m scripts.evaluate runs/a runs/b --lengths 4096 16384 65536 262144 --val-tokens 10485760
    python -m scripts.evaluate runs/a runs/b --data data/books       other text, made with the same tokenizer
    python -m scripts.evaluate runs/rope --as rope_ntk yarn          methods that train identically to the run's method
    python -m scripts.evaluate runs/a --copy 128 1024 --far 128      copy gain and far gain, too (in measure/)
    python -m scripts.evaluate runs/a --riffle                       whole documents against riffled ones

The command prints Markdown tables. It writes the numbers, and the losses by position, to RUN/evaluation.json. All
lengths are measured on the same tokens. By default these are the validation tokens of the run. --data reads the val
split of another folder, at most as many tokens, and the numbers go to RUN/evaluation_FINGERPRINT.json.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from data.shards import open_split
from errors import exit_on_user_error
from files import replace_text, to_json
from measure.copy_gain import KINDS, recovery
from measure.validation import Validation
from model.methods.names import canonical_name
from runtime.checkpoint import latest_checkpoint
from runtime.metrics import read_record
from runtime.processes import World, start_processes
from scripts.shared.arguments import Parser
from scripts.shared.runs import (
    REQUIRED,
    check_tokenizer,
    comparable,
    join,
    load_run,
    open_validation_text,
    read_run,
)
from scripts.shared.tables import format_mean, loss_table, pivot_table


def evaluate(
    folder: Path,
    world: World,
    *,
    lengths: Sequence[int] | None = None,
    tokens: int | None = None,
    data: Path | None = None,
    methods: Sequence[str] = (),
    gaps: Sequence[int] = (),
    windows: int = 0,
    riffles: bool = False,
) -> dict:
    """Return and store the losses of a run (see Validation.losses), with its name, method, train_length, and text.

    lengths, tokens: of the validation (default: the values of the run). data: folder of other text. methods: validate
    the weights with these methods, too. gaps: for copy gain, in tokens. windows: for far gain. riffles: measure
    riffle gain on all of the text.
    """
    # 1. The model and the text.
    config, model = load_run(folder, world.device)
    step = latest_checkpoint(folder / "checkpoints").stem  # now, because a run that goes on writes newer ones
    run, lengths = read_run(folder), tuple(lengths or config.val_lengths)
    stream = open_validation_text(run) if data is None else open_split(data, "val", config.vocab_size)
    # --data may name the folder of the run's validation text.
    same_text = data is None or stream.fingerprint(config.val_tokens) == run.data.get("validation")
    if not same_text:
        check_tokenizer(run, data)
    if tokens is None:
        unit = math.lcm(*lengths) or 1  # Config refuses length 0
        tokens = config.val_tokens if same_text else min(config.val_tokens, len(stream) - 1) // unit * unit

    # 2. The measurements.
    config = dataclasses.replace(
        config,
        val_lengths=lengths,
        val_tokens=tokens,
        val_copy_gaps=tuple(gaps),
        val_far_windows=windows,
        validate_as=tuple(dict.fromkeys((*config.validate_as, *map(canonical_name, methods)))),
    )
    validation = Validation(config, model, stream, world, riffles=riffles)
    result = {
        "step": step,
        "name": folder.name,
        "method": config.method,
        "train_length": config.train_length,
        "text": stream.fingerprint(),
        "data": str(data or config.data_dir),
    }
    if riffles:  # first, because the text may lack long documents
        result |= validation.riffle_gains(len(stream))
    result |= validation.losses(dict.fromkeys(lengths, tokens), complete=True)
    if gaps:
        result |= validation.copy_gains(gaps)
    if windows:
        result |= validation.far_gains()
    if world.is_main:
        store(folder / ("evaluation.json" if same_text else f"evaluation_{result['text']}.json"), result)
    return result


def store(path: Path, result: dict):
    """Write the result. The file keeps this checkpoint's other gains, and its losses on the same number of tokens."""
    old = read_record(path, REQUIRED["evaluation.json"])
    if old and old["step"] == result["step"]:
        result = join(comparable(old, result), result)
    replace_text(path, to_json(result) + "\n")


def print_table(title: str, rows: list[tuple]):
    """Print a table with a row for each name: its cells by column. Names without cells are left out."""
    lines = [([name], cells) for name, cells in rows if cells]
    columns = {key: key for _, cells in lines for key in cells}
    if lines:
        print(f"\n{title}:\n\n{pivot_table(['run'], lines, columns)}")


def gain_cells(result: dict, name: str) -> dict:
    """Return cells of a gain with its standard error. {}: it was not measured."""
    return {key: format_mean(gain, result[f"{name}_error"][key]) for key, gain in result.get(name, {}).items()}


def print_own_documents(results: list[dict]):
    """Print the loss on tokens far inside their own documents, and the share of these tokens."""
    rows = []
    for result in results:
        cells = {}
        for length, loss in result["val_loss_own"].items():
            share = result["val_tokens_own"][length] / result["val_tokens"][length]
            cells[length] = f"{loss:.3f} ({share:.1%})"
        rows.append((result["name"], cells))
    print_table(
        "Loss on tokens with more than a training length of their own document before them, and their share", rows
    )


def print_copies(results: list[dict]):
    """Print tables of copy gain, copy accuracy and recovery."""
    gains, accuracies, recoveries = [], [], []
    for result, kind in itertools.product(results, KINDS):
        name = f"{result['name']}, {kind}"
        gain, error = result["copy_gain"][kind], result["copy_gain_error"][kind]
        shares = result["copy_accuracy"][kind]
        ratios = recovery(gain, error, result["train_length"])
        gains.append((name, {gap: format_mean(mean, error[gap]) for gap, mean in gain.items()}))
        accuracies.append((name, {gap: f"{share:.0%}" for gap, share in shares.items()}))
        recoveries.append((name, {gap: format_mean(*ratio) for gap, ratio in ratios.items()}))
    print_table("Copy gain in nats a token, by the number of tokens between the copies", gains)
    print_table("Tokens of the second copy that are predicted", accuracies)
    print_table("Recovery: the gain over the gain at the longest gap within the training length", recoveries)


def as_method(result: dict, method: str) -> dict:
    """Return the result with the numbers of another method of validation."""
    numbers = {key.removesuffix("_as"): found[method] for key, found in result.items() if key.endswith("_as")}
    return result | numbers | {"name": f"{result['name']} as {method}"}


@exit_on_user_error()
def main():
    # 1. The arguments.
    parser = Parser("python -m scripts.evaluate", __doc__)
    add = parser.add_argument
    parser.add_runs()
    add("--lengths", nargs="+", type=int, help="sequence lengths (default: the run's val_lengths)")
    add("--val-tokens", type=int, help="tokens at each length (default: the run's val_tokens)")
    add("--data", type=Path, metavar="DIR", help="data folder of other text (default: the run's data_dir)")
    add("--as", nargs="+", default=[], metavar="METHOD", dest="methods", help="validate with these methods, too")
    add("--copy", nargs="+", default=[], type=int, metavar="GAP", help="measure copy gain at these gaps, in tokens")
    add("--far", type=int, default=0, metavar="WINDOWS", help="measure far gain on this number of windows")
    add("--riffle", action="store_true", help="measure riffle gain on all long documents")
    parser.add_device()
    args = parser.parse_args()

    # 2. The measurements.
    world, rows, results = start_processes(args.device), [], []
    for folder in args.runs:
        result = evaluate(
            folder,
            world,
            lengths=args.lengths,
            tokens=args.val_tokens,
            data=args.data,
            methods=args.methods,
            gaps=args.copy,
            windows=args.far,
            riffles=args.riffle,
        )
        results.append(result)
        rows.append(result)
        for method in result.get("val_loss_as", {}):
            rows.append(as_method(result, method))

    # 3. The tables.
    if not world.is_main:
        return
    print(loss_table(rows))
    print_own_documents(results)
    if args.copy:
        print_copies(rows)
    for kind, columns in {"far": "class of tokens", "riffle": "the end of an octave of positions"}.items():
        cells = [(row["name"], gain_cells(row, f"{kind}_gain")) for row in rows]
        print_table(f"{kind.capitalize()} gain in nats a token, by {columns}", cells)


if __name__ == "__main__":
    main()

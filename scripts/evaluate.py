"""Validation losses of trained runs at any lengths, and by position, from their latest checkpoints.

    python -m scripts.evaluate runs/quickstart-*/
    python -m scripts.evaluate runs/a runs/b --lengths 4096 16384 65536 262144 --val-tokens 10485760
    python -m scripts.evaluate runs/a runs/b --data data/books       on other text, of the same tokenizer
    python -m scripts.evaluate runs/rope --as rope_ntk yarn          its weights as methods that train identically
    python -m scripts.evaluate runs/a runs/b --copy 128 1024         also their copy gain (see runtime/copy_gain.py)

Prints two Markdown tables and leaves the numbers in RUN/evaluation.json, where reproduce and report find them. All
lengths see the same tokens, by default those that the run itself was validated on; of other text (the val split of
the folder) as many, or all that are whole sequences. Losses on other text are kept apart, by its fingerprint.
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

import torch

from configs.config import Config
from data.loader import check_validation
from data.shards import TOKENIZER_FILE, TokenStream, open_split, tokenizer_of
from errors import exit_on_user_error, require
from files import replace_text, to_json
from runtime.build import build_model
from runtime.checkpoint import checkpoint_errors, latest_checkpoint, load_checkpoint
from runtime.copy_gain import KINDS, SPAN, check_gaps
from runtime.device import compute_dtype
from runtime.processes import World, exit_on_failure, start_processes
from runtime.validation import Validation, validation_plans
from scripts.shared.run_files import OTHER_TEXTS, on_own_text, val_tokens
from scripts.shared.runs import StoredRun, data_fingerprint, read_run, stored_config
from scripts.shared.tables import loss_table, markdown_table

EVALUATION = "evaluation.json"


def load_run(folder: Path, device: torch.device) -> tuple[Config, torch.nn.Module]:
    """Return the configuration of a run and its model, with the latest checkpoint's weights, computing as in it."""
    config = stored_config(folder)
    checkpoint = latest_checkpoint(folder / "checkpoints")
    require(checkpoint, f"{folder} has no checkpoint yet")
    step = int(checkpoint.stem.removeprefix("step_"))
    model = build_model(config, compute_dtype(config, device), step).to(device)
    state = load_checkpoint(checkpoint)
    with checkpoint_errors(checkpoint):
        model.load_state_dict(state["model"])
    return config, model


def evaluate(folder: Path, args: argparse.Namespace, world: World) -> tuple[dict, bool]:
    """Return name, method and train_length of one run, text (its fingerprint) and data folder, with what
    Validation.losses returns (in nats); and whether the text is the one that the run was validated on.

    args: those of the command line.
    """
    data = args.data
    config, model = load_run(folder, world.device)
    config = dataclasses.replace(config, validate_as=tuple(dict.fromkeys((*config.validate_as, *args.as_others))))
    lengths = args.lengths or config.val_lengths
    require(all(n >= 1 for n in lengths), f"--lengths must be at least 1, got {min(lengths)}")
    run = read_run(folder)
    stream = open_own_text(run) if data is None else open_split(data, "val", config.vocab_size)
    # A folder that is named may hold the run's own text, which has moved.
    own = data is None or stream.fingerprint(config.val_tokens) == run.data.get("validation")
    if not own:
        check_tokenizer(run, data)
    tokens = args.val_tokens
    if tokens is None:
        tokens = config.val_tokens if own else choose_tokens(config, stream, lengths, data)
    check_validation(stream, lengths, tokens)
    gaps = choose_gaps(config, stream) if args.copy == [] else args.copy or ()
    check_gaps(stream, gaps)
    config = dataclasses.replace(config, val_lengths=tuple(lengths), val_tokens=tokens, val_copy_gaps=tuple(gaps))
    plans = validation_plans(config, model, world)
    result = Validation(config, model, model, plans, stream, world).losses(dict.fromkeys(lengths, tokens))
    where = dict(text=stream.fingerprint(), data=str(data or config.data_dir))
    return dict(name=folder.name, method=config.method, train_length=config.train_length, **where, **result), own


def open_own_text(run: StoredRun) -> TokenStream:
    """Return the text that a run was validated on. Raise ValueError if its data folder holds another now."""
    config = run.config
    stream = open_split(config.data_dir, "val", config.vocab_size)
    if run.data:
        same = stream.fingerprint(config.val_tokens) == run.data.get("validation")
    else:  # of before data.json: by the training text, where that can be compared
        theirs, here = (run.summary or {}).get("data"), data_fingerprint(config)
        same = None in (theirs, here) or theirs == here
    now = f"{config.data_dir} holds other text now than when {run.path} was trained"
    require(same, f"{now}: bring that back, or evaluate on this as other text, with --data {config.data_dir}")
    return stream


def check_tokenizer(run: StoredRun, data: Path):
    """Raise ValueError unless other text was prepared with the run's tokenizer, so that its tokens mean the same."""
    folder, own = run.path, run.config.data_dir
    theirs, ours = tokenizer_of(data), run.data.get("tokenizer")
    if not run.data and run.summary and run.summary.get("data") == data_fingerprint(run.config):  # of before data.json
        ours = tokenizer_of(own)
    require(theirs, f"{data} has no manifest.json that names its tokenizer: prepare it with `python -m data.text`")
    unknown = f"it is not known which tokenizer {folder} was trained with: neither its data.json nor {own} says it"
    require(ours, f"{unknown}, so losses on {data} would mean nothing")
    tokenizer = "gpt2" if ours == "gpt2" else Path(own) / TOKENIZER_FILE
    differ = f"{data} was prepared with another tokenizer ({theirs[:12]}) than the text of {folder} ({ours[:12]})"
    require(theirs == ours, f"{differ}: prepare it with `python -m data.text ... --tokenizer {tokenizer}`")


def choose_tokens(config: Config, stream: TokenStream, lengths: list[int], data: Path) -> int:
    """Return the run's own number of validation tokens where it fits other text, else, with a line that says so, the
    largest that does."""
    unit = math.lcm(*lengths)
    tokens = min(config.val_tokens, len(stream) - 1) // unit * unit
    short = f"{data} holds {len(stream)} validation tokens, {unit + 1} are needed"
    require(tokens > 0, f"{short}: give shorter --lengths, or prepare more text (data.text has --val-fraction)")
    if tokens < config.val_tokens:
        why = f"{data} holds {len(stream):,} and sequences are whole; the run was validated on {config.val_tokens:,}"
        print(f"{tokens:,} tokens at each length: {why}", file=sys.stderr)
    return tokens


def choose_gaps(config: Config, stream: TokenStream) -> list[int]:
    """Return the default gaps for copy gain that the text allows: T/8, T/2, 2T and so on up to 64T."""
    T = config.train_length
    return [gap for gap in (T // 8 * 4**k for k in range(5)) if 1 <= gap <= len(stream) - SPAN]


def store(folder: Path, result: dict, own: bool):
    """Add the result to the folder's evaluation.json, apart if not on the run's own text. Lengths evaluated there
    on other tokens or with another checkpoint go."""
    path, result = folder / EVALUATION, {"step": latest_checkpoint(folder / "checkpoints").stem, **result}
    try:
        stored = json.loads(path.read_text()) if path.exists() else {}
        kept, others = on_own_text(stored), dict(stored.get(OTHER_TEXTS, {}))
        if own:
            kept = merge_results(kept, result)
        else:
            others[result["text"]] = merge_results(others.get(result["text"], {}), result)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): delete it and evaluate again") from error
    kept |= {OTHER_TEXTS: others} if others else {}
    replace_text(path, to_json(kept) + "\n")


def join(new: dict, old: dict) -> dict:
    """Return both nested dicts as one; the new one's values take precedence."""
    nested = {key: join(new[key], old[key]) for key in new.keys() & old.keys() if isinstance(new[key], dict)}
    return old | new | nested


def merge_results(old: dict, new: dict) -> dict:
    """Return the new result, with the lengths of the old one if that is of the same checkpoint and number of tokens."""
    if not old:
        return new
    if old["step"] == new["step"]:
        new = join(new, {key: value for key, value in old.items() if key.startswith("copy_")})
    theirs, ours = ((evaluation["step"], {*val_tokens(evaluation).values()}) for evaluation in (old, new))
    if theirs != ours:
        return new
    old = old | dict(val_tokens=val_tokens(old))
    both = new | {key: {**old[key], **new[key]} for key in ("val_loss", "val_tokens", "val_loss_by_position")}
    theirs, ours = old.get("val_loss_as", {}), new.get("val_loss_as", {})
    others = {method: theirs.get(method, {}) | ours.get(method, {}) for method in theirs | ours}
    return both | (dict(val_loss_as=others) if others else {})


def add_other_methods(results: list[dict]) -> list[dict]:
    """Return the results, each before those of the same weights run as other methods."""
    rows = []
    for result in results:
        others = result.get("val_loss_as", {}).items()
        rows += [result, *(result | dict(name=f"{result['name']} as {m}", val_loss=loss) for m, loss in others)]
    return rows


def position_table(results: list[dict]) -> str:
    """Return one row a range of positions, one column a run: the mean loss there in sequences of the longest length."""
    longest = max((length for r in results for length in r["val_loss_by_position"]), key=int)
    columns = [r["val_loss_by_position"].get(longest, []) for r in results]
    rows = [["positions", *(r["name"] for r in results)]]
    for k in range(max(map(len, columns))):
        first, last = (2 ** (k - 1) if k else 0), min(2**k, int(longest)) - 1
        cells = [f"{column[k]:.3f}" if column else "" for column in columns]
        rows.append([f"{first}-{last}" if last > first else str(first), *cells])
    return markdown_table(rows)


def copy_table(results: list[dict]) -> str:
    """Return one row a run and kind, one column a gap: the copy gain in nats a token, with its standard error."""
    gaps = sorted({gap for r in results for gap in r["copy_gain"]["random"]}, key=int)
    rows = [["run", "spans", *gaps]]
    for kind in KINDS:
        for r in results:
            gains, errors = r["copy_gain"][kind], r["copy_gain_error"][kind]
            rows.append([r["name"], kind, *(f"{gains[g]:.2f} ± {errors[g]:.2f}" if g in gains else "" for g in gaps)])
    return markdown_table(rows)


@exit_on_failure("evaluate fewer or shorter --lengths")
def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--lengths", nargs="+", type=int, help="sequence lengths (default: those of the run)")
    parser.add_argument("--val-tokens", type=int, help="tokens at each length (default: as many as the run used)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a data folder of other text (default: the run's own)")
    others = dict(
        metavar="METHOD", dest="as_others", help="run the weights as these methods too, which train identically"
    )
    parser.add_argument("--as", nargs="+", default=[], **others)
    copy_help = "also measure copy gain at these gaps in tokens (default: T/8, T/2, 2T and so on, up to 64T)"
    parser.add_argument("--copy", nargs="*", type=int, metavar="GAP", help=copy_help)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    with exit_on_user_error():
        world = start_processes(args.device)
    results, failed = [], False
    for folder in args.runs:
        print(f"evaluating {folder}", file=sys.stderr)
        try:
            result, own = evaluate(folder, args, world)
            results.append(result)
            store(folder, result, own)
        except (ValueError, OSError) as error:  # the other runs still get their row
            print(f"error: {error}", file=sys.stderr)
            failed = True
    if results:
        if args.data:
            print(f"On the text of {args.data}:\n")
        print(loss_table(add_other_methods(results)))
        if len({(r["text"], *r["val_tokens"].values()) for r in results}) > 1:
            print("\nThese rows do not compare: they are of different text, or of different numbers of tokens of it.")
        print(f"\nLoss by position, in sequences of the longest length:\n\n{position_table(results)}")
        if copied := [r for r in results if r.get("copy_gain", {}).get("random")]:
            print(f"\nCopy gain in nats a token, by the tokens between the copies:\n\n{copy_table(copied)}")
    if failed:
        sys.exit(2)


if __name__ == "__main__":
    main()

"""How Gaussian the attention scores of a model are, on a text: QQ plots and moments of every layer and head.

    python -m scripts.logit_statistics runs/NAME --text article.txt                    a run of train_gpt.py
    python -m scripts.logit_statistics meta-llama/Llama-3.2-1B --text article.txt      Llama and Gemma-2 of Hugging Face
    python -m scripts.logit_statistics google/gemma-2-27b --text article.txt --offload

The scores are q.k times the model's own scale, before a soft cap and before whatever a method does with them, without
rotation and with it, of queries i and keys j with 1 <= j < i: without key 0, an outlier that attention sinks into. The
paper's text is the introduction of Wikipedia's article on New England. Writes figures, quantiles.csv, statistics.csv
and a page; `python -m scripts.reproduce figure_qq` makes the paper's figures of them.
"""

import argparse
import datetime
import hashlib
import importlib.util
import json
import shlex
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from configs.config import Config
from data.text import load_tokenizer
from errors import exit_on_user_error, require
from files import replace_text, to_json
from model.gpt import GPT
from runtime.device import device_name
from runtime.processes import start_processes
from runtime.run_folder import git_commit
from scripts.evaluate import check_tokenizer, load_run
from scripts.huggingface.converted import load_converted
from scripts.huggingface.load import DTYPES, RECORD, load_model, read_config, read_tokenizer
from scripts.huggingface.scores import record_layers
from scripts.reproduce import logits
from scripts.reproduce.drawing import draw_qq
from scripts.reproduce.figures import picture
from scripts.reproduce.qq import FOLDER, FORMS, Kept, describe
from scripts.shared.runs import read_run
from scripts.shared.tables import write_csv

MAX_TOKENS, MAX_PAIRS = 2048, 2**18  # the pairs are all those of 725 tokens


def main(argv: list[str] | None = None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    with exit_on_user_error():
        require(args.tokens >= 3, f"--tokens must be at least 3, got {args.tokens}")
        require(args.pairs >= 2, f"--pairs must be at least 2, got {args.pairs}")
        text, device = read_text(args.text), start_processes(args.device).device
        kept, about = (of_huggingface if is_huggingface(args.model) else of_run)(args, text, device)
        about |= dict(text=args.text.name, text_sha256=hashlib.sha256(text.encode()).hexdigest())
        about |= dict(device=device_name(device), commit=git_commit(Path(__file__).parent) or "unknown")
        about |= dict(model=args.model, made=str(datetime.date.today()))
        about |= dict(command=shlex.join(["python", "-m", "scripts.logit_statistics", *argv]))
        out = args.out or Path("runs") / FOLDER / Path(args.model).resolve().name
        write(out, kept, about)
    print(f"{kept.table()}\n\n{out / 'statistics.md'}")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.logit_statistics",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model_help = "a run folder, or a Hugging Face model: a folder, or its name on the hub"
    parser.add_argument("model", metavar="MODEL", help=model_help)
    text_help = "UTF-8; the paper's is the introduction of Wikipedia's article on New England"
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help=text_help)
    parser.add_argument("--out", type=Path, help=f"folder for what is made (default: runs/{FOLDER}/NAME)")
    tokens_help = f"at most, from the beginning of the text (default: {MAX_TOKENS})"
    parser.add_argument("--tokens", type=int, default=MAX_TOKENS, help=tokens_help)
    pairs_help = f"of query and key a head, drawn where there are more (default: {MAX_PAIRS})"
    parser.add_argument("--pairs", type=int, default=MAX_PAIRS, help=pairs_help)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    dtype_help = "of a Hugging Face model's weights (default: as they are stored)"
    parser.add_argument("--dtype", choices=DTYPES, help=dtype_help)
    offload_help = "put the weights of a Hugging Face model that do not fit into host memory and on disk (accelerate)"
    parser.add_argument("--offload", action="store_true", help=offload_help)
    return parser.parse_args(argv)


def read_text(path: Path) -> str:
    require(path.is_file(), f"--text {path}: no such file")
    try:
        return path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path} is not UTF-8: {error.reason} at byte {error.start}") from error


def is_huggingface(model: str) -> bool:
    """Return whether this is a Hugging Face model rather than a run folder. ValueError for what is neither."""
    path = Path(model)
    if not path.exists():
        return True  # a name on the hub
    config = path / "config.json"
    neither = f"{model} is neither a run folder nor a Hugging Face model: it has no config.json"
    require(config.is_file(), neither)
    try:
        return "model_type" in json.loads(config.read_text())
    except (ValueError, TypeError, RecursionError):
        return False  # load_run says what is wrong with it


def take(tokens: list[int], args: argparse.Namespace, device: torch.device) -> torch.Tensor:
    """Return the first of the text's tokens, (1, T). ValueError if there are too few."""
    require(len(tokens) >= 3, f"--text {args.text} has {len(tokens)} tokens for this model, at least 3 are needed")
    return torch.tensor([tokens[: args.tokens]], device=device)


def of_run(args: argparse.Namespace, text: str, device: torch.device) -> tuple[Kept, dict]:
    """Return what is kept of the scores of a run's model, and how they were measured."""
    folder = Path(args.model)
    require(not args.dtype and not args.offload, "--dtype and --offload are for Hugging Face models: a run has its own")
    config, model = load_run(folder, device)
    check_tokenizer(read_run(folder), Path(config.data_dir))
    tokenizer = load_tokenizer(Path(config.data_dir))
    tokens = take([tokenizer.eot, *tokenizer.encode(text)], args, device)
    return measure_run(config, model, tokens, args.pairs)


def measure_run(config: Config, model: GPT, tokens: torch.Tensor, pairs: int) -> tuple[Kept, dict]:
    kept = Kept()
    for layer, rotated, scores in logits.layer_scores(model, tokens, pairs):
        kept.add(scores, by_head=True, layer=layer, rotated=rotated)
    counts = dict(tokens=tokens.shape[1], pairs=scores.shape[1])
    dtype = str(model.dtype).removeprefix("torch.")
    return kept, counts | dict(scale=f"{config.method}'s q.k / sqrt(d)", dtype=dtype)


def of_huggingface(args: argparse.Namespace, text: str, device: torch.device) -> tuple[Kept, dict]:
    """Return what is kept of the scores of a Hugging Face model, and how they were measured."""
    config = read_config(args.model)
    tokens = take(read_tokenizer(args.model, config.vocab_size)(text)["input_ids"], args, device)
    has_accelerate = importlib.util.find_spec("accelerate") is not None
    require(has_accelerate or not args.offload, "--offload needs accelerate: pip install -r requirements-extras.txt")
    dtype = DTYPES[args.dtype] if args.dtype else config.dtype or torch.float32
    place = dict(device_map="auto") if args.offload else dict(device=device)
    load = load_converted if getattr(config, RECORD, None) else load_model
    model = load(args.model, dtype=dtype, **place)
    kept, about = measure_huggingface(model, tokens, args.pairs)
    return kept, about | dict(dtype=str(dtype).removeprefix("torch."))


def measure_huggingface(model: torch.nn.Module, tokens: torch.Tensor, max_pairs: int) -> tuple[Kept, dict]:
    kept, pairs = Kept(), logits.score_pairs(*tokens.shape, max_pairs, seed=0)
    converted, scales = getattr(model.config, RECORD, None), set()
    with tqdm(desc="layers", total=model.config.num_hidden_layers, disable=None) as progress:

        def receive(layer, scale, rotated, q, k):
            kept.add(logits.pair_scores(q, k, pairs, scale), by_head=True, layer=layer, rotated=rotated)
            scales.add(f"q.k * {scale:.6g}")
            progress.update(layer + 1 - progress.n)

        record_layers(model, tokens, receive)
    cap = getattr(model.config, "attn_logit_softcapping", None)
    scale = f"scores that {converted['name']} starts from" if converted else ", ".join(sorted(scales))
    scale += f", before the soft cap at {cap:g}" if cap else ""
    return kept, dict(tokens=tokens.shape[1], pairs=len(pairs[0]), scale=scale)


def write(out: Path, kept: Kept, about: dict):
    """Write figures, rows and page into a folder; about.json last, by which it is known to be whole."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "about.json").unlink(missing_ok=True)
    shown = []
    for name, by_head in dict(layers=False, heads=True).items():
        blocks = {form: kept.lines(rotated, by_head) for rotated, form in FORMS.items()}
        draw_qq(out / name, {form: lines for form, lines in blocks.items() if lines})
        shown.append(f"{'Each head of a layer' if by_head else 'All heads of a layer together'}:\n\n{picture(name)}")
    write_csv(out / "quantiles.csv", kept.quantiles)
    write_csv(out / "statistics.csv", kept.statistics)
    text = (
        f"Attention scores of {about['model']}: {describe(about)}. Only pairs with t > 0, and without key 0. Red: the "
    )
    text += "Gaussian of their mean and standard deviation. The table pools the heads of a layer; statistics.csv has "
    text += "each (layers there from 0)."
    replace_text(out / "statistics.md", "\n\n".join(["# Logit statistics", text, kept.table(), *shown]) + "\n")
    replace_text(out / "about.json", to_json(about, indent=1) + "\n")


if __name__ == "__main__":
    main()

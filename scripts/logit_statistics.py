"""Measures how Gaussian the attention scores of a model are on a text: QQ plots and moments of every layer and head.

    python -m scripts.logit_statistics runs/NAME --text article.txt                    a run of train_gpt.py
    python -m scripts.logit_statistics meta-llama/Llama-3.2-1B --text article.txt      Llama and Gemma-2 of Hugging Face
    python -m scripts.logit_statistics google/gemma-2-27b --text article.txt --offload

Scores are q.k times the model's scale, before a soft cap and the method's changes, without rotation and with it, of
queries i and keys j, 1 <= j < i: key 0 is an outlier, the attention sink. The paper's text is the introduction of
Wikipedia's article on New England. `python -m scripts.reproduce figure_qq` makes the paper's figures of the results.
"""

import argparse
import datetime
import hashlib
import json
import shlex
import sys
from pathlib import Path

import torch

from data.tokenizer import load_tokenizer
from errors import exit_on_user_error, require
from files import replace_text, to_json
from runtime.device import device_name
from runtime.processes import start_processes
from runtime.run_folder import git_commit
from scripts.evaluate import check_tokenizer, load_run
from scripts.hf.attention import RECORD
from scripts.hf.load import DTYPES, load_model, read_config, read_tokenizer
from scripts.hf.scores import record_layers
from scripts.reproduce import logits
from scripts.reproduce.drawing import draw_qq, picture
from scripts.reproduce.qq import FOLDER, FORMS, Kept, describe
from scripts.shared.runs import read_run
from scripts.shared.tables import write_csv

COMMAND = "python -m scripts.logit_statistics"
MAX_TOKENS, MAX_PAIRS = 2048, 2**18  # 2^18 pairs are all those of 725 tokens


@exit_on_user_error()
def main(argv: list[str] | None = None):
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(COMMAND, description=__doc__.split("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="a run folder, or a Hugging Face folder or name on the hub")
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="a text in UTF-8")
    parser.add_argument("--out", type=Path, help=f"folder for the results (default: runs/{FOLDER}/NAME)")
    parser.add_argument("--tokens", type=int, default=MAX_TOKENS, help="most tokens, from the start (default: 2048)")
    parser.add_argument("--pairs", type=int, default=MAX_PAIRS, help="most pairs a head, at random (default: 2^18)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtype", choices=DTYPES, help="of a Hugging Face model (default: as stored)")
    parser.add_argument("--offload", action="store_true", help="move weights that do not fit to host memory and disk")
    args = parser.parse_args(argv)
    require(args.tokens >= 3 and args.pairs >= 2, "--tokens must be at least 3, and --pairs at least 2.")
    text, device = args.text.read_text(encoding="utf-8").strip(), start_processes(args.device).device
    config = Path(args.model) / "config.json"
    is_run = config.is_file() and "model_type" not in json.loads(config.read_text())
    kept, about = (measure_run if is_run else measure_huggingface)(args, text, device)
    about |= dict(
        model=args.model, text=args.text.name, text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        device=device_name(device), commit=git_commit(Path(__file__).parent) or "unknown",
        made=str(datetime.date.today()), command=shlex.join([*COMMAND.split(), *argv]),
    )  # fmt: skip
    out = args.out or Path("runs") / FOLDER / Path(args.model).resolve().name
    write(out, kept, about)
    print(f"{kept.table()}\n\n{out / 'statistics.md'}")


def measure_run(args: argparse.Namespace, text: str, device: torch.device) -> tuple[Kept, dict]:
    """Return the statistics of a run's model, and fields of about.json."""
    require(not args.dtype and not args.offload, "--dtype and --offload are for Hugging Face models. Leave them out.")
    config, model = load_run(Path(args.model), device)
    check_tokenizer(read_run(Path(args.model)), Path(config.data_dir))
    tokenizer, kept = load_tokenizer(Path(config.data_dir)), Kept()
    tokens = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)][: args.tokens]], device=device)
    for layer, rotated, scores in logits.layer_scores(model, tokens, args.pairs):
        kept.add(scores, by_head=True, layer=layer, rotated=rotated)
    scale, dtype = f"{config.method}'s q.k / sqrt(d)", str(model.dtype).removeprefix("torch.")
    return kept, dict(tokens=tokens.shape[1], pairs=scores.shape[1], scale=scale, dtype=dtype)


def measure_huggingface(args: argparse.Namespace, text: str, device: torch.device) -> tuple[Kept, dict]:
    """Return the statistics of a Hugging Face model, and fields of about.json."""
    config, kept, scales = read_config(args.model), Kept(), set()
    tokens = read_tokenizer(args.model, config.vocab_size)(text)["input_ids"][: args.tokens]
    tokens = torch.tensor([tokens], device=device)  # (1, T)
    pairs = logits.score_pairs(*tokens.shape, args.pairs, seed=0)
    dtype = DTYPES[args.dtype] if args.dtype else config.dtype or torch.float32
    model = load_model(args.model, dtype=dtype, device=device, device_map="auto" if args.offload else None)

    def receive(layer, scale, rotated, q, k):
        kept.add(logits.pair_scores(q, k, pairs, scale), by_head=True, layer=layer, rotated=rotated)
        scales.add(f"q.k * {scale:.6g}")

    record_layers(model, tokens, receive)
    converted, cap = getattr(model.config, RECORD, None), getattr(config, "attn_logit_softcapping", None)
    scale = f"scores that {converted['name']} starts from" if converted else ", ".join(sorted(scales))
    scale += f", before the soft cap at {cap:g}" if cap else ""
    dtype = str(dtype).removeprefix("torch.")
    return kept, dict(tokens=tokens.shape[1], pairs=len(pairs[0]), scale=scale, dtype=dtype)


def write(out: Path, kept: Kept, about: dict):
    """Write figures, tables and page into a folder. about.json comes last and marks it as complete."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "about.json").unlink(missing_ok=True)
    for name, by_head in dict(layers=False, heads=True).items():
        blocks = {form: kept.lines(rotated, by_head) for rotated, form in FORMS.items()}
        draw_qq(out / name, {form: lines for form, lines in blocks.items() if lines})
    write_csv(out / "quantiles.csv", kept.quantiles)
    write_csv(out / "statistics.csv", kept.statistics)
    text = f"""# Logit statistics

Attention scores of {about["model"]}: {describe(about)}. Only pairs with t > 0, and without key 0. Red: the Gaussian of
their mean and standard deviation. The table and the first figure pool the heads of a layer; statistics.csv and the
second figure have each head. statistics.csv counts layers from 0."""
    replace_text(out / "statistics.md", "\n\n".join([text, kept.table(), picture("layers"), picture("heads")]) + "\n")
    replace_text(out / "about.json", to_json(about, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measure whether the attention scores of a model are Gaussian: QQ plots and moments of each layer and head.

    python -m scripts.logit_statistics runs/NAME --text article.txt                    a run of train_gpt.py
    python -m scripts.logit_statistics meta-llama/Llama-3.2-1B --text article.txt      Llama or Gemma 2 of Hugging Face

A score is q.k times the model's scale, before any soft cap and before the method changes it. Scores are measured
without rotation and with it, for queries i and keys j, 1 <= j < i. Key 0 is left out, because it is an attention sink.
The paper's text is the introduction of Wikipedia's article on New England. The output folder gets QQ plots (layers.png)
and numbers (statistics.json, layers from 0). `python -m scripts.reproduce figure_qq` makes the paper's figures of them.
"""

import datetime
import hashlib
import shlex
import sys
from pathlib import Path

import torch

from data.tokenizer import load_tokenizer
from errors import exit_on_user_error
from files import parse_object, read_bytes, replace_text, to_json
from model.scores import layer_scores
from runtime.device import device_name
from runtime.processes import start_processes
from runtime.run_folder import git_commit
from scripts.hf import scores as hf_scores
from scripts.hf.convert import attention_layers
from scripts.hf.load import load_model
from scripts.reproduce.logits import FOLDER, describe_scores, draw_qq, moments_table
from scripts.shared.arguments import Parser
from scripts.shared.runs import load_run, read_run, tokenizer_of_run

COMMAND = "python -m scripts.logit_statistics"
MAX_PAIRS = 2**18  # random pairs per head. Texts of up to 725 tokens have fewer pairs, so all are measured.


@exit_on_user_error()
def main():
    # 1. The arguments.
    parser = Parser("python -m scripts.logit_statistics", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="run folder, Hugging Face folder, or name on the hub")
    add("--text", required=True, type=Path, metavar="FILE", help="text file in UTF-8")
    add("--out", type=Path, help=f"folder for the results (default: runs/{FOLDER}/NAME)")
    add("--tokens", type=int, default=2048, help="reads at most this many tokens (default: 2048)")
    parser.add_device()
    args = parser.parse_args()
    text, device = args.text.read_text(encoding="utf-8").strip(), start_processes(args.device).device

    # 2. The model: a run of ours, or a model of Hugging Face.
    folder = Path(args.model)
    config_file = folder / "config.json"
    if config_file.is_file() and "model_type" not in parse_object(read_bytes(config_file), str(config_file)):
        (_, model), tokenizer = load_run(folder, device), tokenizer_of_run(read_run(folder))
        measure, scale = layer_scores, "q.k / sqrt(d)"
    else:
        model, tokenizer = load_model(args.model, dtype="auto", device=device), load_tokenizer(args.model)
        measure, scale = hf_scores.layer_scores, f"q.k * {attention_layers(model)[0].scaling:.6g}"

    # 3. The scores of each layer.
    tokens = [tokenizer.eot, *tokenizer.encode(text)][: args.tokens]
    layers = []
    for layer, rotated, scores in measure(model, torch.tensor([tokens], device=device), MAX_PAIRS):
        layers.append(describe_scores(scores, layer=layer, rotated=rotated))
    statistics = {
        "model": args.model,
        "text": args.text.name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": len(tokens),
        "pairs": scores.shape[1],
        "scale": scale,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(device),
        "commit": git_commit(Path(__file__).parent) or "unknown",
        "made": str(datetime.date.today()),
        "layers": layers,
        "command": shlex.join([*COMMAND.split(), *sys.argv[1:]]),
    }

    # 4. The files.
    place = Path(args.model).resolve()
    place = place.parent if place.name == "model" else place  # of continue_pretraining: RUN/model
    out = args.out or Path("runs") / FOLDER / place.name
    out.mkdir(parents=True, exist_ok=True)
    draw_qq(out / "layers", layers)
    replace_text(out / "statistics.json", to_json(statistics, indent=1) + "\n")
    print(f"{moments_table({args.model: layers})}\n\n{out}")


if __name__ == "__main__":
    main()

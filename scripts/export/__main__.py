"""Writes a trained model as a folder for Hugging Face's transformers, which loads it where this repository is not.

    python -m scripts.export runs/NAME --to hf                       RUN/hf, or --out FOLDER
    python -m scripts.export runs/NAME --tokenizer FOLDER            where the run's tokenizer is, if not in its data

The folder holds the weights of the latest checkpoint (float32, safetensors), the configuration, the tokenizer, the code
that computes the model, and a model card. AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True) gives
the run's own logits. `python -m scripts.push` puts it on the hub.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch

from data.shards import TOKENIZER_FILE, tokenizer_of
from data.text import END_OF_TEXT
from errors import exit_on_user_error, require
from model.methods import method_options
from runtime.checkpoint import latest_checkpoint
from scripts.evaluate import load_run
from scripts.export.card import model_card
from scripts.export.modules import ROOT, export_modules
from scripts.huggingface.load import import_transformers, read_tokenizer
from scripts.shared.runs import StoredRun, read_run

GPT2 = "openai-community/gpt2"  # on the hub
CODE = "scripts.export.modeling_method_gpt"
CLASSES = dict(
    AutoConfig="configuration_method_gpt.MethodGPTConfig",
    AutoModelForCausalLM="modeling_method_gpt.MethodGPTForCausalLM",
)


def export(folder: Path, out: Path, tokenizer: str | None = None) -> int:
    """Write the model of a run folder to `out`, whole or not at all, and return the number of its parameters.

    tokenizer: a data folder, or GPT-2's as transformers finds it (default: that of the run's data folder, or GPT-2's
    from the hub). ValueError or OSError, in one line, for what cannot be exported, and where `out` exists.
    """
    require(not out.exists(), f"{out} exists: remove it, or choose another --out")
    import_transformers()
    config, gpt = load_run(folder, torch.device("cpu"))
    run, step = read_run(folder), int(latest_checkpoint(folder / "checkpoints").stem.removeprefix("step_"))
    encoder = load_tokenizer(run, tokenizer)
    method = config.method_at(step)
    options = {name: value for name, value in config.method_options.items() if name in method_options(method)}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as temporary:
        whole = Path(temporary) / out.name
        make_model(config, gpt, method, options, encoder).save_pretrained(whole)
        encoder.save_pretrained(whole)
        for name, text in export_modules(CODE).items():
            (whole / name).write_text(text)
        shutil.copyfile(ROOT / "LICENSE", whole / "LICENSE")
        parameters = sum(p.numel() for p in gpt.parameters())
        (whole / "README.md").write_text(model_card(run, method, options, step, parameters))
        os.replace(whole, out)
    return parameters


def make_model(config, gpt: torch.nn.Module, method: str, options: dict, encoder):
    """Return the model of transformers with these weights and this tokenizer's special tokens."""
    from scripts.export.modeling_method_gpt import MethodGPTConfig, MethodGPTForCausalLM

    fields = ("vocab_size", "num_layers", "num_heads", "model_dim", "train_length", "position_scale")
    end = encoder.eos_token_id
    new = MethodGPTConfig(
        **{name: getattr(config, name) for name in fields}, method=method, method_options=options,
        max_position_embeddings=max(config.train_length, *config.val_lengths),
        bos_token_id=end, eos_token_id=end, pad_token_id=end, auto_map=CLASSES, dtype="float32",
    )  # fmt: skip
    model = MethodGPTForCausalLM(new)
    model.gpt.load_state_dict(gpt.state_dict())
    return model


def load_tokenizer(run: StoredRun, where: str | None):
    """Return the tokenizer of a run as transformers has it. ValueError if it is not there or is another one."""
    transformers = import_transformers()
    data, known = Path(where or run.config.data_dir), run.data.get("tokenizer")
    if not known and data.is_dir():  # a run of before data.json
        known = tokenizer_of(data)
    require(known, f"it is not known which tokenizer {run.path} has: give its data folder with --tokenizer")
    if known == "gpt2":
        encoder = read_tokenizer(where or GPT2, run.config.vocab_size)
        end = encoder.convert_tokens_to_ids(END_OF_TEXT)
        is_gpt2 = (len(encoder), end) == (50257, 50256)
        require(is_gpt2, f"{where or GPT2} is not GPT-2's tokenizer, which {run.path} has")
    else:
        there = tokenizer_of(data) if data.is_dir() else None
        words = f"{data} does not hold the tokenizer of {run.path}, {TOKENIZER_FILE} of sha256 {known[:12]}"
        require(there == known, f"{words}: give the folder that does with --tokenizer")
        encoder = transformers.PreTrainedTokenizerFast(tokenizer_file=str(data / TOKENIZER_FILE))
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)  # every document begins with it
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=encoder.backend_tokenizer, padding_side="left", **special
    )


@exit_on_user_error()
def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        prog="python -m scripts.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--to", choices=["hf"], default="hf", help="the form: a folder for transformers")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="which must not exist (default: RUN/hf)")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="the data folder of the run's tokenizer, or GPT-2's for transformers"
    )
    args = parser.parse_args(argv)
    out = args.out or args.run / "hf"
    parameters = export(args.run, out, args.tokenizer)
    use = f"AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True)"
    print(f"{out}: {parameters:,} parameters: {use}")


if __name__ == "__main__":
    main()

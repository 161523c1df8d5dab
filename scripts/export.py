"""Writes a trained model as a folder for Hugging Face's transformers, which loads it where this repository is not.

    python -m scripts.export runs/NAME --to hf                       RUN/hf, or --out FOLDER
    python -m scripts.export runs/NAME --tokenizer FOLDER            a folder with the run's tokenizer
    python -m scripts.export runs/NAME --push USER/MODEL             uploads the folder to the hub, too

The folder holds the weights of the latest checkpoint (float32, safetensors), the configuration, the tokenizer, the code
of the model, and a model card. AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True) gives the run's own
logits. --push uploads what --out holds already, or exports first. Without a login (`hf auth login`) it lists the files.
"""

import argparse
import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path

import torch

from configs.config import NOT_MATHEMATICS, Config
from configs.runs import Run
from data.shards import TOKENIZER_FILE, tokenizer_of
from data.tokenizer import END_OF_TEXT
from errors import exit_on_user_error, require
from model.methods import method_options
from runtime.checkpoint import latest_checkpoint
from scripts.evaluate import load_run
from scripts.hf.load import import_transformers, read_tokenizer
from scripts.hf.modules import ROOT, export_modules
from scripts.shared.runs import StoredRun, log_values, read_run
from scripts.shared.tables import loss_table

GPT2 = "openai-community/gpt2"  # on the hub
BASE = "gpt_162m_4k"  # the preset that is all defaults
CLASSES = dict(
    AutoConfig="configuration_method_gpt.MethodGPTConfig",
    AutoModelForCausalLM="modeling_method_gpt.MethodGPTForCausalLM",
)
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [attention, long-context, custom_code]
---

# {name}

A base model for research with the attention method `{method}` (options {options}): a GPT of {parameters:,} parameters,
trained at {length} tokens in a study of [Scale-invariant attention](https://arxiv.org/abs/2505.17083) (Anson, Wang and
Aitchison, NeurIPS 2025).

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on the hub
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)  # dtype="bfloat16" for GPUs
inputs = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))
```

`trust_remote_code=True` runs the Python files of this folder: read them, or trust their author. They need transformers
5. Prompts may be longer than the training length; the prompts of a batch must have equal lengths. Methods that scale to
the length of the text use that of prompt and new tokens, or `generate(..., target_length=N)`.

Losses: {losses}

Training data: {data} (fingerprint {fingerprint}); tokenizer: {tokenizer}. Step {step} of {steps}, {tokens:,} tokens.
Commit: {commit}. The same run:

    {command}
"""


@exit_on_user_error()
def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        prog="python -m scripts.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--to", choices=["hf"], default="hf", help="the form: a folder for transformers")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="new folder (default: RUN/hf)")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="data folder of the run's tokenizer, or GPT-2's folder")
    parser.add_argument("--push", metavar="USER/MODEL", help="upload to this repository of the hub, made if missing")
    parser.add_argument("--private", action="store_true", help="make a missing repository private")
    parser.add_argument("--dry-run", action="store_true", help="list the files that --push would upload")
    args = parser.parse_args(argv)
    out = args.out or args.run / "hf"
    require(args.push is None or "/" in args.push, f"--push {args.push} is not of the form USER/MODEL.")
    if args.push is None or not out.exists():
        parameters = export(args.run, out, args.tokenizer)
        use = f"AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True)"
        print(f"{out}: {parameters:,} parameters: {use}")
    if args.push:
        push(out, args.push, args.private, args.dry_run)


def export(folder: Path, out: Path, tokenizer: str | None = None) -> int:
    """Write the model of a run folder to `out`, all of it or nothing. Return the number of its parameters.

    tokenizer: a data folder, or GPT-2's name or folder (default: the run's data folder, or GPT-2's name on the hub).
    Raises ValueError or OSError for a run that cannot be exported, and where `out` exists.
    """
    require(not out.exists(), f"{out} exists. Remove it, or choose another --out.")
    import_transformers()
    config, gpt = load_run(folder, torch.device("cpu"))
    run, step = read_run(folder), int(latest_checkpoint(folder / "checkpoints").stem.removeprefix("step_"))
    encoder = load_tokenizer(run, tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as temporary:
        whole = Path(temporary) / out.name
        model = make_model(config, gpt, encoder.eos_token_id)
        model.save_pretrained(whole)
        encoder.save_pretrained(whole)
        for name, text in export_modules("scripts.hf.modeling_method_gpt").items():
            (whole / name).write_text(text)
        shutil.copyfile(ROOT / "LICENSE", whole / "LICENSE")
        (whole / "README.md").write_text(model_card(run, step, model))
        os.replace(whole, out)
    return model.num_parameters()


def make_model(config: Config, gpt: torch.nn.Module, end_of_text: int):
    """Return the transformers model with these weights. A default tau is written down, so the folder stays right."""
    from scripts.hf.modeling_method_gpt import MethodGPTConfig, MethodGPTForCausalLM

    known = method_options(config.method)
    tau = dict(tau=known["tau"].default) if "tau" in known else {}
    new = MethodGPTConfig(
        vocab_size=config.vocab_size, num_layers=config.num_layers, num_heads=config.num_heads,
        model_dim=config.model_dim, train_length=config.train_length, position_scale=config.position_scale,
        method=config.method, method_options=tau | config.method_options,
        max_position_embeddings=max(config.train_length, *config.val_lengths),
        bos_token_id=end_of_text, eos_token_id=end_of_text, pad_token_id=end_of_text, auto_map=CLASSES, dtype="float32",
    )  # fmt: skip
    model = MethodGPTForCausalLM(new)
    model.gpt.load_state_dict(gpt.state_dict())
    return model


def load_tokenizer(run: StoredRun, place: str | None):
    """Return the tokenizer of a run as transformers' class. Raises ValueError if `place` holds another one."""
    transformers = import_transformers()
    data, known = Path(place or run.config.data_dir), run.data.get("tokenizer")
    require(known, f"{run.path} does not name its tokenizer in data.json.")
    if known == "gpt2":
        encoder = read_tokenizer(place or GPT2, run.config.vocab_size)
        is_gpt2 = (len(encoder), encoder.convert_tokens_to_ids(END_OF_TEXT)) == (50257, 50256)
        require(is_gpt2, f"{place or GPT2} does not hold GPT-2's tokenizer, which {run.path} has. Change --tokenizer.")
    else:
        same = data.is_dir() and tokenizer_of(data) == known
        message = f"{data} does not hold the tokenizer of {run.path}, {TOKENIZER_FILE} of sha256 {known[:12]}"
        require(same, f"{message}. Give the folder that does with --tokenizer.")
        encoder = transformers.PreTrainedTokenizerFast(tokenizer_file=str(data / TOKENIZER_FILE))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=encoder.backend_tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def model_card(run: StoredRun, step: int, model) -> str:
    """Return the README.md of an exported run: method, losses, data, command."""
    config, defaults, losses = run.config, vars(Config()), "none, because the run has not ended."
    changes = {name: value for name, value in vars(config).items() if value != defaults[name]}
    changes = {name: value for name, value in changes.items() if name not in NOT_MATHEMATICS}
    if run.summary:
        row = dict(name=run.path.name, train_length=config.train_length, val_loss=run.summary["val_loss"])
        losses = f"nats a token, by length of the text.\n\n{loss_table([row])}"
    return CARD.format(
        name=run.path.name, method=config.method, options=json.dumps(model.config.method_options),
        parameters=model.num_parameters(), length=config.train_length, losses=losses, data=Path(config.data_dir).name,
        fingerprint=run.text or "unknown", tokenizer=run.data["tokenizer"], step=step, steps=config.steps,
        tokens=step * config.batch_tokens, commit=", ".join(log_values(run.path, "commit")),
        command=shlex.join(["python", "train_gpt.py", *Run(BASE, changes).arguments[:-2]]),  # without --name
    )  # fmt: skip


def push(folder: Path, repo: str, private: bool, dry_run: bool):
    """Upload the files of an exported folder, or list them if there is no login."""
    from huggingface_hub import HfApi, get_token

    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        print(f"{path.stat().st_size:>14,}  {path.name}")
    if dry_run or not get_token():
        print(f"nothing was uploaded to {repo}" + ("" if dry_run else ": log in with `hf auth login`"))
        return
    api = HfApi()
    url = api.create_repo(repo, private=private, exist_ok=True)
    api.upload_folder(repo_id=repo, folder_path=folder, commit_message="A model exported by scripts.export")
    print(url)


if __name__ == "__main__":
    main()

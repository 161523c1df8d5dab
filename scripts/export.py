"""Writes a trained model as a folder that Hugging Face's transformers loads without this repository.

    python -m scripts.export runs/NAME                   writes RUN/hf, or the folder of --out
    hf upload USER/MODEL runs/NAME/hf --private          uploads the folder to the hub

The folder holds the latest checkpoint (float32, safetensors), configuration, tokenizer, model code, and a model card.
AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True) gives the same logits as the run.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch

from data.download import model_file
from data.shards import TOKENIZER_FILE
from data.tokenizer import Tokenizer
from errors import exit_on_user_error, require
from files import naming
from runtime.checkpoint import latest_checkpoint
from scripts.hf.load import import_transformers
from scripts.hf.modules import ROOT, export_modules
from scripts.shared.arguments import Parser
from scripts.shared.runs import StoredRun, load_run, read_run, tokenizer_file
from scripts.shared.tables import loss_table

GPT2 = "openai-community/gpt2"  # on the hub
CODE = "modeling_method_gpt"  # transformers imports this file first
CLASSES = {"AutoConfig": f"{CODE}.MethodGPTConfig", "AutoModelForCausalLM": f"{CODE}.MethodGPTForCausalLM"}
FIELDS = """
vocab_size num_layers num_heads model_dim train_length position_scale method method_options
""".split()  # of our configuration, which the exported one has, too
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [attention, long-context, custom_code]
---

# {name}

A base model for research on [scale-invariant attention](https://arxiv.org/abs/2505.17083): a GPT of {parameters:,}
parameters with the attention method `{method}` (options {options}), trained at {length} tokens.

```python
tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code=True)  # dtype="bfloat16" for GPUs
```

`trust_remote_code=True` runs the Python files of this folder, which need transformers 5. Prompts may be longer than the
training length. All prompts of a batch must have the same length.

Losses: {losses}

Training data: {data} (fingerprint {fingerprint}); tokenizer: {tokenizer}. Step {step} of {steps}, {tokens:,} tokens.
Commit: {commit}.
"""


@exit_on_user_error()
def main():
    parser = Parser("python -m scripts.export", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="new folder (default: RUN/hf)")
    args = parser.parse_args()
    out = args.out or args.run / "hf"
    print(f"{out}: {export(args.run, out):,} parameters")


def export(folder: Path, out: Path) -> int:
    """Write the model of a run folder to `out`, and return its number of parameters. A failure leaves no folder.

    Raise ValueError or OSError if the run cannot be exported or `out` exists.
    """
    # 1. The model, in the class of transformers.
    require(not out.exists(), f"{out} exists. Remove it, or choose another --out.")
    config, gpt = load_run(folder, torch.device("cpu"))
    import_transformers()
    from scripts.hf.modeling_method_gpt import MethodGPTConfig, MethodGPTForCausalLM

    run, step = read_run(folder), int(latest_checkpoint(folder / "checkpoints").stem.removeprefix("step_"))
    encoder = load_tokenizer(run)
    fields = {field: getattr(config, field) for field in FIELDS}
    fields |= {token: getattr(encoder, token) for token in ("bos_token_id", "eos_token_id", "pad_token_id")}
    longest = max(config.train_length, *config.val_lengths)
    exported = MethodGPTConfig(**fields, max_position_embeddings=longest, auto_map=CLASSES, dtype="float32")
    model = MethodGPTForCausalLM(exported)
    model.gpt.load_state_dict(gpt.state_dict())

    # 2. The folder, which appears as a whole.
    with naming("write", out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with naming("write", out), tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as temporary:
        whole = Path(temporary) / out.name
        model.save_pretrained(whole)
        encoder.save_pretrained(whole)
        for name, text in export_modules(f"scripts.hf.{CODE}").items():
            (whole / name).write_text(text)
        shutil.copyfile(ROOT / "LICENSE", whole / "LICENSE")
        (whole / "README.md").write_text(model_card(run, step, model.num_parameters()))
        os.replace(whole, out)
    return model.num_parameters()


def load_tokenizer(run: StoredRun):
    """Return the tokenizer of a run as an object of transformers. Raise ValueError if its file has changed."""
    file = tokenizer_file(run)
    if file == "gpt2":
        file = model_file(GPT2, TOKENIZER_FILE)
    token = Tokenizer(file).eot_text
    fast = import_transformers().PreTrainedTokenizerFast
    return fast(tokenizer_file=str(file), bos_token=token, eos_token=token, pad_token=token)


def model_card(run: StoredRun, step: int, parameters: int) -> str:
    """Return the README.md of an exported run: method, losses, data."""
    config, losses = run.config, "none, because the run has not ended."
    if run.summary:
        row = {"name": run.path.name, "train_length": config.train_length, "val_loss": run.summary["val_loss"]}
        losses = f"nats a token, by length of the text.\n\n{loss_table([row])}"
    return CARD.format(
        name=run.path.name,
        method=config.method,
        options=json.dumps(config.method_options),
        parameters=parameters,
        length=config.train_length,
        losses=losses,
        data=Path(config.data_dir).name,
        fingerprint=run.text or "unknown",
        tokenizer=run.data["tokenizer"],
        step=step,
        steps=config.steps,
        tokens=step * config.batch_tokens,
        commit=", ".join(run.logged("commit")),
    )


if __name__ == "__main__":
    main()

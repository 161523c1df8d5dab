"""Writes the README.md of an exported model: what was trained, on what, how well it does, how to use and cite it."""

import json
import shlex
from pathlib import Path

from configs.config import NOT_MATHEMATICS, Config
from configs.sweeps import Run
from data.shards import read_manifest
from scripts.shared.run_files import on_own_text, val_tokens
from scripts.shared.runs import StoredRun, log_values
from scripts.shared.tables import loss_table

BASE = "gpt_162m_4k"  # the preset that is all defaults

USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on the hub
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)  # dtype="bfloat16" for GPUs
inputs = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))
```"""

NOTES = (
    "`trust_remote_code=True` runs the Python files of this folder: read them, or trust whom they are from. It needs"
    " transformers 5. Prompts may be longer than the texts of the training; those of a batch are padded on the left."
    " Attention methods that scale to the length of the text take the prompt's with all new tokens: `generate(...,"
    " target_length=N)` sets another."
)

CITATION = """```bibtex
@inproceedings{anson2025scale,
  title={Scale-invariant attention},
  author={Anson, Ben and Wang, Xi and Aitchison, Laurence},
  booktitle={Advances in Neural Information Processing Systems},
  year={2025},
  url={https://arxiv.org/abs/2505.17083}
}
```"""


def training_words(config: Config) -> list[str]:
    """Return what follows `train_gpt.py` for a run of the same mathematics."""
    defaults = vars(Config())
    compared = [name for name in defaults if name not in NOT_MATHEMATICS]
    changes = {name: getattr(config, name) for name in compared if getattr(config, name) != defaults[name]}
    return Run(BASE, changes).arguments[:-2]  # without its name


def losses(run: StoredRun) -> str:
    """Return the table of a run's validation losses, also of those that scripts.evaluate found on the run's own text,
    or why there is none."""
    results = [found for found in (on_own_text(run.json("evaluation.json") or {}), run.summary) if found]
    by_length = {length: loss for found in results for length, loss in found["val_loss"].items()}
    if not by_length:
        return "The run has not ended, so there are none."
    tokens = {length: number for found in results for length, number in val_tokens(found).items()}
    counts = ", ".join(f"{number:,} at {length}" for length, number in sorted(tokens.items(), key=lambda x: int(x[0])))
    row = dict(name=run.path.name, train_length=run.config.train_length, val_loss=by_length)
    return f"{loss_table([row])}\n\nNats a token, by the length of the text; validation tokens: {counts}."


def model_card(run: StoredRun, method: str, options: dict, step: int, parameters: int) -> str:
    """Return the text of the card of a run's model after a step, with the attention method that it has then."""
    config, manifest = run.config, None
    if Path(config.data_dir).is_dir():
        manifest = read_manifest(Path(config.data_dir))
    source = (manifest or {}).get("source")
    head = [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [attention, long-context, custom_code]",
    ]
    head += [f"datasets: [{json.dumps(source)}]"] if source else []
    with_options = f", with {json.dumps(options)}" if options else ""
    text = f"the folder {Path(config.data_dir).name}" + (f", which is {source}" if source else "")
    known = run.data.get("tokenizer", "unknown")
    tokenizer = "GPT-2's" if known == "gpt2" else f"sha256 {known[:12]}"
    commit = ", ".join(log_values(run.path, "commit"))
    words = shlex.join(["python", "train_gpt.py", *training_words(config)])
    lines = [
        "---", *head, "---", "", f"# {run.path.name}", "",
        f"A GPT of {parameters:,} parameters ({config.num_layers} layers, {config.num_heads} heads, width"
        f" {config.model_dim}) with the attention method `{method}`{with_options}; lengths in tokens are"
        f" {config.position_scale:g} times the paper's. It was trained at {config.train_length} tokens, in a study of"
        " the paper below. It is a base model for research: it completes text. Its code is in this folder.", "",
        "## Use", "", USE, "",
        NOTES, "",
        "## Losses", "", losses(run), "",
        "## Training", "",
        f"Data: {text} (fingerprint {run.text or 'unknown'}); tokenizer: {tokenizer}. Step {step} of {config.steps},"
        f" {step * config.batch_tokens:,} tokens. Commit: {commit}. The same run:", "",
        f"    {words}", "",
        "## Cite", "", CITATION, "",
    ]  # fmt: skip
    return "\n".join(lines)

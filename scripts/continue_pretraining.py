"""Continues the pretraining of a Hugging Face model with another attention method, as in the paper's table of
Llama 2 7B: validates at 4k, 16k and 64k, trains at 4k, and validates again.

    python -m scripts.continue_pretraining MODEL --method scale_invariant_p_rope --data_dir data/fineweb_llama2
    python -m scripts.continue_pretraining MODEL --method p_rope --save_model       writes RUN/model at the end
    python -m scripts.continue_pretraining MODEL --dry_run                          the memory that a run needs
    torchrun --standalone --nproc_per_node=8 -m scripts.continue_pretraining MODEL ...

MODEL is a folder or a name on the hub, of the family llama. Each run leaves everything in runs/continued/NAME/, as
train_gpt.py does; `--resume auto` continues it from its latest checkpoint. `python -m scripts.reproduce table_llama`
makes the table. docs/huggingface.md lists our choices where the paper is silent.
"""

import functools
import hashlib
import os
import shutil
import sys
from pathlib import Path

import torch

from data.download import model_file
from data.loader import TrainLoader
from data.shards import TOKENIZER_FILE, TokenStream, tokenizer_of
from data.tokenizer import TOKENIZER_CONFIG
from errors import exit_on_user_error, require
from optim.sharded import Group, Optimizers
from runtime.build import open_text, train_step
from runtime.device import compute_dtype
from runtime.metrics import read_metrics
from runtime.processes import World, fail_together, start_processes
from runtime.run import Run
from runtime.validation import Validation
from scripts.hf.attention import convert
from scripts.hf.load import load_model, read_config
from scripts.hf.scores import rescale
from scripts.hf.settings import Settings, read_settings
from scripts.hf.training import AdamW, WithLoss, count_memory


def main(argv: list[str] | None = None):
    # ---- setup: mistakes of the user are reported here, before a run folder exists ----
    argv = sys.argv[1:] if argv is None else argv
    with exit_on_user_error():
        config = read_settings([word for word in argv if word not in ("--dry_run", "--save_model")], __doc__)
        if "--dry_run" in argv:
            return print_memory(config)
        world = start_processes(config.device)
        with fail_together(world):
            train_text, val_text = open_text(config, world)
            check_tokenizer(config)
            torch.manual_seed(config.seed)  # of the stochastic rounding
            model = build_model(config, world, val_text)
            adamw = functools.partial(AdamW, weight_decay=config.weight_decay)
            groups = {"all": Group([*model.parameters()], adamw, config.lr)}
            optimizers = Optimizers(groups, world.rank, world.world_size, skip=config.on_nonfinite == "skip")
            validation = Validation(config, model, val_text, world)
        run = ContinuedRun(config, world, model, optimizers, {config.train_length: ()}, train_text, val_text, "off")

    # ---- the run ----
    with run:
        first_step = run.restore()
        loader = TrainLoader(
            train_text, batch_tokens=config.batch_tokens, length=config.train_length,
            micro_batch_tokens=config.micro_batch_tokens, vocab_size=config.vocab_size, rank=world.rank,
            world_size=world.world_size, start_step=first_step, device=world.device,
        )  # fmt: skip
        for step in range(first_step, config.steps + 1):
            if run.save_or_stop(step):
                break
            if tokens_by_length := validation.due(step):
                run.log_validation(step, validation.measure(tokens_by_length, run.stop_requested))
            if step == config.steps:
                break
            loss, grad_norm = train_step(model, next(loader), None, optimizers, 1.0, world)
            run.log_step(step + 1, optimizers.learning_rates(1.0), loss, grad_norm)
        loader.close()
    if "--save_model" in argv and world.is_main:
        write_model(model, config, run.path / "model")


class ContinuedRun(Run):
    def _summary(self, validation: dict) -> dict:
        """Return summary.json of a run, with what `scripts.reproduce table_llama` needs."""
        first = next(record for record in read_metrics(self.folder.metrics) if "val_loss" in record)
        settings = {name: getattr(self.config, name) for name in ("model", "method_options", "rescale", "lr")}
        settings["dtype"] = str(self.model.dtype).removeprefix("torch.")
        before = {"val_loss_before": first["val_loss"], "scores_std_before": first["scores_std"]}
        return super()._summary(validation) | settings | before | {"validation": self.data["validation"]}


def print_memory(config: Settings):
    processes, model_config = int(os.environ.get("WORLD_SIZE", 1)), read_config(config.model)
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    parts = count_memory(model_config, config, processes, dtype)
    print(f"{config.model}, {config.method}: GiB on each of {processes} devices")
    for kind, size in (parts | {"together": sum(parts.values())}).items():
        print(f"{size / 2**30:10.2f}  {kind}")


def check_tokenizer(config: Settings):
    """Raise ValueError for shards of another tokenizer than the model's."""
    file = model_file(config.model, TOKENIZER_FILE)
    same = tokenizer_of(config.data_dir) == hashlib.sha256(file.read_bytes()).hexdigest()
    command = f"python -m data.text ... --tokenizer {config.model}"
    require(same, f"{config.data_dir} has another tokenizer than {config.model}. Make shards with `{command}`.")


def build_model(config: Settings, world: World, val_text: TokenStream) -> WithLoss:
    """Return the converted model on its device, rescaled if --rescale says so."""
    dtype = compute_dtype(config, world.device)
    model = load_model(config.model, dtype=dtype, device=world.device, attention_dropout=0.0)
    convert(model, config.method, train_length=config.train_length, **config.method_options)
    model.activation_checkpointing_enable()
    if config.rescale != "no":
        tokens = val_text.read(0, config.train_length, config.vocab_size).astype("int64")
        rescale(model, torch.from_numpy(tokens).to(world.device).unsqueeze(0), by=config.rescale)
    return WithLoss(model)


def write_model(model: WithLoss, config: Settings, folder: Path):
    """Write the model and its tokenizer as load_model reads them."""
    model.model.save_pretrained(folder)
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG):
        if (file := Path(config.data_dir) / name).exists():
            shutil.copyfile(file, folder / name)


if __name__ == "__main__":
    main()

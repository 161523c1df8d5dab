"""Continues the pretraining of a Hugging Face model with another attention method, as in the paper's table of Llama 2.

    python -m scripts.continue_pretraining MODEL --method scale_invariant_p_rope --data_dir data/fineweb_llama2
    torchrun --standalone --nproc_per_node=8 -m scripts.continue_pretraining MODEL ...

MODEL is a Llama model: a folder, or a name on the hub. The command validates at 4k, 16k and 64k, trains at 4k, and
validates again. A run writes its files to runs/continued/NAME/, and the trained model to model/ in that folder.
`--resume auto` continues a run from its latest checkpoint. `python -m scripts.reproduce table_llama` makes the table.
"""

import dataclasses
import sys
from pathlib import Path

import torch

from configs.command_line import read_fields
from configs.config import RATE, Config, setting
from data.download import model_file
from data.shards import TOKENIZER_FILE, copy_tokenizer, sha256_of, tokenizer_of
from errors import exit_on_user_error, require
from files import naming
from measure.flops import training_flops_per_token
from measure.validation import Validation
from model.attention.plan import Plan
from model.methods.names import canonical_name
from model.scores import MAX_PAIRS, calibrated_parameters
from optim.schedule import lr_factor
from optim.sharded import Group, Optimizers
from runtime.build import accumulate, build_loader, calibration_tokens, open_text
from runtime.checkpoint import latest_checkpoint
from runtime.device import compute_dtype
from runtime.processes import World, start_processes
from runtime.run import Run
from scripts.hf.convert import convert
from scripts.hf.load import load_model, read_config, save_model
from scripts.hf.scores import layer_scores
from scripts.hf.training import AdamW, WithLoss

# The methods of the paper's table, in its order. The paper validates two of them without training.
PAPER = "rope p_rope nope rope_ntk yarn logn_rope logn_p_rope logn_ntk alibi scale_invariant_p_rope".split()
NOT_TRAINED = ("rope", "rope_ntk")
PAPER_MODEL = "meta-llama/Llama-2-7b-hf"
USED = (  # fields on the command line
    "method method_options data_dir train_length batch_tokens micro_batch_tokens seed val_lengths val_tokens val_every"
    " val_copy_gaps val_profile name runs_dir resume on_nonfinite device dtype save_every keep timeout wandb"
    " wandb_project steps lr schedule warmup_steps cooldown_steps"
).split()


@dataclasses.dataclass(frozen=True)
class Settings(Config):
    """One run, with the paper's settings for Llama 2 7B. docs/huggingface.md lists the choices that are ours."""

    model: str = ""
    """Model to continue: a folder, or a name on the hub."""
    val_every: int = setting(0, at_least=0)
    """Steps between validations, the first before training. 0: before training and at the end."""
    steps: int = setting(763, at_least=0)
    """Optimizer steps. 763 steps are 50 M tokens. 0, the default for rope and rope_ntk, validates without training."""
    lr: float = setting(2e-5, **RATE)
    """Peak learning rate of AdamW for all parameters. Without cooldown_steps, as in the paper, it is constant."""


DEFAULTS = Settings(
    data_dir="data/fineweb_llama2",
    batch_tokens=65_536,
    micro_batch_tokens=8192,
    val_tokens=2_097_152,
    runs_dir="runs/continued",
    save_every=200,
    keep=1,
    group="continued",
    cooldown_steps=0,
)


def main():
    # ---- setup: a user's mistake ends the command here, before a run folder exists ----
    with exit_on_user_error():
        config = read_settings(sys.argv[1:])
        world = start_processes(config.device, config.timeout)
        check_tokenizer(config)
        text = open_text(config, world)
        torch.manual_seed(config.seed)  # seeds the stochastic rounding
        model = build_model(config, world)
        if calibrated_parameters(model):
            tokens = calibration_tokens(config, text.train).to(world.device)
            layer_scores(model.model, tokens, MAX_PAIRS, calibrate=True)
        groups = {"all": Group([*model.parameters()], AdamW, config.lr)}
        optimizers = Optimizers(
            groups, world.rank, world.world_size, continue_after_nonfinite=config.on_nonfinite == "skip"
        )
        validation = Validation(config, model, text.validation, world)
        plans = {config.train_length: Plan(())}
        run = ContinuedRun(config, world, model, optimizers, plans, text, training_flops_per_token(config))

    # ---- the run ----
    with run:
        first_step = run.restore()
        loader = build_loader(config, world, text.train, run.progress)
        for step in range(first_step, config.steps + 1):
            run.save_if_due(step)
            if validation.is_due(step):
                run.validate(step, validation.measure)
            if step == config.steps:
                break
            micro_batches = next(loader)
            losses = (model(x, y) / (config.batch_tokens / x.numel()) for x, y in micro_batches)
            loss, grad_norm = optimizers.reduce(accumulate(losses))
            optimizers.step(lr_factor(config, step), torch.isfinite(loss + grad_norm))
            run.log_step(step + 1, loss, grad_norm)
        loader.close()
    if config.steps and world.is_main and latest_checkpoint(run.path / "checkpoints"):  # else its weights are gone
        with exit_on_user_error():
            write_model(model, config, run.path / "model")


class ContinuedRun(Run):
    def _summary(self, validation: dict) -> dict:
        """Return the content of summary.json, with the fields that `scripts.reproduce table_llama` needs."""
        settings = {name: getattr(self.config, name) for name in ("model", "method_options")}
        settings["peak_lr"] = self.config.lr
        return super()._summary(validation) | settings | {"validation": self.data["validation"]}


def read_settings(arguments: list[str]) -> Settings:
    """Return the run that the command line describes: MODEL --field value ... --help prints the fields and exits."""
    require(arguments, "the model is missing. Use: python -m scripts.continue_pretraining MODEL --field value ...")
    name, *rest = arguments if arguments[0] not in ("-h", "--help") else ["MODEL", "--help"]
    fields = read_fields(rest, DEFAULTS, USED, description=__doc__)
    method = fields["method"] = canonical_name(fields.get("method", DEFAULTS.method))
    steps = fields.setdefault("steps", 0 if method in NOT_TRAINED else DEFAULTS.steps)
    fields["val_every"] = fields.get("val_every") or max(1, steps)
    fields.setdefault("name", f"{Path(name).name}-{method.replace(',', '.')}")
    config = read_config(name)
    problem = f"{name} has {config.vocab_size} tokens in its vocabulary, but shards store 16-bit tokens"
    require(config.vocab_size <= 2**16, f"{problem}. Use another model.")
    return dataclasses.replace(
        DEFAULTS,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        model=name,
        num_heads=config.num_attention_heads,
        model_dim=config.hidden_size,
        **fields,
    )


def check_tokenizer(config: Settings):
    """Raise ValueError unless the shards were made with the model's tokenizer."""
    same = tokenizer_of(config.data_dir) == sha256_of(model_file(config.model, TOKENIZER_FILE))
    command = f"python -m data.text ... --tokenizer {config.model}"
    require(same, f"{config.data_dir} was not made with the tokenizer of {config.model}. Make shards with `{command}`.")


def build_model(config: Settings, world: World) -> WithLoss:
    """Return the converted model on its device."""
    model = load_model(config.model, dtype=compute_dtype(config, world.device), device=world.device)
    convert(model, config.method, train_length=config.train_length, **config.method_options)
    if world.device.type == "cuda":
        model.activation_checkpointing_enable()
    return WithLoss(model)


def write_model(model: WithLoss, config: Settings, folder: Path):
    """Write the model, its code and its tokenizer to a folder that transformers and load_model read."""
    with naming("write", folder):
        save_model(model.model, folder)
        copy_tokenizer(Path(config.data_dir) / TOKENIZER_FILE, folder)


if __name__ == "__main__":
    main()

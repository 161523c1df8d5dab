"""The configuration of a continued pretraining: the paper's for Llama 2 7B, and our choices where it is silent."""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

from configs.command_line import fields_help, methods_help, read_fields
from configs.config import RATE, Config, setting
from errors import require
from model.methods import METHODS, check_options
from scripts.hf.load import read_config

# The methods of the paper's table, in its order. It does not train two of them.
PAPER = ("rope", "p_rope", "nope", "rope_ntk", "yarn", "logn_rope", "logn_p_rope", "logn_ntk", "alibi")
PAPER += ("scale_invariant_p_rope",)
NOT_TRAINED = ("rope", "rope_ntk")
PAPER_MODEL = "meta-llama/Llama-2-7b-hf"
USED = (  # fields of Config that apply here
    "method method_options data_dir train_length batch_tokens micro_batch_tokens seed val_lengths val_tokens val_every"
    " name runs_dir resume force on_nonfinite device dtype save_every keep timeout wandb wandb_project"
).split()


@dataclasses.dataclass(frozen=True)
class Settings(Config):
    """One run of scripts.continue_pretraining."""

    model: str = ""
    """The model, a folder or a name on the hub."""
    steps: int = setting(763, at_least=0)
    """Optimizer steps; 763 are 50 M tokens. 0 validates without training: the default for rope and rope_ntk."""
    lr: float = setting(2e-5, **RATE)
    """Learning rate of AdamW, constant, for all parameters."""
    weight_decay: float = setting(0.01, **RATE)
    """Weight decay of AdamW."""
    rescale: Literal["no", "layer", "head"] = "no"
    """Before training, scale q_proj of each layer or head so that its scores have the deviation 1 on the first sequence
    of the validation text."""


def read_settings(arguments: list[str], usage: str) -> Settings:
    """Return the run that the command line describes: MODEL --field value ... --help prints the fields and exits."""
    defaults = Settings(
        data_dir="data/fineweb_llama2", batch_tokens=65_536, micro_batch_tokens=8192, val_tokens=2_097_152, val_every=0,
        runs_dir="runs/continued", save_every=200, keep=1, group="continued", cooldown_steps=0,
    )  # fmt: skip
    own = ("steps", "lr", "weight_decay", "rescale")
    if not arguments or {"-h", "--help"} & {*arguments}:
        values = {name: getattr(defaults, name) for name in (*USED, *own)}
        lines = [*fields_help(Settings, values), *fields_help(Config, values)]
        print("\n".join([usage, methods_help(METHODS), "", *lines]))
        sys.exit(0 if arguments else 2)
    name, *rest = arguments
    require(not name.startswith("-"), "the model comes first: scripts.continue_pretraining MODEL --field value ...")
    fields = read_fields(rest, Settings)
    unused = sorted(fields.keys() - {*USED, *own})
    require(not unused, f"--{', --'.join(unused)} does not apply here. --help lists the fields.")
    config = read_config(name)
    fits = config.model_type == "llama" and config.vocab_size <= 2**16
    message = f"{name} is of the family {config.model_type} with a vocabulary of {config.vocab_size}"
    require(fits, f"{message}. Use a llama of at most {2**16} tokens, as shards have 16-bit tokens.")
    settings = dataclasses.replace(
        defaults, vocab_size=config.vocab_size, num_layers=config.num_hidden_layers, model=name,
        num_heads=config.num_attention_heads, model_dim=config.hidden_size, **fields,
    )  # fmt: skip
    check_options(settings.method, settings.method_options)
    steps = 0 if settings.method in NOT_TRAINED and "steps" not in fields else settings.steps
    return dataclasses.replace(
        settings, steps=steps, val_every=settings.val_every or max(1, steps),
        name=settings.name or f"{Path(name).name}-{settings.method}",
    )  # fmt: skip

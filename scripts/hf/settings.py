"""The fields of a continued pretraining. Defaults are the paper's for Llama 2 7B, or ours where it is silent."""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

from configs.command_line import fields_help, methods_help, read_fields
from configs.config import RATE, OptionValue, check_fields, check_name, setting
from errors import require
from model.methods import METHODS, canonical_name, method_options

# The methods of the paper's table, in its order. It does not train two of them.
PAPER = ("rope", "p_rope", "nope", "rope_ntk", "yarn", "logn_rope", "logn_p_rope", "logn_ntk", "alibi")
PAPER += ("scale_invariant_p_rope",)
NOT_TRAINED = ("rope", "rope_ntk")
ALL = "all"
PAPER_MODEL = "meta-llama/Llama-2-7b-hf"


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run of scripts.continue_pretraining. Raises ValueError for impossible values."""

    model: str
    method: str = "scale_invariant_p_rope"
    """Attention method; `all` runs the ten of the paper's table one after the other."""
    method_options: dict[str, OptionValue] = dataclasses.field(default_factory=dict)
    """Options of the method, such as: --method_options form barbero. With --method all, each method takes its own."""
    rescale: Literal["no", "layer", "head"] = "no"
    """Before training, scale q_proj of each layer or head so that its scores have the deviation 1 on the first sequence
    of the validation text."""

    data: str = setting("data/fineweb_llama2", mathematics=False)
    """Folder of token shards, made by `python -m data.text ... --tokenizer MODEL`."""
    train_length: int = setting(4096, at_least=4)
    """Tokens in a training sequence."""
    batch_tokens: int = setting(65_536, at_least=1, at_most=2**40)
    """Tokens in a step over all devices."""
    micro_batch_tokens: int = setting(8192, at_least=1, mathematics=False)
    """Most tokens that a device computes at once (at least one sequence)."""
    steps: int = setting(763, at_least=0)
    """Optimizer steps; 763 are 50 M tokens. Default for rope and rope_ntk: 0, as in the paper."""

    lr: float = setting(2e-5, **RATE)
    """Learning rate of AdamW, constant, for all parameters."""
    weight_decay: float = setting(0.01, **RATE)
    """Weight decay of AdamW."""
    seed: int = setting(0, at_least=0, at_most=2**31)
    """Seed of the stochastic rounding. The order of the data does not depend on it."""

    val_lengths: tuple[int, ...] = setting((4096, 16_384, 65_536), at_least=4, mathematics=False)
    """Sequence lengths of the validation before and after training, all on the same tokens."""
    val_tokens: int = setting(2_097_152, at_least=1, mathematics=False)
    """Validation tokens at each length."""
    val_every: int = setting(0, at_least=0, mathematics=False)
    """Steps between further validations; 0: none."""

    name: str = setting("", mathematics=False)
    """Name of the run folder; default: MODEL-METHOD."""
    runs_dir: str = setting("runs/continued", mathematics=False)
    """Folder that holds the run folders."""
    resume: Literal["never", "auto"] = setting("never", mathematics=False)
    """auto: continue an existing run folder from its latest checkpoint."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto", mathematics=False)
    """auto: CUDA if present."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights, gradients, moments and computation. Updates in bfloat16 are rounded stochastically."""
    save_every: int = setting(200, at_least=0, mathematics=False)
    """Steps between checkpoints; 0: only at the end."""
    keep: int = setting(1, at_least=1, mathematics=False)
    """Checkpoints kept. One of Llama 2 7B has 40 GB."""
    save_model: bool = setting(False, mathematics=False)
    """Write the trained model and its tokenizer to model/ in the run folder."""
    wandb: Literal["off", "offline", "online"] = setting("off", mathematics=False)
    """Mirror the metrics to wandb (without an API key: offline)."""
    dry_run: bool = setting(False, mathematics=False)
    """Print the memory that a run needs, from the model's configuration alone."""

    def __post_init__(self):
        check_fields(self)
        check_name(self.name)
        if self.method != ALL:
            canonical_name(self.method)  # ValueError for an unknown method
        require(self.val_lengths, "val_lengths is empty. Name at least one length.")
        for length in self.val_lengths:
            divides = self.val_tokens % length == 0
            require(divides, f"val_tokens {self.val_tokens} is not a multiple of validation length {length}.")

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @property
    def path(self) -> Path:
        return Path(self.runs_dir) / self.name


NOT_MATHEMATICS = frozenset(f.name for f in dataclasses.fields(Settings) if not f.metadata.get("mathematics", True))


def read_settings(arguments: list[str], usage: str) -> list[Settings]:
    """Return the runs that the command line describes, with their names. --help prints the fields and exits."""
    if not arguments or {"-h", "--help"} & {*arguments}:
        values = {f.name: getattr(Settings(""), f.name) for f in dataclasses.fields(Settings) if f.name != "model"}
        print("\n".join([usage, methods_help(METHODS), "", *fields_help(Settings, values)]))
        sys.exit(0 if arguments else 2)
    model, *rest = arguments
    fields = read_fields(rest, Settings)
    at_first = not model.startswith("-") and "model" not in fields
    require(at_first, "the model comes first. Write: python -m scripts.continue_pretraining MODEL --field value ...")
    settings = Settings(**{"model": model} | fields)
    methods = PAPER if settings.method == ALL else (settings.method,)
    require(len(methods) == 1 or not settings.name, f"--name is for one run, --method {ALL} makes ten. Leave it out.")
    known = {option for method in methods for option in method_options(method)}
    unknown = sorted(settings.method_options.keys() - known)
    require(not unknown, f"{settings.method} has no option {', '.join(unknown)}. See docs/methods.md.")
    runs = []
    for method in methods:
        options = {key: value for key, value in settings.method_options.items() if key in method_options(method)}
        steps = 0 if method in NOT_TRAINED and "steps" not in fields else settings.steps
        name = settings.name or f"{Path(model).name}-{method}"
        runs.append(dataclasses.replace(settings, method=method, method_options=options, steps=steps, name=name))
    return runs

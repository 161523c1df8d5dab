"""What a continual pretraining consists of: by default what the paper says of Llama 2 7B, and our choices beside it."""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

from configs.command_line import fields_help, methods_help, read_fields
from configs.config import RATE, OptionValue, check_fields, check_name, setting
from errors import require
from model.methods import METHODS, method_options

# The methods of the paper's table, in its order. Two are not trained: they are the model as it is, up to its length.
PAPER = ("rope", "p_rope", "nope", "rope_ntk", "yarn", "logn_rope", "logn_p_rope", "logn_ntk", "alibi")
PAPER += ("scale_invariant_p_rope",)
NOT_TRAINED = ("rope", "rope_ntk")
ALL = "all"
PAPER_MODEL = "meta-llama/Llama-2-7b-hf"


@dataclasses.dataclass(frozen=True)
class Settings:
    """One continual pretraining, or only an evaluation, with 0 steps. Raise ValueError for values that cannot be."""

    model: str
    method: str = "scale_invariant_p_rope"
    """Attention method, or `all`, one run after the other: the ten of the paper's table."""
    method_options: dict[str, OptionValue] = dataclasses.field(default_factory=dict)
    """Options of the method, as in: --method_options form barbero. With --method all, each takes those that it has."""
    rescale: Literal["no", "layer", "head"] = "no"
    """Before training, a factor for the scores of each layer or head that makes their deviation 1, measured on the
    first sequence of the validation text; the models do not normalise q and k."""

    data: str = setting("data/fineweb_llama2", mathematics=False)
    """Folder of token shards, made by `python -m data.text ... --tokenizer MODEL`."""
    train_length: int = setting(4096, at_least=4)
    """Tokens in a training sequence."""
    batch_tokens: int = setting(65_536, at_least=1, at_most=2**40)
    """Tokens in a step over all devices."""
    micro_batch_tokens: int = setting(8192, at_least=1, mathematics=False)
    """Most tokens a device computes at once (at least one sequence)."""
    steps: int = setting(763, at_least=0)
    """Optimizer steps: 50 M tokens. Where it is not given, 0 for rope and rope_ntk, as in the paper."""

    lr: float = setting(2e-5, **RATE)
    """Learning rate of AdamW, constant, for all parameters, the method's own too."""
    weight_decay: float = setting(0.01, **RATE)
    """Of AdamW."""
    betas: tuple[float, float] = setting((0.9, 0.999), at_least=0, less_than=1)
    """Of AdamW."""
    seed: int = setting(0, at_least=0, at_most=2**31)
    """Seed of the stochastic rounding; it never changes the order of the data."""

    val_lengths: tuple[int, ...] = setting((4096, 16_384, 65_536), at_least=4, mathematics=False)
    """Sequence lengths of the validation, before and after training, all on the same tokens."""
    val_tokens: int = setting(2_097_152, at_least=1, mathematics=False)
    """Validation tokens at each length."""
    val_every: int = setting(0, at_least=0, mathematics=False)
    """Steps between further validations; 0: none."""

    name: str = setting("", mathematics=False)
    """Name of the run folder; empty: MODEL-METHOD."""
    runs_dir: str = setting("runs/continued", mathematics=False)
    """Folder that holds the run folders."""
    resume: Literal["never", "auto"] = setting("never", mathematics=False)
    """auto: continue an existing run folder from its latest checkpoint, or start afresh if it has none."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto", mathematics=False)
    """auto: CUDA if present."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights, gradients and computation. bfloat16 weights are rounded at random, up or down, in proportion: half of
    a last place, 0.2 % of a weight, is far more than what a step changes."""
    compile: Literal["auto", "off"] = setting("auto", mathematics=False)
    """auto: the optimizer's update is compiled, if a trial compilation works."""
    save_every: int = setting(200, at_least=0, mathematics=False)
    """Steps between checkpoints; 0: only at the end."""
    keep: int = setting(1, at_least=1, mathematics=False)
    """Checkpoints kept: of Llama 2 7B, 27 GB each."""
    save_model: bool = setting(False, mathematics=False)
    """Write the model at the end, with its tokenizer, to model/ in the run folder, as scripts.huggingface.converted
    reads it."""
    timeout: float = setting(600.0, more_than=0, at_most=1e9, mathematics=False)
    """Seconds that a process waits for the others before the run ends."""
    wandb: Literal["off", "offline", "online"] = setting("off", mathematics=False)
    """Mirror the metrics to wandb (without an API key: offline)."""
    wandb_project: str = setting("scale-invariant-attention", mathematics=False)
    """wandb project."""
    dry_run: bool = setting(False, mathematics=False)
    """Print parameters and memory by kind, from the model's configuration alone, and end."""

    def __post_init__(self):
        check_fields(self)
        check_name(self.name)
        require(self.method in (*METHODS, ALL), f"there is no method {self.method}: --help lists them")
        lengths = self.val_lengths
        require(lengths and len(set(lengths)) == len(lengths), f"val_lengths must name lengths, once each: {lengths}")
        for length in lengths:
            whole = self.val_tokens % length == 0
            require(whole, f"validation length {length} does not divide val_tokens {self.val_tokens}")
        whole = self.batch_tokens % self.train_length == 0
        words = f"train_length {self.train_length} does not divide batch_tokens {self.batch_tokens}"
        require(whole, f"{words}: a step must be whole sequences")

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @property
    def path(self) -> Path:
        return Path(self.runs_dir) / self.name


NOT_MATHEMATICS = frozenset(f.name for f in dataclasses.fields(Settings) if not f.metadata.get("mathematics", True))


def read_settings(arguments: list[str], usage: str) -> list[Settings]:
    """Return the runs that the command line asks for, with their names. --help ends the process.

    Raise ValueError, in one line, for what describes none.
    """
    if not arguments or {"-h", "--help"} & {*arguments}:
        values = {f.name: getattr(Settings(""), f.name) for f in dataclasses.fields(Settings) if f.name != "model"}
        print("\n".join([usage, methods_help(METHODS), "", *fields_help(Settings, values)]))
        sys.exit(0 if arguments else 2)
    model, *rest = arguments
    require(not model.startswith("-"), f"the first argument is the model, a folder or a name on the hub, not {model}")
    fields = read_fields(rest, Settings)
    require("model" not in fields, "the model is the first argument, not --model")
    settings = Settings(**{"model": model} | fields)
    names = PAPER if settings.method == ALL else (settings.method,)
    require(not (len(names) > 1 and settings.name), f"--name is for one run, and --method {ALL} makes ten")
    known = {option for name in names for option in method_options(name)}
    unknown = next((option for option in settings.method_options if option not in known), None)
    require(unknown is None, f"no method of {', '.join(names)} has an option {unknown}")
    return [run_of(settings, name, "steps" in fields) for name in names]


def run_of(settings: Settings, method: str, steps_given: bool) -> Settings:
    """Return the settings of the run of one method."""
    options = {key: value for key, value in settings.method_options.items() if key in method_options(method)}
    steps = settings.steps if steps_given or method not in NOT_TRAINED else 0
    name = settings.name or f"{Path(settings.model).name}-{method}"
    return dataclasses.replace(settings, method=method, method_options=options, steps=steps, name=name)

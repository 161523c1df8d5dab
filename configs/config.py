"""The fields of a run. `python train_gpt.py PRESET --help` shows them with the preset's values."""

import dataclasses
import hashlib
import json
import re
from typing import Literal

from errors import require

OptionValue = int | float | bool | str
RATE = dict(at_least=0, below=3e38)  # limits of a learning rate in float32


def setting(default, *, mathematics: bool = True, at_least: float | None = None, below: float = 2**63):
    """Return a field of a dataclass with this default, and with limits of the number or of each number of a tuple.

    mathematics: False for fields that name, watch or speed up a run. Such fields leave the losses unchanged, up to
    rounding.
    """
    limits = None if at_least is None else (at_least, below)
    return dataclasses.field(default=default, metadata=dict(mathematics=mathematics, limits=limits))


@dataclasses.dataclass(frozen=True)
class Config:
    """One pretraining run. The defaults are the paper's 162M model at training length 4096.

    Raise ValueError for values outside their limits. The types of values are checked where they are read.
    """

    # ---- the run ----
    name: str = setting("", mathematics=False)
    """Name of the run folder; empty: PRESET-METHOD-sSEED."""
    runs_dir: str = setting("runs", mathematics=False)
    """Folder that holds the run folders."""
    seed: int = setting(0, at_least=0)
    """Seed of the initialisation; it never changes the order of the data."""
    resume: Literal["never", "auto"] = setting("never", mathematics=False)
    """auto: continue an existing run folder from its latest checkpoint, or start afresh if it has none."""
    init_from: str = ""
    """Start from the weights of another run: the path of its folder. The optimizer state starts anew, and the text goes
    on after that run's tokens. For another method (DroPE: --method nope) or a longer train_length."""
    on_nonfinite: Literal["stop", "skip"] = setting("stop", mathematics=False)
    """When loss or gradient norm is not finite, nothing is updated; stop: the run ends there, skip: it goes on."""
    timeout: float = setting(600.0, at_least=1, below=1e9, mathematics=False)
    """Seconds that a process waits for the others in a step before the run ends."""
    tags: tuple[str, ...] = setting((), mathematics=False)
    """Tags of the run in wandb."""
    group: str = setting("", mathematics=False)
    """Group of the run in wandb, such as a sweep's name."""
    wandb: Literal["off", "offline", "online", "trackio"] = setting("off", mathematics=False)
    """Mirror the metrics to wandb (without an API key: offline), or to trackio, a dashboard without an account."""
    wandb_project: str = setting("scale-invariant-attention", mathematics=False)
    """wandb project."""

    # ---- the model ----
    method: str = "scale_invariant_p_rope"
    """Attention method, one of those listed in model/methods/__init__.py."""
    method_options: dict[str, OptionValue] = dataclasses.field(default_factory=dict)
    """Options of the method that differ from the paper's, as in: --method_options tau 3 base 64."""
    position_scale: float = setting(1.0, at_least=1e-9, below=1e10)
    """Multiplies the rotary base and 1/slope of ALiBi where method_options does not set them. The paper's values are
    for 4096 tokens; 1/16 fits them to 256. Tau is 10 tokens at every training length, as in the paper."""
    validate_as: tuple[str, ...] = setting((), mathematics=False)
    """Other methods that train identically, to validate the same weights with: rope as rope_ntk and yarn."""
    vocab_size: int = setting(50304, at_least=1, below=2**24)
    """Size of embedding and head; GPT-2's 50,257 tokens rounded up to a multiple of 128."""
    num_layers: int = setting(12, at_least=1, below=2**12)
    """Transformer blocks."""
    num_heads: int = setting(6, at_least=1)
    """Attention heads."""
    model_dim: int = setting(768, at_least=1, below=2**17)
    """Width of the residual stream; the head size is model_dim / num_heads."""

    # ---- the data ----
    data_dir: str = setting("data/fineweb10B", mathematics=False)
    """Folder of token shards, made by `python -m data.download` or `python -m data.text`."""
    train_length: int = setting(4096, at_least=1)
    """Tokens in a training sequence."""
    length_schedule: tuple[int, ...] = setting((), at_least=1)
    """Shorter sequences at first: pairs of tokens a sequence and steps, such as 64 280; then train_length. Every step
    has batch_tokens tokens, so the order of the data stays."""
    batch_tokens: int = setting(524_288, at_least=1, below=2**40)
    """Tokens in a step over all devices; the number of devices sets only the gradient accumulation."""
    micro_batch_tokens: int = setting(32_768, at_least=1, mathematics=False)
    """Most tokens a device computes at once (at least one sequence)."""

    # ---- optimisation ----
    steps: int = setting(4578, at_least=1)
    """Optimizer steps. Changed alone, warm-up, cooldown and length_schedule keep their share of the steps."""
    schedule: Literal["constant_linear", "cosine", "trapezoid"] = "constant_linear"
    """Shape of the learning rates over the steps."""
    warmup_steps: int = setting(0, at_least=0)
    """Linear warm-up (trapezoid)."""
    cooldown_steps: int = setting(1308, at_least=0)
    """Linear decay to zero over the last steps (constant_linear, trapezoid)."""
    muon_lr: float = setting(0.02, **RATE)
    """Learning rate of the matrices in the blocks (Muon)."""
    muon_momentum: float = setting(0.95, at_least=0, below=1)
    """Momentum of Muon."""
    embedding_lr: float = setting(0.3, **RATE)
    """Learning rate of the embedding (Adam)."""
    head_lr: float = setting(0.002, **RATE)
    """Learning rate of the head (Adam)."""
    scalar_lr: float = setting(0.002, **RATE)
    """Learning rate of an attention method's own parameters: LogN scales, Infini gates (Adam)."""
    adam_betas: tuple[float, float] = setting((0.9, 0.95), at_least=0, below=1)
    """Betas of Adam."""
    # With 0, Adam divides 0 by 0 in the embeddings of tokens that it has not seen.
    adam_eps: float = setting(1e-8, at_least=1e-37)
    """Epsilon of Adam."""

    # ---- validation ----
    val_lengths: tuple[int, ...] = setting((4096, 16_384, 65_536), at_least=1, mathematics=False)
    """Sequence lengths of the validation, all on the same tokens."""
    val_tokens: int = setting(10_485_760, at_least=1, mathematics=False)
    """Validation tokens at each length."""
    val_copy_gaps: tuple[int, ...] = setting((), at_least=1, mathematics=False)
    """Tokens between two copies of a span, for copy gain (runtime/copy_gain.py) at validations at all lengths; empty:
    copy gain is not measured."""
    val_every: int = setting(125, at_least=0, mathematics=False)
    """Steps between validations; 0: only at the end."""
    val_profile: Literal["paper", "fast"] = setting("paper", mathematics=False)
    """paper: every validation is at all lengths, on all tokens. fast: at the training length alone, on all tokens (at
    none if it is not one of val_lengths); every fourth also at the other lengths, on the first quarter of the tokens.
    The last validation of a run is at all lengths, on all tokens, in both."""

    # ---- the machine ----
    device: Literal["auto", "cpu", "cuda"] = setting("auto", mathematics=False)
    """auto: CUDA if present."""
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", mathematics=False)
    """Data type of the computation, Muon's too; parameters are float32. auto: bfloat16 on CUDA, float32 on a CPU."""
    compile: Literal["auto", "on", "off"] = setting("auto", mathematics=False)
    """torch.compile of model and optimizer. auto: off if a trial compilation fails."""
    attention_backend: Literal["auto", "sdpa", "triton", "flex_flash", "flex", "cpu", "blocks"] = setting(
        "auto", mathematics=False
    )
    """How attention runs; see docs/kernels.md."""
    save_every: int = setting(1000, at_least=0, mathematics=False)
    """Steps between checkpoints; 0: only at the end."""
    keep: int = setting(2, at_least=1, mathematics=False)
    """Checkpoints kept."""

    def __post_init__(self):
        check_fields(self)
        steps, d = self.steps, self.model_dim
        is_plain = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._+=-]{,199})?", self.name)
        require(is_plain, f"name {self.name!r} must be a folder name: at most 200 letters, digits and . _ + = -")
        require(d % self.num_heads == 0, f"model_dim {d} is not divisible by num_heads {self.num_heads}")
        require(len(self.length_schedule) % 2 == 0, "length_schedule takes pairs: tokens a sequence, steps")
        for length in self.train_lengths:
            fits = self.batch_tokens % length == 0 and length <= self.train_length
            advice = "Each must divide batch_tokens and be at most train_length."
            require(fits, f"train_length and length_schedule have {length} tokens. {advice}")
        scheduled, ramps = sum(self.length_schedule[1::2]), self.warmup_steps + self.cooldown_steps
        all_steps = scheduled and scheduled >= steps
        require(not all_steps, f"length_schedule takes {scheduled} steps of {steps}. Leave some for train_length.")
        require(ramps <= steps, f"warmup_steps and cooldown_steps take {ramps} steps of {steps}. Give them fewer.")
        no_warmup = self.schedule != "trapezoid" and self.warmup_steps
        require(not no_warmup, f"schedule {self.schedule} has no warm-up. Set warmup_steps to 0, or use trapezoid.")
        require(self.val_lengths, "val_lengths must name at least one length")

    def length_at(self, step: int) -> int:
        """Return the tokens of a training sequence in a step."""
        for length, steps in zip(self.length_schedule[::2], self.length_schedule[1::2]):
            if step < steps:
                return length
            step -= steps
        return self.train_length

    @property
    def train_lengths(self) -> list[int]:
        """Return every length that the run trains at, shortest first."""
        return sorted({*self.length_schedule[::2], self.train_length})

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def check_fields(instance):
    """Raise ValueError for a field of a dataclass that is outside its limits."""
    for field in dataclasses.fields(instance):
        if limits := field.metadata.get("limits"):
            value, (least, below) = getattr(instance, field.name), limits
            for number in value if isinstance(value, tuple) else (value,):
                fits = isinstance(number, (int, float)) and least <= number < below
                require(fits, f"{field.name} must be at least {least} and below {below:g}, got {number!r}")


NOT_MATHEMATICS = frozenset(f.name for f in dataclasses.fields(Config) if not f.metadata.get("mathematics", True))


def with_changes(base: Config, changes: dict) -> Config:
    """Return base with these fields changed.

    Where `steps` is changed, but neither warmup_steps nor cooldown_steps nor length_schedule, the three keep their
    share of the steps.
    """
    depend = ("warmup_steps", "cooldown_steps", "length_schedule")
    if type(changes.get("steps")) is int and not changes.keys() & {*depend}:
        ratio = changes["steps"] / base.steps
        pairs = zip(base.length_schedule[::2], base.length_schedule[1::2])
        scaled = [(length, round(steps * ratio)) for length, steps in pairs]
        changes = changes | dict(
            warmup_steps=round(base.warmup_steps * ratio),
            cooldown_steps=round(base.cooldown_steps * ratio),
            length_schedule=tuple(number for pair in scaled if pair[1] for number in pair),
        )
    return dataclasses.replace(base, **changes)


def config_hash(config: Config) -> str:
    """Return twelve hex digits that two runs share when their mathematics is the same.

    Fields at their default value are left out, so that a new field whose default is the old behaviour changes nothing.
    """
    defaults = vars(Config())
    changed = {k: v for k, v in vars(config).items() if k not in NOT_MATHEMATICS and v != defaults.get(k)}
    if options := changed.get("method_options"):  # 3 and 3.0 are the same number
        changed["method_options"] = {k: float(v) if type(v) is int else v for k, v in options.items()}
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:12]

"""The fields of a run. `python train_gpt.py PRESET --help` shows them with the preset's values."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection
from typing import Literal

import numpy as np

from errors import UserError
from files import fits

OptionValue = int | float | bool | str
RATE = dict(at_least=0, below=3e38)  # limits of a learning rate in float32


def setting(default, *, hashed: bool = True, at_least: float | None = None, below: float = 2**63):
    """Return a dataclass field with this default.

    at_least, below: limits of the value, or of each number in a tuple. hashed: False for fields outside config_hash.
    They name, watch or speed up a run and change losses by rounding, or name the data, which has a fingerprint.
    """
    limits = None if at_least is None else (at_least, below)
    return dataclasses.field(default=default, metadata=dict(hashed=hashed, limits=limits))


@dataclasses.dataclass(frozen=True)
class Config:
    """One pretraining run. The defaults are the paper's 162M model at training length 4096.

    Raise ValueError for values of another type or outside their limits.
    """

    # ---- the run ----
    name: str = setting("", hashed=False)
    """Name of the run folder. Empty: PRESET-METHOD-sSEED."""
    runs_dir: str = setting("runs", hashed=False)
    """Folder that holds the run folders."""
    seed: int = setting(0, at_least=0)
    """Seed of the initial weights. It does not change the order of the data."""
    data_seed: int = setting(0, at_least=0)
    """0: the steps read the text in its order. Another number: they read the same batches in a random order. Only steps
    of the same sequence length change places."""
    resume: Literal["never", "auto"] = setting("never", hashed=False)
    """auto: continue from the latest checkpoint in the run folder. Without a checkpoint, start at step 0."""
    init_from: str = ""
    """Folder of another run, whose weights this run starts from. The optimizer state starts at zero, and the text
    continues after the other run's tokens. Use it to change the method (DroPE: --method nope) or the train_length."""
    on_nonfinite: Literal["stop", "skip"] = setting("stop", hashed=False)
    """A step whose loss or gradient norm is not finite updates nothing. stop: the run ends. skip: the run continues."""
    timeout: float = setting(600.0, at_least=1, below=1e9, hashed=False)
    """Seconds that a process waits for the other processes in a step. Then the run ends."""
    group: str = setting("", hashed=False)
    """Group of the run in wandb, such as a sweep's name."""
    wandb: Literal["off", "offline", "online", "trackio"] = setting("off", hashed=False)
    """Send the metrics to wandb, or to trackio, which needs no account. Without an API key, wandb works offline."""
    wandb_project: str = setting("scale-invariant-attention", hashed=False)
    """wandb project."""

    # ---- the model ----
    method: str = "scale_invariant_p_rope"
    """Attention method: a name, or mechanisms such as p_rope+alibi. docs/methods.md describes all."""
    method_options: dict[str, OptionValue] = dataclasses.field(default_factory=dict)
    """Options of the method that differ from its paper's. Example: --method_options tau 3 base 64."""
    position_scale: float = setting(1.0, at_least=1e-9, below=1e10)
    """Multiplies the default options that are lengths, such as rotary base, 1/slope of ALiBi and windows, but not tau.
    Published values are for 4096 tokens. Use 1/16 for 256."""
    validate_as: tuple[str, ...] = setting((), hashed=False)
    """Methods that train identically, to validate the same weights with. Example for rope: rope_ntk yarn."""
    vocab_size: int = setting(50304, at_least=1, below=2**24)
    """Rows of the embedding and of the head. 50,304 is GPT-2's 50,257 tokens rounded up to a multiple of 128."""
    num_layers: int = setting(12, at_least=1, below=2**12)
    """Transformer blocks."""
    num_heads: int = setting(6, at_least=1)
    """Attention heads."""
    model_dim: int = setting(768, at_least=1, below=2**17)
    """Width of the residual stream. The head size is model_dim / num_heads."""

    # ---- the data ----
    data_dir: str = setting("data/fineweb10B", hashed=False)
    """Folder of token shards, made by `python -m data.download`, `data.text` or `data.python_source`."""
    train_length: int = setting(4096, at_least=1)
    """Tokens in a training sequence."""
    length_schedule: tuple[int, ...] = setting((), at_least=1)
    """Pairs of a shorter sequence length and its steps, for the start of the run. Example: 64 280. The other steps use
    train_length. Every step has batch_tokens tokens, so the order of the data does not change."""
    document_mask: Literal["off", "train", "val", "both"] = "off"
    """Attention stays within documents in training, in the losses of validation, or in both. Then positions count from
    the first token of a document. Copy gain and far gain are measured without it."""
    batch_tokens: int = setting(524_288, at_least=1, below=2**40)
    """Tokens in a step, summed over all devices. The number of devices changes only the gradient accumulation."""
    micro_batch_tokens: int = setting(32_768, at_least=1, hashed=False)
    """Largest number of tokens in a micro-batch of one device. A micro-batch has at least one sequence."""

    # ---- optimisation ----
    steps: int = setting(4578, at_least=0)
    """Optimizer steps. 0: validation only. A change scales warmup_steps, cooldown_steps and length_schedule, unless
    they are given too."""
    schedule: Literal["constant_linear", "cosine", "trapezoid"] = "constant_linear"
    """Shape of the learning rate over the steps."""
    warmup_steps: int = setting(0, at_least=0)
    """Steps of linear warm-up (trapezoid)."""
    cooldown_steps: int = setting(1308, at_least=0)
    """Last steps, with a linear decay of the learning rate to zero (constant_linear, trapezoid)."""
    muon_lr: float = setting(0.02, **RATE)
    """Learning rate of the matrices of attention and MLP (Muon)."""
    muon_momentum: float = setting(0.95, at_least=0, below=1)
    """Momentum of Muon."""
    embedding_lr: float = setting(0.3, **RATE)
    """Learning rate of the embedding (Adam)."""
    head_lr: float = setting(0.002, **RATE)
    """Learning rate of the head (Adam)."""
    scalar_lr: float = setting(0.002, **RATE)
    """Learning rate of the attention method's parameters, such as LogN's scales or a gate's matrix (Adam)."""
    adam_betas: tuple[float, float] = setting((0.9, 0.95), at_least=0, below=1)
    """Betas of Adam."""
    # With epsilon 0, Adam divides 0 by 0 for embeddings of tokens that were in no batch yet.
    adam_eps: float = setting(1e-8, at_least=1e-37)
    """Epsilon of Adam."""

    # ---- validation ----
    val_lengths: tuple[int, ...] = setting((4096, 16_384, 65_536), at_least=1, hashed=False)
    """Sequence lengths of the validation. All lengths use the same tokens."""
    val_tokens: int = setting(10_485_760, at_least=1, hashed=False)
    """Validation tokens at each length."""
    val_copy_gaps: tuple[int, ...] = setting((), at_least=1, hashed=False)
    """Distances, in tokens, at which copy gain is measured (measure/copy_gain.py). Only validations at all lengths
    and val_profile light measure it. Empty: copy gain is not measured."""
    val_far_windows: int = setting(0, at_least=0, hashed=False)
    """Windows of 16 training lengths on which the last validation measures far gain (measure/far_gain.py)."""
    val_every: int = setting(125, at_least=0, hashed=False)
    """Steps between validations. 0: only at the end."""
    val_profile: Literal["paper", "fast", "light"] = setting("paper", hashed=False)
    """paper: every validation uses all lengths and all tokens. fast: a validation uses the training length, if
    val_lengths has it. Every fourth adds the other lengths, on the first quarter of the tokens. light: a validation
    uses lengths up to 16 training lengths, copy gaps up to 2, and the first sixteenth of the tokens. The last
    validation of a run uses all lengths, gaps and tokens in each profile."""

    # ---- the machine ----
    device: Literal["auto", "cpu", "cuda"] = setting("auto", hashed=False)
    """auto: CUDA if there is a GPU, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", hashed=False)
    """Data type of the computation, also in Muon. Parameters are float32. auto: bfloat16 on CUDA, float32 on a CPU."""
    compile: Literal["auto", "on", "off"] = setting("auto", hashed=False)
    """Compile model and optimizer with torch.compile. auto: off if a trial compilation fails."""
    attention_backend: Literal["auto", "sdpa", "flex_flash", "flex", "cpu", "blocks"] = setting("auto", hashed=False)
    """Implementation of attention. docs/kernels.md describes each."""
    save_every: int = setting(1000, at_least=0, hashed=False)
    """Steps between checkpoints. 0: only at the end."""
    keep: int = setting(2, at_least=1, hashed=False)
    """Number of checkpoints to keep. Older checkpoints are deleted."""

    def __post_init__(self):
        # 1. Each field alone, and the name.
        check_fields(self)
        if not re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._+=-]{,199})?", self.name):
            raise UserError(f"name {self.name!r} is not a folder name. Use at most 200 letters, digits and . _ + = -")
        if not self.val_lengths:
            raise UserError("val_lengths is empty. Give at least one length.")

        # 2. Training lengths.
        if len(self.length_schedule) % 2:
            raise UserError("length_schedule is not in pairs. Give a length and its steps.")
        for length in self.train_lengths:
            if length > self.train_length:
                raise UserError(f"length_schedule has {length} tokens. Use at most train_length.")
            if self.batch_tokens % length:
                raise UserError(
                    f"train_length or length_schedule: {length} does not divide batch_tokens. Change either."
                )
        scheduled = sum(steps for _, steps in self.scheduled)
        if scheduled and scheduled >= self.steps:
            raise UserError(f"length_schedule takes {scheduled} steps of {self.steps}. Leave some for train_length.")

        # 3. The learning rate over the steps.
        ramps = self.warmup_steps + self.cooldown_steps
        if ramps > self.steps:
            raise UserError(f"warmup_steps and cooldown_steps take {ramps} of {self.steps} steps. Make them shorter.")
        if self.warmup_steps and self.schedule != "trapezoid":
            raise UserError(f"schedule {self.schedule} has no warm-up. Set warmup_steps to 0, or use trapezoid.")

    @property
    def scheduled(self) -> list[tuple]:
        """Return the pairs of length_schedule: (tokens in a sequence, steps)."""
        return list(zip(self.length_schedule[::2], self.length_schedule[1::2]))

    @property
    def train_lengths(self) -> list[int]:
        """Return every length that the run trains at, shortest first."""
        return sorted({*self.length_schedule[::2], self.train_length})

    def masks_documents(self, phase: str) -> bool:
        """Return True if attention stays within documents in a phase, train or val."""
        return self.document_mask in (phase, "both")

    def length_at(self, step: int) -> int:
        """Return the tokens of a training sequence in a step."""
        for length, steps in self.scheduled:
            if step < steps:
                return length
            step -= steps
        return self.train_length


def batch_order(config: Config) -> list[int]:
    """Return the number of the batch of the text that each step reads."""
    order = np.arange(config.steps)
    if config.data_seed:
        lengths = np.array([config.length_at(step) for step in range(config.steps)])
        generator = np.random.default_rng(config.data_seed)
        for length in config.train_lengths:
            places = np.flatnonzero(lengths == length)
            order[places] = generator.permutation(places)
    return order.tolist()


def check_fields(instance):
    """Raise ValueError for a field of a dataclass that is of another type or outside its limits."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if not fits(value, field.type):
            raise UserError(f"{field.name} is {value!r}, not of type {field.type}. Correct it.")
        if not field.metadata.get("limits"):
            continue
        least, below = field.metadata["limits"]
        for number in value if isinstance(value, tuple) else (value,):
            if not least <= number < below:
                raise UserError(f"{field.name} is {number!r}. Use at least {least} and less than {below:g}.")


NOT_HASHED = frozenset(f.name for f in dataclasses.fields(Config) if not f.metadata.get("hashed", True))


def with_changes(base: Config, changes: dict) -> Config:
    """Return base with these fields changed.

    If `steps` changes, then warmup_steps, cooldown_steps and length_schedule scale with it, unless they change too.
    """
    if type(changes.get("steps")) is int:
        ratio = changes["steps"] / base.steps
        length_schedule = []
        for length, steps in base.scheduled:
            scaled_steps = round(steps * ratio)
            if scaled_steps:
                length_schedule += [length, scaled_steps]
        scaled = dict(
            warmup_steps=round(base.warmup_steps * ratio),
            cooldown_steps=round(base.cooldown_steps * ratio),
            length_schedule=tuple(length_schedule),
        )
        changes = scaled | changes
    return dataclasses.replace(base, **changes)


def config_hash(config: Config) -> str:
    """Return twelve hex digits, a hash of the fields that change the losses.

    Fields at their default value are left out, so a new field does not change the hash of older runs.
    """
    # 1. Collect the fields. A subclass may have more fields than Config. 3 and 3.0 are the same number.
    defaults = vars(Config())
    changed = {}
    for name, value in vars(config).items():
        if name not in NOT_HASHED and value != defaults.get(name):
            changed[name] = float(value) if type(defaults.get(name)) is float else value

    # 2. Write the options' integers as floats.
    if "method_options" in changed:
        options = changed["method_options"].items()
        changed["method_options"] = {name: float(value) if type(value) is int else value for name, value in options}

    # 3. Hash them.
    text = json.dumps(changed, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def file_hash(config: Config, names: Collection[str]) -> str:
    """Return a hash for config.json, of the names of all its fields and of the values that change the losses."""
    return hashlib.sha256(f"{config_hash(config)} {sorted(names)}".encode()).hexdigest()[:12]


def describe_differences(config: Config, stored: Config, extra_fields: Collection[str] = ()) -> str:
    """Return the fields that differ, with both values. Fields outside the hash count if in extra_fields."""
    found = vars(stored)
    differences = []
    for name, wanted in vars(config).items():
        if name in NOT_HASHED and name not in extra_fields:
            continue
        if wanted != found[name]:
            differences.append(f"{name} {found[name]}, not {wanted}")
    return ", ".join(differences)

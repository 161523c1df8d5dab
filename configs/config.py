"""The fields of a run. `python train_gpt.py PRESET --help` shows them with the preset's values."""

import dataclasses
import hashlib
import json
import math
import re
from types import UnionType
from typing import Literal, get_args, get_origin

OptionValue = int | float | bool | str


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of a run, unchecked. The defaults are the paper's 162M model at training length 4096."""

    # ---- the run ----
    name: str = ""
    """Name of the run folder; empty: PRESET-METHOD-sSEED."""
    runs_dir: str = "runs"
    """Folder that holds the run folders."""
    seed: int = 0
    """Seed of the initialisation; it never changes the order of the data."""
    resume: Literal["never", "auto"] = "never"
    """auto: continue an existing run folder from its latest checkpoint, or start afresh if it has none."""
    force: bool = False
    """Resume although the checkpoint is of another configuration or other data."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When loss or gradient norm is not finite, nothing is updated; stop: the run ends there, skip: it goes on."""
    timeout: float = 600.0
    """Seconds that a process waits for the others, once all have compiled, before the run ends."""
    tags: tuple[str, ...] = ()
    """Tags of the run in wandb."""
    group: str = ""
    """Group of the run in wandb, such as a sweep's name."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Mirror the metrics to wandb (without an API key: offline)."""
    wandb_project: str = "scale-invariant-attention"
    """wandb project."""

    # ---- the model ----
    method: str = "scale_invariant_p_rope"
    """Attention method, one of those listed in model/methods/__init__.py."""
    method_options: dict[str, OptionValue] = dataclasses.field(default_factory=dict)
    """Options of the method where they differ from the paper's, as in: --method_options tau 3 base 64."""
    length_scale: float = 1.0
    """What is a length in tokens (tau, rotary bases, one over ALiBi's slopes) and not given in method_options is this
    times the paper's, which is meant for training at 4096."""
    validate_as: tuple[str, ...] = ()
    """Other methods that train identically and are validated with the same weights: rope as rope_ntk and yarn."""
    vocab_size: int = 50304
    """Size of embedding and head; GPT-2's 50,257 tokens rounded up to a multiple of 128."""
    num_layers: int = 12
    """Transformer blocks."""
    num_heads: int = 6
    """Attention heads."""
    model_dim: int = 768
    """Width of the residual stream; the head size is model_dim / num_heads."""

    # ---- the data ----
    data_dir: str = "data/fineweb10B"
    """Folder of token shards, made by `python -m data.fineweb` or `python -m data.text`."""
    train_length: int = 4096
    """Tokens in a training sequence."""
    batch_tokens: int = 524_288
    """Tokens in a step over all devices, whatever their number; gradient accumulation follows from it."""
    micro_batch_tokens: int = 32_768
    """Most tokens a device computes at once (at least one sequence)."""

    # ---- optimisation ----
    steps: int = 4578
    """Optimizer steps. Changed alone, it leaves warm-up and cooldown their share of the steps."""
    schedule: Literal["constant_linear", "cosine", "trapezoid"] = "constant_linear"
    """Shape of the learning rates over the steps."""
    warmup_steps: int = 0
    """Linear warm-up (trapezoid)."""
    cooldown_steps: int = 1308
    """Linear decay to zero over the last steps (constant_linear, trapezoid)."""
    muon_lr: float = 0.02
    """Learning rate of the matrices in the blocks (Muon)."""
    muon_momentum: float = 0.95
    """Momentum of Muon."""
    embedding_lr: float = 0.3
    """Learning rate of the embedding (Adam)."""
    head_lr: float = 0.002
    """Learning rate of the head (Adam)."""
    scalar_lr: float = 0.002
    """Learning rate of an attention method's own parameters: LogN scales, Infini gates (Adam)."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Betas of Adam."""
    adam_eps: float = 1e-8
    """Epsilon of Adam."""
    bf16_embedding: bool = False
    """Keep the embedding in bfloat16 without a float32 master, as the base script did."""

    # ---- validation ----
    val_lengths: tuple[int, ...] = (4096, 16_384, 65_536)
    """Sequence lengths of the validation, all on the same tokens."""
    val_tokens: int = 10_485_760
    """Validation tokens at each length."""
    val_every: int = 125
    """Steps between validations; 0: only at the end."""
    val_profile: Literal["paper", "fast"] = "paper"
    """paper: every validation is at all lengths, on all tokens. fast: at the training length alone, on all tokens (at
    none if it is not one of val_lengths); every fourth also at the other lengths, on the first quarter of the tokens.
    The last validation of a run is at all lengths, on all tokens, in both."""

    # ---- the machine ----
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if present."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the computation, Muon's too; parameters are float32. auto: bfloat16 on CUDA and on CPUs that multiply it in
    hardware (ONEDNN_MAX_CPU_ISA=AVX2 in the environment hides that)."""
    compile: Literal["auto", "model", "blocks", "off"] = "auto"
    """What torch.compile takes as a whole. blocks: each on its own, so that gradients are sent while others are still
    computed. auto: blocks for several GPUs, otherwise model; off if a trial compilation fails."""
    attention_backend: Literal["auto", "sdpa", "triton", "flex", "cpu", "blocks"] = "auto"
    """How attention runs; see model/attention.py."""
    context_parallel: int = 1
    """Processes that share each sequence, for sequences that do not fit one device; divides heads and lengths."""
    save_every: int = 1000
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """Checkpoints kept."""


@dataclasses.dataclass(frozen=True)
class Config(Fields):
    """One pretraining run. ValueError, in one line, for values that cannot make a run on any machine."""

    def __post_init__(self):
        for field in dataclasses.fields(self):  # config.json may come from anywhere
            value, kind = getattr(self, field.name), field.type
            words = f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else type_name(kind)
            require(is_of_type(value, kind), f"{field.name} must be {words}, got {shortened(value)}")
            too_large = type(value) is int and abs(value) >= 2**63  # for torch
            require(not too_large, f"{field.name} must be below 2**63, got {shortened(value)}")
        sizes = "vocab_size num_layers num_heads model_dim train_length batch_tokens micro_batch_tokens val_tokens"
        for field in (*sizes.split(), "steps", "keep", "context_parallel"):
            require(getattr(self, field) >= 1, f"{field} must be at least 1, got {getattr(self, field)}")
        for field in "seed warmup_steps cooldown_steps val_every save_every".split():
            require(getattr(self, field) >= 0, f"{field} must not be negative, got {getattr(self, field)}")
        for field in "muon_lr embedding_lr head_lr scalar_lr".split():
            value = getattr(self, field)
            require(0 <= value <= 1e38, f"{field} must be from 0 to 1e38, in float32, got {value}")
        # In float32; with 0, Adam divides 0 by 0 in the embeddings of tokens that it has not seen.
        require(1e-37 <= self.adam_eps < math.inf, f"adam_eps must be from 1e-37 to infinity, got {self.adam_eps}")
        require(1e-9 <= self.length_scale <= 1e9, f"length_scale must be from 1e-9 to 1e9, got {self.length_scale}")
        require(len(set(self.validate_as)) == len(self.validate_as), f"validate_as repeats: {self.validate_as}")
        require(0 < self.timeout <= 1e9, f"timeout must be more than 0 and at most 1e9 seconds, got {self.timeout}")
        for field, values in dict(muon_momentum=[self.muon_momentum], adam_betas=self.adam_betas).items():
            require(all(0 <= v < 1 for v in values), f"{field} must lie in [0, 1), got {getattr(self, field)}")
        require(
            self.model_dim % self.num_heads == 0,
            f"model_dim {self.model_dim} is not divisible by num_heads {self.num_heads}",
        )
        require(
            self.batch_tokens % self.train_length == 0,
            f"train_length {self.train_length} does not divide batch_tokens {self.batch_tokens}: "
            "a step must be whole sequences",
        )
        most = 2**40  # more is a slip of the finger, and would fail deep inside, or take hours to
        parameters = 2 * self.vocab_size * self.model_dim + 12 * self.num_layers * self.model_dim**2
        require(
            parameters <= most,
            f"vocab_size {self.vocab_size}, num_layers {self.num_layers} and model_dim {self.model_dim} make "
            f"{parameters:.1e} parameters: more than {most:.1e} cannot be trained here",
        )
        require(self.batch_tokens <= most, f"batch_tokens must be at most {most}, got {self.batch_tokens}")
        require(len(self.val_lengths) > 0, "val_lengths must name at least one length")
        require(len(set(self.val_lengths)) == len(self.val_lengths), f"val_lengths repeat: {self.val_lengths}")
        for length in self.val_lengths:
            require(length >= 1, f"val_lengths must be at least 1, got {length}")
            require(
                self.val_tokens % length == 0,
                f"validation length {length} does not divide val_tokens {self.val_tokens}",
            )
        for tag in self.tags:
            require(1 <= len(tag) <= 64, f"tags must be of 1 to 64 characters, for wandb, got {shortened(tag)}")
        require(
            self.name == "" or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]*", self.name),
            f"name {self.name!r} must be a plain folder name of letters, digits and . _ + = -",
        )
        require(len(self.name) <= 200, f"name must be of at most 200 characters, got {len(self.name)}")

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


# Fields that name, watch or speed up a run but do not change what it computes (up to rounding).
NOT_MATHEMATICS = frozenset(
    "name runs_dir resume force on_nonfinite timeout tags group wandb wandb_project micro_batch_tokens device dtype "
    "compile attention_backend context_parallel save_every keep val_every val_lengths val_tokens val_profile "
    "validate_as data_dir".split()
)


def with_changes(base: Config, changes: dict) -> Config:
    """base with these fields changed. Where `steps` is one of them, and neither warmup_steps nor cooldown_steps, the
    two keep their share of the steps."""
    if type(changes.get("steps")) is int and not changes.keys() & {"warmup_steps", "cooldown_steps"}:
        keep_share = lambda field: round(getattr(base, field) * changes["steps"] / base.steps)
        changes = {field: keep_share(field) for field in ("warmup_steps", "cooldown_steps")} | changes
    return dataclasses.replace(base, **changes)


def config_hash(config: Config) -> str:
    """Twelve hex digits that two runs share when their mathematics is the same.

    Fields at their default value are left out, so that a new field whose default is the old behaviour changes nothing.
    """
    defaults = Config()
    changed = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(Config)
        if field.name not in NOT_MATHEMATICS and getattr(config, field.name) != getattr(defaults, field.name)
    }
    if options := changed.get("method_options"):  # 3 and 3.0 are the same number
        changed["method_options"] = {k: float(v) if type(v) is int else v for k, v in options.items()}
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:12]


def is_of_type(value, kind) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return type(value) is str and value in parts
    if origin is UnionType:
        return any(is_of_type(value, part) for part in parts)
    if origin is tuple:
        kinds = parts[:1] * len(value) if isinstance(value, tuple) and parts[-1] is ... else parts
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(is_of_type, value, kinds))
    if origin is dict:
        return isinstance(value, dict) and all(is_of_type(x, k) for item in value.items() for x, k in zip(item, parts))
    return type(value) is kind or kind is float and type(value) is int


def type_name(kind) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def shortened(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def require(condition, message: str):
    if not condition:
        raise ValueError(message)

"""The sweeps: which runs each study consists of. `python -m scripts.sweep NAME` trains them; add yours as a function.

A sweep is a function from a Scale to a list of Runs, usually a grid. Those named like an item of scripts/reproduce
are the runs that the paper's table or figure of that name needs, at any of three scales. Runs are distinguished by the
hash of what changes their mathematics, so sweeps share the runs that they have in common; and within a sweep by every
other field that it varies, such as data_dir or dtype. A run with `needle` is, once trained, fine-tuned on the needle
task.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from configs.config import NOT_MATHEMATICS, Config, config_hash, with_changes
from configs.presets import preset
from errors import did_you_mean, require


@dataclasses.dataclass(frozen=True)
class Needle:
    """How a run is fine-tuned and scored on the needle task (scripts/needle.py), as in the paper; the number of
    examples, of which it says nothing, is ours, and so is the curriculum, which the paper has not."""

    haystack: str = "c4"  # or "shards", the run's own data, or a file or folder of text
    steps: int = 300
    sequences: int = 64  # in a step
    examples: int = 500  # scored at each length
    curriculum: int = 0  # tokens a prompt in the first half of the steps; 0: no such half

    def __post_init__(self):
        for name in ("steps", "sequences", "examples"):
            value = getattr(self, name)
            require(type(value) is int and value >= 1, f"{name} of the needle task must be at least 1, got {value}")
        is_count = type(self.curriculum) is int and self.curriculum >= 0
        require(is_count, f"curriculum of the needle task must be 0 or a number of tokens, got {self.curriculum}")

    def __str__(self) -> str:
        begin = f", the first half with prompts of {self.curriculum} tokens and more of them" if self.curriculum else ""
        return (
            f"haystack {self.haystack}, {self.steps} steps of {self.sequences} sequences{begin}, {self.examples} "
            "examples scored at each length"
        )

    @property
    def arguments(self) -> list[str]:
        """Return what follows `scripts.needle RUN` on the command line."""
        return [word for name, value in dataclasses.asdict(self).items() for word in (f"--{name}", str(value))]

    @staticmethod
    def lengths(train_length: int) -> list[int]:
        """Return where a run is scored, in tokens a prompt: the paper's 4k, 16k and 64k of models trained at 4k."""
        return [factor * train_length for factor in (1, 4, 16)]


@dataclasses.dataclass(frozen=True)
class Run:
    """What is to be trained: a preset, the fields that differ from it, and the fine-tuning that follows, if any.

    distinguishing: the fields outside the mathematics (NOT_MATHEMATICS) in which other runs of its sweep differ.
    """

    preset: str
    changes: dict
    needle: Needle | None = None
    distinguishing: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """Return the hash of what distinguishes it from other runs."""
        config = with_changes(preset(self.preset), self.changes)
        parts = [config_hash(config), *((field, getattr(config, field)) for field in self.distinguishing)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12] if self.distinguishing else parts[0]

    @property
    def name(self) -> str:
        """Return the run folder's name: preset, method, whatever else distinguishes it from other runs (if that is
        long, its hash), and the seed."""
        parts = [self.preset, self.changes.get("method", preset(self.preset).method).replace(",", ".")]
        for field, value in sorted(self.changes.items()):
            if field == "method_options":
                parts += [f"{option}{as_folder_part(value[option])}" for option in sorted(value)]
            elif field in self.distinguishing or field not in {"method", "seed", *NOT_MATHEMATICS}:
                parts.append(f"{field}{as_folder_part(value)}")
        if len("-".join(parts)) > 120:
            parts[2:] = [self.identity]
        return "-".join([*parts, f"s{self.changes.get('seed', 0)}"])

    @property
    def path(self) -> Path:
        """Return its run folder: where and under which name `changes` say, else in the preset's runs_dir."""
        return Path(self.changes.get("runs_dir", preset(self.preset).runs_dir)) / self.changes.get("name", self.name)

    @functools.cached_property
    def config(self) -> Config:
        return with_changes(preset(self.preset), {"name": self.name, **self.changes})

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the method that is trained, and those that its weights are validated as."""
        return self.config.method, *self.config.validate_as

    @property
    def arguments(self) -> list[str]:
        """Return what follows `train_gpt.py` on the command line."""
        words = [self.preset]
        for field, value in {**self.changes, "name": self.config.name}.items():
            if isinstance(value, bool):
                words.append(f"--{field}" if value else f"--no_{field}")
            else:
                words += [f"--{field}", *(value if isinstance(value, (list, tuple)) else as_words(value))]
        return [str(word) for word in words]


def as_words(value) -> list:
    return [word for pair in value.items() for word in pair] if isinstance(value, dict) else [value]


def as_folder_part(value) -> str:
    """Return the value as a part of a folder's name."""
    shown = "_".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return re.sub(r"[^A-Za-z0-9._+=-]", "_", shown)


def grid(presets: str | list[str], **axes: list) -> list[Run]:
    """Return every combination of the values of the axes (fields of the config), for each preset."""
    presets = [presets] if isinstance(presets, str) else presets
    for field, values in axes.items():
        is_list = isinstance(values, Iterable) and not isinstance(values, str)
        require(is_list, f"a sweep's axis {field} must be a list of values, got {values!r}")
    return [Run(name, dict(zip(axes, values))) for name in presets for values in itertools.product(*axes.values())]


# ---- the paper's studies ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scale:
    """Where a study runs: the presets that stand for the paper's models, the seeds, and the needle task."""

    base: str  # the 162M model trained at 4k
    lengths: tuple[str, str, str]  # the same trained at 4k, 16k, 64k
    large: str  # the 304M model trained at 4k
    seeds: tuple[int, ...] = (0, 1, 2)  # of every method trained with the base preset, as in the paper
    once: tuple[int, ...] = (0,)  # of the rest, which the paper ran once
    needle: Needle = Needle()


# The paper's 19,200 sequences in mini's batches are too few for a model that is this small, and all of them at full
# length: scale-invariant p-RoPE then finds none, and with these nearly all within the training length.
MINI_NEEDLE = Needle("shards", steps=6000, sequences=8, examples=100, curriculum=144)
SCALES = dict(
    paper=Scale("gpt_162m_4k", ("gpt_162m_4k", "gpt_162m_16k", "gpt_162m_64k"), "gpt_304m_4k"),
    small=Scale("small_4k", ("small_4k", "small_16k", "small_64k"), "small_304m"),
    mini=Scale("mini", ("mini", "mini_1024", "mini_4096"), "mini_large", needle=MINI_NEEDLE),
    taught=Scale("taught", ("taught", "taught", "taught"), "taught", seeds=(0, 1, 2, 3, 4)),
)
# The others train identically and differ beyond the training length only: one run is validated as all of them.
SAME_WEIGHTS = dict(rope=("rope_ntk", "yarn"), logn_rope=("logn_ntk",))
OURS = "scale_invariant_p_rope"
MAIN_METHODS = ["rope", "p_rope", "nope", "logn_rope", "logn_p_rope", "alibi", OURS]
SCALE_INVARIANT = [OURS, "scale_invariant_rope", "scale_invariant_nope"]
TAU = 10.0  # tokens, the default at every training length


def tau_option(tau: float) -> dict:
    return {} if tau == TAU else {"tau": tau}


def trained(presets: str | list[str], methods: list[str], seeds: tuple[int, ...], options: dict | None = None):
    """Return the runs of these methods, validated as all that train identically."""
    runs = grid(presets, method=methods, seed=seeds)
    for run in runs:
        if options:
            run.changes["method_options"] = options
        if run.changes["method"] in SAME_WEIGHTS:
            run.changes["validate_as"] = SAME_WEIGHTS[run.changes["method"]]
    return runs


def with_other_lengths(runs: list[Run]) -> list[Run]:
    """Return the runs. Where position_scale is not 1, add ALiBi with its published slopes and tau times that scale."""
    others = []
    for run in runs:
        scale, method = run.config.position_scale, run.changes["method"]
        if scale != 1 and method == "alibi":
            others.append(Run(run.preset, run.changes | {"method_options": {"slope_scale": 1.0}}))
        if scale != 1 and method in SCALE_INVARIANT:
            others.append(Run(run.preset, run.changes | {"method_options": {"tau": TAU * scale}}))
    return [*runs, *others]


def table_losses(scale: Scale) -> list[Run]:
    return with_other_lengths(trained(scale.base, MAIN_METHODS, scale.seeds))


def figure_tau(scale: Scale) -> list[Run]:
    taus = sorted({0.01, 0.1, 1.0, TAU, 100.0, TAU * preset(scale.base).position_scale})
    return [run for tau in taus for run in trained(scale.base, [OURS], scale.once, tau_option(tau))]


def open_choices(scale: Scale) -> list[Run]:
    """Return the runs of what the paper leaves open, each beside our choice; and of the parts of scale-invariant
    attention one by one."""
    train_length, tau = preset(scale.base).train_length, tau_option(TAU * preset(scale.base).position_scale)
    variants = [
        ("rope", [{}]),
        ("yarn", [{"factor": 1.0}]),  # RoPE, if the scaling is never active
        ("p_rope", [{}, {"form": "barbero"}]),
        ("logn_p_rope", [{}, {"context": "length"}]),
        ("alibi", [{}, {"slopes": "geometric"}]),
        ("infini_rope", [{}, {"segment_length": train_length // 8}, {"segment_length": train_length // 2}]),
        (OURS, [tau, tau | {"terms": "a"}, tau | {"terms": "m"}]),
    ]
    return [
        run for method, choices in variants for options in choices
        for run in trained(scale.base, [method], scale.once, options)
    ]  # fmt: skip


# ---- beyond the paper ------------------------------------------------------------------------------------------------


def tau_by_length(scale: Scale) -> list[Run]:
    """Return scale-invariant p-RoPE at three training lengths, with taus from 1/16 to 64 times the scaled one.

    Each head learns its own tau in one more run, which starts from the scaled one.
    """
    tau = TAU * preset(scale.base).position_scale
    options = [tau_option(factor * tau) for factor in (1, 1 / 16, 1 / 4, 4, 16, 64)]
    options.append(tau_option(tau) | {"learn_tau": True})
    return [
        run for length in scale.lengths for chosen in options
        for run in trained(length, [OURS], scale.once, chosen)
    ]  # fmt: skip


def far_tokens(scale: Scale) -> list[Run]:
    return with_other_lengths(trained(scale.base, MAIN_METHODS, scale.once))


def scale_invariant_by_head(scale: Scale) -> list[Run]:
    """Return scale-invariant p-RoPE with something of its own in each head, beside ALiBi.

    A head learns its tau, or a factor of its scores (also with 4 and 16 times the scaled tau, and in PoPE). Or tau
    grows from the first to the last head of a layer by 16, 64 or 256.
    """
    steps, tau = preset(scale.base).num_heads - 1, TAU * preset(scale.base).position_scale
    options = [{}, {"learn_tau": True}, {"learn_gain": True}]
    options += [{"tau_ratio": round(ratio ** (1 / steps), 4)} for ratio in (16, 64, 256)]
    options = [tau_option(tau) | chosen for chosen in options]
    for larger in (4 * tau, 16 * tau):
        options += [tau_option(larger), tau_option(larger) | {"learn_gain": True}]
    runs = [run for chosen in options for run in trained(scale.base, [OURS], scale.seeds, chosen)]
    for chosen in ({}, {"learn_gain": True}):
        runs += trained(scale.base, ["pope+scale_invariant"], scale.seeds, tau_option(tau) | chosen)
    return runs + trained(scale.base, ["alibi"], scale.seeds)


# The newer methods, beside BEST of the paper's. One line each, in the canonical order of model/methods/__init__.py.
RIVALS = [
    "fox",
    "p_rope+forget",
    "scale_invariant+forget",
    "p_rope+scale_invariant+forget",
    "rnope_swa",
    "scale_invariant_nope,rope+window,rope+window,rope+window",
    "scale_invariant_p_rope,rope+window,rope+window,rope+window",
    "p_rope+sink",
    "p_rope+scale_invariant+sink",
    "p_rope+gate",
    "p_rope+scale_invariant+gate",
    "p_rope+forget+gate",
    "alibi+gate",
    "p_rope+forget,rope+window,rope+window,rope+window",
    "kerple_log",
    "kerple_power",
    "nape",
    "swan",
    "llama4",
    "pope",
    "pope+scale_invariant",
    "pope+scale_invariant+gate",
    "pope+alibi",
    "pope+forget",
    "pope+scale_invariant,pope+window,pope+window,pope+window",
    "fire",
    "stick_breaking",
    "stick_breaking+gate",
]
BEST = [OURS, "logn_p_rope", "alibi", "p_rope", "rope"]
DROPPED = dict(rope="nope") | {OURS: "scale_invariant_nope"}  # what is left of a method without its rotation
DROPE = 0.875  # of the steps: DroPE trains on 16 B tokens, the last 2 B without RoPE
REWARM = 0.02  # of the steps that are left then: over these the learning rates rise anew, as the authors' of Llama 2


def table_rivals(scale: Scale) -> list[Run]:
    """Return the newer methods and the best of the paper's, DroPE among them."""
    tau = tau_option(TAU * preset(scale.base).position_scale)  # the kept runs at scale mini were trained with it
    runs = []
    for method in [*BEST, *RIVALS]:
        runs += trained(scale.base, [method], scale.seeds, tau if "scale_invariant" in method else None)
    rewarm = round(REWARM * (1 - DROPE) * preset(scale.base).steps)
    for method, later in DROPPED.items():
        switch = dict(method=[method], switch_method_at=[DROPE], switch_method_to=[later])
        runs += grid(scale.base, **switch, seed=scale.seeds)
        runs += grid(scale.base, **switch, switch_warmup_steps=[rewarm], seed=scale.seeds)
    return runs


def with_needle(sweep: Callable[[Scale], list[Run]]) -> Callable[[Scale], list[Run]]:
    """Return the sweep whose runs are fine-tuned on the needle task, once trained."""
    return lambda scale: [dataclasses.replace(run, needle=scale.needle) for run in sweep(scale)]


def needle_tau(scale: Scale) -> list[Run]:
    """Return scale-invariant p-RoPE with the scaled tau and 4, 16 and 64 times it, and m_t alone.

    With 16 times the scaled tau there is also a learned factor of the scores, and PoPE.
    """
    tau = TAU * preset(scale.base).position_scale
    options = [tau_option(factor * tau) for factor in (1, 4, 16, 64)]
    options += [tau_option(16 * tau) | {"learn_gain": True}, tau_option(tau) | {"terms": "m"}]
    runs = [run for chosen in options for run in trained(scale.base, [OURS], scale.seeds, chosen)]
    for chosen in (tau_option(tau), tau_option(16 * tau)):
        runs += trained(scale.base, ["pope+scale_invariant"], scale.seeds, chosen)
    return runs


TAUGHT_PRIMARY = [  # method, options
    ("rope", {}),
    ("logn_p_rope", {}),
    (OURS, {}),
    ("alibi", {}),
    ("alibi", {"slope_scale": 4.0}),
    ("alibi", {"slope_scale": 16.0}),
]
TAUGHT_EXPLORATORY = [
    ("p_rope", {}),
    ("nope", {}),
    ("logn_rope", {}),
    (OURS, {"tau": 2.5}),
    (OURS, {"tau": 40.0}),
    (OURS, {"terms": "m"}),
    (OURS, {"terms": "a"}),
    (OURS, {"learn_gain": True}),
    ("rope", {"base": 500.0}),
    ("stick_breaking", {}),
]


def taught(scale: Scale) -> list[Run]:
    """Return the study of models that were taught to copy: the primary methods first, and all methods of a seed."""
    return [
        run for group in (TAUGHT_PRIMARY, TAUGHT_EXPLORATORY) for seed in scale.seeds for method, options in group
        for run in trained(scale.base, [method], (seed,), options)
    ]  # fmt: skip


SET_BY_SWEEPS = ("name", "runs_dir", "resume")  # the sweep runner names and resumes the runs
# Which "all" leaves out:
BEYOND_PAPER = ("tau_by_length", "far_tokens", "scale_invariant_by_head", "needle_by_head")
BEYOND_PAPER += ("taught", "table_rivals", "needle_rivals", "needle_nope", "needle_tau")
SCALE_OF_SWEEP = dict(taught="taught")  # where --scale is not given; all others: paper
SWEEPS = dict(
    table_losses=table_losses,
    table_needle=with_needle(table_losses),
    table_infini=lambda scale: trained(scale.base, ["rope", OURS, "infini_rope", "infini_p_rope"], scale.seeds),
    figure_entropy=lambda scale: trained(scale.base, ["p_rope", "logn_p_rope", OURS], scale.once),
    figure_train_lengths=lambda scale: (
        trained(scale.base, MAIN_METHODS, scale.seeds) + trained([*scale.lengths[1:]], MAIN_METHODS, scale.once)
    ),
    figure_train_4k=lambda scale: trained(scale.base, MAIN_METHODS, scale.seeds),
    figure_train_16k=lambda scale: trained(scale.lengths[1], MAIN_METHODS, scale.once),
    figure_304m=lambda scale: trained(scale.large, ["logn_p_rope", "alibi", OURS], scale.once),
    figure_tau=figure_tau,
    figure_scale_invariant_variants=lambda scale: with_other_lengths(trained(scale.base, SCALE_INVARIANT, scale.seeds)),
    figure_qq_ours=lambda scale: trained(scale.base, ["rope", "p_rope", OURS], scale.once),
    open_choices=open_choices,
    tau_by_length=tau_by_length,
    far_tokens=far_tokens,
    scale_invariant_by_head=scale_invariant_by_head,
    needle_by_head=with_needle(scale_invariant_by_head),
    taught=taught,
    table_rivals=table_rivals,
    needle_rivals=with_needle(table_rivals),
    needle_nope=with_needle(lambda scale: trained(scale.base, ["nope", "scale_invariant_nope", OURS], scale.seeds)),
    needle_tau=with_needle(needle_tau),
)


def sweep(
    name: str,
    scale: str,
    seeds: list[int] | None = None,
    methods: list[str] | None = None,
    changes: dict | None = None,
    needle: dict | None = None,
) -> list[Run]:
    """Return the runs of a sweep ("all": of all of them but BEYOND_PAPER, each once).

    seeds replace those of the scale, everywhere; methods keeps the runs that are validated as one of these; changes are
    fields set in every run, needle holds settings of the needle task that replace the scale's. Raise ValueError for
    what there is not, and for a field in changes that a run has a value of its own for.
    """
    require(name in ("all", *SWEEPS), f"unknown sweep {name!r}; {did_you_mean(name, ['all', *SWEEPS])}")
    require(scale in SCALES, f"unknown scale {scale!r}; there are: {', '.join(SCALES)}")
    where = dataclasses.replace(SCALES[scale], seeds=tuple(seeds), once=tuple(seeds)) if seeds else SCALES[scale]
    settings = [field.name for field in dataclasses.fields(Needle)]
    for setting in needle or {}:
        require(setting in settings, f"the needle task has no setting {setting!r}; it has {', '.join(settings)}")
    where = dataclasses.replace(where, needle=dataclasses.replace(where.needle, **(needle or {})))
    names = [each for each in SWEEPS if each not in BEYOND_PAPER] if name == "all" else [name]
    runs = {}
    for own in [list(SWEEPS[each](where) or []) for each in names]:
        check_fields(name, own)
        for run in distinguish([add_changes(run, changes or {}) for run in own]):
            if not methods or set(run.methods) & set(methods):
                check_given(name, run, changes or {})
            first = runs.setdefault(run.identity, run)
            if run.needle:  # one sweep that fine-tunes a run is enough
                runs[run.identity] = dataclasses.replace(first, needle=run.needle)
    require(runs, f"sweep {name} has no runs: its function in configs/sweeps.py gives none")
    if methods:
        present = {method for run in runs.values() for method in run.methods}
        has_some = present & set(methods)
        require(has_some, f"sweep {name} has no method {', '.join(methods)}; it has {', '.join(sorted(present))}")
    chosen = [run for run in runs.values() if not methods or set(run.methods) & set(methods)]
    [(most_common, count)] = collections.Counter(run.name for run in chosen).most_common(1)
    words = f"two of its runs would be called {most_common}: choose values that differ more"
    require(count == 1, f"sweep {name}: {words}")
    return chosen


def check_fields(name: str, runs: list[Run]):
    """Raise ValueError for a field in the runs of a sweep that there is not, or that the sweep runner sets."""
    fields = {field.name for field in dataclasses.fields(Config)}
    for field in itertools.chain.from_iterable(run.changes for run in runs):
        hint = did_you_mean(field, fields, "see configs/config.py")
        require(field in fields, f"sweep {name}: a run has no field {field!r}; {hint}")
        require(field not in SET_BY_SWEEPS, f"sweep {name} sets {field}, which is no choice of a sweep's")


def add_changes(run: Run, changes: dict) -> Run:
    """Return the run with these changes too, but for fields that it sets itself or that are so in its preset."""
    base = preset(run.preset)
    added = {field: value for field, value in changes.items() if value != getattr(base, field)}
    return dataclasses.replace(run, changes={**added, **run.changes})


def distinguish(runs: list[Run]) -> list[Run]:
    """Return the runs, those of the same mathematics distinguished by all other fields in which they differ."""
    same = collections.defaultdict(list)
    for run in runs:
        same[run.identity].append(run.config.to_dict() | {"name": ""})
    differing = {
        identity: tuple(f for f in sorted(NOT_MATHEMATICS) if any(c[f] != configs[0][f] for c in configs))
        for identity, configs in same.items()
    }
    return [dataclasses.replace(run, distinguishing=differing[run.identity]) for run in runs]


def check_given(name: str, run: Run, changes: dict):
    """Raise ValueError when a field that is to be set in every run has a value of its own in this one."""
    how = dict(seed="--seeds", method="--methods")
    for field, value in changes.items():
        own = getattr(run.config, field)
        where = f"{name} sets it itself, to {own!r} in {run.name}"
        require(own == value, f"--{field} cannot be set in every run: sweep {where}; {how.get(field, 'leave it out')}")

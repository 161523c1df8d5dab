"""The attention methods by name.

A method is a set of mechanisms in any order: `p_rope+scale_invariant+gate`. METHODS names the published methods. Such a
name can stand for its mechanisms: `scale_invariant_p_rope+gate` is the method above. Commas separate the methods of
different layers: `nope,rope+window`. Later layers repeat the methods from the first on.

To add a mechanism, write a subclass of one of the kinds in base.py. Import it here, and add it to MECHANISMS.
"""

import inspect
import itertools
import warnings

import torch

from errors import did_you_mean, require
from model.methods.alibi import ALiBi
from model.methods.bam import BAM
from model.methods.base import KINDS, Mechanism, Method
from model.methods.fire import FIRE
from model.methods.forgetting import Forgetting
from model.methods.gate import SigmoidGate
from model.methods.grape import GrapeAP
from model.methods.infini import Infini
from model.methods.kerple import KerpleLog, KerplePower
from model.methods.logn import LogN
from model.methods.nape import AdaptiveScale, EntmaxOfHalfALiBi, HalfALiBi
from model.methods.ntk import NTK
from model.methods.p_rope import PRoPE
from model.methods.pope import PoPE
from model.methods.query_temperature import LogBeyondTraining, LogOffset, LogSteps
from model.methods.rope import RoPE
from model.methods.scale_invariant import ScaleInvariant
from model.methods.sharpness import Factor, LogRoot, Power
from model.methods.sink import LearnedSink
from model.methods.softplus import Softplus
from model.methods.stick_breaking import StickBreaking
from model.methods.wall import Wall
from model.methods.window import SlidingWindow
from model.methods.xsa import ExclusiveSelfAttention
from model.methods.yarn import YaRN

# `python -m model.methods.scale_invariant` runs a file that this file has imported, of which runpy warns.
warnings.filterwarnings("ignore", "'model.methods", RuntimeWarning, "runpy")

SMALLEST, LARGEST = 1e-30, 1e30  # limits of the size of an option that is not 0, so that float32 does not overflow

MECHANISMS: dict[str, type[Mechanism]] = {
    "rope": RoPE,
    "p_rope": PRoPE,
    "ntk": NTK,
    "yarn": YaRN,
    "pope": PoPE,
    "logn": LogN,
    "log_beyond": LogBeyondTraining,
    "log_steps": LogSteps,
    "log_offset": LogOffset,
    "factor": Factor,
    "log_root": LogRoot,
    "n_power": Power,
    "adaptive": AdaptiveScale,
    "alibi": ALiBi,
    "half_alibi": HalfALiBi,
    "scale_invariant": ScaleInvariant,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "bam": BAM,
    "forget": Forgetting,
    "window": SlidingWindow,
    "sink": LearnedSink,
    "infini": Infini,
    "fire": FIRE,
    "stick_breaking": StickBreaking,
    "wall": Wall,
    "softplus": Softplus,
    "grape_ap": GrapeAP,
    "half_alibi_entmax": EntmaxOfHalfALiBi,
    "gate": SigmoidGate,
    "xsa": ExclusiveSelfAttention,
}

METHODS = {  # the published methods: the paper's 14 first
    "rope": "rope",
    "p_rope": "p_rope",
    "nope": "",
    "rope_ntk": "ntk",
    "yarn": "yarn",
    "logn_rope": "rope+logn",
    "logn_p_rope": "p_rope+logn",
    "logn_ntk": "ntk+logn",
    "alibi": "alibi",
    "scale_invariant_p_rope": "p_rope+scale_invariant",
    "scale_invariant_rope": "rope+scale_invariant",
    "scale_invariant_nope": "scale_invariant",
    "infini_rope": "rope+infini",
    "infini_p_rope": "p_rope+infini",
    "kerple_log": "kerple_log",
    "kerple_power": "kerple_power",
    "bam": "bam",
    "bam_ssmax": "logn+bam",
    "nape": "adaptive+half_alibi",
    "fox": "forget",
    "pope": "pope",
    "fire": "fire",
    "stick_breaking": "stick_breaking",
    "wall": "wall",
    "lssar": "rope+softplus",
    "grape_ap": "grape_ap",
    "nape_entmax": "adaptive+half_alibi_entmax",
    "swan": "log_beyond,rope+window,rope+window,rope+window",
    "llama4": "rope+window,rope+window,rope+window,log_steps",
    "rnope_swa": "nope,rope+window,rope+window,rope+window",
}


def layer_pattern(name: str) -> tuple[str, ...]:
    """Return the canonical names of the methods of the first layers. Later layers repeat them.

    Raise ValueError for an unknown part.
    """
    description = METHODS[name] if "," in METHODS.get(name, "") else name
    layers = [published_name("+".join(mechanism_names(layer))) for layer in description.split(",")]
    period = next(n for n in range(1, len(layers) + 1) if layers == layers[:n] * (len(layers) // n))
    return tuple(layers[:period])


def canonical_name(name: str) -> str:
    """Return a method's name with its parts in canonical order. Raise ValueError for an unknown part."""
    return published_name(",".join(layer_pattern(name)))


def published_name(description: str) -> str:
    """Return the published name of mechanisms in canonical order, or the description if there is no such name."""
    return next((name for name, described in METHODS.items() if described == description), description)


def mechanism_names(layer: str) -> list[str]:
    """Return the names of one layer's mechanisms, ordered by kind. Its parts are mechanisms or published names."""
    parts = dict(zip(MECHANISMS, MECHANISMS)) | {part: names for part, names in METHODS.items() if "," not in names}
    names = []
    for part in layer.split("+"):
        suggestion = did_you_mean(part, METHODS.keys() | MECHANISMS.keys())
        require(part in parts, f"unknown part {part!r} of attention method {layer!r}. {suggestion}")
        names += parts[part].split("+") if parts[part] else []
    return sorted(names, key=lambda name: [issubclass(MECHANISMS[name], kind) for kind in KINDS.values()].index(True))


def all_mechanisms(name: str) -> list[type[Mechanism]]:
    """Return the mechanisms of all layers. Raise ValueError for an unknown part."""
    return [MECHANISMS[part] for layer in layer_pattern(name) for part in mechanism_names(layer)]


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of all layers of a method, by name. Raise ValueError for an unknown part."""
    return {key: value for mechanism in all_mechanisms(name) for key, value in mechanism.options().items()}


def option_type(option: inspect.Parameter) -> type:
    """Return the annotated type of an option, or else the type of its default, or `object` if the default is None."""
    if option.annotation is not option.empty:
        return option.annotation
    return object if option.default is None else type(option.default)


def check_options(name: str, options: dict) -> dict:
    """Return the options. An int for a float option becomes a float, because 2**64 overflows torch's int.

    Raise ValueError for an unknown method or option, with similar names, and for a value out of range.
    """
    valid, checked = method_options(name), {}
    positive = {option for mechanism in all_mechanisms(name) for option in mechanism.lengths}
    for option, value in options.items():
        unknown = f"unknown option {option!r} of attention method {name!r}"
        require(option in valid, f"{unknown}. {did_you_mean(option, valid)}")
        kind = option_type(valid[option])
        int_for_float = type(value) is int and kind in (float, float | None)
        problem = f"option {option!r} of attention method {name!r} is {value!r:.60}"
        fits = int_for_float or isinstance(value, kind)
        require(fits, f"{problem}. Give a value of type {getattr(kind, '__name__', kind)}.")
        in_range = not isinstance(value, int | float) or value == 0 or SMALLEST <= abs(value) <= LARGEST
        require(in_range, f"{problem}. Use 0 or a size from {SMALLEST:g} to {LARGEST:g}.")
        require(option not in positive or value is None or value > 0, f"{problem}. Use a positive number.")
        checked[option] = float(value) if int_for_float else value
    return checked


def make_method(
    name: str, /, *, num_heads: int, head_dim: int, train_length: int, position_scale: float = 1.0, **options
) -> Method:
    """Return the attention method `name` for one layer (see make_layers). Raise ValueError if layers differ."""
    same = len(layer_pattern(name)) == 1
    require(same, f"attention method {name!r} has layers that differ. Use make_layers.")
    (method,) = make_layers(
        name, 1, num_heads=num_heads, head_dim=head_dim, train_length=train_length, position_scale=position_scale,
        options=options,
    )  # fmt: skip
    return method


def make_layers(
    name: str, num_layers: int, *, num_heads: int, head_dim: int, train_length: int, position_scale: float = 1.0,
    options: dict,
) -> list[Method]:  # fmt: skip
    """Return the attention methods of a model's layers.

    train_length: tokens; NTK, YaRN and LogN's initial scale depend on it. position_scale: multiplies default options
    that are lengths in tokens. Other defaults are the papers' values. Each mechanism takes the options that it has.
    Raise ValueError for an unknown name or option, for values out of range, and for mechanisms that exclude each other.
    """
    options = check_options(name, options)
    methods = []
    for layer in itertools.islice(itertools.cycle(layer_pattern(name)), num_layers):
        mechanisms = []
        for mechanism in (MECHANISMS[part] for part in mechanism_names(layer)):
            given = {option: value for option, value in options.items() if option in mechanism.options()}
            chosen = mechanism.scaled_defaults(position_scale, given) | given
            mechanisms.append(mechanism(num_heads, head_dim, train_length, **chosen))
        methods.append(Method(layer, num_heads, head_dim, train_length, mechanisms))
    return methods


def make_alternative(
    name: str, other: str, *, num_heads: int, head_dim: int, train_length: int, position_scale: float = 1.0,
    options: dict,
) -> Method:  # fmt: skip
    """Return the method `other`, with the options that both methods have, for weights trained with `name`.

    Raise ValueError unless both train identically: only their rotations beyond the training length may differ.
    """
    trained, alternative = (
        make_method(
            method_name,
            num_heads=num_heads, head_dim=head_dim, train_length=train_length, position_scale=position_scale,
            **{option: value for option, value in options.items() if option in method_options(method_name)},
        )
        for method_name in (name, other)
    )  # fmt: skip
    unrotated, other_unrotated = (
        [mechanism for mechanism in all_mechanisms(method_name) if not issubclass(mechanism, KINDS["rotation"])]
        for method_name in (name, other)
    )
    identical = unrotated == other_unrotated and all(method.rotation is not None for method in (trained, alternative))
    if identical:
        tables = (method.rotation.tables(train_length, train_length, "cpu") for method in (trained, alternative))
        identical = all(map(torch.equal, *tables))
    require(identical, f"weights of {name} cannot be validated as {other}: they train differently. Train {other}.")
    return alternative

"""The attention methods by name.

A method is a set of mechanisms, written in any order: `p_rope+scale_invariant+gate`. Published methods have a name in
METHODS, which may stand as a part of another: `scale_invariant_p_rope+gate` is the method above. A comma separates the
methods of layers that differ, which repeat from the first layer on: `nope,rope+window`.

To add a mechanism, write a file with a subclass of one of the kinds in base.py, import it, and add it to MECHANISMS.
"""

import inspect
import itertools

import torch

from errors import did_you_mean, require
from model.methods.alibi import ALiBi
from model.methods.base import KINDS, Mechanism, Method
from model.methods.fire import FIRE
from model.methods.forgetting import Forgetting
from model.methods.gate import SigmoidGate
from model.methods.infini import Infini
from model.methods.kerple import KerpleLog, KerplePower
from model.methods.logn import LogN
from model.methods.nape import AdaptiveScale, HalfALiBi
from model.methods.ntk import NTK
from model.methods.p_rope import PRoPE
from model.methods.pope import PoPE
from model.methods.query_temperature import LogBeyondTraining, LogSteps
from model.methods.rope import RoPE
from model.methods.scale_invariant import ScaleInvariant
from model.methods.sharpness import Factor, LogRoot
from model.methods.sink import LearnedSink
from model.methods.stick_breaking import StickBreaking
from model.methods.window import SlidingWindow
from model.methods.yarn import YaRN

SMALLEST, LARGEST = 1e-30, 1e30  # sizes of an option that is not 0: outside, float32 overflows in what follows

MECHANISMS: dict[str, type[Mechanism]] = {
    "rope": RoPE,
    "p_rope": PRoPE,
    "ntk": NTK,
    "yarn": YaRN,
    "pope": PoPE,
    "logn": LogN,
    "log_beyond": LogBeyondTraining,
    "log_steps": LogSteps,
    "factor": Factor,
    "log_root": LogRoot,
    "adaptive": AdaptiveScale,
    "alibi": ALiBi,
    "half_alibi": HalfALiBi,
    "scale_invariant": ScaleInvariant,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "forget": Forgetting,
    "window": SlidingWindow,
    "sink": LearnedSink,
    "infini": Infini,
    "fire": FIRE,
    "stick_breaking": StickBreaking,
    "gate": SigmoidGate,
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
    "nape": "adaptive+half_alibi",
    "fox": "forget",
    "pope": "pope",
    "fire": "fire",
    "stick_breaking": "stick_breaking",
    "swan": "log_beyond,rope+window,rope+window,rope+window",
    "llama4": "rope+window,rope+window,rope+window,log_steps",
    "rnope_swa": "nope,rope+window,rope+window,rope+window",
}


def layer_pattern(name: str) -> tuple[str, ...]:
    """Return the canonical names of the layers' methods, which repeat: one name if all layers have the same method.

    ValueError for an unknown part.
    """
    layers = METHODS[name] if "," in METHODS.get(name, "") else name
    layers = [published_name("+".join(mechanism_names(layer))) for layer in layers.split(",")]
    period = next(n for n in range(1, len(layers) + 1) if layers == layers[:n] * (len(layers) // n))
    return tuple(layers[:period])


def canonical_name(name: str) -> str:
    """Return the one name that a method has, whatever the order of its parts. ValueError for an unknown part."""
    return published_name(",".join(layer_pattern(name)))


def published_name(description: str) -> str:
    """Return the published name of mechanisms in canonical order; the description itself if it has none."""
    return next((name for name, described in METHODS.items() if described == description), description)


def mechanism_names(layer: str) -> list[str]:
    """Return the mechanisms of one layer by name, ordered by kind."""
    parts = dict(zip(MECHANISMS, MECHANISMS)) | {part: names for part, names in METHODS.items() if "," not in names}
    names = []
    for part in layer.split("+"):
        suggestion = did_you_mean(part, METHODS.keys() | MECHANISMS.keys())
        require(part in parts, f"unknown part {part!r} of attention method {layer!r}. {suggestion}")
        names += parts[part].split("+") if parts[part] else []
    kinds = [*KINDS.values()]
    return sorted(names, key=lambda name: [issubclass(MECHANISMS[name], kind) for kind in kinds].index(True))


def all_mechanisms(name: str) -> list[type[Mechanism]]:
    """Return the mechanisms of all layers. ValueError for an unknown part."""
    return [MECHANISMS[part] for layer in layer_pattern(name) for part in mechanism_names(layer)]


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of a method, in all its layers, with types and defaults. ValueError for an unknown part."""
    return {key: value for mechanism in all_mechanisms(name) for key, value in mechanism.options().items()}


def option_type(option: inspect.Parameter) -> type:
    """Return the annotated type of an option. Without annotation: the type of its default, and any type for None."""
    if option.annotation is not option.empty:
        return option.annotation
    return object if option.default is None else type(option.default)


def check_options(name: str, options: dict) -> dict:
    """Return the options, whole numbers as floats where a method takes floats: torch has no number 2**64, but 1.8e19.

    ValueError for an unknown method or option, naming the nearest ones, and for a value that does not fit.
    """
    valid, checked = method_options(name), {}
    positive = {option for mechanism in all_mechanisms(name) for option in mechanism.lengths}
    for option, value in options.items():
        unknown = f"unknown option {option!r} of attention method {name!r}"
        require(option in valid, f"{unknown}. {did_you_mean(option, valid)}")
        kind = option_type(valid[option])
        whole = type(value) is int and kind in (float, float | None)
        must = f"option {option!r} of attention method {name!r} must be"
        require(whole or isinstance(value, kind), f"{must} {getattr(kind, '__name__', kind)}, got {value!r}")
        sized = not isinstance(value, int | float) or value == 0 or SMALLEST <= abs(value) <= LARGEST
        require(sized, f"{must} 0 or of a size from {SMALLEST:g} to {LARGEST:g}, got {str(value)[:60]}")
        require(option not in positive or value is None or value > 0, f"{must} positive, got {value}")
        checked[option] = float(value) if whole else value
    return checked


def make_method(
    name: str, /, *, num_heads: int, head_dim: int, train_length: int, position_scale: float = 1.0, **options
) -> Method:
    """Return the attention method `name` for one layer, see make_layers. ValueError for methods of several layers."""
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

    train_length (tokens) is the length that NTK, YaRN and LogN's initial scale compare with. Each mechanism takes the
    options that it has. Their defaults are the papers', for lengths that are position_scale times the paper's.
    ValueError for an unknown name or option, for values out of range, and for mechanisms that exclude each other.
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
    """Return the method `other`, with the options that it shares with `name`, for weights trained with `name`.

    ValueError unless the two train identically: their rotations differ, and only beyond the training length. Then one
    training shows what both do there.
    """
    trained, alternative = (
        make_method(
            each, num_heads=num_heads, head_dim=head_dim, train_length=train_length, position_scale=position_scale,
            **{option: value for option, value in options.items() if option in method_options(each)},
        )
        for each in (name, other)
    )  # fmt: skip
    rest, other_rest = (
        [mechanism for mechanism in all_mechanisms(each) if not issubclass(mechanism, KINDS["rotation"])]
        for each in (name, other)
    )
    identical = rest == other_rest and all(method.rotation is not None for method in (trained, alternative))
    if identical:
        tables = (method.rotation.tables(train_length, train_length, "cpu") for method in (trained, alternative))
        identical = all(map(torch.equal, *tables))
    require(identical, f"weights of {name} cannot be validated as {other}: they train differently. Train {other}.")
    return alternative

"""The attention methods by name.

A method is a set of mechanisms, written in any order: `p_rope+scale_invariant+gate`. Published methods have a name in
METHODS, which may stand as a part of another: `scale_invariant_p_rope+gate` is the method above. A comma separates the
methods of layers that differ, which repeat from the first layer on: `nope,rope+window`.

To add a mechanism, write a file with a subclass of one of the kinds in base.py, and add one line to MECHANISMS.
"""

import inspect
import itertools
from types import NoneType, UnionType

import torch
from torch import Tensor

from errors import did_you_mean, require
from model.methods.alibi import ALiBi
from model.methods.base import KINDS, Mechanism, Method, Rotation, check_kinds, kind_of
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

SHAPE = ("num_heads", "head_dim", "train_length", "position_scale")
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

    ValueError for an unknown part, and for mechanisms that exclude each other.
    """
    layers = METHODS[name] if "," in METHODS.get(name, "") else name
    layers = [published_name("+".join(mechanism_names(layer))) for layer in layers.split(",")]
    period = next(n for n in range(1, len(layers) + 1) if layers == layers[:n] * (len(layers) // n))
    return tuple(layers[:period])


def canonical_name(name: str) -> str:
    """Return the one name that a method has, whatever the order of its parts. ValueError: see layer_pattern."""
    return published_name(",".join(layer_pattern(name)))


def published_name(description: str) -> str:
    """Return the published name of mechanisms in canonical order; the description itself if it has none."""
    return next((name for name, described in METHODS.items() if described == description), description)


def mechanism_names(layer: str) -> list[str]:
    """Return the mechanisms of one layer by name, ordered by kind. Score changes stay in the order that is given."""
    names = []
    for part in layer.split("+"):
        known = [*METHODS, *(name for name in MECHANISMS if name not in METHODS)]
        require(part in known, f"unknown attention method {part!r} in {layer!r}; {did_you_mean(part, known)}")
        mechanisms = METHODS.get(part, part)
        alone = "," not in mechanisms
        require(alone, f"attention method {part!r} in {layer!r} has layers that differ. Use it alone.")
        names += mechanisms.split("+") if mechanisms else []
    check_kinds(names, [MECHANISMS[name] for name in names])
    return sorted(names, key=lambda name: list(KINDS).index(kind_of(MECHANISMS[name])))


def layer_mechanisms(layer: str) -> list[type[Mechanism]]:
    return [MECHANISMS[name] for name in mechanism_names(layer)]


def mechanism_options(mechanism: type[Mechanism]) -> dict[str, inspect.Parameter]:
    """Return the options of a mechanism with their types (without one, the default's) and defaults.

    ValueError for an option without both.
    """
    options = {}
    for name, parameter in inspect.signature(mechanism, eval_str=True).parameters.items():
        if name not in SHAPE:
            kind = type(parameter.default) if parameter.annotation is parameter.empty else parameter.annotation
            complete = parameter.default is not parameter.empty and isinstance(kind, type | UnionType)
            example = f"def __init__(self, num_heads, head_dim, train_length, {name}: float = 1.0)"
            refusal = f"option {name!r} of {mechanism.__name__} needs a type and a default. Write it as in {example}"
            require(complete and kind is not NoneType, refusal)
            options[name] = parameter.replace(annotation=kind)
    return options


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of a method with their types and defaults; of all its layers, where they differ.

    ValueError for an unknown name, and for two mechanisms of a layer that share an option.
    """
    options = {}
    for layer in layer_pattern(name):
        layer_options = {}
        for mechanism in layer_mechanisms(layer):
            new = mechanism_options(mechanism)
            shared = new.keys() & layer_options.keys()
            require(not shared, f"mechanisms of {layer!r} share the option {', '.join(shared)}. Leave one out.")
            layer_options |= new
        options |= layer_options
    return options


def check_options(name: str, options: dict) -> None:
    """Raise ValueError for an unknown method or option, naming the nearest ones, and for values of a wrong type."""
    valid = method_options(name)
    for option, value in options.items():
        unknown = f"unknown option {option!r} of attention method {name!r}"
        require(option in valid, f"{unknown}; {did_you_mean(option, valid)}")
        kind = valid[option].annotation
        accepted = kind | int if kind in (float, float | None) else kind
        right = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
        must = f"option {option!r} of attention method {name!r} must be"
        require(right, f"{must} {getattr(kind, '__name__', kind)}, got {value!r}")
        sized = not isinstance(value, int | float) or value == 0 or SMALLEST <= abs(value) <= LARGEST
        require(sized, f"{must} 0 or of a size from {SMALLEST:g} to {LARGEST:g}, got {str(value)[:60]}")


def scaled_options(name: str, position_scale: float, options: dict) -> dict:
    """Return the options of a method with the rotary base and 1/slope of ALiBi multiplied by position_scale.

    An option that is given is taken as it is.
    """
    scaled = {}
    for layer in layer_pattern(name) if position_scale != 1 else ():
        for mechanism in layer_mechanisms(layer):
            scaled |= mechanism.scaled(position_scale, options)
    return scaled | options


def make_method(
    name: str, /, *, num_heads: int, head_dim: int, train_length: int, position_scale: float = 1.0, **options
) -> Method:
    """Return the attention method `name` for one layer; make_layers for methods whose layers differ.

    train_length (tokens) is the length that NTK, YaRN and LogN's initial scale compare with. Each option of the
    method's mechanisms has the paper's value as its default, scaled as in scaled_options. ValueError for an unknown
    name or option, for values out of range, and for mechanisms that exclude each other.
    """
    check_options(name, options)
    pattern = layer_pattern(name)
    require(len(pattern) == 1, f"attention method {name!r} has layers that differ. Use make_layers.")
    (layer,) = pattern
    kinds = {option: parameter.annotation for option, parameter in method_options(name).items()}
    options = {  # float(): 2**64 is no number for torch, 1.8e19 is
        option: float(value) if kinds[option] in (float, float | None) and value is not None else value
        for option, value in scaled_options(name, position_scale, options).items()
    }
    mechanisms = []
    for mechanism in layer_mechanisms(layer):
        given = {option: options[option] for option in mechanism_options(mechanism) if option in options}
        mechanisms.append(mechanism(num_heads, head_dim, train_length, **given))
    return Method(layer, num_heads, head_dim, train_length, mechanisms)


def make_layers(
    name: str, num_layers: int, *, num_heads: int, head_dim: int, train_length: int, position_scale: float = 1.0,
    options: dict,
) -> list[Method]:  # fmt: skip
    """Return the attention methods of a model's layers. Each takes the options that it has; see make_method."""
    check_options(name, options)
    methods = []
    for layer in itertools.islice(itertools.cycle(layer_pattern(name)), num_layers):
        given = {option: value for option, value in options.items() if option in method_options(layer)}
        shape = dict(num_heads=num_heads, head_dim=head_dim, train_length=train_length, position_scale=position_scale)
        methods.append(make_method(layer, **shape, **given))
    return methods


def make_alternative(
    name: str, other: str, /, *, num_heads: int, head_dim: int, train_length: int, position_scale: float = 1.0,
    **options,
) -> Method:  # fmt: skip
    """Return the method `other`, with the options that it shares with `name`, for weights trained with `name`.

    ValueError unless the two train identically: their rotations differ, and only beyond the training length. Then one
    training shows what both do there.
    """
    patterns = layer_pattern(name), layer_pattern(other)
    single = all(len(pattern) == 1 for pattern in patterns)
    require(single, f"weights of {name} cannot be validated as {other}: a method has layers that differ. Leave it out.")
    require(patterns[0] != patterns[1], f"{name} and {other} are the same method. Leave out the second.")
    shape = dict(num_heads=num_heads, head_dim=head_dim, train_length=train_length, position_scale=position_scale)
    shared = {option: value for option, value in options.items() if option in method_options(other)}
    trained, alternative = make_method(name, **shape, **options), make_method(other, **shape, **shared)
    rest, other_rest = (
        [mechanism for mechanism in layer_mechanisms(layer) if not issubclass(mechanism, Rotation)]
        for (layer,) in patterns
    )
    identical = rest == other_rest and torch.equal(training_rotation(trained), training_rotation(alternative))
    require(identical, f"weights of {name} cannot be validated as {other}: they train differently. Train {other}.")
    return alternative


def training_rotation(method: Method) -> Tensor:
    """Return cos and sin at the training length, (2, T, D/2); an empty tensor without a rotation."""
    if method.rotation is None:
        return torch.empty(0)
    return torch.stack(method.rotation.tables(method.train_length, method.train_length, "cpu"))

"""The attention methods by name. To add one: a file beside this one, and a line in METHODS.

A method is the mechanisms of each layer. Where layers differ, it is the names of their methods instead, which repeat
from the first layer on; such a pattern needs no line in the table: "rope_window,rope_window,nope" is a name, too.
"""

import inspect
import itertools

import torch
from torch import Tensor

from errors import did_you_mean, require
from model.methods.alibi import ALiBi
from model.methods.base import Mechanism, Method, Rotation, check_kinds
from model.methods.fire import FIRE
from model.methods.forgetting import Forgetting
from model.methods.gate import SigmoidGate
from model.methods.infini import Infini
from model.methods.kerple import KerpleLog, KerplePower
from model.methods.llama4 import PositionTemperature
from model.methods.logn import LogN
from model.methods.nape import AdaptiveScale, HalfALiBi
from model.methods.ntk import NTK
from model.methods.p_rope import PRoPE
from model.methods.path import PaTH, PaTHFoX
from model.methods.pope import PoPE
from model.methods.rope import RoPE
from model.methods.scale_invariant import ScaleInvariant
from model.methods.sink import LearnedSink
from model.methods.stick_breaking import StickBreaking
from model.methods.swan import LogBeyondTraining
from model.methods.window import SlidingWindow
from model.methods.yarn import YaRN

SHAPE = ("num_heads", "head_dim", "train_length", "position_scale")
SMALLEST, LARGEST = 1e-30, 1e30  # an option's number, if not 0: beyond them float32 has no room for what follows

METHODS = {
    "rope": (RoPE,),
    "p_rope": (PRoPE,),
    "nope": (),
    "rope_ntk": (NTK,),
    "yarn": (YaRN,),
    "logn_rope": (RoPE, LogN),
    "logn_p_rope": (PRoPE, LogN),
    "logn_ntk": (NTK, LogN),
    "alibi": (ALiBi,),
    "scale_invariant_p_rope": (PRoPE, ScaleInvariant),
    "scale_invariant_rope": (RoPE, ScaleInvariant),
    "scale_invariant_nope": (ScaleInvariant,),
    "infini_rope": (RoPE, Infini),
    "infini_p_rope": (PRoPE, Infini),
    "kerple_log": (KerpleLog,),
    "kerple_power": (KerplePower,),
    "nape": (HalfALiBi, AdaptiveScale),
    "fox": (Forgetting,),
    "fox_p_rope": (PRoPE, Forgetting),
    "fox_scale_invariant": (ScaleInvariant, Forgetting),
    "fox_scale_invariant_p_rope": (PRoPE, ScaleInvariant, Forgetting),
    "rope_window": (RoPE, SlidingWindow),
    "p_rope_window": (PRoPE, SlidingWindow),
    "p_rope_sink": (PRoPE, LearnedSink),
    "scale_invariant_p_rope_sink": (PRoPE, ScaleInvariant, LearnedSink),
    "p_rope_gate": (PRoPE, SigmoidGate),
    "scale_invariant_p_rope_gate": (PRoPE, ScaleInvariant, SigmoidGate),
    "fox_p_rope_gate": (PRoPE, Forgetting, SigmoidGate),
    "alibi_gate": (ALiBi, SigmoidGate),
    "pope": (PoPE,),
    "scale_invariant_pope": (PoPE, ScaleInvariant),
    "scale_invariant_pope_gate": (PoPE, ScaleInvariant, SigmoidGate),
    "alibi_pope": (PoPE, ALiBi),
    "fox_pope": (PoPE, Forgetting),
    "pope_window": (PoPE, SlidingWindow),
    "fire": (FIRE,),
    "stick_breaking": (StickBreaking,),
    "stick_breaking_gate": (StickBreaking, SigmoidGate),
    "path": (PaTH,),
    "path_fox": (PaTHFoX,),
    "nope_log_beyond": (LogBeyondTraining,),
    "nope_temperature": (PositionTemperature,),
    "swan": "nope_log_beyond,rope_window,rope_window,rope_window",
    "llama4": "rope_window,rope_window,rope_window,nope_temperature",
    "rnope_swa": "nope,rope_window,rope_window,rope_window",
    "local_scale_invariant_nope": "scale_invariant_nope,rope_window,rope_window,rope_window",
    "local_scale_invariant_p_rope": "scale_invariant_p_rope,rope_window,rope_window,rope_window",
    "local_scale_invariant_pope": "scale_invariant_pope,pope_window,pope_window,pope_window",
    "local_fox_p_rope": "fox_p_rope,rope_window,rope_window,rope_window",
}


def layer_pattern(name: str) -> tuple[str, ...]:
    """Return the methods of the layers, by name, which repeat: one for a method that is the same in all of them.

    ValueError for an unknown name.
    """
    known = METHODS.get(name, name if "," in name else None)
    if known is None:
        raise ValueError(f"unknown attention method {name!r}; {did_you_mean(name, METHODS)}")
    if not isinstance(known, str):
        return (name,)
    pattern = tuple(known.split(","))
    for part in pattern:
        one = METHODS.get(part)
        if one is None:
            raise ValueError(f"unknown attention method {part!r} in {name!r}; {did_you_mean(part, METHODS)}")
        require(not isinstance(one, str), f"attention method {part!r} in {name!r} is a pattern of layers itself")
    return pattern


def mechanisms_of(name: str) -> tuple[type[Mechanism], ...]:
    """Return all mechanisms of a method's layers. ValueError for an unknown name."""
    return tuple(dict.fromkeys(mechanism for part in layer_pattern(name) for mechanism in METHODS[part]))


def own_options(mechanism: type) -> dict[str, inspect.Parameter]:
    """Return the options of a mechanism with their types (without one, the default's) and defaults.

    ValueError for an option without both.
    """
    options = {}
    for name, p in inspect.signature(mechanism, eval_str=True).parameters.items():
        if name in SHAPE:
            continue
        kind = type(p.default) if p.annotation is p.empty else p.annotation
        example = f"def __init__(self, num_heads, head_dim, train_length, {name}: float = 1.0)"
        complete = p.default is not p.empty and kind is not type(None) and is_checkable(kind)
        require(complete, f"option {name!r} of {mechanism.__name__} needs a type and a default, as in {example}")
        options[name] = p.replace(annotation=kind)
    return options


def is_checkable(kind) -> bool:
    """Tell whether isinstance takes a type: float and int | None are such types, list[int] is not."""
    try:
        isinstance(None, kind)
    except TypeError:
        return False
    return True


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of a method, with their types and default values; where layers differ, those of any of them.

    ValueError for an unknown name.
    """
    options = {}
    for part in layer_pattern(name):
        check_kinds(part, METHODS[part])
        own = {}
        for mechanism in METHODS[part]:
            new = own_options(mechanism)
            both, shared = " and ".join(m.__name__ for m in METHODS[part]), ", ".join(sorted(new.keys() & own.keys()))
            require(not shared, f"attention method {part!r}: {both} share the option {shared}")
            own |= new
        options |= own
    return options


def check_options(name: str, options: dict) -> None:
    """Raise ValueError for an unknown method or option, naming the nearest ones, and for values of a wrong type."""
    valid = method_options(name)
    for option, value in options.items():
        if option not in valid:
            raise ValueError(f"unknown option {option!r} of attention method {name!r}; {did_you_mean(option, valid)}")
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
    if position_scale == 1:
        return options
    scaled = [mechanism.scaled(position_scale, options) for mechanism in mechanisms_of(name)]
    return {option: value for part in scaled for option, value in part.items()} | options


def make_method(
    name: str, /, *, num_heads: int, head_dim: int, train_length: int, position_scale: float = 1.0, **options
) -> Method:
    """Return the attention method `name` for one layer; make_layers for the layers of a pattern.

    train_length (tokens) is what length-dependent methods (NTK, YaRN, LogN's initial scale) compare against. Options
    are those of the method's mechanisms, each with the paper's value as its default (scaled as in scaled_options).
    ValueError for an unknown name or option, naming the nearest valid ones, for values out of range, and for mechanisms
    that do not go together.
    """
    check_options(name, options)
    require(len(layer_pattern(name)) == 1, f"attention method {name!r} is not the same in all layers: use make_layers")
    options = scaled_options(name, position_scale, options)
    kinds = {option: p.annotation for option, p in method_options(name).items()}
    for option, value in options.items():
        if kinds[option] in (float, float | None) and value is not None:
            options[option] = float(value)  # 2**64 is no number for torch, 1.8e19 is
    mechanisms = [
        mechanism(num_heads, head_dim, train_length, **{o: options[o] for o in own_options(mechanism) if o in options})
        for mechanism in METHODS[name]
    ]
    return Method(name, num_heads, head_dim, train_length, mechanisms)


def make_layers(name: str, num_layers: int, /, **shape_and_options) -> list[Method]:
    """Return the attention methods of the layers of a model. Each takes the options that it has; see make_method."""
    methods = []
    check_options(name, {o: v for o, v in shape_and_options.items() if o not in SHAPE})
    pattern = layer_pattern(name)
    for part in itertools.islice(itertools.cycle(pattern), num_layers):
        known = method_options(part).keys() | SHAPE
        methods.append(make_method(part, **{o: v for o, v in shape_and_options.items() if o in known}))
    return methods


def make_alternative(
    name: str,
    other: str,
    /,
    *,
    num_heads: int,
    head_dim: int,
    train_length: int,
    position_scale: float = 1.0,
    **options,
) -> Method:
    """Return the method `other`, with the options that it shares with `name`, for weights trained with `name`.

    ValueError unless the two train identically: they differ in their rotation only, and there only beyond the training
    length. So one training shows what both do there.
    """
    for one in (name, other):
        words = f"{one} has layers that differ: weights of such methods are validated as themselves alone"
        require(len(layer_pattern(one)) == 1, words)
    shape = dict(num_heads=num_heads, head_dim=head_dim, train_length=train_length, position_scale=position_scale)
    shared = {option: value for option, value in options.items() if option in method_options(other)}
    ours, theirs = make_method(name, **shape, **options), make_method(other, **shape, **shared)
    refused = f"weights of {name} cannot be validated as {other}, which"
    require(name != other, f"{refused} is the same method")
    rest, other_rest = ([m for m in METHODS[x] if not issubclass(m, Rotation)] for x in (name, other))
    identical = rest == other_rest and torch.equal(trained_rotation(ours), trained_rotation(theirs))
    require(identical, f"{refused} does not train identically: train it by itself")
    return theirs


def trained_rotation(method: Method) -> Tensor:
    """Return cos and sin at the training length, (2, T, D/2); empty without a rotation."""
    if method.rotation is None:
        return torch.empty(0)
    return torch.stack(method.rotation.tables(method.train_length, method.train_length, "cpu"))

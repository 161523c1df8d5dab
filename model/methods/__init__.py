"""The attention methods by name. To add one: a file beside this one, and a line in METHODS."""

import inspect

import torch
from torch import Tensor

from errors import did_you_mean, require
from model.methods.alibi import ALiBi
from model.methods.base import Method, Rotation, check_kinds
from model.methods.infini import Infini
from model.methods.logn import LogN
from model.methods.ntk import NTK
from model.methods.p_rope import PRoPE
from model.methods.rope import RoPE
from model.methods.scale_invariant import ScaleInvariant
from model.methods.yarn import YaRN

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
}


def own_options(mechanism: type) -> dict[str, inspect.Parameter]:
    """Return the options of a mechanism with their types (without one, the default's) and defaults.

    ValueError for an option without both.
    """
    options = {}
    for name, p in inspect.signature(mechanism, eval_str=True).parameters.items():
        if name in ("num_heads", "head_dim", "train_length"):
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
    """Return the options of a method, with their types and default values. ValueError for an unknown name."""
    if name not in METHODS:
        raise ValueError(f"unknown attention method {name!r}; {did_you_mean(name, METHODS)}")
    check_kinds(name, METHODS[name])
    options = {}
    for mechanism in METHODS[name]:
        own = own_options(mechanism)
        both, shared = " and ".join(m.__name__ for m in METHODS[name]), ", ".join(sorted(own.keys() & options.keys()))
        require(not shared, f"attention method {name!r}: {both} share the option {shared}")
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


def scaled_options(name: str, length_scale: float, options: dict) -> dict:
    """Return the options of a method with its lengths in tokens (tau, rotary bases, one over ALiBi's slopes) scaled.

    They become length_scale times the paper's. An option that is given is taken as it is.
    """
    if length_scale == 1:
        return options
    scaled = [mechanism.scaled(length_scale, options) for mechanism in METHODS[name]]
    return {option: value for part in scaled for option, value in part.items()} | options


def make_method(
    name: str, /, *, num_heads: int, head_dim: int, train_length: int, length_scale: float = 1.0, **options
) -> Method:
    """Return the attention method `name` for one layer.

    train_length (tokens) is what length-dependent methods (NTK, YaRN, LogN's initial scale) compare against. Options
    are those of the method's mechanisms, each with the paper's value as its default, lengths in tokens times
    length_scale (see scaled_options). ValueError for an unknown name or option, naming the nearest valid ones, for
    values out of range, and for mechanisms that do not go together.
    """
    check_options(name, options)
    options = scaled_options(name, length_scale, options)
    kinds = {option: p.annotation for option, p in method_options(name).items()}
    for option, value in options.items():
        if kinds[option] in (float, float | None) and value is not None:
            options[option] = float(value)  # 2**64 is no number for torch, 1.8e19 is
    mechanisms = [
        mechanism(num_heads, head_dim, train_length, **{o: options[o] for o in own_options(mechanism) if o in options})
        for mechanism in METHODS[name]
    ]
    return Method(name, num_heads, head_dim, train_length, mechanisms)


def make_alternative(
    name: str, other: str, /, *, num_heads: int, head_dim: int, train_length: int, length_scale: float = 1.0, **options
) -> Method:
    """Return the method `other`, with the options that it shares with `name`, for weights trained with `name`.

    ValueError unless the two train identically: they differ in their rotation only, and there only beyond the training
    length. So one training shows what both do there.
    """
    shape = dict(num_heads=num_heads, head_dim=head_dim, train_length=train_length, length_scale=length_scale)
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

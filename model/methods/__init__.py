"""The attention methods by name. To add one: a file beside this one, and a line in METHODS."""

import difflib
import inspect

from model.methods.alibi import ALiBi
from model.methods.base import Method
from model.methods.infini import Infini
from model.methods.logn import LogN
from model.methods.ntk import NTK
from model.methods.p_rope import PRoPE
from model.methods.rope import RoPE
from model.methods.scale_invariant import ScaleInvariant
from model.methods.yarn import YaRN

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
    shared = ("num_heads", "head_dim", "train_length")
    return {name: p for name, p in inspect.signature(mechanism).parameters.items() if name not in shared}


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """The options of a method, with their types and default values. ValueError for an unknown name."""
    if name not in METHODS:
        raise ValueError(f"unknown attention method {name!r}; {nearest(name, METHODS)}")
    return {option: p for mechanism in METHODS[name] for option, p in own_options(mechanism).items()}


def make_method(name: str, *, num_heads: int, head_dim: int, train_length: int, **options) -> Method:
    """The attention method `name` for one layer.

    train_length (tokens) is what length-dependent methods (NTK, YaRN, LogN's initial scale) compare against. Options
    are those of the method's mechanisms, each with the paper's value as its default. ValueError for an unknown name or
    option, naming the nearest valid ones, and for values out of range.
    """
    valid = method_options(name)
    for option, value in options.items():
        if option not in valid:
            raise ValueError(f"unknown option {option!r} of attention method {name!r}; {nearest(option, valid)}")
        kind = valid[option].annotation
        accepted = kind | int if kind in (float, float | None) else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            kind = getattr(kind, "__name__", kind)
            raise ValueError(f"option {option!r} of attention method {name!r} must be {kind}, got {value!r}")
    mechanisms = [
        mechanism(num_heads, head_dim, train_length, **{o: options[o] for o in own_options(mechanism) if o in options})
        for mechanism in METHODS[name]
    ]
    return Method(name, num_heads, head_dim, train_length, mechanisms)


def nearest(name: str, valid) -> str:
    close = difflib.get_close_matches(name, valid, n=3, cutoff=0.4)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"valid: {', '.join(sorted(valid)) or 'none'}"

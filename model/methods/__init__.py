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
    shared = ("num_heads", "head_dim", "train_length")
    return {name: p for name, p in inspect.signature(mechanism).parameters.items() if name not in shared}


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """The options of a method, with their types and default values. ValueError for an unknown name."""
    if name not in METHODS:
        raise ValueError(f"unknown attention method {name!r}; {nearest(name, METHODS)}")
    return {option: p for mechanism in METHODS[name] for option, p in own_options(mechanism).items()}


def check_options(name: str, options: dict) -> None:
    """ValueError for an unknown method or option, naming the nearest valid ones, and for values of the wrong type."""
    valid = method_options(name)
    for option, value in options.items():
        if option not in valid:
            raise ValueError(f"unknown option {option!r} of attention method {name!r}; {nearest(option, valid)}")
        kind = valid[option].annotation
        accepted = kind | int if kind in (float, float | None) else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            kind = getattr(kind, "__name__", kind)
            raise ValueError(f"option {option!r} of attention method {name!r} must be {kind}, got {value!r}")
        if isinstance(value, int | float) and value != 0 and not SMALLEST <= abs(value) <= LARGEST:
            size = f"0 or of a size from {SMALLEST:g} to {LARGEST:g}"
            raise ValueError(f"option {option!r} of attention method {name!r} must be {size}, got {str(value)[:60]}")


def make_method(name: str, /, *, num_heads: int, head_dim: int, train_length: int, **options) -> Method:
    """The attention method `name` for one layer.

    train_length (tokens) is what length-dependent methods (NTK, YaRN, LogN's initial scale) compare against. Options
    are those of the method's mechanisms, each with the paper's value as its default. ValueError for an unknown name or
    option, naming the nearest valid ones, and for values out of range.
    """
    check_options(name, options)
    kinds = {option: p.annotation for option, p in method_options(name).items()}
    for option, value in options.items():
        if kinds[option] in (float, float | None) and value is not None:
            options[option] = float(value)  # 2**64 is no number for torch, 1.8e19 is
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

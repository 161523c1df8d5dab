"""Checks the options of attention methods. The options of a mechanism are the arguments of its constructor."""

import inspect

from errors import UserError, did_you_mean
from model.methods.names import all_mechanisms

SMALLEST, LARGEST = 1e-30, 1e30  # limits of the size of an option that is not 0, so that float32 does not overflow


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of all layers of a method, by name. Raise ValueError for an unknown part."""
    options = {}
    for mechanism in all_mechanisms(name):
        options |= mechanism.options()
    return options


def check_options(name: str, options: dict) -> dict:
    """Return the options. An int for a float option becomes a float, because 2**64 overflows torch's int.

    Raise ValueError for an unknown method or option, with similar names, and for a value out of range.
    """
    valid = method_options(name)
    lengths = {option for mechanism in all_mechanisms(name) for option in mechanism.lengths + mechanism.inverse_lengths}
    checked = {}
    for option, value in options.items():
        described = f"option {option!r} of attention method {name!r}"
        if option not in valid:
            raise UserError(f"unknown {described}. {did_you_mean(option, valid)}")
        kind = valid[option].annotation
        kind = object if kind is inspect.Parameter.empty else kind
        if type(value) is int and kind in (float, float | None):
            value = float(value)
        problem = f"{described} is {value!r:.60}"
        if not isinstance(value, kind):
            raise UserError(f"{problem}. Give a value of type {getattr(kind, '__name__', kind)}.")
        if isinstance(value, int | float) and value != 0 and not SMALLEST <= abs(value) <= LARGEST:
            raise UserError(f"{problem}. Use 0 or a size from {SMALLEST:g} to {LARGEST:g}.")
        if option in lengths and value is not None and value <= 0:
            raise UserError(f"{problem}. Use a positive number.")
        checked[option] = value
    return checked

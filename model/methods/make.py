"""Makes attention methods from a name, a Shape and options."""

import torch

from errors import UserError
from model.methods import MECHANISMS
from model.methods.base import KINDS, Method, Shape
from model.methods.names import all_mechanisms, layer_pattern, mechanism_names
from model.methods.options import check_options, method_options


def make_layers(name: str, shape: Shape, num_layers: int, options: dict) -> list[Method]:
    """Return the attention methods of a model's layers.

    Each mechanism takes the options that it has. Other options have the papers' values, scaled by position_scale.
    Raise ValueError for an unknown name or option, for values out of range, and for mechanisms that exclude each other.
    """
    options = check_options(name, options)
    pattern = layer_pattern(name)
    methods = []
    for number in range(num_layers):
        layer = pattern[number % len(pattern)]
        mechanisms = []
        for mechanism in (MECHANISMS[part] for part in mechanism_names(layer)):
            given = {option: value for option, value in options.items() if option in mechanism.options()}
            chosen = mechanism.scaled_defaults(shape.position_scale, given) | given
            mechanisms.append(mechanism(shape, **chosen))
        methods.append(Method(layer, shape, mechanisms))
    return methods


def layer_methods(config) -> list[Method]:
    """Return each layer's method, with new parameters, of a model's configuration (see GPT)."""
    return make_layers(config.method, Shape.of(config), config.num_layers, config.method_options or {})


def make_method(name: str, shape: Shape, **options) -> Method:
    """Return the attention method `name` for one layer (see make_layers). Raise ValueError if layers differ."""
    if len(layer_pattern(name)) > 1:
        raise UserError(f"attention method {name!r} has layers that differ. Use make_layers, and no validate_as.")
    return make_layers(name, shape, 1, options)[0]


def make_alternative(name: str, other: str, shape: Shape, options: dict) -> Method:
    """Return the method `other`, with the options that both methods have, for weights trained with `name`.

    Raise ValueError unless both train identically: only their rotations beyond the training length may differ.
    """
    trained = make_method(name, shape, **options)
    valid = method_options(other)
    common = {option: value for option, value in options.items() if option in valid}
    alternative = make_method(other, shape, **common)
    if unrotated(name) != unrotated(other) or not same_rotation(trained, alternative):
        raise UserError(f"weights of {name} cannot be validated as {other}: they train differently. Train {other}.")
    return alternative


def alternative_methods(config) -> dict[str, Method]:
    """Return the methods of a configuration's validate_as by name. Raise ValueError as make_alternative does."""
    shape, options = Shape.of(config), config.method_options
    return {name: make_alternative(config.method, name, shape, options) for name in config.validate_as}


def unrotated(name: str) -> list[type]:
    """Return a method's mechanisms but for its rotation."""
    return [mechanism for mechanism in all_mechanisms(name) if not issubclass(mechanism, KINDS["rotation"])]


def same_rotation(method: Method, other: Method) -> bool:
    """Return True if both methods rotate, and have the same tables up to the training length."""
    if method.rotation is None or other.rotation is None:
        return False
    length = method.shape.train_length
    tables, other_tables = (m.rotation.tables(length, length, "cpu") for m in (method, other))
    return all(map(torch.equal, tables, other_tables))

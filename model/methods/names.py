"""Reads the names of attention methods.

A method is a set of mechanisms in any order: `p_rope+scale_invariant+gate`. A published name can stand for its
mechanisms: `scale_invariant_p_rope+gate` is the method above. Commas separate the methods of different layers:
`nope,rope+window`. Later layers repeat the methods from the first on.
"""

from errors import UserError, did_you_mean
from model.methods import MECHANISMS, METHODS
from model.methods.base import KINDS, Mechanism


def layer_pattern(name: str) -> tuple[str, ...]:
    """Return the canonical names of the methods of the first layers. Later layers repeat them.

    Raise ValueError for an unknown part.
    """
    description = METHODS[name] if "," in METHODS.get(name, "") else name
    layers = []
    for layer in description.split(","):
        mechanisms = "+".join(mechanism_names(layer))
        layers.append(published_name(mechanisms))
    period = 1
    while layers[:period] * (len(layers) // period) != layers:
        period += 1
    return tuple(layers[:period])


def canonical_name(name: str) -> str:
    """Return a method's name with its parts in canonical order. Raise ValueError for an unknown part."""
    return published_name(",".join(layer_pattern(name)))


def published_name(description: str) -> str:
    """Return the published name of mechanisms in canonical order, or the description if there is no such name."""
    return next((name for name, described in METHODS.items() if described == description), description)


def mechanism_names(layer: str) -> list[str]:
    """Return the names of one layer's mechanisms, ordered by kind. Raise ValueError for an unknown part."""
    names = []
    for part in layer.split("+"):
        described = METHODS.get(part)
        if part in MECHANISMS:
            names.append(part)
        elif described is None or "," in described:
            suggestion = f"It is {described}. Add the other parts to each layer of it."
            if not described:
                suggestion = did_you_mean(part, METHODS.keys() | MECHANISMS.keys())
            raise UserError(f"unknown part {part!r} of attention method {layer!r}. {suggestion}")
        elif described:
            names += described.split("+")
    return sorted(names, key=kind_number)


def kind_number(name: str) -> int:
    """Return the position of a mechanism's kind in KINDS."""
    return [issubclass(MECHANISMS[name], kind) for kind in KINDS.values()].index(True)


def all_mechanisms(name: str) -> list[type[Mechanism]]:
    """Return the mechanisms of all layers. Raise ValueError for an unknown part."""
    return [MECHANISMS[part] for layer in layer_pattern(name) for part in mechanism_names(layer)]

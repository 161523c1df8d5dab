"""Which parameter goes to which optimiser."""

from collections.abc import Callable, Iterable, Mapping

from torch.nn import Parameter

Rule = Callable[[str, Parameter], bool]


def split_parameters(
    named_parameters: Iterable[tuple[str, Parameter]], rules: Mapping[str, Rule]
) -> dict[str, list[Parameter]]:
    """Put every parameter in the one group whose rule `rule(name, parameter)` accepts it.

    Groups come in the order of `rules`, parameters in their own order; a group may stay empty. Pass
    `model.named_parameters(remove_duplicate=False)`: the default hides tied weights.

    Raises ValueError for a parameter that falls in no group or in several, and for one that comes twice (tied
    weights): it would be updated twice, or by an optimiser that is not the intended one.
    """
    groups = {group: [] for group in rules}
    first_name = {}
    for name, parameter in named_parameters:
        if parameter in first_name:
            raise ValueError(f"parameters {first_name[parameter]} and {name} are one tensor: untie them or pass one")
        first_name[parameter] = name
        matches = [group for group, rule in rules.items() if rule(name, parameter)]
        if len(matches) != 1:
            where = f"the groups {', '.join(matches)}" if matches else f"none of the groups {', '.join(rules)}"
            raise ValueError(f"parameter {name} {tuple(parameter.shape)} is in {where}: it must be in exactly one")
        groups[matches[0]].append(parameter)
    return groups

"""Groups of runs: the same config up to the seed, each with its label and look."""

import collections
import dataclasses

from configs.config import NOT_MATHEMATICS, Config, config_hash
from scripts.shared.looks import LINES, looks, method_name

COMPUTED = ("dtype", "device", "compile", "attention_backend", "context_parallel", "micro_batch_tokens")  # how
UNKNOWN = "unknown"  # the method of a run whose config is damaged


def group(runs: list[dict]) -> list[dict]:
    """Return the groups of the runs, in the order of the methods, and set run["group"], an index into them."""
    members = collections.defaultdict(list)
    for run in runs:
        members[group_key(run)].append(run)
    parts, distinguishing = [], set()
    for same in members.values():
        for part, fields in one_a_seed(same):
            parts.append(part)
            distinguishing |= fields
    for same in parts:
        texts = collections.Counter(run["validation_text"] for run in same if run["validation_text"])
        for run in same:
            if run["validation_text"] not in (None, *dict(texts.most_common(1))):
                run["problems"].append("validated on another text than most runs of its group")
    rank = {name: place for place, name in enumerate(LINES)}
    groups = [dict(method=method(same[0]), runs=same, fields=same[0]["fields"]) for same in parts]
    groups.sort(key=lambda g: (rank.get(g["method"], len(rank)), g["method"], g["fields"].get("train_length", 0)))
    look = looks(g["method"] for g in groups)
    for g, label in zip(groups, labels(groups, distinguishing)):
        same = [other for other in groups if other["method"] == g["method"]]
        pale = same.index(g) / max(1, len(same) - 1)  # one colour a method: its second and later groups are paler
        g |= dict(label=label, look=look[g["method"]], opacity=round(1 - 0.4 * pale, 2))
    for index, g in enumerate(groups):
        for run in g["runs"]:
            run["group"] = index
    return groups


def one_a_seed(runs: list[dict]) -> list[tuple[list[dict], set[str]]]:
    """Return runs of the same config up to the seed in parts in which each seed is once, each with the fields in which
    the parts differ.

    Two runs of one seed are no two seeds: they are kept apart by how they were computed where that differs. One that
    remains is a part of its own, and is named among its problems.
    """
    by_seed = collections.defaultdict(list)
    for run in runs:
        by_seed[run["config"] and run["config"].seed].append(run["config"])
    if len(by_seed) == len(runs):
        return [(runs, set())]
    differing = [
        field
        for field in COMPUTED
        if any(len({getattr(config, field) for config in configs}) > 1 for configs in by_seed.values())
    ]
    parts = collections.defaultdict(dict)  # by seed
    for run in runs:
        part = parts[tuple(getattr(run["config"], field) for field in differing)]
        first = part.setdefault(run["config"].seed, run)
        if first is not run:
            run["problems"].append(f"another run of the seed and configuration of {first['name']}: shown apart")
            parts[run["path"],][None] = run
    return [([*part.values()], {*differing}) for part in parts.values()]


def group_key(run: dict) -> tuple:
    """Return what the runs of a group have in common."""
    config = run["config"]
    if config is None:
        return (run["path"],)
    text = run["data"] or config.data_dir  # the fingerprint where it is known: a folder can move, or be filled anew
    return config_hash(dataclasses.replace(config, seed=0)), text, config.val_tokens, config.val_profile


def method(run: dict) -> str:
    return run["config"].method if run["config"] else UNKNOWN


def flat(config: Config | None) -> dict:
    """Return the fields, each of the method's options as one of them."""
    fields = config.to_dict() if config else {}
    options = fields.pop("method_options", {})
    return fields | {f"method_options.{option}": value for option, value in options.items()}


def labels(groups: list[dict], distinguishing: set[str]) -> list[str]:
    """Return for each group its method and the fewest fields that distinguish it from the others of that method.
    distinguishing: the fields outside the mathematics in which groups differ too."""
    result = [method_name(g["method"]) for g in groups]
    skipped = NOT_MATHEMATICS - {"data_dir", "val_tokens", "val_profile"} - distinguishing | {"seed", "method"}
    fields = dict.fromkeys(field for g in groups for field in g["fields"] if field not in skipped)
    for field in sorted(fields, key=lambda f: (f != "train_length", not f.startswith("method_options."))):
        values = collections.defaultdict(set)
        for label, g in zip(result, groups):
            values[label].add(repr(g["fields"].get(field)))
        result = [
            f"{label}, {field.removeprefix('method_options.')} {g['fields'][field]}"
            if len(values[label]) > 1 and field in g["fields"]
            else label
            for label, g in zip(result, groups)
        ]
    again = collections.Counter(result)
    return [f"{label}, {g['runs'][0]['name']}" if again[label] > 1 else label for label, g in zip(result, groups)]

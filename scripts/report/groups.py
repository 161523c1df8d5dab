"""Groups of runs: the same config up to the seed, each with its label and look."""

import collections
import dataclasses

from configs.config import NOT_MATHEMATICS, config_hash
from scripts.shared.looks import LINES, choose_looks, method_name

COMPUTED = ("dtype", "device", "compile", "attention_backend", "context_parallel", "micro_batch_tokens")  # how
IN_NO_LABEL = NOT_MATHEMATICS - {"data_dir", "val_tokens", "val_profile", *COMPUTED} | {"seed", "method"}


def group_runs(runs: list[dict]) -> list[dict]:
    """Return the groups of the runs, in the order of the methods, and set run["group"], an index into them."""
    members = collections.defaultdict(list)
    for run in runs:
        members[group_key(run)].append(run)
    groups = []
    for same in (part for together in members.values() for part in one_a_seed(together)):
        texts = collections.Counter(run["validation_text"] for run in same if run["validation_text"])
        for run in same:
            if run["validation_text"] not in (None, *dict(texts.most_common(1))):
                run["problems"].append("validated on another text than most runs of its group")
        fields = {f: v for f, v in same[0]["fields"].items() if all(run["fields"].get(f) == v for run in same)}
        groups.append(dict(method=same[0]["method"], runs=same, fields=fields))
    rank = {name: place for place, name in enumerate(LINES)}
    groups.sort(key=lambda g: (rank.get(g["method"], len(rank)), g["method"], g["fields"].get("train_length", 0)))
    looks_of = choose_looks(g["method"] for g in groups)
    for index, (g, label) in enumerate(zip(groups, label_groups(groups))):
        same = [other for other in groups if other["method"] == g["method"]]
        pale = same.index(g) / max(1, len(same) - 1)  # one colour a method: its second and later groups are paler
        g |= dict(label=label, opacity=round(1 - 0.4 * pale, 2))
        g |= dict(zip(("color", "dash", "marker"), looks_of[g["method"]]))
        for run in g["runs"]:
            run["group"] = index
    return groups


def group_key(run: dict) -> tuple:
    """Return what the runs of a group have in common."""
    config = run["config"]
    if config is None:
        return (run["path"],)
    text = run["data"] or config.data_dir  # the fingerprint where it is known: a folder can move, or be filled anew
    return config_hash(dataclasses.replace(config, seed=0)), text, config.val_tokens, config.val_profile


def one_a_seed(runs: list[dict]) -> list[list[dict]]:
    """Return runs of the same config up to the seed in parts in which each seed is once.

    Two runs of one seed are no two seeds: they are kept apart by how they were computed where that differs. One that
    remains is a part of its own, and is named among its problems.
    """
    by_seed = collections.defaultdict(list)
    for run in runs:
        by_seed[run["config"] and run["config"].seed].append(run["config"])
    if len(by_seed) == len(runs):
        return [runs]
    differing = [f for f in COMPUTED if any(len({getattr(c, f) for c in same}) > 1 for same in by_seed.values())]
    parts = collections.defaultdict(dict)  # by seed
    for run in runs:
        part = parts[tuple(getattr(run["config"], field) for field in differing)]
        first = part.setdefault(run["config"].seed, run)
        if first is not run:
            run["problems"].append(f"another run of the seed and configuration of {first['name']}: shown apart")
            parts[run["path"],][None] = run
    return [[*part.values()] for part in parts.values()]


def label_groups(groups: list[dict]) -> list[str]:
    """Return for each group its method and the fewest fields that distinguish it from the others of that method."""
    result = [method_name(g["method"]) for g in groups]
    fields = dict.fromkeys(field for g in groups for field in g["fields"] if field not in IN_NO_LABEL)
    first = ("train_length", "method_options.")
    for field in sorted(fields, key=lambda f: (f in COMPUTED, not f.startswith(first))):
        values = collections.defaultdict(set)
        for label, g in zip(result, groups):
            values[label].add(repr(g["fields"].get(field)))
        for index, g in enumerate(groups):
            if len(values[result[index]]) > 1 and field in g["fields"]:
                result[index] += f", {field.removeprefix('method_options.')} {g['fields'][field]}"
    again = collections.Counter(result)
    return [f"{label}, {g['runs'][0]['name']}" if again[label] > 1 else label for label, g in zip(result, groups)]

"""Time each kernel of model/attention/triton/flash.py with other tiles: from this flash.choose_tiles is set.

python -m scripts.bench attention --tune --lengths 16384
"""

import functools
import itertools
import statistics
from collections.abc import Callable

from model.attention.triton import flash
from scripts.bench.kernel_code import ROLES, Launch, describe, kernel_launches
from scripts.bench.protocol import build_variants, measure, results_table, time_calls
from scripts.bench.variants import Case, random_inputs

ROUNDS, SECONDS = 5, 5.0  # for all tiles of one kernel
CANDIDATES = {  # queries, keys, warps, stages
    "forward": [
        (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2),
        (128, 64, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3), (128, 32, 8, 4),
    ],
    "query_gradient": [
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 1), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3),
        (64, 64, 4, 1), (64, 128, 8, 2), (128, 128, 8, 1),
    ],
    "key_gradient": [
        (32, 128, 8, 3), (32, 128, 8, 2), (32, 128, 8, 1), (64, 128, 8, 2), (64, 128, 8, 3), (64, 128, 8, 1),
        (32, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1), (64, 64, 8, 2), (32, 64, 4, 2), (128, 128, 8, 1),
    ],
}  # fmt: skip


def tune(cases: list[Case], deadline: float):
    """Print, for scale-invariant and plain causal attention at the first case, each kernel's tiles by their time.

    Raise ValueError where the kernels cannot run.
    """
    case = cases[0]
    if reason := flash.kernel_problem(case.device, case.dtype, case.head_dim):
        raise ValueError(f"the Triton kernel cannot run: {reason}")
    for formula in ("si", "plain"):
        for role in ROLES:
            print(f"\n{formula}, {role}, batch {case.batch}, length {case.length}\n")
            print(rank_tiles(case, formula, role, deadline), flush=True)


def rank_tiles(case: Case, formula: str, role: str, deadline: float) -> str:
    """Return a table of the tiles, the fastest first; those that cannot run come last, with the reason."""
    chosen = describe(make_launch(case, formula, role, {}).tiles)
    candidates = {chosen: {}} | {describe(t): {role: t} for t in itertools.starmap(flash.Tiles, CANDIDATES[role])}

    def build(tiles: dict[str, flash.Tiles]) -> Callable[[int], float]:
        launch = make_launch(case, formula, role, tiles)
        time_launch = functools.partial(time_calls, launch.run, device=case.device)
        time_launch(2)  # compiles, or fails: mostly for too much shared memory
        return time_launch

    makers = {name: functools.partial(build, tiles) for name, tiles in candidates.items()}
    launches, problems = build_variants(makers, deadline)
    seconds = measure(launches, ROUNDS, SECONDS, case.device).seconds
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [["tiles", "ms", "of the chosen"]]
    for name, median in sorted(medians.items(), key=lambda item: item[1]):
        ratio = f"{median / medians[chosen]:.3f}" if chosen in medians else ""
        rows.append([name + (" (chosen)" if name == chosen else ""), f"{median * 1e3:.3f}", ratio])
    return results_table(rows, problems)


def make_launch(case: Case, formula: str, role: str, tiles: dict[str, flash.Tiles]) -> Launch:
    """Return the launch of this kernel with these tiles, with everything that it reads already computed."""
    inputs = [x.detach() for x in random_inputs(case)]
    launches = kernel_launches(inputs, case.plan(case.method(formula), "triton").prepared, tiles)
    if role != "forward":
        launches["forward"].run()
        launches["delta"].run()
    return launches[role]

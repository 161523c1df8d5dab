"""Time each kernel of model/kernels/flash.py with other tiles: from this flash.choose_tiles is set.

python -m scripts.bench attention --tune --lengths 16384
"""

import statistics
import time

import torch

from model.kernels import flash
from model.kernels.distance import Coefficients
from scripts.bench.kernel_code import ROLES, Launch, recorded_launches
from scripts.bench.protocol import in_one_line, in_turns, schedule, time_calls
from scripts.bench.variants import Case, random_inputs
from scripts.shared.tables import markdown_table

ROUNDS, SECONDS = 5, 5.0  # for all tiles of one kernel
CANDIDATES = {  # queries, keys, warps, stages
    "forward": [
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2), (64, 128, 4, 2),
        (64, 64, 4, 3), (128, 32, 4, 3), (128, 32, 8, 4),
    ],
    "query_gradient": [
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2),
        (64, 128, 4, 1), (128, 128, 8, 1),
    ],
    "key_gradient": [
        (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3),
        (64, 64, 8, 2), (32, 64, 4, 3), (128, 64, 8, 1), (128, 128, 8, 1),
    ],
}  # fmt: skip


def tune(cases: list[Case], deadline: float):
    """Print, for scale-invariant and plain causal attention at the first case, each kernel's tiles by their time.

    Raise ValueError where the kernels cannot run.
    """
    case = cases[0]
    if reason := flash.find_problem(case.device, case.dtype, case.head_dim):
        raise ValueError(f"the Triton kernel cannot run: {reason}")
    for formula in ("si", "plain"):
        for role in ROLES:
            print(f"\n{formula}, {role}, batch {case.batch}, length {case.length}\n")
            print(ranking(case, formula, role, deadline), flush=True)


def ranking(case: Case, formula: str, role: str, deadline: float) -> str:
    """Return a table of the tiles, the fastest first; those that cannot run come last, with the reason."""
    chosen = make_launch(case, formula, role, {}).tiles
    launches, problems = {}, {}
    for tiles in dict.fromkeys([chosen, *(flash.Tiles(*numbers) for numbers in CANDIDATES[role])]):
        if time.perf_counter() > deadline:
            problems[tiles] = "not run: out of time (--minutes)"
            continue
        try:
            launches[tiles] = make_launch(case, formula, role, {role: tiles})
            time_calls(launches[tiles].run, 2, case.device)  # compiles
        except Exception as error:  # too much shared memory, mostly
            launches.pop(tiles, None)
            problems[tiles] = f"not run: {in_one_line(error)}"
    one_call = {tiles: time_calls(launch.run, 1, case.device) for tiles, launch in launches.items()}
    rounds, calls = schedule(one_call, ROUNDS, SECONDS) if one_call else (0, {})
    seconds = {tiles: [] for tiles in launches}
    for round_number in range(rounds):
        for tiles in in_turns(list(launches), round_number):
            seconds[tiles].append(time_calls(launches[tiles].run, calls[tiles], case.device))
    medians = {tiles: statistics.median(times) for tiles, times in seconds.items()}

    def name(tiles: flash.Tiles) -> str:
        return f"{tiles.queries} x {tiles.keys}, {tiles.warps} warps, {tiles.stages} stages"

    rows = [["tiles", "ms", "of the chosen"]]
    for tiles, median in sorted(medians.items(), key=lambda item: item[1]):
        ratio = f"{median / medians[chosen]:.3f}" if chosen in medians else ""
        rows.append([name(tiles) + (" (chosen)" if tiles == chosen else ""), f"{median * 1e3:.3f}", ratio])
    return markdown_table(rows + [[f"{name(tiles)}: {reason}", "", ""] for tiles, reason in problems.items()])


def make_launch(case: Case, formula: str, role: str, tiles: dict[str, flash.Tiles]) -> Launch:
    """Return the launch of this kernel with these tiles, with everything that it reads already computed."""
    q, k, v, do = (x.detach() for x in random_inputs(case))
    coefficients = case.plan(case.method(formula), "triton").prepared
    c = coefficients or Coefficients(torch.empty(0, 1, 1, device=case.device))
    functions = c.table, c.polynomials, c.tangent, list(c.degrees), c.far, 0
    o, lse = flash.forward_op(q, k, v, c.parameter, *functions)
    with recorded_launches(tiles) as launches:
        if role == "forward":
            flash.forward_op(q, k, v, c.parameter, *functions)
        else:
            flash.backward_op(do, q, k, v, o, lse, *functions)
    by_name = {launch.kernel.__name__: launch for launch in launches}
    if "delta_kernel" in by_name:
        by_name["delta_kernel"].run()
    return by_name[f"{role}_kernel"]

"""The paper's sweeps: lists of runs. `python -m scripts.sweep NAME` trains a sweep.

A sweep is a function from a Scale to a list of Runs. Sweeps share their names with the tables and figures of
scripts/reproduce that show their runs. Runs with the same config_hash are one run, so sweeps can share runs. Sweeps of
our own studies are in results/NAME/study.py.
"""

import dataclasses
import itertools
from collections.abc import Callable

from configs.presets import preset
from configs.runs import Needle, Run

# ---- scales ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scale:
    """The presets that stand for the paper's models, the seeds, and the needle task of a study."""

    base: str  # the 162M model trained at 4k
    lengths: tuple[str, str, str]  # the same trained at 4k, 16k, 64k
    large: str  # the 304M model trained at 4k
    seeds: tuple[int, ...] = (0, 1, 2)  # for methods trained with the base preset, as in the paper
    once: tuple[int, ...] = (0,)  # seeds of all other runs, which the paper ran once
    needle: Needle = Needle()

    @property
    def scaled_tau(self) -> float:
        """Return the paper's tau times position_scale, which also scales rotary bases."""
        return TAU * preset(self.base).position_scale


# The paper's 19,200 sequences at full length do not teach a model as small as mini to find a needle.
MINI_NEEDLE = Needle("shards", steps=6000, sequences=8, examples=100, curriculum=144)
SCALES = dict(
    paper=Scale("gpt_162m_4k", ("gpt_162m_4k", "gpt_162m_16k", "gpt_162m_64k"), "gpt_304m_4k"),
    small=Scale("small_4k", ("small_4k", "small_16k", "small_64k"), "small_304m"),
    mini=Scale("mini", ("mini", "mini_1024", "mini_4096"), "mini_large", needle=MINI_NEEDLE),
    taught=Scale("taught", ("taught", "taught", "taught"), "taught", seeds=(0, 1, 2, 3, 4)),
    far=Scale("far", ("far", "far", "far"), "far"),
)
TAU = 10.0  # tokens, the default at every training length
# These methods differ only beyond the training length, so one run is validated as all of them.
SAME_WEIGHTS = dict(rope=("rope_ntk", "yarn"), logn_rope=("logn_ntk",))
SI = "scale_invariant_p_rope"
MAIN_METHODS = ["rope", "p_rope", "nope", "logn_rope", "logn_p_rope", "alibi", SI]
SCALE_INVARIANT = [SI, "scale_invariant_rope", "scale_invariant_nope"]


def tau_option(tau: float) -> dict:
    return {} if tau == TAU else {"tau": tau}


def trained(preset_name: str, methods: list[str], seeds: tuple[int, ...]) -> list[Run]:
    """Return the runs of these methods with their default options."""
    return forms(preset_name, [(method, {}) for method in methods], seeds)


def forms(preset_name: str, cases: list[tuple], seeds: tuple[int, ...]) -> list[Run]:
    """Return the runs of (method, options) cases, validated as all methods that train identically."""
    runs = []
    for (method, options), seed in itertools.product(cases, seeds):
        changes = {"method": method, "seed": seed}
        if options:
            changes["method_options"] = options
        if method in SAME_WEIGHTS:
            changes["validate_as"] = SAME_WEIGHTS[method]
        runs.append(Run(preset_name, changes))
    return runs


def with_variants(runs: list[Run]) -> list[Run]:
    """Return the runs. If position_scale is not 1, add ALiBi with published slopes and SI methods with scaled tau."""
    others = []
    for run in runs:
        scale, method = run.config.position_scale, run.config.method
        options = {"slope_scale": 1.0} if method == "alibi" else {"tau": TAU * scale}
        if scale != 1 and method in ("alibi", *SCALE_INVARIANT):
            others.append(Run(run.preset, run.changes | {"method_options": options}))
    return [*runs, *others]


def with_needle(sweep: Callable) -> Callable:
    """Return the sweep with its runs fine-tuned on the needle task."""
    return lambda scale: [dataclasses.replace(run, needle=scale.needle) for run in sweep(scale)]


# ---- the paper's studies ---------------------------------------------------------------------------------------------


def table_losses(scale: Scale) -> list[Run]:
    return with_variants(trained(scale.base, MAIN_METHODS, scale.seeds))


def figure_train_lengths(scale: Scale) -> list[Run]:
    runs = trained(scale.base, MAIN_METHODS, scale.seeds)
    return runs + [run for name in scale.lengths[1:] for run in trained(name, MAIN_METHODS, scale.once)]


def figure_tau(scale: Scale) -> list[Run]:
    taus = sorted({0.01, 0.1, 1.0, TAU, 100.0, scale.scaled_tau})
    return forms(scale.base, [(SI, tau_option(tau)) for tau in taus], scale.once)


PAPER_SWEEPS = dict(
    table_losses=table_losses,
    table_needle=with_needle(table_losses),
    table_infini=lambda scale: trained(scale.base, ["rope", SI, "infini_rope", "infini_p_rope"], scale.seeds),
    figure_entropy=lambda scale: trained(scale.base, ["p_rope", "logn_p_rope", SI], scale.once),
    figure_train_lengths=figure_train_lengths,
    figure_train_4k=lambda scale: trained(scale.base, MAIN_METHODS, scale.seeds),
    figure_train_16k=lambda scale: trained(scale.lengths[1], MAIN_METHODS, scale.once),
    figure_304m=lambda scale: with_variants(trained(scale.large, ["logn_p_rope", "alibi", SI], scale.once)),
    figure_tau=figure_tau,
    figure_scale_invariant_variants=lambda scale: with_variants(trained(scale.base, SCALE_INVARIANT, scale.seeds)),
)

"""The sweeps: lists of runs. `python -m scripts.sweep NAME` trains a sweep. To add one, write a function.

A sweep is a function from a Scale to a list of Runs. Sweeps share their names with the tables and figures of
scripts/reproduce that show their runs. Runs with the same config_hash are one run, so sweeps can share runs.
"""

import dataclasses
import itertools
from collections.abc import Callable

from configs.config import config_hash, with_changes
from configs.presets import preset
from configs.runs import Needle, Run
from errors import did_you_mean, require

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
# The default of --scale. Other sweeps: paper.
SCALE_OF_SWEEP = dict(taught="taught", taught_rivals="taught", taught_rotation="taught")
SCALE_OF_SWEEP |= dict(far="far", far_heads="far", far_rotation="far")
TAU = 10.0  # tokens, the default at every training length
# These methods differ only beyond the training length, so one run is validated as all of them.
SAME_WEIGHTS = dict(rope=("rope_ntk", "yarn"), logn_rope=("logn_ntk",))
SI, SI_POPE = "scale_invariant_p_rope", "pope+scale_invariant"
MAIN_METHODS = ["rope", "p_rope", "nope", "logn_rope", "logn_p_rope", "alibi", SI]
SCALE_INVARIANT = [SI, "scale_invariant_rope", "scale_invariant_nope"]


def tau_option(tau: float) -> dict:
    return {} if tau == TAU else {"tau": tau}


def trained(preset_name: str, methods: list[str], seeds: tuple[int, ...]) -> list[Run]:
    """Return the runs of these methods with their default options."""
    return forms(preset_name, [(method, {}) for method in methods], seeds)


def forms(preset_name: str, cases: list[tuple[str, dict]], seeds: tuple[int, ...]) -> list[Run]:
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


def with_needle(sweep: Callable[[Scale], list[Run]]) -> Callable[[Scale], list[Run]]:
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


def open_choices(scale: Scale) -> list[Run]:
    """Return runs for each choice that the paper leaves open, and runs with a_t alone and m_t alone."""
    length, tau = preset(scale.base).train_length, tau_option(scale.scaled_tau)
    cases = [("rope", {}), ("yarn", {"stretch": 1.0})]  # YaRN without its scaling is RoPE
    cases += [("p_rope", {}), *(("p_rope", {"form": "barbero"} | share) for share in ({}, {"share": 0.75}))]
    cases += [("logn_p_rope", {}), ("logn_p_rope", {"context": "length"})]
    cases += [("alibi", {}), ("alibi", {"slopes": "geometric"})]
    cases += [("infini_rope", {}), *(("infini_rope", {"segment_length": length // n}) for n in (8, 2))]
    cases += [(SI, tau), (SI, tau | {"terms": "a"}), (SI, tau | {"terms": "m"})]
    return forms(scale.base, cases, scale.once)


# ---- beyond the paper ------------------------------------------------------------------------------------------------


def tau_by_length(scale: Scale) -> list[Run]:
    """Return runs at three training lengths, with 1/16 to 64 times the scaled tau and with a learned tau."""
    options = [tau_option(scale.scaled_tau * factor) for factor in (1, 1 / 16, 1 / 4, 4, 16, 64)]
    options.append(tau_option(scale.scaled_tau) | {"learn_tau": True})
    return [run for name in scale.lengths for run in forms(name, [(SI, chosen) for chosen in options], scale.once)]


def scale_invariant_by_head(scale: Scale) -> list[Run]:
    """Return runs whose heads differ in tau or in a factor of the scores, and ALiBi for comparison.

    Heads learn tau or the factor. Or tau_ratio makes tau grow by 16, 64 or 256 from the first to the last head.
    """
    steps, tau = preset(scale.base).num_heads - 1, tau_option(scale.scaled_tau)
    options = [{}, {"learn_tau": True}, {"learn_gain": True}]
    options += [{"tau_ratio": round(ratio ** (1 / steps), 4)} for ratio in (16, 64, 256)]
    cases = [(SI, tau | chosen) for chosen in options]
    for larger in (tau_option(scale.scaled_tau * 4), tau_option(scale.scaled_tau * 16)):
        cases += [(SI, larger), (SI, larger | {"learn_gain": True})]
    cases += [(SI_POPE, tau), (SI_POPE, tau | {"learn_gain": True}), ("alibi", {})]
    return forms(scale.base, cases, scale.seeds)


BEST = [SI, "logn_p_rope", "alibi", "p_rope", "rope"]
# The newer methods, under the names that model/methods/__init__.py's canonical_name gives them.
RIVALS = """
fox p_rope+forget scale_invariant+forget p_rope+scale_invariant+forget rnope_swa
scale_invariant_nope,rope+window,rope+window,rope+window scale_invariant_p_rope,rope+window,rope+window,rope+window
p_rope+sink p_rope+scale_invariant+sink p_rope+gate p_rope+scale_invariant+gate p_rope+forget+gate alibi+gate
p_rope+forget,rope+window,rope+window,rope+window kerple_log kerple_power nape swan llama4
pope pope+scale_invariant pope+scale_invariant+gate pope+alibi pope+forget
pope+scale_invariant,pope+window,pope+window,pope+window fire stick_breaking stick_breaking+gate
""".split()


def table_rivals(scale: Scale) -> list[Run]:
    """Return runs of the newer methods and of the best methods of the paper."""
    # The kept runs at scale mini were trained with the scaled tau.
    tau = tau_option(scale.scaled_tau)
    cases = [(method, tau if "scale_invariant" in method else {}) for method in [*BEST, *RIVALS]]
    return forms(scale.base, cases, scale.seeds)


def needle_tau(scale: Scale) -> list[Run]:
    """Return runs with multiples of the scaled tau, with m_t alone, with a learned factor and with PoPE."""
    tau, large = tau_option(scale.scaled_tau), tau_option(scale.scaled_tau * 16)
    cases = [(SI, tau_option(scale.scaled_tau * factor)) for factor in (1, 4, 16, 64)]
    cases += [(SI, large | {"learn_gain": True}), (SI, tau | {"terms": "m"}), (SI_POPE, tau), (SI_POPE, large)]
    return forms(scale.base, cases, scale.seeds)


# The fastest quarter of RoPE's pairs takes all its angles within 47 tokens (results/calibration.md).
FAST = {"form": "barbero", "share": 0.25}
MOMENTS = {"learn_moments": True}
NOPE = "scale_invariant_nope"
# The paper's bases, 10,000 for RoPE and 1024 for p-RoPE, are for 4096 tokens. These are for 256.
FITTED, FITTED_ROPE = {"base": 64.0}, {"base": 625.0}
TAUGHT_PRIMARY = [("rope", {}), ("logn_p_rope", {}), (SI, {}), ("alibi", {})]
TAUGHT_PRIMARY += [("alibi", {"slope_scale": 4.0}), ("alibi", {"slope_scale": 16.0})]
TAUGHT_FITTED = [("rope", FITTED_ROPE), ("logn_p_rope", FITTED), (SI, FITTED)]
TAUGHT_EXPLORATORY = [("p_rope", {}), ("nope", {}), ("logn_rope", {})]
TAUGHT_EXPLORATORY += [(SI, {"tau": 2.5}), (SI, {"tau": 40.0}), (SI, {"terms": "m"}), (SI, {"terms": "a"})]
TAUGHT_EXPLORATORY += [(SI, {"learn_gain": True}), (SI, MOMENTS), (SI, FAST), (SI, FAST | MOMENTS)]
TAUGHT_EXPLORATORY += [(NOPE, {}), (NOPE, MOMENTS), ("p_rope", FITTED), (SI, FITTED | MOMENTS)]
TAUGHT_EXPLORATORY += [("p_rope", FAST), ("logn_p_rope", FAST), ("p_rope+scale_invariant+xsa", FAST)]
TAUGHT_EXPLORATORY += [("p_rope+log_root", FAST), ("p_rope+factor", FAST | {"factor": 2.0})]
TAUGHT_EXPLORATORY += [("stick_breaking", {}), (SI_POPE, FITTED_ROPE), ("p_rope+log_root", FITTED)]
for _method, _fitted in (("p_rope+factor", FITTED), ("factor+alibi", {"slope_scale": 16.0})):  # a sharper softmax alone
    TAUGHT_EXPLORATORY += [(_method, _fitted | {"factor": factor}) for factor in (1.5, 2.0, 3.0)]
    TAUGHT_EXPLORATORY += [(_method, _fitted | {"learn_factor": True})]
RIVALS_2026 = """
bam bam_ssmax wall p_rope+xsa p_rope+scale_invariant+xsa p_rope+log_offset p_rope+n_power lssar grape_ap nape_entmax fox
""".split()


# Methods of 2025 and 2026, beside the primary methods of sweep `taught`.
TAUGHT_RIVALS = [*TAUGHT_PRIMARY, *((method, {}) for method in RIVALS_2026), (SI, {"skip_first": True})]
FAR_PRIMARY = [("rope", {}), ("logn_p_rope", {}), (SI, {}), ("alibi", {}), ("alibi", {"slope_scale": 4.0})]
FAR_LATER = [("bam_ssmax", {}), (SI, FAST), ("p_rope+scale_invariant+xsa", FAST)]  # added after results at `taught`
FAR_EXPLORATORY = [("p_rope", {}), (SI, {"terms": "m"}), (SI, {"terms": "a"}), (SI, {"tau": 2.5})]
FAR_EXPLORATORY += [(SI, {"tau": 40.0}), (NOPE, {}), ("rope", {"base": 500.0})]
FAR_EXPLORATORY += [("alibi", {"slope_scale": 16.0}), ("p_rope+factor", {"factor": 2.0})]
FAR_EXPLORATORY += [(SI, MOMENTS), (SI, FAST | MOMENTS)]


def in_turn(scale: Scale, *groups: list[tuple[str, dict]]) -> list[Run]:
    """Return the runs of groups of (method, options) cases: the first group first, one seed after the other."""
    turns = itertools.product(groups, scale.seeds)
    return [run for cases, seed in turns for run in forms(scale.base, cases, (seed,))]


def rotation(scale: Scale) -> list[Run]:
    """Return the runs of three score rules with the same rotations: are a_t and m_t the cause, or the rotation?

    The rules are p-RoPE, LogN and scale-invariant attention. The rotations are the fastest quarter of RoPE's pairs, the
    published one, the published one for this training length, and none.
    """
    rules = ["p_rope", "logn_p_rope", SI]
    scaled = {"base": 1024.0 * preset(scale.base).train_length / 4096}
    rotated = [[(rule, options) for rule in rules] for options in (FAST, {}, scaled)]
    return in_turn(scale, *rotated, [("nope", {}), ("logn", {}), (NOPE, {})])


# ---- all sweeps ------------------------------------------------------------------------------------------------------


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
    open_choices=open_choices,
)
SWEEPS = PAPER_SWEEPS | dict(
    tau_by_length=tau_by_length,
    scale_invariant_by_head=scale_invariant_by_head,
    taught=lambda scale: in_turn(scale, TAUGHT_PRIMARY, TAUGHT_FITTED, TAUGHT_EXPLORATORY),
    taught_rivals=lambda scale: in_turn(scale, TAUGHT_RIVALS),
    taught_rotation=rotation,
    far_rotation=rotation,
    far=lambda scale: in_turn(scale, FAR_PRIMARY, FAR_LATER, FAR_EXPLORATORY),
    far_heads=lambda scale: forms(scale.base, FAR_PRIMARY, scale.once),
    table_rivals=table_rivals,
    needle_rivals=with_needle(table_rivals),
    needle_tau=with_needle(needle_tau),
)


def sweep(
    name: str, scale: str, seeds: list[int] | None = None, methods: list[str] | None = None,
    changes: dict | None = None, needle: dict | None = None,
) -> list[Run]:  # fmt: skip
    """Return the runs of a sweep. The name "all" stands for every run of the paper's sweeps.

    seeds: replace the seeds of the scale. methods: leave out runs that are validated as none of these. changes: fields
    to set in every run. needle: settings that replace the scale's settings of the needle task.
    Raise ValueError for an unknown name, for a changed field that the sweep sets, and if there are no runs.
    """
    require(name in ("all", *SWEEPS), f"unknown sweep {name!r}. {did_you_mean(name, ['all', *SWEEPS])}")
    chosen, settings = SCALES[scale], dataclasses.asdict(Needle()).keys()
    unknown = {*(needle or {})} - settings
    require(not unknown, f"unknown needle setting {', '.join(map(repr, unknown))}. There are: {', '.join(settings)}")
    chosen = dataclasses.replace(chosen, needle=dataclasses.replace(chosen.needle, **(needle or {})))
    if seeds:
        chosen = dataclasses.replace(chosen, seeds=tuple(seeds), once=tuple(seeds))
    runs = {}
    for run in (run for each in (PAPER_SWEEPS if name == "all" else [name]) for run in SWEEPS[each](chosen)):
        if not methods or {run.config.method, *run.config.validate_as} & {*methods}:
            run = add_changes(name, run, changes or {})
            first = runs.setdefault(config_hash(run.config), run)
            if run.needle:  # one sweep that fine-tunes a run is enough
                runs[config_hash(run.config)] = dataclasses.replace(first, needle=run.needle)
    require(runs, f"sweep {name} has no runs of {', '.join(methods or ())}. Choose other methods.")
    return [*runs.values()]


def add_changes(name: str, run: Run, changes: dict) -> Run:
    """Return the run with the changes that differ from its preset. Raise ValueError for a field that the sweep sets."""
    for field in changes.keys() & run.changes.keys():
        instruction = dict(seed="Use --seeds.", method="Use --methods.").get(field, "Leave it out.")
        same = changes[field] == run.changes[field]
        require(same, f"--{field}: sweep {name} sets it to {run.changes[field]!r} in a run. {instruction}")
    base = preset(run.preset)
    scaled = with_changes(base, {"steps": changes.get("steps", base.steps)})  # other fields scale with steps
    added = {f: value for f, value in changes.items() if value != getattr(base if f == "steps" else scaled, f)}
    return dataclasses.replace(run, changes=added | run.changes)

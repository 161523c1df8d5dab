"""The study `taught`: models that learn to copy at 256 tokens, read up to 64 times farther. README.md has the rules."""

import statistics

from configs.presets import preset
from configs.runs import Run
from configs.sweeps import SI, Scale, forms
from data.python_source import COPY_ROWS
from measure.flops import training_flops_per_token
from results.paired import PairedTests, at
from results.reach import draw_reach, reach_tables
from results.text_error import text_errors
from scripts.reproduce.study import BySeed, Study
from scripts.shared.looks import plot_styles, series_label, series_name
from scripts.shared.runs import copy_gains, final_losses
from scripts.shared.tables import markdown_table

SCALE = "taught"

# ---- the runs --------------------------------------------------------------------------------------------------------

# The fastest quarter of RoPE's pairs takes all its angles within 47 tokens (../calibration.md).
QUARTER = {"form": "barbero", "share": 0.25}
MOMENTS = {"learn_moments": True}
NOPE = "scale_invariant_nope"
ORDERS = (1, 2, 3, 4)  # values of data_seed
# The paper's bases, 10,000 for RoPE and 1024 for p-RoPE, are for 4096 tokens. These are for 256.
BASE, ROPE_BASE = {"base": 64.0}, {"base": 625.0}
PRIMARY = [
    ("rope", {}),
    ("logn_p_rope", {}),
    (SI, {}),
    ("alibi", {}),
    ("alibi", {"slope_scale": 4.0}),
    ("alibi", {"slope_scale": 16.0}),
]
FITTED = [("rope", ROPE_BASE), ("logn_p_rope", BASE), (SI, BASE)]
EXPLORATORY = [
    ("p_rope", {}),
    ("nope", {}),
    ("logn_rope", {}),
    (SI, {"tau": 2.5}),
    (SI, {"tau": 40.0}),
    (SI, {"terms": "m"}),
    (SI, {"terms": "a"}),
    (SI, {"learn_gain": True}),
    (SI, MOMENTS),
    (SI, QUARTER),
    (SI, QUARTER | MOMENTS),
    (NOPE, {}),
    (NOPE, MOMENTS),
    ("p_rope", BASE),
    (SI, BASE | MOMENTS),
    ("p_rope", QUARTER),
    ("logn_p_rope", QUARTER),
    ("p_rope+scale_invariant+xsa", QUARTER),
    ("p_rope+log_root", QUARTER),
    ("p_rope+factor", QUARTER | {"factor": 2.0}),
    ("stick_breaking", {}),
    ("pope+scale_invariant", ROPE_BASE),
    ("p_rope+log_root", BASE),
]
for sharper in ({"factor": 1.5}, {"factor": 2.0}, {"factor": 3.0}, {"learn_factor": True}):
    EXPLORATORY.append(("p_rope+factor", BASE | sharper))  # a sharper softmax alone
for sharper in ({"factor": 1.5}, {"factor": 2.0}, {"factor": 3.0}, {"learn_factor": True}):
    EXPLORATORY.append(("factor+alibi", {"slope_scale": 16.0} | sharper))
RIVALS_2026 = """
bam bam_ssmax wall p_rope+xsa p_rope+scale_invariant+xsa p_rope+log_offset p_rope+n_power lssar grape_ap nape_entmax fox
""".split()


def in_turn(scale: Scale, *groups: list[tuple[str, dict]]) -> list[Run]:
    """Return the runs of groups of (method, options) cases: the first group first, one seed after the other."""
    runs = []
    for cases in groups:
        for seed in scale.seeds:
            runs += forms(scale.base, cases, (seed,))
    return runs


def taught_runs(scale: Scale) -> list[Run]:
    return in_turn(scale, PRIMARY, FITTED, EXPLORATORY)


def rival_runs(scale: Scale) -> list[Run]:
    """Return the runs of methods of 2025 and 2026, beside the primary methods."""
    rivals = [(method, {}) for method in RIVALS_2026]
    return in_turn(scale, [*PRIMARY, *rivals, (SI, {"skip_first": True})])


def rotation_runs(scale: Scale) -> list[Run]:
    """Return the runs of three score rules with the same rotations: are a_t and m_t the cause, or the rotation?

    The rules are p-RoPE, LogN and scale-invariant attention. The rotations are the fastest quarter of RoPE's pairs, the
    published one, the published one for this training length, and none.
    """
    rules = ["p_rope", "logn_p_rope", SI]
    scaled = {"base": 1024.0 * preset(scale.base).train_length / 4096}
    groups = []
    for options in (QUARTER, {}, scaled):
        groups.append([(rule, options) for rule in rules])
    return in_turn(scale, *groups, [("nope", {}), ("logn", {}), (NOPE, {})])


def order_runs(scale: Scale) -> list[Run]:
    """Return the runs of two score rules with the fast rotation: all seeds, and seed 0 with four orders of the data."""
    cases = [(SI, QUARTER), ("logn_p_rope", QUARTER)]
    runs = forms(scale.base, cases, scale.seeds)
    for run in forms(scale.base, cases, scale.once):
        runs += [Run(run.preset, run.changes | {"data_seed": order}) for order in ORDERS]
    return runs


def half_runs(scale: Scale) -> list[Run]:
    """Return the runs of scale-invariant p-RoPE with the fast rotation, and of m_t alone and a_t alone with it."""
    return in_turn(scale, [(SI, QUARTER | {"terms": "m"}), (SI, QUARTER | {"terms": "a"}), (SI, QUARTER)])


SWEEPS = dict(
    taught=taught_runs,
    taught_rivals=rival_runs,
    taught_rotation=rotation_runs,
    taught_order=order_runs,
    taught_halves=half_runs,
)

# ---- the tests -------------------------------------------------------------------------------------------------------

FAST_OPTIONS = "form=barbero share=0.25"
LATER_SEEDS = range(3, 7)  # at `far`
FAST = f"{SI} {FAST_OPTIONS}"
XSA = f"p_rope+scale_invariant+xsa {FAST_OPTIONS}"
ALIBI = "alibi slope_scale=4"
SI_64, ROPE_625, LOGN_64 = f"{SI} base=64", "rope base=625", "logn_p_rope base=64"
BOTH = f"{SI} base=64 learn_moments=True"
FAST_MOMENTS = f"{SI} form=barbero learn_moments=True share=0.25"
KNOWN = "Seeds known before are left out."


def tests(study: Study) -> list[PairedTests]:
    """Return the primary tests, and the tests that were fixed after them and before their own runs."""
    near, far = reach_measures(study, gap_ratio=2), reach_measures(study, gap_ratio=4)

    def later(title, ours, rivals, measures=far, left_out=(), note=KNOWN) -> PairedTests:
        return PairedTests(title, ours, rivals, measures, "nats", left_out, note)

    loss_alone = {label: values for label, values in far.items() if label.startswith("loss")}
    slopes, two_seeds = "ALiBi has the slopes as above.", "Two seeds of fitted rotation were known."
    return [
        primary_tests(study, far, "nats"),
        later("Fitted rotation", SI_64, [ROPE_625, LOGN_64, ALIBI], note=slopes),
        later("Learned moments", f"{SI} learn_moments=True", [SI, "logn_p_rope", ALIBI, "yarn"], near, left_out=[0]),
        later("Both", BOTH, [SI_64, ROPE_625, LOGN_64, ALIBI, "yarn", "yarn base=625"], note=two_seeds),
        later("Fast rotation", FAST, ["rope", "logn_p_rope", ALIBI, "yarn"], left_out=[0]),
        later("Fast and moments", FAST_MOMENTS, [BOTH, LOGN_64, ALIBI, "yarn"], left_out=[0, 1]),
        later("Xsa", XSA, [FAST], left_out=[0]),
        later("All pairs", FAST, ["logn_rope"], loss_alone, left_out=[0]),
    ]


def primary_tests(study: Study, measures: dict[str, dict[str, BySeed]], unit: str, note: str = "") -> PairedTests:
    """Return the tests of scale-invariant p-RoPE against RoPE, LogN + p-RoPE and ALiBi.

    ALiBi has the slopes with the lowest mean loss at the training length. At `far`, times 16 was not among them.
    """
    near = at(study.by_seed(final_losses), study.base_length)
    if study.scale == "far":
        near.pop("alibi slope_scale=16", None)
    alibis = {series: statistics.fmean(losses.values()) for series, losses in near.items() if is_alibi(series)}
    rivals = ["rope", "logn_p_rope"]
    if alibis:
        rivals.append(min(alibis, key=alibis.get))
    fixed = f"ALiBi has the slopes with the lowest mean loss at {study.base_length}. These comparisons were fixed "
    fixed += "before the first run. All others are exploratory."
    return PairedTests("Primary comparisons", SI, rivals, measures, unit, note=f"{fixed}{note}")


def is_alibi(series: str) -> bool:
    return series.split(" ")[0] == "alibi"


def reach_measures(study: Study, gap_ratio: int) -> dict[str, dict]:
    """Return two measures by label: loss at 16 training lengths, and copy gain over gap_ratio training lengths."""
    length, gap = 16 * study.base_length, gap_ratio * study.base_length
    return {
        f"loss, {length} tokens (16x)": at(study.by_seed(final_losses), length),
        f"copy gain, {gap} tokens ({gap_ratio}x)": at(study.by_seed(copy_gains), gap),
    }


def rotation_tests(study: Study) -> list[PairedTests]:
    """Return the four tests of the factorial, in the loss at 16 training lengths.

    Two tests compare the rules with the fast rotation. Two tests compare the changes of the loss from the published to
    the fast rotation, which are the interactions of rule and rotation.
    """
    losses = at(study.by_seed(final_losses), 16 * study.base_length)
    rivals = ["logn_p_rope", "p_rope"]
    fast, change = {}, {}
    for rule in [SI, *rivals]:
        published = losses.get(rule, {})
        fast[rule] = losses.get(f"{rule} {FAST_OPTIONS}", {})
        change[rule] = {seed: loss - published[seed] for seed, loss in fast[rule].items() if seed in published}
    measures = {"loss with the fast rotation": fast, "change from the published to the fast rotation": change}

    # At `taught`, seed 0 of the rivals with the fast rotation was known when the tests were fixed. At `far`, the later
    # seeds have a test of their own.
    left_out, note = [0], " Seed 0 was known, and is left out."
    if study.scale == "far":
        left_out, note = LATER_SEEDS, ""
    note = f"These tests were fixed before their runs.{note}"
    return [PairedTests("Tests", SI, rivals, measures, "nats a token", left_out, note)]


def half_tests(study: Study) -> list[PairedTests]:
    """Return the four tests of a_t and m_t together against each alone, all with the fast rotation."""
    halves = [f"{FAST} terms=m", f"{FAST} terms=a"]
    note = "These tests were fixed before the runs of the halves."
    return [PairedTests("Halves", FAST, halves, reach_measures(study, gap_ratio=4), "nats", note=note)]


TESTS = dict(taught=tests, taught_rotation=rotation_tests, taught_halves=half_tests)

# ---- the tables ------------------------------------------------------------------------------------------------------

GAP_RATIOS = (0.5, 2, 4, 8)  # tokens between two copies / training length


def taught(study: Study) -> str:
    """Return the figure and the tables as Markdown. Sections have the tests."""
    # 1. The tests, of the study alone.
    for paired in TESTS[study.item](study) if study.item in TESTS else []:
        study.sections += paired.section()

    # 2. The figure.
    drawn = ["rope", "logn_p_rope", LOGN_64, SI, FAST]
    if study.item == "taught_rivals":
        drawn = ["rope", "p_rope", "logn_p_rope", "alibi", SI, FAST]
    draw_reach(study, drawn_styles(study, drawn))

    # 3. The page.
    T = study.base_length
    text = "Loss: nats per token on natural text, by sequence length. Copy gain: loss of 32 random tokens minus the "
    text += "loss of their second copy, in nats per token, by tokens between the copies. Mean \u00b1 standard error "
    text += f"over seeds. In brackets: multiples of the training length of {T} tokens."
    text += f" {COPY_ROWS:.0%} of the training rows are copy rows."
    tables = reach_tables(study, [round(ratio * T) for ratio in GAP_RATIOS])
    return "\n\n".join([text, study.figure_markdown(), *tables, cost_table(study)])


def drawn_styles(study: Study, drawn: list[str]) -> dict[str, dict]:
    """Return plot_styles of these series, and of ALiBi with other slopes."""
    shown = [series for series in study.all_series if series in drawn or series.startswith("alibi slope_scale=")]
    return plot_styles(shown)


def cost_table(study: Study) -> str:
    """Return a table of parameters, FLOPs and speed. The speed is the fastest seed's, because other jobs slow runs."""
    costs, rates = {}, {}
    for run, stored in study.finished:
        series = series_label(run.config)
        rate = round(stored.summary["tokens"] / stored.summary["seconds"])
        rates[series] = max(rate, rates.get(series, 0))
        costs[series] = [stored.summary["parameters"], training_flops_per_token(run.config), rates[series]]
    rows = [["method", "parameters", "FLOPs a training token", "training tokens a second"]]
    for series in study.all_series:
        if series in costs:
            rows.append([series_name(series), *(f"{number:,}" for number in costs[series])])
    note = "Tokens a second: the fastest seed's. Machines and their load differ between runs by a factor of two, so "
    note += "these rates do not rank methods. `python -m scripts.bench step` times methods side by side."
    return f"{markdown_table(rows)}\n\n{note}"


def rotation(study: Study) -> str:
    """Return the tables of the factorial as Markdown. A section has the tests."""
    rivals = [f"logn_p_rope {FAST_OPTIONS}", f"p_rope {FAST_OPTIONS}"]
    return reach_page(study, rotation_tests(study), rivals)


def halves(study: Study) -> str:
    """Return the tables of the halves as Markdown. A section has the tests."""
    return reach_page(study, half_tests(study), [f"{FAST} terms=m", f"{FAST} terms=a"])


def reach_page(study: Study, tests: list[PairedTests], rivals: list[str]) -> str:
    """Return tables of losses and copy gains by length as Markdown. Sections have the tests.

    Another section has FAST minus each rival in loss, with its error from the text (results/text_error.py).
    """
    for paired in tests:
        study.sections += paired.section()
    study.sections += text_errors(study, FAST, rivals)
    text = "Loss: nats per token on natural text, by sequence length. Copy gain: loss of 32 random tokens minus the "
    text += "loss of their second copy. Mean \u00b1 standard error over seeds."
    gaps = [round(ratio * study.base_length) for ratio in GAP_RATIOS]
    return "\n\n".join([text, *reach_tables(study, gaps)])


def order(study: Study) -> str:
    """Return a table with the spread of the loss over seeds and over orders of the data, as Markdown."""
    # 1. The losses at 16 training lengths: of all seeds in the text's order, and of the first seed in all orders.
    length, first = 16 * study.base_length, min(run.config.seed for run in study.runs)
    found = {}
    for run, stored in study.finished:
        (series,) = study.series(run)
        loss = final_losses(stored.summary)[length]
        if not run.config.data_seed:
            found.setdefault((series, "seeds, one order"), []).append(loss)
        if run.config.seed == first:
            found.setdefault((series, "orders, one seed"), []).append(loss)

    # 2. The table.
    rows = [["method", "runs", "number", "mean", "standard deviation", "lowest", "highest"]]
    for (series, group), losses in sorted(found.items()):
        if len(losses) < 2:
            continue
        numbers = statistics.fmean(losses), statistics.stdev(losses), min(losses), max(losses)
        rows.append([series_name(series), group, str(len(losses)), *(f"{number:.3f}" for number in numbers)])
    text = f"Loss at {length} tokens, nats per token. A seed changes the initial weights. An order of the data "
    text += "(`data_seed`) changes the places of the batches of one sequence length. The run with seed 0 in the text's "
    text += "order is in both groups."
    return f"{text}\n\n{markdown_table(rows)}"


NUMBERS = {}
ITEMS = dict(taught=taught, taught_rivals=taught, taught_rotation=rotation, taught_order=order, taught_halves=halves)

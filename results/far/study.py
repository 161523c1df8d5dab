"""The study `far`: when models learn to copy from natural text, and how far they read then. Its README has the rules.

A model copies once its copy gain of random spans at a gap of T / 8 is above 1 nat. T is the training length. The time
to copy is the number of training tokens until then.
"""

import collections
import statistics

import numpy as np

from configs.runs import Run
from configs.sweeps import SCALES, SI, Scale, forms
from measure.copy_gain import recovery
from measure.far_gain import CLASSES
from results.far.heads import far_heads
from results.far.other_texts import losses as losses_elsewhere
from results.far.recall import recalled
from results.paired import PairedTests, at
from results.reach import draw_reach, reach_tables
from results.taught.study import (
    ALIBI,
    FAST,
    FAST_OPTIONS,
    LATER_SEEDS,
    MOMENTS,
    NOPE,
    QUARTER,
    XSA,
    drawn_styles,
    in_turn,
    primary_tests,
    reach_page,
    rotation_runs,
    rotation_tests,
)
from results.text_error import text_errors
from scripts.reproduce.drawing import Line, Panel, draw_panels, row_lines
from scripts.reproduce.study import BySeed, Study, samples
from scripts.reproduce.tables import make_table
from scripts.shared.looks import plot_styles, series_name
from scripts.shared.runs import StoredRun, copy_gains, final_losses, measured
from scripts.shared.tables import format_mean, markdown_table, mean_and_stderr, summarise

SCALE = "far"

# ---- the runs --------------------------------------------------------------------------------------------------------

PRIMARY = [
    ("rope", {}),
    ("logn_p_rope", {}),
    (SI, {}),
    ("alibi", {}),
    ("alibi", {"slope_scale": 4.0}),
]
LATER = [("bam_ssmax", {}), (SI, QUARTER), ("p_rope+scale_invariant+xsa", QUARTER)]  # added after results at `taught`
EXPLORATORY = [
    ("p_rope", {}),
    (SI, {"terms": "m"}),
    (SI, {"terms": "a"}),
    (SI, {"tau": 2.5}),
    (SI, {"tau": 40.0}),
    (NOPE, {}),
    ("logn_rope", {}),
    ("rope", {"base": 500.0}),
    ("alibi", {"slope_scale": 16.0}),
    ("p_rope+factor", {"factor": 2.0}),
    (SI, MOMENTS),
    (SI, QUARTER | MOMENTS),
]


def far_runs(scale: Scale) -> list[Run]:
    return in_turn(scale, PRIMARY, LATER, EXPLORATORY)


def head_runs(scale: Scale) -> list[Run]:
    return forms(scale.base, PRIMARY, scale.once)


def again_runs(scale: Scale) -> list[Run]:
    """Return new seeds of the two best score rules with the fast rotation, seed by seed.

    The seeds are 3 to 6, unless the user names others.
    """
    seeds = range(3, 7) if scale == SCALES[SCALE] else scale.seeds
    runs = []
    for seed in seeds:
        runs += forms(scale.base, [(SI, QUARTER), ("logn_p_rope", QUARTER)], (seed,))
    return runs


SWEEPS = dict(far=far_runs, far_heads=head_runs, far_rotation=rotation_runs, far_again=again_runs)

# ---- the measures ----------------------------------------------------------------------------------------------------

COPIES = 1.0  # nats; a model copies once its copy gain of random spans is above this


def far_gains(summary: dict, method: str | None = None) -> dict[str, float]:
    """Return the far gain in nats by class of tokens, and of all tokens. method: as in `measured`."""
    gains = measured(summary, "far_gain", method)
    counts = summary.get("far_tokens")
    if not gains or not counts:
        return gains
    weights = [counts[name] for name in gains]
    return gains | {"all": float(np.average([*gains.values()], weights=weights))}


def late_losses(summary: dict, method: str | None, first: int) -> dict[int, float]:
    """Return the loss by validation length, in nats a token, at the positions from `first`, a power of 2, on.

    In a longer text, early tokens count for less, so its mean loss falls even if far tokens do not help.
    """
    late = {}
    for length, octaves in measured(summary, "val_loss_by_position", method).items():
        means = octaves[first.bit_length() :]  # entry k covers positions 2^(k-1) .. 2^k - 1
        if means:
            late[int(length)] = float(np.average(means, weights=2 ** np.arange(len(means))))
    return late


def copy_curve(stored: StoredRun) -> list[tuple[float, float]]:
    """Return the pairs (M training tokens, copy gain at a gap of T / 8) of a run. T: the training length."""
    gap, curve = stored.config.train_length // 8, []
    for record in stored.validations():
        gains = copy_gains(record)
        if gap in gains:
            curve.append((record["step"] * stored.config.batch_tokens / 1e6, gains[gap]))
    return curve


def time_to_copy(curve: list[tuple[float, float]]) -> float | None:
    """Return where a copy_curve first passes COPIES, by linear interpolation, or None."""
    for (before, low), (after, high) in zip(curve, curve[1:]):
        if high > COPIES:
            return before if low >= COPIES else before + (after - before) * (COPIES - low) / (high - low)
    return None


def times(stored: StoredRun, method: str | None) -> dict[int, float]:
    """Return the time to copy by gap, {} for a run that does not copy."""
    time = time_to_copy(copy_curve(stored))
    return {} if time is None else {stored.config.train_length // 8: time}


def recoveries(stored: StoredRun, method: str | None) -> dict[int, float]:
    """Return the recovery of the copy gain by gap."""
    gains, errors = (measured(stored.summary, name).get("random", {}) for name in ("copy_gain", "copy_gain_error"))
    if method or not errors:  # errors are not measured as other methods, nor in old runs
        return {}
    return {int(gap): ratio for gap, (ratio, _) in recovery(gains, errors, stored.config.train_length).items()}


NUMBERS = dict(
    far_gain=lambda stored, method: far_gains(stored.summary, method),
    riffle=lambda stored, method: measured(stored.summary, "riffle_gain", method),
    recovery=recoveries,
    recall=lambda stored, method: {} if method else recalled(stored.path.name),
    elsewhere=lambda stored, method: {} if method else losses_elsewhere(stored.path.name),
    late=lambda stored, method: late_losses(stored.summary, method, stored.config.train_length // 2),
    time=times,
)

# ---- the tests -------------------------------------------------------------------------------------------------------


def tests(study: Study) -> list[PairedTests]:
    """Return the primary tests, and the tests that were fixed after them and before their own runs.

    Losses and far gains are of the runs that copy.
    """
    T, budget, times = study.base_length, training_tokens(study), times_to_copy(study)
    if not copies(times):
        return []
    losses = study.by_seed(final_losses)
    near = of_copying(at(losses, T), times)
    far = of_copying(at(losses, 16 * T), times)
    gains = of_copying(at(study.by_seed(far_gains), "far"), times)
    limited = {}
    for series, by_seed in times.items():
        limited[series] = {seed: budget if time is None else time for seed, time in by_seed.items()}

    loss_label = f"loss, {16 * T} tokens (16x)"
    measures = {loss_label: far, "far gain, class far": gains}
    primary = {"time to copy, M tokens": limited, f"loss, {T} tokens (1x)": near} | measures
    note = f" A run that does not copy counts with {budget:.1f} M tokens. Loss and far gain compare runs that copy "
    note += "with runs that copy."
    found = [
        primary_tests(study, primary, "nats or M tokens", note),
        PairedTests("Fast at far", FAST, [SI, "logn_p_rope", ALIBI, "bam_ssmax"], measures, "nats"),
        PairedTests("Xsa at far", XSA, [FAST], measures, "nats"),
        PairedTests("All pairs", FAST, ["logn_rope"], {loss_label: far}, "nats"),
    ]
    return [paired._replace(left_out=LATER_SEEDS) for paired in found]


def again_tests(study: Study) -> list[PairedTests]:
    """Return the test of the loss of the new seeds, and the later one of their recall."""
    length = 16 * study.base_length
    losses, recall = at(study.by_seed(final_losses), length), collections.defaultdict(dict)
    for run, stored in study.finished:
        (series,), shares = study.series(run), recalled(stored.path.name)
        if shares:
            recall[series][run.config.seed] = shares[f"spread {length}"]
    note, rivals = "This test was fixed before its runs.", [f"logn_p_rope {FAST_OPTIONS}"]
    of_loss = {f"loss, {length} tokens (16x)": losses}
    of_recall = {f"values recalled, {length} tokens": recall}
    return [
        PairedTests("Again", FAST, rivals, of_loss, "nats a token", range(3), note),
        PairedTests("Recall", FAST, rivals, of_recall, "shares", range(3), note),
    ]


TESTS = dict(far=tests, far_rotation=rotation_tests, far_again=again_tests)


def training_tokens(study: Study) -> float:
    """Return the training tokens of one run in millions."""
    return study.runs[0].config.steps * study.runs[0].config.batch_tokens / 1e6


def times_to_copy(study: Study) -> dict[str, dict[int, float | None]]:
    """Return time_to_copy of each series and seed."""
    times = collections.defaultdict(dict)
    for run, stored in study.finished:
        for series in study.series(run):
            times[series][run.config.seed] = time_to_copy(copy_curve(stored))
    return times


def of_copying(values: dict[str, BySeed], times: dict[str, dict]) -> dict[str, BySeed]:
    """Return the numbers of the runs that copy, by series."""
    found = {}
    for series, by_seed in values.items():
        found[series] = {seed: number for seed, number in by_seed.items() if times[series][seed] is not None}
    return found


def copies(times: dict[str, dict[int, float | None]]) -> bool:
    """Return whether any run copies. times: times_to_copy."""
    return any(time is not None for by_seed in times.values() for time in by_seed.values())


# ---- the tables ------------------------------------------------------------------------------------------------------

GAP_RATIOS = (1 / 8, 1 / 2, 2, 8)  # tokens between two copies / training length
DRAWN = ["rope", "p_rope", "logn_p_rope", "alibi", SI, FAST]


def far(study: Study) -> str:
    """Return the figures and the tables as Markdown. Sections have the tests, and the error from the text."""
    # 1. The tests.
    T = study.base_length
    for paired in tests(study):
        study.sections += paired.section()
    if study.sections:
        copying = of_copying(at(study.by_seed(final_losses), T), times_to_copy(study))
        for ours in (SI, FAST):
            study.sections += text_errors(study, ours, study.all_series, copying)

    # 2. The figures.
    looks = drawn_styles(study, DRAWN)
    draw_reach(study, looks)
    draw_time(study, looks)
    draw_curves(study, looks)
    names = [study.item, f"{study.item}_time", f"{study.item}_curves"]
    figures = [study.figure_markdown(name) for name in names]

    # 3. The tables.
    late = samples(study.by_seed(lambda summary, method: late_losses(summary, method, T // 2)))
    methods = [series for series in study.all_series if (series, T) in late]
    label = f"loss from position {T // 2} on"
    late_table = make_table(study, {label: late}, [T, 4 * T, 16 * T], best=min, methods=methods)
    tables = [copy_table(study), late_table, *reach_tables(study, [round(ratio * T) for ratio in GAP_RATIOS])]

    text = f"Copying begins when the copy gain of random spans at a gap of {T // 8} tokens passes {COPIES:g} nat. "
    text += f"The training takes {training_tokens(study):.1f} M tokens. Loss: nats per token on natural text. "
    text += "Copy gain: loss of 32 random tokens minus the loss of their second copy. Far gain: loss with one training "
    text += "length of context minus loss with 16, by the latest place where the 8 tokens before a token occur: more "
    text += "than a training length back (far), nearer, or nowhere. Mean \u00b1 standard error over seeds."
    return "\n\n".join([text, *figures, *tables])


def far_rotation(study: Study) -> str:
    """Return the tables of the factorial and its losses against training tokens as Markdown.

    The tests were fixed for code. If no run copies, as on books, the page has neither tests nor the figure.
    """
    rules = ("p_rope", "logn_p_rope", SI)
    fast = [f"{rule} {FAST_OPTIONS}" for rule in rules]
    if not copies(times_to_copy(study)):
        return reach_page(study, [], fast[:2])
    text = reach_page(study, rotation_tests(study), fast[:2])
    draw_curves(study, plot_styles([*rules, *fast]))
    return f"{text}\n\n{study.figure_markdown(f'{study.item}_curves')}"


def again(study: Study) -> str:
    """Return the tables of the new seeds as Markdown. Sections have the tests."""
    for paired in again_tests(study):
        study.sections += paired.section()
    study.sections += text_errors(study, FAST, [f"logn_p_rope {FAST_OPTIONS}"])
    text = "Loss: nats per token on natural text, by sequence length. Copy gain: loss of 32 random tokens minus the "
    text += "loss of their second copy. Mean \u00b1 standard error over seeds."
    return "\n\n".join([text, *reach_tables(study, [round(ratio * study.base_length) for ratio in GAP_RATIOS])])


def copy_table(study: Study) -> str:
    """Return a table with the time to copy and the far gain by class."""
    times, gains, classes = times_to_copy(study), study.by_seed(far_gains), (*CLASSES, "all")
    rows = [["method", "seeds that copy", "time to copy, M tokens", *(f"far gain, {name}" for name in classes)]]
    for series in study.all_series:
        if series not in times:
            continue
        found = [time for time in times[series].values() if time is not None]
        copying = f"{len(found)} of {len(times[series])}"
        shown = f"{statistics.fmean(found):.1f}" if found else "not"
        if len(found) > 1:
            shown += f" ({min(found):.1f} to {max(found):.1f})"
        cells = []
        for name in classes:
            by_seed = gains.get((series, name), {})
            cells.append(format_mean(*mean_and_stderr([*by_seed.values()])))
        rows.append([series_name(series), copying, shown, *cells])
    return markdown_table(rows)


def draw_time(study: Study, looks: dict[str, dict]):
    """Draw the copy gain at T / 8 of each run against its training tokens, and the far gain by class."""
    lines, by_class = [], []
    for series, look in looks.items():
        for run, stored in study.finished:
            curve = copy_curve(stored)
            if series in study.series(run) and curve:
                lines.append(Line(look | dict(markersize=2), *zip(*curve)))
    gains = study.by_seed(far_gains)
    for series, look in looks.items():
        means = [mean_and_stderr([*gains.get((series, name), {}).values()]) for name in CLASSES]
        if None not in [mean for mean, _ in means]:
            by_class.append(Line(look, range(len(CLASSES)), *zip(*means)))

    gap = study.base_length // 8
    time_axes = dict(xlabel="M training tokens", ylabel="nats")
    class_axes = dict(xlabel="8 tokens before occurred", ylabel="nats", xticks=range(len(CLASSES)), xticklabels=CLASSES)
    panels = [
        Panel(f"copy gain at a gap of {gap} tokens, each seed", lines, time_axes),
        Panel("far gain by class of tokens", by_class, class_axes),
    ]
    draw_panels(study.figure_path(f"{study.item}_time"), [panels], x="", y="")


def draw_curves(study: Study, looks: dict[str, dict]):
    """Draw the loss at the training length and at 16 times it against training tokens, mean over seeds.

    The last validation reads more text than the others, so it is left out.
    """
    losses = collections.defaultdict(list)
    for series in looks:
        for run, stored in study.finished:
            methods = study.series(run)
            if series not in methods:
                continue
            for record in stored.validations()[:-1]:
                tokens = record["step"] * run.config.batch_tokens / 1e6
                for length, loss in final_losses(record, methods[series]).items():
                    losses[series, length, tokens].append(loss)
    rows = [row for row in summarise(losses, "series", "length", "tokens") if row["tokens"] > 0]
    panels = []
    for ratio in (1, 16):
        length = ratio * study.base_length
        lines = row_lines([row for row in rows if row["length"] == length], "series", "tokens", looks)
        panels.append(Panel(f"loss at {study.length_label(length)}", lines))
    path = study.figure_path(f"{study.item}_curves")
    draw_panels(path, [panels], x="M training tokens", y="nats a token", bands=True, sharey=True)


ITEMS = dict(far=far, far_heads=far_heads, far_rotation=far_rotation, far_again=again)

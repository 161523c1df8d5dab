"""Make the tables of the study `far`: when models learn to copy from natural text, and how far they read then.

A model copies once its copy gain of random spans at a gap of T / 8 is above 1 nat. T is the training length. The time
to copy is the number of training tokens until then.
"""

import collections
import statistics

import numpy as np
from scipy import stats

from configs.sweeps import SI
from measure.far_gain import CLASSES
from scripts.reproduce.beyond import ALIBI, FAST, XSA, draw_reach, drawn_styles, reach_tables
from scripts.reproduce.comparisons import paired_rows, paired_section, primary_comparisons
from scripts.reproduce.drawing import Line, Panel, draw_panels
from scripts.reproduce.study import BySeed, Study, at, samples
from scripts.reproduce.tables import make_table
from scripts.shared.looks import series_name
from scripts.shared.runs import copy_gains, final_losses, measured
from scripts.shared.tables import format_mean, markdown_table, mean_and_stderr

THRESHOLD = 1.0  # nats
GAP_RATIOS = (1 / 8, 1 / 2, 2, 8)
MILLION = 1e6
# Tests fixed after the first, before their own runs: series and rivals.
LATER_TESTS = {"fast at far": (FAST, [SI, "logn_p_rope", ALIBI, "bam_ssmax"]), "xsa at far": (XSA, [FAST])}


def far(study: Study) -> str:
    """Return the figures and the tables as Markdown. A section lists the primary comparisons."""
    T, losses, gains = study.base_length, study.by_seed(final_losses), study.by_seed(copy_gains)
    study.sections = comparisons(study)
    draw_reach(study, losses, gains)
    draw_time(study)
    text = f"Copying begins when the copy gain of random spans at a gap of {T // 8} tokens passes {THRESHOLD:g} nat. "
    text += f"The training takes {training_tokens(study):.1f} M tokens. Loss: nats per token on natural text. "
    text += "Copy gain: loss of 32 random tokens minus the loss of their second copy. Far gain: loss with one training "
    text += "length of context minus loss with 16, by the latest place where the 8 tokens before a token occur: more "
    text += "than a training length back (far), nearer, or nowhere. Mean \u00b1 standard error over seeds."
    figures = study.figure_markdown(), study.figure_markdown(f"{study.item}_time")
    late = samples(study.by_seed(lambda summary, method: late_losses(summary, method, T // 2)))
    label, methods = f"loss from position {T // 2} on", [s for s in study.all_series if (s, T) in late]
    late_table = make_table(study, {label: late}, [T, 4 * T, 16 * T], best=min, methods=methods)
    tables = [copy_table(study), late_table, *reach_tables(study, losses, gains, GAP_RATIOS)]
    return "\n\n".join([text, *figures, *tables])


def training_tokens(study: Study) -> float:
    """Return the training tokens of one run in millions."""
    return study.runs[0].config.steps * study.runs[0].config.batch_tokens / MILLION


def far_gains(summary: dict, method: str | None = None) -> dict[str, float]:
    """Return the far gain in nats by class of tokens. method: as in scripts.shared.runs.measured."""
    return measured(summary, "far_gain", method)


def late_losses(summary: dict, method: str | None, first: int) -> dict[int, float]:
    """Return the loss by validation length, in nats a token, at the positions from `first`, a power of 2, on.

    A longer text has fewer tokens with a short context, so its mean loss falls even if far tokens do not help.
    """
    octaves = measured(summary, "val_loss_by_position", method)  # entry k covers positions 2^(k-1) .. 2^k - 1
    late = {int(length): losses[first.bit_length() :] for length, losses in octaves.items()}
    return {n: float(np.average(means, weights=2 ** np.arange(len(means)))) for n, means in late.items() if means}


def copy_curves(study: Study) -> dict[str, dict[int, list]]:
    """Return the pairs (M training tokens, copy gain of random spans at a gap of T / 8) of each series and seed."""
    curves, gap = collections.defaultdict(dict), study.base_length // 8
    for run, stored in study.finished:
        gains = [(record["step"], copy_gains(record)) for record in stored.validations()]
        curve = [(step * run.config.batch_tokens / MILLION, nats[gap]) for step, nats in gains if nats]
        curves |= {series: curves[series] | {run.config.seed: curve} for series in study.series(run)}
    return curves


def times_to_copy(study: Study) -> dict[str, dict[int, float | None]]:
    """Return time_to_copy of each series and seed."""
    curves = copy_curves(study)
    return {series: {seed: time_to_copy(curve) for seed, curve in found.items()} for series, found in curves.items()}


def time_to_copy(curve: list[tuple[float, float]]) -> float | None:
    """Return where a curve of copy_curves first passes the threshold, by linear interpolation, or None."""
    for (before, low), (after, high) in zip(curve, curve[1:]):
        if high > THRESHOLD:
            return before + (after - before) * max(0.0, THRESHOLD - low) / (high - low) if low < THRESHOLD else before
    return None


def primary_measures(study: Study) -> dict[str, dict[str, BySeed]]:
    """Return the measures of the primary comparisons by label: loss and far gain are of the runs that copy."""
    T, budget, times = study.base_length, training_tokens(study), times_to_copy(study)
    losses, gains = study.by_seed(final_losses), at(study.by_seed(far_gains), "far")
    limited = {s: {seed: budget if t is None else t for seed, t in by_seed.items()} for s, by_seed in times.items()}
    measures = {"time to copy, M tokens": limited}
    measures |= {f"loss, {n} tokens ({n // T}x)": of_copying(at(losses, n), times) for n in (T, 16 * T)}
    return measures | {"far gain, class far": of_copying(gains, times)}


def comparisons(study: Study) -> list[str]:
    """Return sections with the primary comparisons, and with the error from the text."""
    losses, measures, budget = study.by_seed(final_losses), primary_measures(study), training_tokens(study)
    sections = primary_comparisons(study, losses, measures, unit="nats or M tokens")
    if sections:
        sections[1] += f" A run that does not copy counts with {budget:.1f} M tokens. Loss and far gain compare runs "
        sections[1] += "that copy with runs that copy."
        for title, (ours, _) in LATER_TESTS.items():
            sections += paired_section(f"### {title.capitalize()}", ours, later_rows(study, title), "nats", "")
        sections += text_errors(study)
    return sections


def later_rows(study: Study, title: str) -> list[dict]:
    """Return the rows of these LATER_TESTS, in the loss at 16 training lengths and the far gain."""
    measures = primary_measures(study)
    return paired_rows(*LATER_TESTS[title], {label: measures[label] for label in [*measures][2:]})


def of_copying(values: dict[str, BySeed], times: dict[str, dict]) -> dict[str, BySeed]:
    """Return the numbers of the runs that copy, by series."""
    return {
        series: {seed: number for seed, number in by_seed.items() if times[series][seed] is not None}
        for series, by_seed in values.items()
    }


def text_errors(study: Study) -> list[str]:
    """Return lines with bootstrap errors of the loss differences over blocks of the validation text."""
    times, lines = times_to_copy(study), []
    blocks = study.by_seed(lambda summary, method: measured(summary, "val_loss_by_block", method))
    count = min(len(losses) for by_seed in blocks.values() for losses in by_seed.values())  # it divides all counts
    blocks = {
        key: {seed: np.reshape(losses, (count, -1)).mean(axis=1) for seed, losses in by_seed.items()}
        for key, by_seed in blocks.items()
    }
    for length in (study.base_length, 16 * study.base_length):
        losses = of_copying(at(blocks, str(length)), times)
        for series in study.all_series:
            ours, others = losses.get(SI, {}), losses.get(series, {})
            if series != SI and (seeds := sorted(ours.keys() & others.keys())):
                difference = np.mean([np.subtract(ours[seed], others[seed]) for seed in seeds], axis=0)  # (blocks,)
                error = stats.bootstrap((difference,), np.mean, method="basic", rng=0).standard_error
                cell = f"{difference.mean():+.3f} \u00b1 {error:.3f}"
                lines.append([series_name(series), str(length), cell, str(len(seeds))])
    if not lines:
        return []
    text = f"Error from the text: {series_name(SI)} minus each method, mean over seeds \u00b1 bootstrap error over "
    text += f"{len(difference)} blocks of the validation text, of runs that copy."
    return [text, markdown_table([["minus", "tokens", "difference", "seeds"], *lines])]


def copy_table(study: Study) -> str:
    """Return a table with the time to copy and the far gain by class."""
    times, gains = times_to_copy(study), study.by_seed(far_gains)
    rows = [["method", "seeds that copy", "time to copy, M tokens", *(f"far gain, {name}" for name in CLASSES)]]
    for series in study.all_series:
        if by_seed := times.get(series):
            found = [time for time in by_seed.values() if time is not None]
            cells = [format_mean(*mean_and_stderr([*gains.get((series, name), {}).values()])) for name in CLASSES]
            mean = f"{statistics.fmean(found):.1f}" if found else "not"
            spread = f" ({min(found):.1f} to {max(found):.1f})" if len(found) > 1 else ""
            rows.append([series_name(series), f"{len(found)} of {len(by_seed)}", mean + spread, *cells])
    return markdown_table(rows)


def draw_time(study: Study):
    """Draw the copy gain at T / 8 of each run against its training tokens, and the far gain by class."""
    gap, curves, gains, lines, by_class = study.base_length // 8, copy_curves(study), study.by_seed(far_gains), [], []
    for series, look in drawn_styles(study).items():
        lines += [Line(look | dict(markersize=2), *zip(*curve)) for curve in curves.get(series, {}).values() if curve]
        means = [mean_and_stderr([*gains.get((series, name), {}).values()]) for name in CLASSES]
        if None not in [mean for mean, _ in means]:
            by_class.append(Line(look, range(len(CLASSES)), *zip(*means)))
    panels = [
        Panel(f"copy gain at a gap of {gap} tokens, each seed", lines, dict(xlabel="M training tokens", ylabel="nats")),
        Panel("far gain by class of tokens", by_class,
              dict(xlabel="8 tokens before occurred", ylabel="nats", xticks=range(len(CLASSES)), xticklabels=CLASSES)),
    ]  # fmt: skip
    draw_panels(study.figure_path(f"{study.item}_time"), [panels], x="", y="")

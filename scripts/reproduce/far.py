"""Make the tables of the study `far`: when models learn to copy from natural text, and how far they read then.

A model copies once its copy gain of random spans at a gap of T / 8 is above 1 nat. T is the training length. The time
to copy is the number of training tokens until then.
"""

import collections
import statistics

import numpy as np
from scipy import stats

from configs.sweeps import OURS
from runtime.far_gain import CLASSES
from scripts.reproduce.drawing import Line, Panel, draw_panels
from scripts.reproduce.paired import BySeed, at, losses_and_gains, primary_comparisons
from scripts.reproduce.study import Study
from scripts.reproduce.taught import DRAWN, draw_reach, reach_tables
from scripts.shared.looks import plot_styles, series_name
from scripts.shared.runs import StoredRun
from scripts.shared.tables import format_mean, markdown_table, mean_and_stderr

THRESHOLD = 1.0  # nats
GAP_RATIOS = (1 / 8, 1 / 2, 2, 8)
MILLION = 1e6


def far(study: Study) -> str:
    """Return the figures and the tables as Markdown. A section lists the primary comparisons."""
    T, budget = study.base_length, study.runs[0].config.steps * study.runs[0].config.batch_tokens / MILLION
    losses, gains = losses_and_gains(study)
    curves, far_gains = collections.defaultdict(dict), collections.defaultdict(dict)
    for run, stored in study.finished:
        gains_as = {None: stored.summary.get("far_gain", {})} | stored.summary.get("far_gain_as", {})
        for series, method in study.series(run).items():
            curves[series][run.config.seed] = copy_curve(stored, T // 8)
            for name, nats in gains_as.get(method, {}).items():
                far_gains[series, name][run.config.seed] = nats
    times = {
        series: {seed: time_to_copy(curve) for seed, curve in by_seed.items()} for series, by_seed in curves.items()
    }
    study.sections = comparisons(study, losses, at(far_gains, "far"), times, budget)
    draw_reach(study, losses, gains)
    draw_time(study, curves, far_gains)
    text = f"Copying begins when the copy gain of random spans at a gap of {T // 8} tokens passes {THRESHOLD:g} nat. "
    text += f"The training takes {budget:.1f} M tokens. Loss: nats per token on natural text. Copy gain: loss of 32 "
    text += "random tokens minus the loss of their second copy. Far gain: loss with one training length of context "
    text += "minus loss with 16, by the latest place where the 8 tokens before a token occur: more than a training "
    text += "length back (far), nearer, or nowhere. Mean \u00b1 standard error over seeds."
    figures = study.figure_markdown(), study.figure_markdown(f"{study.item}_time")
    time_row = copy_table(study, times, far_gains)
    return "\n\n".join([text, *figures, time_row, *reach_tables(study, losses, gains, GAP_RATIOS)])


def copy_curve(stored: StoredRun, gap: int) -> list[tuple[float, float]]:
    """Return the pairs (million training tokens, copy gain of random spans at this gap) of a run's validations."""
    tokens = stored.config.batch_tokens
    measured = [(record["step"], record.get("copy_gain", {})) for record in stored.validations()]
    return [(step * tokens / MILLION, gain["random"][str(gap)]) for step, gain in measured if "random" in gain]


def time_to_copy(curve: list[tuple[float, float]]) -> float | None:
    """Return where a curve of copy_curve first passes the threshold, by linear interpolation, or None."""
    for (before, low), (after, high) in zip(curve, curve[1:]):
        if high > THRESHOLD:
            return before + (after - before) * max(0.0, THRESHOLD - low) / (high - low) if low < THRESHOLD else before
    return None


def comparisons(study: Study, losses: dict, far_gains: dict, times: dict, budget: float) -> list[str]:
    """Return sections with the primary comparisons: time to copy, and loss and far gain of the runs that copy."""
    T, copying = study.base_length, {(series, seed) for series, by_seed in times.items() for seed in by_seed
                                     if by_seed[seed] is not None}  # fmt: skip
    limited = {s: {seed: budget if t is None else t for seed, t in by_seed.items()} for s, by_seed in times.items()}
    reach = {f"loss, {n} tokens ({n // T}x)": at(losses, n) for n in (T, 16 * T)} | {"far gain, class far": far_gains}
    reach = {
        label: {s: {seed: x for seed, x in by_seed.items() if (s, seed) in copying} for s, by_seed in values.items()}
        for label, values in reach.items()
    }
    measures = {"time to copy, M tokens": limited} | reach
    sections = primary_comparisons(study, losses, measures, unit="nats or M tokens")
    if sections:
        sections[1] += (
            f" A run that does not copy counts with {budget:.1f} M tokens. Loss and far gain compare runs that "
        )
        sections[1] += "copy with runs that copy."
        sections += text_errors(study, copying)
    return sections


def text_errors(study: Study, copying: set) -> list[str]:
    """Return lines with bootstrap errors of the loss differences over blocks of the validation text."""
    T, blocks = study.base_length, collections.defaultdict(dict)
    for run, stored in study.finished:
        by_length, seed = stored.summary.get("val_loss_by_block", {}), run.config.seed
        for series, method in study.series(run).items():
            if method is None and (series, seed) in copying:
                for length, of_blocks in by_length.items():
                    blocks[series, int(length)][seed] = np.array(of_blocks)
    lines = []
    for length in (T, 16 * T):
        ours = blocks.get((OURS, length), {})
        for series in study.all_series:
            others = blocks.get((series, length), {})
            if series != OURS and (seeds := ours.keys() & others.keys()):
                difference = np.mean([ours[seed] - others[seed] for seed in sorted(seeds)], axis=0)  # (blocks,)
                error = stats.bootstrap((difference,), np.mean, method="basic", rng=0).standard_error
                lines.append(
                    [series_name(series), str(length), f"{difference.mean():+.3f} \u00b1 {error:.3f}", str(len(seeds))]
                )
    if not lines:
        return []
    text = f"Error from the text: {series_name(OURS)} minus each method, mean over seeds \u00b1 bootstrap error over "
    text += f"{len(difference)} blocks of the validation text, of runs that copy."
    return [text, markdown_table([["minus", "tokens", "difference", "seeds"], *lines])]


def copy_table(study: Study, times: dict[str, dict[int, float | None]], far_gains: dict) -> str:
    """Return a table with the time to copy and the far gain by class."""
    rows = [["method", "seeds that copy", "time to copy, M tokens", *(f"far gain, {name}" for name in CLASSES)]]
    for series in study.all_series:
        if by_seed := times.get(series):
            found = [time for time in by_seed.values() if time is not None]
            cells = [format_mean(*mean_and_stderr([*far_gains.get((series, name), {}).values()])) for name in CLASSES]
            mean = f"{statistics.fmean(found):.1f}" if found else "not"
            spread = f" ({min(found):.1f} to {max(found):.1f})" if len(found) > 1 else ""
            rows.append([series_name(series), f"{len(found)} of {len(by_seed)}", mean + spread, *cells])
    return markdown_table(rows)


def draw_time(study: Study, curves: dict, far_gains: dict[tuple, BySeed]):
    """Draw the copy gain at T / 8 of each run against its training tokens, and the far gain by class."""
    shown = [series for series in study.all_series if series in DRAWN or series.startswith("alibi slope_scale=")]
    looks, gap = plot_styles(shown), study.base_length // 8
    lines = [
        Line(looks[series] | dict(markersize=2), *zip(*curve))
        for series in shown for curve in curves.get(series, {}).values() if curve
    ]  # fmt: skip
    by_class = []
    for series in shown:
        measured = [mean_and_stderr([*far_gains.get((series, name), {}).values()]) for name in CLASSES]
        if None not in [mean for mean, _ in measured]:
            by_class.append(Line(looks[series], range(len(CLASSES)), *zip(*measured)))
    panels = [
        Panel(f"copy gain at a gap of {gap} tokens, each seed", lines, dict(xlabel="M training tokens", ylabel="nats")),
        Panel("far gain by class of tokens", by_class,
              dict(xlabel="8 tokens before occurred", ylabel="nats", xticks=range(len(CLASSES)), xticklabels=CLASSES)),
    ]  # fmt: skip
    draw_panels(study.figure_path(f"{study.item}_time"), [panels], x="", y="")

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
from scripts.reproduce.beyond import draw_reach, drawn_styles, reach_tables
from scripts.reproduce.comparisons import primary_comparisons
from scripts.reproduce.drawing import Line, Panel, draw_panels
from scripts.reproduce.study import BySeed, Study, at
from scripts.shared.looks import series_name
from scripts.shared.runs import StoredRun, copy_gains, final_losses, measured
from scripts.shared.tables import format_mean, markdown_table, mean_and_stderr

THRESHOLD = 1.0  # nats
GAP_RATIOS = (1 / 8, 1 / 2, 2, 8)
MILLION = 1e6


def far(study: Study) -> str:
    """Return the figures and the tables as Markdown. A section lists the primary comparisons."""
    T, budget = study.base_length, study.runs[0].config.steps * study.runs[0].config.batch_tokens / MILLION
    losses, gains = study.by_seed(final_losses), study.by_seed(copy_gains)
    far_gains = study.by_seed(lambda summary, method: measured(summary, "far_gain", method))
    curves, times = collections.defaultdict(dict), collections.defaultdict(dict)
    for run, stored in study.finished:
        for series in study.series(run):
            curve = curves[series][run.config.seed] = copy_curve(stored, T // 8)
            times[series][run.config.seed] = time_to_copy(curve)
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
    gains = [(record["step"] * tokens / MILLION, copy_gains(record)) for record in stored.validations()]
    return [(x, by_gap[gap]) for x, by_gap in gains if by_gap]


def time_to_copy(curve: list[tuple[float, float]]) -> float | None:
    """Return where a curve of copy_curve first passes the threshold, by linear interpolation, or None."""
    for (before, low), (after, high) in zip(curve, curve[1:]):
        if high > THRESHOLD:
            return before + (after - before) * max(0.0, THRESHOLD - low) / (high - low) if low < THRESHOLD else before
    return None


def comparisons(study: Study, losses: dict, far_gains: dict, times: dict, budget: float) -> list[str]:
    """Return sections with the primary comparisons: time to copy, and loss and far gain of the runs that copy."""
    T = study.base_length
    limited = {s: {seed: budget if t is None else t for seed, t in by_seed.items()} for s, by_seed in times.items()}
    measures = {"time to copy, M tokens": limited}
    measures |= {f"loss, {n} tokens ({n // T}x)": of_copying(at(losses, n), times) for n in (T, 16 * T)}
    measures["far gain, class far"] = of_copying(far_gains, times)
    sections = primary_comparisons(study, losses, measures, unit="nats or M tokens")
    if sections:
        sections[1] += f" A run that does not copy counts with {budget:.1f} M tokens. Loss and far gain compare runs "
        sections[1] += "that copy with runs that copy."
        sections += text_errors(study, times)
    return sections


def of_copying(values: dict[str, BySeed], times: dict[str, dict]) -> dict[str, BySeed]:
    """Return the numbers of the runs that copy, by series."""
    return {
        series: {seed: number for seed, number in by_seed.items() if times[series][seed] is not None}
        for series, by_seed in values.items()
    }


def text_errors(study: Study, times: dict[str, dict]) -> list[str]:
    """Return lines with bootstrap errors of the loss differences over blocks of the validation text."""
    blocks, lines = study.by_seed(lambda summary, method: measured(summary, "val_loss_by_block", method)), []
    for length in (study.base_length, 16 * study.base_length):
        losses = of_copying(at(blocks, str(length)), times)
        for series in study.all_series:
            ours, others = losses.get(OURS, {}), losses.get(series, {})
            if series != OURS and (seeds := sorted(ours.keys() & others.keys())):
                difference = np.mean([np.subtract(ours[seed], others[seed]) for seed in seeds], axis=0)  # (blocks,)
                error = stats.bootstrap((difference,), np.mean, method="basic", rng=0).standard_error
                cell = f"{difference.mean():+.3f} \u00b1 {error:.3f}"
                lines.append([series_name(series), str(length), cell, str(len(seeds))])
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
    gap, lines, by_class = study.base_length // 8, [], []
    for series, look in drawn_styles(study).items():
        lines += [Line(look | dict(markersize=2), *zip(*curve)) for curve in curves.get(series, {}).values() if curve]
        means = [mean_and_stderr([*far_gains.get((series, name), {}).values()]) for name in CLASSES]
        if None not in [mean for mean, _ in means]:
            by_class.append(Line(look, range(len(CLASSES)), *zip(*means)))
    panels = [
        Panel(f"copy gain at a gap of {gap} tokens, each seed", lines, dict(xlabel="M training tokens", ylabel="nats")),
        Panel("far gain by class of tokens", by_class,
              dict(xlabel="8 tokens before occurred", ylabel="nats", xticks=range(len(CLASSES)), xticklabels=CLASSES)),
    ]  # fmt: skip
    draw_panels(study.figure_path(f"{study.item}_time"), [panels], x="", y="")

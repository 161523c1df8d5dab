"""The paper's figures: each function draws one and returns the Markdown that shows it."""

import collections
import math
from collections.abc import Callable

from configs.config import Config
from configs.runs import Run
from model.methods import method_options
from scripts.evaluate import load_run, open_own_text
from scripts.reproduce import logits, theory
from scripts.reproduce.drawing import SCHEMES, draw_curves, draw_entropy, draw_sublog, tau_looks
from scripts.reproduce.study import Study
from scripts.shared.looks import plot_style
from scripts.shared.runs import StoredRun, val_tokens
from scripts.shared.tables import markdown_table, mean_and_stderr

NO_FIGURE = "**No figure: there is no finished run to draw.**"
WINDOWS = 4  # of validation text, for the trained models' attention

# ---- validation curves -----------------------------------------------------------------------------------------------


def figure_train_lengths(study: Study) -> str:
    study.notes.append("NoPE is shown in the left panel only, as in the paper.")
    text = "Validation loss at the training length, for three training lengths."
    return curve_figure(study, text, at_train_length=True, nope_panels=1)


def figure_train_4k(study: Study) -> str:
    study.notes.append("Below: the last fifth of the training, and the half of the methods that is best at its end.")
    study.notes.append("NoPE is shown in the left panel only, as in the paper.")
    text = f"Validation loss of the models trained at {study.title(study.base_length)}, at three validation lengths."
    return curve_figure(study, text, nope_panels=1, zoom=True)


def figure_train_16k(study: Study) -> str:
    study.notes.append("NoPE is left out of the right panel, as in the paper.")
    text = f"Validation loss of the models trained at {study.title(study.lengths[1])}, at three validation lengths."
    return curve_figure(study, text, nope_panels=2)


def figure_304m(study: Study) -> str:
    return curve_figure(study, "Validation loss of the large model, at three validation lengths.", baseline=False)


def figure_scale_invariant_variants(study: Study) -> str:
    text = "Validation loss of scale-invariant attention with three positional encodings."
    return curve_figure(study, text, baseline=False)


def figure_tau(study: Study) -> str:
    text = "Validation loss of scale-invariant p-RoPE with different lengthscales \u03c4 (tokens)."
    return curve_figure(
        study, text, baseline=False, series_of=lambda run: {tau_of(run.config): None}, looks_of=tau_looks
    )


def tau_of(config: Config) -> float:
    """Return the lengthscale in tokens that a run trains with."""
    return float(config.method_options.get("tau", method_options(config.method)["tau"].default))


def curve_figure(
    study: Study,
    text: str,
    *,
    at_train_length: bool = False,
    nope_panels: int = 3,
    series_of: Callable[[Run], dict] | None = None,
    looks_of: Callable[[set], dict] | None = None,
    baseline: bool = True,
    zoom: bool = False,
) -> str:
    """Draw a panel a validation length, write the curves as CSV, and return the Markdown: text, then the figure.

    at_train_length: only the models that were trained at the length. nope_panels: in how many of the panels NoPE is
    shown. series_of: in place of study.series. looks_of: the looks of these series. baseline: mark the paper's 3.28, at
    its scale. zoom: as draw_curves takes it.
    """
    rows = validation_curves(study, series_of or study.series)
    if not rows:
        return f"{text}\n\n{NO_FIGURE}"
    panels = []
    for n in study.lengths:
        shown = [r for r in rows if r["val_length"] == n and (r["train_length"] == n or not at_train_length)]
        shown = [r for r in shown if r["series"] != "nope" or len(panels) < nope_panels]
        panels.append((f"{'train and ' if at_train_length else ''}val @{study.title(n)}", shown))
    present = {row["series"] for row in rows}
    known = [series for series in study.all_series if series in present]
    looks = looks_of(present) if looks_of else {series: plot_style(series, present) for series in known}
    if baseline and study.scale != "paper":
        study.notes.append("The paper's dashed line at 3.28 is left out: it means nothing at this scale.")
    draw_curves(study.figure(), panels, looks, 3.28 if baseline and study.scale == "paper" else None, zoom)
    study.write_csv(rows)
    several = any(row["seeds"] > 1 for row in rows)
    study.notes.append("Bands: \u00b1 1 standard error over seeds." if several else "One seed: no bands.")
    if len({row["val_tokens"] for row in rows}) > 1:
        study.notes.append("Open circles: validations on a part of the tokens (`--val_profile fast`).")
    return f"{text}\n\n{study.picture()}"


def validation_curves(study: Study, series_of: Callable[[Run], dict]) -> list[dict]:
    """Return the mean validation loss over seeds: one row a series, training length, validation length and step.

    A step counts when all seeds were validated at it, on the same tokens.
    """
    seeds = collections.defaultdict(list)
    for run, stored in list(study.finished):
        with study.dropping_unreadable(run):
            curves = {name: validation_curve(stored, method) for name, method in series_of(run).items()}
            wanted = [n for n in study.lengths if n in run.config.val_lengths]
            if lacking := [str(n) for n in wanted if any(n not in curve for curve in curves.values())]:
                study.missing.append((run.name, f"not validated at {', '.join(lacking)} during training"))
            for series, curve in curves.items():
                seeds[series, run.config.train_length].append(curve)
    rows = []
    for (name, train_length), group in seeds.items():
        for length in study.lengths:
            known = [curve[length] for curve in group if length in curve]
            for step, tokens in sorted(set.intersection(*map(set, known)) if known else ()):
                # null in the metrics is a loss that was not finite
                losses = [math.nan if curve[step, tokens] is None else curve[step, tokens] for curve in known]
                mean, stderr = mean_and_stderr(losses)
                row = dict(series=name, train_length=train_length, val_length=length, step=step)
                rows.append(row | dict(mean=mean, stderr=stderr, seeds=len(known), val_tokens=tokens))
    return rows


def validation_curve(stored: StoredRun, method: str | None) -> dict[int, dict]:
    """Return a run's losses by validation length, then by step and tokens. method: as in Study.series."""
    curve = collections.defaultdict(dict)
    for record in stored.validations():
        losses = record["val_loss"] if method is None else record.get("val_loss_as", {}).get(method, {})
        for length, tokens in val_tokens(record).items():
            if length in losses:
                curve[int(length)][record["step"], tokens] = losses[length]
    return curve


# ---- theory and trained models ---------------------------------------------------------------------------------------


def figure_entropy(study: Study) -> str:
    lengths = [2**k for k in range(7, 17)]  # 128 .. 65,536
    iid = theory.iid_entropy(lengths, study.draws, seed=0)
    trained = trained_entropy(study, [n for n in lengths if n <= study.lengths[-1]])
    sources = {"iid scores": iid} | ({"trained models": trained} if trained else {})
    draw_entropy(study.figure(), sources, theory.RANGES, theory.LOCAL)
    keys = ("scheme", "length", "quantity", "mean", "stderr")
    study.write_csv([dict(source=name) | {key: r[key] for key in keys} for name, rows in sources.items() for r in rows])
    text = "Top: independent Gaussian scores, none scaled, LogN (s = 0.4) and scale-invariant (\u03c4 = 10), mean over "
    text += f"{study.draws} draws. Bottom: p-RoPE models trained with each, the last query of each context, mean over "
    text += (
        f"seeds, layers, heads and {WINDOWS} windows of validation text. Bands: \u00b1 1 standard error, over seeds "
    )
    text += "if there are several, else over windows."
    if not trained:
        study.notes.append("The bottom row is left out: there is no trained model.")
    return text + "\n\n" + study.picture()


def trained_entropy(study: Study, lengths: list[int]) -> list[dict]:
    """Return attention_statistics of the trained models: one row a scheme, length and quantity, the mean over seeds."""
    schemes = {method: scheme for scheme, (method, _) in SCHEMES.items()}
    profiles = collections.defaultdict(list)
    for run, stored in list(study.finished):
        with study.dropping_unreadable(run):
            config, model = load_run(stored.path, study.device)
            tokens = logits.validation_windows(open_own_text(stored), WINDOWS, lengths[-1], study.device)
            for row in logits.attention_profile(model, tokens, lengths):
                profiles[schemes[config.method], row["length"], row["quantity"]].append(row)
    return [mean_over_seeds(rows, scheme=s, length=n, quantity=q) for (s, n, q), rows in profiles.items()]


def mean_over_seeds(rows: list[dict], **keys) -> dict:
    """Return one row with these keys, the mean of the rows, and its standard error (of one row: its own)."""
    mean, stderr = mean_and_stderr([row["mean"] for row in rows])
    return keys | dict(mean=mean, stderr=rows[0]["stderr"] if len(rows) == 1 else stderr)


def figure_sublog(study: Study, scale_invariant: bool = True) -> str:
    starts = [10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000]
    rows = theory.iid_range_entropy(starts, [2, 5, 10], study.draws, 0, scale_invariant)
    fits = theory.range_fits(rows)
    draw_sublog(study.figure(), rows, fits)
    study.write_csv(rows)
    keys = ["slope", "intercept", "r_squared"]
    cells = [[f"\u0394 = {f['factor']}, against {f['against']}", *(f"{f[key]:.4f}" for key in keys)] for f in fits]
    text = "Expected entropy (nats) of independent Gaussian scores in the range of distances [t, t\u0394), "
    text += "scale-invariant with \u03c4 = 10" if scale_invariant else "not scaled"
    text += f": mean over {study.draws} draws (bars: \u00b1 1 standard error), against log t and sqrt(log t), with the "
    text += "best linear fits (dashed)."
    table = markdown_table([["linear fit", "slope", "intercept", "R^2"], *cells])
    return f"{text}\n\n{study.picture()}\n\n{table}"


def figure_sublog_unscaled(study: Study) -> str:
    return figure_sublog(study, scale_invariant=False)

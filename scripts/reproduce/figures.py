"""The paper's figures: each function draws one and returns the Markdown that shows it."""

import collections
import math
from collections.abc import Callable

from configs.config import Config
from configs.sweeps import Run
from model.methods import method_options, scaled_options
from scripts.evaluate import load_run, open_own_text
from scripts.reproduce import logits, theory
from scripts.reproduce.drawing import draw_curves, draw_entropy, draw_qq, draw_sublog, tau_looks
from scripts.reproduce.study import Study
from scripts.shared.looks import line, method_name
from scripts.shared.run_files import val_tokens
from scripts.shared.tables import markdown_table, mean_and_stderr, write_csv

NO_FIGURE = "**No figure: there is no finished run to draw.**"
WINDOWS = 4  # of validation text, for the trained models' attention

# ---- validation curves -----------------------------------------------------------------------------------------------


def figure_train_lengths(study: Study) -> str:
    rows = curves(study)
    panels = []
    for length in study.lengths:
        shown = [r for r in rows if r["train_length"] == r["val_length"] == length]
        panels.append((f"train and val @{study.title(length)}", without_nope(shown) if panels else shown))
    study.notes.append("NoPE is shown in the left panel only, as in the paper.")
    text = "Validation loss at the training length, for three training lengths."
    return text + "\n\n" + curve_figure(study, rows, panels)


def figure_train_4k(study: Study) -> str:
    rows = curves(study)
    first, *others = by_length(study, rows)
    panels = [first, *((title, without_nope(shown)) for title, shown in others)]
    study.notes.append("Below: the last fifth of the training, and the half of the methods that is best at its end.")
    study.notes.append("NoPE is shown in the left panel only, as in the paper.")
    text = f"Validation loss of the models trained at {study.title(study.base_length)}, at three validation lengths."
    return text + "\n\n" + curve_figure(study, rows, panels, zoom=True)


def figure_train_16k(study: Study) -> str:
    rows = curves(study)
    panels = by_length(study, rows)
    panels[-1] = panels[-1][0], without_nope(panels[-1][1])
    study.notes.append("NoPE is left out of the right panel, as in the paper.")
    text = f"Validation loss of the models trained at {study.title(study.lengths[1])}, at three validation lengths."
    return text + "\n\n" + curve_figure(study, rows, panels)


def figure_304m(study: Study) -> str:
    rows = curves(study)
    text = "Validation loss of the large model, at three validation lengths."
    return text + "\n\n" + curve_figure(study, rows, by_length(study, rows), baseline=False)


def figure_tau(study: Study) -> str:
    rows = curves(study, lambda run: {tau_of(run.config): run.config.method})
    looks = tau_looks({row["series"] for row in rows})
    text = "Validation loss of scale-invariant p-RoPE with different lengthscales \u03c4 (tokens)."
    return text + "\n\n" + curve_figure(study, rows, by_length(study, rows), looks, baseline=False)


def figure_scale_invariant_variants(study: Study) -> str:
    rows = curves(study)
    text = "Validation loss of scale-invariant attention with three positional encodings."
    return text + "\n\n" + curve_figure(study, rows, by_length(study, rows), baseline=False)


def tau_of(config: Config) -> float:
    """Return the lengthscale in tokens that a run trains with."""
    options = scaled_options(config.method, config.length_scale, config.method_options)
    return float(options.get("tau", method_options(config.method)["tau"].default))


def curves(study: Study, series_of: Callable[[Run], dict] | None = None) -> list[dict]:
    """Return the validation curves of the study's series (or those of series_of(run)), one row a series, training
    length, validation length and step: mean, standard error, number of seeds, validation tokens. A step counts when all
    seeds were validated at it, on the same tokens."""
    seeds = collections.defaultdict(list)
    for run, stored in list(study.finished):
        shown = (series_of or study.series)(run)
        try:
            records = [r for r in stored.metrics() if "val_loss" in r]
            own = {series: validation_curve(records, method, run.config.method) for series, method in shown.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            study.drop(run, f"{stored.path}/metrics.jsonl is damaged ({error}): repair it, or delete the run")
            continue
        wanted = [n for n in study.lengths if n in run.config.val_lengths]
        if lacking := [str(n) for n in wanted if any(n not in curve for curve in own.values())]:
            what = f"was not validated at {', '.join(lacking)} during training; move {stored.path} away and train again"
            study.miss(run, what, study.train_command(run, None))
        for series, curve in own.items():
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


def validation_curve(records: list[dict], method: str, trained: str) -> dict[int, dict]:
    """Return the losses of a run's weights run as `method`, by validation length, then by step and tokens.

    records: of its validations. trained: the method that it trained.
    """
    curve = {}
    for record in records:
        losses = record["val_loss"] if method == trained else record.get("val_loss_as", {}).get(method, {})
        for n, tokens in val_tokens(record).items():
            if n in losses:
                curve.setdefault(int(n), {})[record["step"], tokens] = losses[n]
    return curve


def without_nope(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["series"] != "nope"]


def by_length(study: Study, rows: list[dict]) -> list[tuple[str, list[dict]]]:
    """Return a panel a validation length: title and rows."""
    return [(f"val @{study.title(n)}", [r for r in rows if r["val_length"] == n]) for n in study.lengths]


def curve_figure(study: Study, rows, panels, looks: dict | None = None, *, baseline=True, zoom=False) -> str:
    """Draw the panels, write the rows as CSV, and return the Markdown that shows the figure.

    panels, looks and zoom: as draw_curves takes them. baseline: mark the paper's 3.28, at its scale.
    """
    if not rows:
        return NO_FIGURE
    present = {row["series"] for row in rows}
    looks = looks or {series: line(series, present) for series in study.all_series if series in present}
    if baseline and study.scale != "paper":
        study.notes.append("The paper's dashed line at 3.28 is left out: it means nothing at this scale.")
        baseline = False
    draw_curves(study.path, panels, looks, baseline=3.28 if baseline else None, zoom=zoom)
    write_csv(study.path.with_suffix(".csv"), rows)
    if any(row["seeds"] > 1 for row in rows):
        study.notes.append("Bands: \u00b1 1 standard error over seeds.")
    else:
        study.notes.append("One seed: no bands.")
    if len({row["val_tokens"] for row in rows}) > 1:
        study.notes.append("Open circles: validations on a part of the tokens (`--val_profile fast`).")
    return picture(study.item)


# ---- theory and trained models ---------------------------------------------------------------------------------------


def figure_entropy(study: Study) -> str:
    lengths = [2**k for k in range(7, 17)]  # 128 .. 65,536
    rows = [dict(source="iid", **row) for row in theory.iid_entropy(lengths, study.draws, seed=0)]
    schemes = dict(p_rope="none", logn_p_rope="logn", scale_invariant_p_rope="scale_invariant")
    for run, stored in list(study.finished):
        longest = study.lengths[-1]
        with study.dropping_unreadable(run):
            config, model = load_run(stored.path, study.device)
            tokens = logits.validation_windows(open_own_text(stored), WINDOWS, longest, study.device)
            profile = logits.attention_profile(model, tokens, [n for n in lengths if n <= longest])
            scheme = dict(source="trained", scheme=schemes[config.method])
            rows += [scheme | dict(length=r["length"], quantity=r["quantity"]) | r for r in profile]
    sources = {"iid scores": "iid", "trained models": "trained"}
    panels = {title: [r for r in rows if r["source"] == source] for title, source in sources.items()}
    panels = {title: mine for title, mine in panels.items() if mine}
    draw_entropy(study.path, panels, theory.RANGES, theory.LOCAL)
    keys = ("source", "scheme", "length", "quantity", "mean", "stderr")
    write_csv(study.path.with_suffix(".csv"), [{key: row[key] for key in keys} for row in rows])
    text = "Top: independent Gaussian scores, none scaled, LogN (s = 0.4) and scale-invariant (\u03c4 = 10), mean over "
    text += f"{study.draws} draws. Bottom: p-RoPE models trained with each, the last query of each context, mean over "
    text += f"layers, heads and {WINDOWS} windows of validation text. Bands: \u00b1 1 standard error."
    if len(panels) == 1:
        study.notes.append("The bottom row is left out: there is no trained model.")
    return text + "\n\n" + picture(study.item)


def figure_sublog(study: Study, scale_invariant: bool = True) -> str:
    starts = [10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000]
    rows = theory.iid_range_entropy(starts, [2, 5, 10], study.draws, 0, scale_invariant)
    fits = theory.range_fits(rows)
    draw_sublog(study.path, rows, fits)
    squares = {(f["factor"], f["against"]): f["r_squared"] for f in fits}
    names = {"log t": "r_squared_log_t", "sqrt(log t)": "r_squared_sqrt_log_t"}
    data = [row | {name: squares[row["factor"], against] for against, name in names.items()} for row in rows]
    write_csv(study.path.with_suffix(".csv"), data)
    keys = ["slope", "intercept", "r_squared"]
    cells = [[f"\u0394 = {f['factor']}, against {f['against']}", *(f"{f[key]:.4f}" for key in keys)] for f in fits]
    head = ["linear fit", "slope", "intercept", "R^2"]
    text = "Expected entropy (nats) of independent Gaussian scores in the range of distances [t, t\u0394), "
    text += "scale-invariant with \u03c4 = 10" if scale_invariant else "not scaled"
    text += f": mean over {study.draws} draws (bars: \u00b1 1 standard error), against log t and sqrt(log t), with the "
    text += "best linear fits (dashed)."
    return text + f"\n\n{picture(study.item)}\n\n{markdown_table([head, *cells])}"


def figure_sublog_unscaled(study: Study) -> str:
    return figure_sublog(study, scale_invariant=False)


def figure_qq(study: Study) -> str:
    study.missing.append("the paper's figures are of Llama and Gemma models, which cannot be loaded here yet")
    text = "Quantiles of the attention scores of other people's models (Llama 3 1B and 8B, Gemma 2 27B). **Not built "
    return text + "yet: see [figure_qq_ours](figure_qq_ours.md) for those of the models trained here.**"


def figure_qq_ours(study: Study) -> str:
    titles = {False: "without rotation", True: "with rotation"}
    points, statistics_of_heads, shown = [], [], []
    for run, stored in list(study.finished):
        with study.dropping_unreadable(run):
            config, model = load_run(stored.path, study.device)
            tokens = logits.validation_windows(open_own_text(stored), WINDOWS, config.train_length, study.device)
            blocks = collections.defaultdict(list)
            for layer, rotated, scores in logits.layer_scores(model, tokens):
                keys = dict(method=config.method, layer=layer, rotated=rotated)
                quantiles = logits.qq_points(scores.flatten())
                points += [keys | point for point in quantiles]
                for head, mine in [*enumerate(scores), ("all", scores.flatten())]:
                    statistics_of_heads.append(keys | dict(head=head) | logits.moments(mine))
                blocks[titles[rotated]].append([[p[axis] for p in quantiles] for axis in ("gaussian", "sample")])
            name = f"{study.item}_{config.method}"
            draw_qq(study.draft / name, blocks)
            shown.append(f"{method_name(config.method)}:\n\n{picture(name)}")
    text = f"Quantiles of the scores q.k / sqrt(d) of trained models, on {WINDOWS} windows of validation text of the "
    text += "training length, all heads of a layer, against those of the Gaussian with their mean and standard "
    text += "deviation (red: equal). Only pairs with t > 0, and without key 0, which attention sinks into."
    if not shown:
        return f"{text}\n\n{NO_FIGURE}"
    write_csv(study.path.with_suffix(".csv"), points)
    write_csv(study.draft / f"{study.item}_heads.csv", statistics_of_heads)
    keys = ["mean", "std", "skewness", "excess_kurtosis", "ks"]
    cells = [
        [method_name(s["method"]), str(s["layer"] + 1), titles[s["rotated"]], *(f"{s[key]:.3f}" for key in keys)]
        for s in statistics_of_heads
        if s["head"] == "all"
    ]
    head = ["method", "layer", "form", "mean", "std", "skewness", "excess kurtosis", "KS distance"]
    text += f" The table pools the heads of a layer; each head is in {study.item}_heads.csv (layers there from 0)."
    return "\n\n".join([text, *shown, markdown_table([head, *cells])])


def picture(name: str) -> str:
    return f"![{name}]({name}.png)"

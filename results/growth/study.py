"""The studies `longer` and `sizes`: does the advantage at 16x grow or shrink? README.md has the rules."""

from pathlib import Path

import numpy as np
from scipy import stats

from configs.runs import Run
from configs.sweeps import SCALES, SI, Scale, forms
from results.far.study import draw_curves
from results.reach import reach_tables
from results.taught.study import FAST, FAST_OPTIONS, QUARTER
from results.text_error import text_errors
from scripts.reproduce.drawing import Line, Panel, draw_panels
from scripts.reproduce.study import Study
from scripts.shared.looks import plot_styles, series_label, series_name
from scripts.shared.runs import StoredRun, final_losses, read_runs
from scripts.shared.tables import markdown_table

SCALE = "far"
CASES = [(SI, QUARTER), ("logn_p_rope", {}), (SI, {})]
ALSO_LONGER = [("logn_p_rope", QUARTER)]
FORMS, RIVAL = (FAST, SI), "logn_p_rope"
SEEDS = (0, 1)  # unless the user names others
LENGTHS = {"val_lengths": (512, 2048, 8192)}
LONGER = LENGTHS | {"steps": 12_288, "val_every": 1024}
GAPS = (256, 1024, 4096)  # tokens between two copies
WIDTHS = (64, 192, 256)  # and 128, the width of the study `far`
HEAD_DIM = 64
FAR_RUNS = Path(__file__).parents[1] / "far/runs.jsonl"

# ---- the runs --------------------------------------------------------------------------------------------------------


def seeds_of(scale: Scale) -> tuple[int, ...]:
    """Return SEEDS, or the seeds that the user names."""
    return SEEDS if scale == SCALES[SCALE] else scale.seeds


def longer_runs(scale: Scale) -> list[Run]:
    """Return the longer runs, seed by seed."""
    runs = []
    for seed in seeds_of(scale):
        runs += [Run(run.preset, LONGER | run.changes) for run in forms(scale.base, CASES + ALSO_LONGER, (seed,))]
    return runs


def size_runs(scale: Scale) -> list[Run]:
    """Return the runs of other widths, seed by seed and from small to large."""
    runs = []
    for seed in seeds_of(scale):
        for width in WIDTHS:
            changes = LENGTHS | {"model_dim": width, "num_heads": width // HEAD_DIM}
            runs += [Run(run.preset, changes | run.changes) for run in forms(scale.base, CASES, (seed,))]
    return runs


SWEEPS = dict(longer=longer_runs, sizes=size_runs)

# ---- longer ----------------------------------------------------------------------------------------------------------


def leads(study: Study) -> list[list[str]]:
    """Return a row for each validation: the loss at 16x of our forms minus the rival's, of each seed."""
    length, by_step = 16 * study.base_length, {}
    seeds = sorted({run.config.seed for run, _ in study.finished})
    for run, stored in study.finished:
        (series,) = study.series(run)
        for record in stored.validations()[1:]:  # the first is before training
            losses = by_step.setdefault(record["step"] * run.config.batch_tokens, {})
            losses[series, run.config.seed] = final_losses(record)[length]
    rows = [["M tokens", *(f"{series_name(form)}, seed {seed}" for form in FORMS for seed in seeds)]]
    for tokens, losses in sorted(by_step.items()):
        cells = []
        for form in FORMS:
            for seed in seeds:
                pair = losses.get((form, seed)), losses.get((RIVAL, seed))
                cells.append("" if None in pair else f"{pair[0] - pair[1]:+.3f}")
        rows.append([f"{tokens / 1e6:.1f}", *cells])
    return rows


def longer(study: Study) -> str:
    """Return the tables as Markdown, and draw the losses against training tokens."""
    text = "Loss: nats per token on natural text, by sequence length. Copy gain: loss of 32 random tokens minus the "
    text += "loss of their second copy. Mean \u00b1 standard error over seeds."
    lead = f"Loss at {16 * study.base_length} tokens minus that of {series_name(RIVAL)} with the published rotation, "
    lead += "within seeds. The last row is on all validation tokens, the others on a sixteenth."
    parts = [text, *reach_tables(study, [*GAPS]), lead, markdown_table(leads(study))]
    for form in FORMS:
        parts += text_errors(study, form, [RIVAL, f"{RIVAL} {FAST_OPTIONS}"])
    if study.finished:
        draw_curves(study, plot_styles(study.all_series))
        parts.append(study.figure_markdown(f"{study.item}_curves"))
    return "\n\n".join(parts)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def runs_of_width_128(others: list[StoredRun]) -> list[StoredRun]:
    """Return the kept runs of the study `far` with the forms of this study, and with seeds and text of other runs."""
    places = {(stored.config.seed, stored.text) for stored in others}
    kept = [stored for stored in read_runs(FAR_RUNS) if (stored.config.seed, stored.text) in places]
    return [stored for stored in kept if series_label(stored.config) in (*FORMS, RIVAL)]


def leads_by_size(runs: list[StoredRun], length: int) -> dict[str, list[tuple[int, int, float]]]:
    """Return (parameters, seed, loss minus the rival's of this seed) at a length, by form."""
    rivals, found = {}, {form: [] for form in FORMS}
    for stored in runs:
        if series_label(stored.config) == RIVAL:
            rivals[stored.config.model_dim, stored.config.seed] = final_losses(stored.summary)[length]
    for stored in sorted(runs, key=lambda stored: (stored.config.model_dim, stored.config.seed)):
        form, seed = series_label(stored.config), stored.config.seed
        rival = rivals.get((stored.config.model_dim, seed))
        if form in FORMS and rival is not None:
            found[form].append((stored.summary["parameters"], seed, final_losses(stored.summary)[length] - rival))
    return found


def slope(points: list[tuple[int, int, float]]) -> str:
    """Return the slope of the lead for each doubling of the parameters, and its 95 % interval, as text."""
    parameters, _, lead = np.transpose(points)
    fit = stats.linregress(np.log2(parameters), lead)
    half = fit.stderr * stats.t.ppf(0.975, len(points) - 2)
    return f"{fit.slope:+.3f} ({fit.slope - half:+.3f} to {fit.slope + half:+.3f})"


def sizes(study: Study) -> str:
    """Return the table of the leads as Markdown, with a line through them, and draw them."""
    length, runs = 16 * study.base_length, [stored for _, stored in study.finished]
    found = leads_by_size(runs + runs_of_width_128(runs), length)
    places = sorted({(parameters, seed) for points in found.values() for parameters, seed, _ in points})

    rows = [["form", *(f"{parameters / 1e6:.2f} M, seed {seed}" for parameters, seed in places), "for each doubling"]]
    for form, points in found.items():
        by_place = {(parameters, seed): lead for parameters, seed, lead in points}
        cells = [f"{by_place[place]:+.3f}" if place in by_place else "" for place in places]
        enough = len({parameters for parameters, _, _ in points}) > 1 and len(points) > 2
        rows.append([series_name(form), *cells, slope(points) if enough else ""])

    text = f"Loss at {length} tokens minus that of {series_name(RIVAL)} with the published rotation, within seeds, by "
    text += "parameters. The last column is the slope of a line through the numbers of its row, with its 95 % interval."
    if not places:
        return "\n\n".join([text, markdown_table(rows)])
    lines = []
    for form, look in plot_styles(FORMS).items():
        xs = [parameters / 1e6 for parameters, _, _ in found[form]]
        lines.append(Line(look | dict(linestyle=""), xs, [lead for _, _, lead in found[form]]))
    panel = Panel(f"loss at {length} tokens minus LogN's, each seed", lines)
    draw_panels(study.figure_path(), [[panel]], x="M parameters", y="nats a token")
    return "\n\n".join([text, study.figure_markdown(), markdown_table(rows)])


TESTS = {}  # two seeds are too few for a test
NUMBERS = {}
ITEMS = dict(longer=longer, sizes=sizes)

"""The study `longer`: does the advantage at 16x grow or shrink with training? README.md has the rules."""

from configs.runs import Run
from configs.sweeps import SCALES, SI, Scale, forms
from results.far.study import draw_curves
from results.reach import reach_tables
from results.taught.study import FAST, QUARTER
from scripts.reproduce.study import Study
from scripts.shared.looks import plot_styles, series_name
from scripts.shared.runs import final_losses
from scripts.shared.tables import markdown_table

SCALE = "far"
CASES = [(SI, QUARTER), ("logn_p_rope", {}), (SI, {}), ("logn_p_rope", QUARTER)]
SEEDS = (0, 1)  # unless the user names others
CHANGES = {"steps": 12_288, "val_every": 1024, "val_lengths": (512, 2048, 8192)}
RIVAL = "logn_p_rope"
GAPS = (256, 1024, 4096)  # tokens between two copies

# ---- the runs --------------------------------------------------------------------------------------------------------


def longer_runs(scale: Scale) -> list[Run]:
    """Return the runs, seed by seed: SEEDS, unless the user names others."""
    seeds = SEEDS if scale == SCALES[SCALE] else scale.seeds
    runs = []
    for seed in seeds:
        runs += [Run(run.preset, CHANGES | run.changes) for run in forms(scale.base, CASES, (seed,))]
    return runs


SWEEPS = dict(longer=longer_runs)

# ---- the table -------------------------------------------------------------------------------------------------------


def leads(study: Study) -> list[list[str]]:
    """Return a row for each validation: the loss at 16x of our forms minus the rival's, of each seed."""
    length, by_step = 16 * study.base_length, {}
    seeds = sorted({run.config.seed for run, _ in study.finished})
    for run, stored in study.finished:
        (series,) = study.series(run)
        for record in stored.validations()[1:]:  # the first is before training
            losses = by_step.setdefault(record["step"] * run.config.batch_tokens, {})
            losses[series, run.config.seed] = final_losses(record)[length]
    rows = [["M tokens", *(f"{series_name(form)}, seed {seed}" for form in (FAST, SI) for seed in seeds)]]
    for tokens, losses in sorted(by_step.items()):
        cells = []
        for form in (FAST, SI):
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
    if study.finished:
        draw_curves(study, plot_styles(study.all_series))
        parts.append(study.figure_markdown(f"{study.item}_curves"))
    return "\n\n".join(parts)


TESTS = {}  # two seeds are too few for a test
NUMBERS = {}
ITEMS = dict(longer=longer)

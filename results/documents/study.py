"""The study `documents`: does far gain survive training without the text of strangers? README.md has the rules.

With document_mask "train", attention stays within documents in training. Validation is the same for all runs: whole
folders of source, without a mask.
"""

from configs.runs import Run
from configs.sweeps import SI, Scale, forms
from results.far.study import copy_curve, far_gains, time_to_copy
from results.paired import PairedTests
from results.taught.study import FAST, QUARTER
from scripts.reproduce.study import BySeed, Study
from scripts.shared.looks import series_name
from scripts.shared.runs import copy_gains, final_losses
from scripts.shared.tables import format_mean, markdown_table, mean_and_stderr

SCALE = "far"
CASES = [(SI, QUARTER), ("logn_p_rope", {}), ("rope", {})]
RIVALS = ["logn_p_rope", "rope"]
MASKS = {"off": "unmasked", "train": "masked"}
STEPS = 2048
CHANGES = {"data_dir": "data/blocks", "steps": STEPS, "val_lengths": (512, 2048, 8192)}
FAR_LENGTH, FAR_GAP = 8192, 1024  # tokens

# ---- the runs --------------------------------------------------------------------------------------------------------


def document_runs(scale: Scale) -> list[Run]:
    """Return the runs with and without the mask, seed by seed."""
    runs = []
    for seed in scale.seeds:
        for case in CASES:
            (run,) = forms(scale.base, [case], (seed,))
            for mask in MASKS:
                changes = CHANGES | ({"document_mask": mask} if mask != "off" else {})
                runs.append(Run(run.preset, changes | run.changes))
    return runs


SWEEPS = dict(documents=document_runs)

# ---- the tests -------------------------------------------------------------------------------------------------------


def by_mask(study: Study, read, key) -> dict[str, dict[str, BySeed]]:
    """Return a number of the finished runs: {mask: {series: BySeed}}. read, key: as in Study.by_seed."""
    found = {mask: {} for mask in MASKS}
    for run, stored in study.finished:
        for series, method in study.series(run).items():
            numbers = read(stored.summary, method)
            if key in numbers:
                found[run.config.document_mask].setdefault(series, {})[run.config.seed] = numbers[key]
    return found


def tests(study: Study) -> list[PairedTests]:
    """Return the tests of the mask for each method, and of the methods with the mask."""
    losses, gains = by_mask(study, final_losses, FAR_LENGTH), by_mask(study, far_gains, "far")
    note = "These tests were fixed before their runs."

    # 1. The mask, for each method.
    measures = {}
    for kind, values in ((f"loss at {FAR_LENGTH}", losses), ("far gain", gains)):
        for series in (FAST, *RIVALS):
            label = f"{kind} of {series_name(series)}"
            measures[label] = {name: values[mask].get(series, {}) for mask, name in MASKS.items()}
    of_mask = PairedTests("The mask", "masked", ["unmasked"], measures, "nats a token", note=note)

    # 2. The methods, trained with the mask.
    masked = {f"loss, {FAR_LENGTH} tokens": losses["train"], "far gain, class far": gains["train"]}
    return [of_mask, PairedTests("The methods with the mask", FAST, RIVALS, masked, "nats a token", note=note)]


TESTS = dict(documents=tests)

# ---- the table -------------------------------------------------------------------------------------------------------


def documents(study: Study) -> str:
    """Return the table as Markdown. Sections have the tests."""
    for paired in tests(study):
        study.sections += paired.section()
    columns = {}
    for length in CHANGES["val_lengths"]:
        columns[f"loss at {length}"] = by_mask(study, final_losses, length)
    columns[f"copy gain at {FAR_GAP}"] = by_mask(study, copy_gains, FAR_GAP)
    for kind in ("far", "near", "none", "all"):
        columns[f"far gain, {kind}"] = by_mask(study, far_gains, kind)
    rows = [["method", "mask in training", "seeds", *columns]]
    for series in study.all_series:
        for mask in MASKS:
            cells = [values[mask].get(series, {}) for values in columns.values()]
            means = [format_mean(*mean_and_stderr([*by_seed.values()])) for by_seed in cells]
            rows.append([series_name(series), mask, str(len(cells[0])), *means])
    study.sections += ["### Each run (not registered)", *by_run(study)]
    text = f"Training documents have at most {study.base_length} tokens. Loss: nats per token on whole folders, by "
    text += "sequence length. Copy gain: loss of 32 random tokens minus the loss of their second copy. Far gain: loss "
    text += "with one training length of context minus loss with 16, by the latest place where the 8 tokens before a "
    text += "token occur. Mean \u00b1 standard error over seeds."
    return f"{text}\n\n{markdown_table(rows)}"


def by_run(study: Study) -> list[str]:
    """Return a table with each run: when it copies, and what it reaches."""
    rows = [["method", "mask in training", "seed", "time to copy, M tokens", f"loss at {FAR_LENGTH}", "far gain, far"]]
    for run, stored in study.finished:
        (series, *_) = study.series(run)
        time = time_to_copy(copy_curve(stored))
        shown = "not" if time is None else f"{time:.1f}"
        loss = final_losses(stored.summary)[FAR_LENGTH]
        gain = far_gains(stored.summary)["far"]
        cells = run.config.document_mask, str(run.config.seed), shown, f"{loss:.3f}", f"{gain:+.2f}"
        rows.append([series_name(series), *cells])
    rows[1:] = sorted(rows[1:])
    text = "A run copies once its copy gain at a gap of 64 tokens is above 1 nat (results/far/README.md). The runs end "
    text += "after 4.2 M tokens."
    return [text, markdown_table(rows)]


NUMBERS = {}
ITEMS = dict(documents=documents)

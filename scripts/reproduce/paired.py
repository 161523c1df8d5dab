"""Read results by method and seed, and compare scale-invariant p-RoPE with its rivals in pairs of equal seeds.

Runs of one seed share the data and its order, and methods draw equal initial weights. So differences are taken within
seeds. The studies `taught` and `far` fixed these comparisons before their first run.
"""

import collections
import statistics

from scipy import stats

from configs.sweeps import OURS
from scripts.reproduce.comparisons import difference_cell, holm
from scripts.reproduce.study import Study
from scripts.shared.looks import series_name
from scripts.shared.runs import final_losses
from scripts.shared.tables import markdown_table, mean_and_stderr

BySeed = dict[int, float]  # seed -> number


def losses_and_gains(study: Study) -> tuple[dict, dict]:
    """Return final losses and copy gains of random spans, each {(series, tokens): BySeed} in nats."""
    losses, gains = collections.defaultdict(dict), collections.defaultdict(dict)
    for run, stored in study.finished:
        gains_as = {None: stored.summary.get("copy_gain", {})} | stored.summary.get("copy_gain_as", {})
        for series, method in study.series(run).items():
            by_gap = gains_as.get(method, {}).get("random", {})  # only copying can predict random tokens
            for values, found in ((losses, final_losses(stored.summary, method)), (gains, by_gap)):
                for tokens, nats in found.items():
                    values[series, int(tokens)][run.config.seed] = nats
    return losses, gains


def samples(values: dict) -> dict[tuple, list[float]]:
    """Return the numbers of each key in the order of the runs, without their seeds."""
    return {key: [*by_seed.values()] for key, by_seed in values.items()}


def at(values: dict, x) -> dict[str, BySeed]:
    """Return {series: BySeed} of the keys (series, x)."""
    return {series: by_seed for (series, other), by_seed in values.items() if other == x}


def primary_rows(study: Study, losses: dict, measures: dict[str, dict[str, BySeed]]) -> list[dict]:
    """Return paired t-tests of scale-invariant p-RoPE against three rivals, with Holm's correction.

    losses: {(series, tokens): BySeed}. The ALiBi with the lowest loss at the training length is a rival.
    measures: {label: {series: BySeed}}.
    """
    alibis = {series: statistics.fmean(by_seed.values()) for series, by_seed in at(losses, study.base_length).items()
              if series.split(" ")[0] == "alibi"}  # fmt: skip
    rivals = ["rope", "logn_p_rope", *([min(alibis, key=alibis.get)] if alibis else [])]
    rows = []
    for measure, values in measures.items():
        for rival in rivals:
            ours, others = values.get(OURS, {}), values.get(rival, {})
            differences = [ours[seed] - others[seed] for seed in sorted(ours.keys() & others.keys())]
            if len(differences) > 1:
                mean, stderr = mean_and_stderr(differences)
                # Equal differences, such as 0 when neither method copies, have no t-test.
                p = float(stats.ttest_1samp(differences, 0).pvalue) if stderr else float(mean == 0)
                row = dict(measure=measure, rival=rival, difference=mean, stderr=stderr)
                rows.append(row | dict(p=p, seeds=len(differences)))
    return [row | dict(p_holm=p) for row, p in zip(rows, holm([row["p"] for row in rows]))]


def primary_comparisons(study: Study, losses: dict, measures: dict[str, dict[str, BySeed]], unit: str) -> list[str]:
    """Return a section with the tests of primary_rows. unit: of the measures."""
    rows = primary_rows(study, losses, measures)
    if not rows:
        return []
    table = [["minus", "measure", "seeds", "difference"]]
    table += [[series_name(row["rival"]), row["measure"], str(row["seeds"]), difference_cell(row)] for row in rows]
    text = f"{series_name(OURS)} (\u03c4 = 10) minus each rival, in {unit}: mean difference within seeds \u00b1 "
    text += f"standard error. p: paired t-test after Holm's correction for {len(rows)} tests. ALiBi has the slopes "
    text += f"with the lowest mean loss at {study.base_length}. These comparisons were fixed before the first run. "
    text += "All others are exploratory."
    return ["### Primary comparisons", text, markdown_table(table)]

"""Make the tables of the study `taught`: models learn to copy, and are tested beyond their training length.

The primary comparisons were fixed before the first run (results/taught/README.md).
"""

import collections
import statistics

from scipy import stats

from configs.sweeps import OURS
from scripts.reproduce.comparisons import difference_cell, holm
from scripts.reproduce.drawing import Panel, draw_panels, row_lines
from scripts.reproduce.study import Study
from scripts.reproduce.tables import make_table
from scripts.shared.looks import plot_styles, series_name
from scripts.shared.runs import final_losses
from scripts.shared.tables import markdown_table, mean_and_stderr, summarise

GAP_RATIOS = (0.5, 2, 4, 8)  # tokens between two copies / training length
DRAWN = ("rope", "p_rope", "logn_p_rope", "alibi", OURS)  # the figure also shows ALiBi with other slopes


def taught(study: Study) -> str:
    """Return the figure and the tables as Markdown. A section lists the primary comparisons."""
    losses, gains = collections.defaultdict(dict), collections.defaultdict(dict)  # (series, tokens) -> nats by seed
    for run, stored in study.finished:
        gains_as = {None: stored.summary.get("copy_gain", {})} | stored.summary.get("copy_gain_as", {})
        for series, method in study.series(run).items():
            by_gap = gains_as.get(method, {}).get("random", {})  # only copying can predict random tokens
            for values, found in ((losses, final_losses(stored.summary, method)), (gains, by_gap)):
                for tokens, nats in found.items():
                    values[series, int(tokens)][run.config.seed] = nats
    study.sections = primary_comparisons(study, losses, gains)
    measured = [{key: [*by_seed.values()] for key, by_seed in values.items()} for values in (losses, gains)]
    draw(study, *measured)
    gaps = [round(ratio * study.base_length) for ratio in GAP_RATIOS]
    methods = [series for series in study.all_series if (series, study.base_length) in losses]
    tables = [make_table(study, {"loss": measured[0]}, study.runs[0].config.val_lengths, best=min, methods=methods)]
    tables.append(make_table(study, {"copy gain": measured[1]}, gaps, best=max, methods=methods))
    text = "Loss: nats per token on natural text, by sequence length. Copy gain: loss of 32 random tokens minus the "
    text += "loss of their second copy, in nats per token, by tokens between the copies. Mean \u00b1 standard error "
    text += f"over seeds. In brackets: multiples of the training length of {study.base_length} tokens."
    copy_rows = [stored.data["copy_rows"] for _, stored in study.finished if stored.data.get("copy_rows")]
    text += f" {copy_rows[0]['share']:.0%} of the training rows are copy rows." if copy_rows else ""
    return "\n\n".join([text, study.figure_markdown(), *tables])


def primary_comparisons(study: Study, losses: dict, gains: dict) -> list[str]:
    """Return a section with paired t-tests of scale-invariant p-RoPE against three rivals, with Holm's correction.

    losses, gains: {(series, tokens): {seed: nats}}.
    """
    T = study.base_length
    alibis = {series: statistics.fmean(by_seed.values()) for (series, at), by_seed in losses.items()
              if at == T and series.split(" ")[0] == "alibi"}  # fmt: skip
    rivals = ["rope", "logn_p_rope", *([min(alibis, key=alibis.get)] if alibis else [])]
    rows = []
    for measure, values, tokens in (("loss", losses, 16 * T), ("copy gain", gains, 4 * T)):
        for rival in rivals:
            ours, others = values.get((OURS, tokens), {}), values.get((rival, tokens), {})
            differences = [ours[seed] - others[seed] for seed in sorted(ours.keys() & others.keys())]
            if len(differences) > 1:
                mean, stderr = mean_and_stderr(differences)
                row = dict(measure=measure, tokens=tokens, rival=rival, difference=mean, stderr=stderr)
                rows.append(row | dict(p=float(stats.ttest_1samp(differences, 0).pvalue), seeds=len(differences)))
    if not rows:
        return []
    rows = [row | dict(p_holm=p) for row, p in zip(rows, holm([row["p"] for row in rows]))]
    table = [["minus", "measure", "seeds", "difference"]]
    for row in rows:
        measure = f"{row['measure']}, {row['tokens']} tokens ({row['tokens'] / T:g}x)"
        table.append([series_name(row["rival"]), measure, str(row["seeds"]), difference_cell(row)])
    text = f"{series_name(OURS)} (\u03c4 = 10) minus each rival, in nats: mean difference within seeds \u00b1 standard "
    text += f"error. p: paired t-test after Holm's correction for {len(rows)} tests. ALiBi has the slopes with the "
    text += f"lowest mean loss at {T}. These comparisons were fixed before the first run. All others are exploratory."
    return ["### Primary comparisons", text, markdown_table(table)]


def draw(study: Study, losses: dict, gains: dict):
    """Draw the loss against the sequence length, and the copy gain against the tokens between the copies."""
    shown = [series for series in study.all_series if series in DRAWN or series.startswith("alibi slope_scale=")]
    looks, panels = plot_styles(shown), []
    for title, label, values in (
        ("loss by sequence length", "nats a token", losses),
        ("copy gain by tokens between the copies", "nats", gains),
    ):
        rows = sorted(summarise(values, "series", "tokens"), key=lambda row: row["tokens"])
        panels.append(Panel(title, row_lines(rows, "series", "tokens", looks), dict(ylabel=label)))
    draw_panels(study.figure_path(), [panels], x="tokens", y="", log=2)

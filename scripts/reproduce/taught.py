"""The study `taught`: which methods read far tokens beyond their training length, of models that were taught to copy.

results/taught/README.md says what was fixed before the first run: the primary comparisons, made here.
"""

import collections
import statistics

from scipy import stats

from scripts.reproduce.comparisons import difference_cell, holm
from scripts.reproduce.drawing import draw_lines
from scripts.reproduce.study import Study
from scripts.reproduce.tables import OURS
from scripts.shared.looks import plot_style, series_label, series_name
from scripts.shared.tables import embolden_best, format_mean, markdown_table, mean_and_stderr

GAP_RATIOS = (0.5, 2, 4, 8)  # of the tokens between two copies to the training length
DRAWN = ("rope", "p_rope", "logn_p_rope", "alibi", OURS)  # all their forms that are primary, and p-RoPE
KIND = "random"  # spans of random tokens, which only copying can predict


def taught(study: Study) -> str:
    """Return the table and the figure as Markdown. A section has the primary comparisons."""
    values = measures(study)
    series = [one for one in study.all_series if any(key[0] == one for key in values)]
    if not series:
        return "**No finished run of this study is there.**"
    T = study.base_length
    lengths = sorted({at for _, what, at in values if what == "loss"})
    gaps = [round(ratio * T) for ratio in GAP_RATIOS]
    columns, rows = {}, []
    for what, places, best in (("loss", lengths, min), ("copy gain", gaps, max)):
        for at in places:
            numbers = {one: mean_and_stderr([*values.get((one, what, at), {}).values()]) for one in series}
            cells = embolden_best(
                {one: format_mean(*n) for one, n in numbers.items()}, {s: n[0] for s, n in numbers.items()}, best
            )
            columns[f"{what}, {at} ({at / T:g}x)"] = cells
            for one, (mean, stderr) in numbers.items():
                seeds = len(values.get((one, what, at), {}))
                rows.append(dict(series=one, measure=what, tokens=at, mean=mean, stderr=stderr, seeds=seeds))
    study.write_csv(rows)
    seeds = {one: str(len(values.get((one, "loss", T), {}))) for one in series}
    table = [["method", "seeds", *columns]]
    table += [[series_name(one), seeds[one], *(cells[one] for cells in columns.values())] for one in series]
    study.sections = primary_comparisons(study, values)
    text = "Loss on natural text in nats a token, by sequence length; and copy gain: by how many nats a second copy of "
    text += "32 random tokens is easier than the first, by the tokens between them. Mean \u00b1 standard error over "
    text += f"seeds; in brackets, multiples of the training length of {T} tokens. {describe_copy_rows(study)}"
    return "\n\n".join([text, draw(study, values), markdown_table(table)])


def measures(study: Study) -> dict[tuple[str, str, int], dict[int, float]]:
    """Return {(series, "loss" or "copy gain", tokens): {seed: nats}} at the end of training."""
    values = collections.defaultdict(dict)
    for run, stored in study.finished:
        found = dict(loss=stored.summary["val_loss"]) | {"copy gain": stored.summary.get("copy_gain", {}).get(KIND, {})}
        for what, by_tokens in found.items():
            for tokens, value in by_tokens.items():
                values[series_label(run.config), what, int(tokens)][run.config.seed] = value
    return values


def primary_comparisons(study: Study, values: dict) -> list[str]:
    """Return a section on scale-invariant p-RoPE against each of three rivals, paired by seed, Holm over all tests."""
    T = study.base_length
    slopes = {one: statistics.fmean(found.values()) for (one, what, at), found in values.items()
              if (what, at) == ("loss", T) and one.split(" ")[0] == "alibi"}  # fmt: skip
    rivals = ["rope", "logn_p_rope", *([min(slopes, key=slopes.get)] if slopes else [])]
    rows = []
    for what, at in (("loss", 16 * T), ("copy gain", 4 * T)):
        for rival in rivals:
            ours, theirs = (values.get((one, what, at), {}) for one in (OURS, rival))
            pairs = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
            if len(pairs) > 1:
                mean, stderr = mean_and_stderr(pairs)
                p = float(stats.ttest_1samp(pairs, 0).pvalue)
                rows.append(
                    dict(measure=what, tokens=at, rival=rival, difference=mean, stderr=stderr, p=p, seeds=len(pairs))
                )
    if not rows:
        return []
    rows = [row | dict(p_holm=p) for row, p in zip(rows, holm([row["p"] for row in rows]))]
    study.write_csv(rows, "_primary")
    table = [["minus", "measure", "seeds", "difference"]]
    for row in rows:
        measure = f"{row['measure']}, {row['tokens']} tokens ({row['tokens'] / T:g}x)"
        table.append([series_name(row["rival"]), measure, str(row["seeds"]), difference_cell(row)])
    text = f"{series_name(OURS)} (\u03c4 = 10) minus each rival, in nats: mean of the differences within seeds \u00b1 "
    text += f"its standard error, and p of the paired t-test after Holm's correction for {len(rows)} tests. ALiBi: the "
    text += f"slopes with the lowest mean loss at {T}. Fixed before the first run; all else is exploratory."
    return ["### Primary comparisons", text, markdown_table(table)]


def draw(study: Study, values: dict) -> str:
    """Draw loss against sequence length beside copy gain against the gap, and return the Markdown."""
    shown = [one for one in study.all_series if one in DRAWN or one.startswith("alibi slope_scale=")]
    panels = {}
    for what, title in (("loss", "loss by sequence length"), ("copy gain", "copy gain by tokens between the copies")):
        panels[title] = []
        for one in shown:
            places = sorted(at for other, kind, at in values if (other, kind) == (one, what))
            numbers = [mean_and_stderr([*values[one, what, at].values()]) for at in places]
            panels[title].append((plot_style(one, shown), places, *([n[i] for n in numbers] for i in (0, 1))))
    axes = dict(x="tokens", y="nats a token|nats", base=2, same_y=False)
    draw_lines(study.figure(), panels, columns=4, **axes)
    return study.picture()


def describe_copy_rows(study: Study) -> str:
    """Return a sentence on the copy rows in the training text."""
    rows = [stored.data["copy_rows"] for _, stored in study.finished if stored.data.get("copy_rows")]
    return f"{rows[0]['share']:.0%} of the training rows are copy rows." if rows else ""

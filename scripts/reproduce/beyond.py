"""Studies beyond the paper: tau by training length, heads that learn, and models that learn to copy."""

import collections
import math
import re

from configs.sweeps import SI
from measure.flops import training_flops_per_token
from scripts.reproduce.comparisons import paired_rows, paired_section, primary_comparisons
from scripts.reproduce.drawing import Panel, draw_panels, row_lines
from scripts.reproduce.figures import OPEN_CIRCLE, tau_of
from scripts.reproduce.study import Study, at, samples
from scripts.reproduce.tables import make_table, table_losses
from scripts.shared.looks import plot_styles, series_label, series_name
from scripts.shared.runs import copy_gains, final_losses
from scripts.shared.tables import markdown_table, mean_cells, pivot_table, summarise

# Validation length / training length, with keyword arguments of matplotlib's plot:
RATIOS = {
    ratio: dict(color=colour, marker="o", label=f"at {ratio}x")
    for ratio, colour in {1: "#E69F00", 4: "#56B4E9", 16: "#009E73", 64: "#0072B2"}.items()
}
LEARNED = math.inf  # stands for tau in runs where every head learns its tau
# Parameters that a head can learn (model/methods/scale_invariant.py), with the function from parameter to shown value.
PARAMETERS = dict(log_tau=math.exp, gain=float)
GAP_RATIOS = (0.5, 2, 4, 8)  # tokens between two copies / training length
MOMENTS, BOTH = f"{SI} learn_moments=True", f"{SI} base=64 learn_moments=True"
FITTED = [f"{SI} base=64", "rope base=625", "logn_p_rope base=64"]
FAST, FAST_MOMENTS = f"{SI} form=barbero share=0.25", f"{SI} form=barbero learn_moments=True share=0.25"
XSA = "p_rope+scale_invariant+xsa form=barbero share=0.25"
ALIBI, KNOWN = "alibi slope_scale=4", "Seeds known before are left out."
# Tests of `taught` fixed after the first, before their own runs: series, rivals, gap / length, seeds left out, note.
LATER_TESTS = {
    "fitted rotation": (FITTED[0], [*FITTED[1:], ALIBI], 4, [], "ALiBi has the slopes as above."),
    "learned moments": (MOMENTS, [SI, "logn_p_rope", ALIBI, "yarn"], 2, [0], KNOWN),
    "both": (BOTH, [*FITTED, ALIBI, "yarn", "yarn base=625"], 4, [], "Two seeds of fitted rotation were known."),
    "fast rotation": (FAST, ["rope", "logn_p_rope", ALIBI, "yarn"], 4, [0], KNOWN),
    "fast and moments": (FAST_MOMENTS, [BOTH, "logn_p_rope base=64", ALIBI, "yarn"], 4, [0, 1], KNOWN),
    "xsa": (XSA, [FAST], 4, [0], KNOWN),
}
DRAWN = ("rope", "p_rope", "logn_p_rope", "alibi", SI, FAST)  # and ALiBi with other slopes


def tau_by_length(study: Study) -> str:
    """Draw the loss against tau for each training length. Return the Markdown with the table of losses."""
    losses = collections.defaultdict(list)
    for run, stored in study.finished:
        tau = LEARNED if run.config.method_options.get("learn_tau") else tau_of(run.config)
        for length, loss in final_losses(stored.summary).items():
            if length / run.config.train_length in RATIOS:
                losses[run.config.train_length, tau, length / run.config.train_length].append(loss)
    rows = summarise(dict(sorted(losses.items())), "train_length", "tau", "ratio")
    study.sections = learned_section(study)
    panels, lines = [], []
    for length in dict.fromkeys(row["train_length"] for row in rows):
        length_rows = [row for row in rows if row["train_length"] == length]
        fixed = [row for row in length_rows if row["tau"] != LEARNED]
        curves = row_lines(fixed, "ratio", "tau", RATIOS)
        circles = {
            ratio: OPEN_CIRCLE | dict(color=look["color"], label="_", zorder=3) for ratio, look in RATIOS.items()
        }
        curves += row_lines([row for row in fixed if row["seeds"] == 1], "ratio", "tau", circles)
        panels.append(Panel(f"trained at {length}", curves))
        lines += tau_lines(length, length_rows)
    draw_panels(study.figure_path(), [panels], x="\u03c4 (tokens)", y="nats a token", log=10, sharey=True)
    table = pivot_table(["trained at", "\u03c4", "\u03c4 / length", "seeds"], lines, {n: f"{n}x" for n in RATIOS})
    text = "Validation loss of scale-invariant p-RoPE (nats per token) against its lengthscale \u03c4 (tokens), at "
    text += "multiples of three training lengths. All models read equally many tokens. Bars: \u00b1 1 standard error "
    text += "over seeds. Open circles: one seed. Bold: the best \u03c4 for the training length."
    return "\n\n".join([text, study.figure_markdown(), table])


def tau_lines(length: int, rows: list[dict]) -> list[tuple[list[str], dict]]:
    """Return a line of the table for each tau. rows: the losses of one training length."""
    lines = {}
    for row in rows:
        tau = row["tau"]
        names = ["learned", ""] if tau == LEARNED else [f"{tau:.3g}", f"{tau / length:.2g}"]
        lines[tau] = ([str(length), *names, str(row["seeds"])], {})
    for ratio in RATIOS:
        numbers = {row["tau"]: (row["mean"], row["stderr"]) for row in rows if row["ratio"] == ratio}
        for tau, cell in mean_cells(numbers).items():
            lines[tau][1][ratio] = cell
    return [*lines.values()]


def scale_invariant_by_head(study: Study) -> str:
    """Return tables of scale-invariant p-RoPE with different heads: losses, and the parameters that heads learned."""
    page = table_losses(study)
    study.sections += learned_section(study)
    return page


def learned_section(study: Study) -> list[str]:
    """Return a section with the learned parameters of each head at the end of training."""
    cells = collections.defaultdict(dict)
    for run, stored in study.finished:
        for name, values in (stored.last("method_parameters") or {}).items():
            layer, parameter = re.fullmatch(r"blocks\.(\d+)\..*\.(\w+)", name).groups()
            heads = ", ".join(f"{PARAMETERS[parameter](value):.2f}" for value in values)
            cells[series_label(run.config), run.config.train_length, run.config.seed, parameter][int(layer)] = heads
    if not cells:
        return []
    lines = [([series_name(series), str(n), str(seed)], found) for (series, n, seed, _), found in cells.items()]
    columns = {layer: f"layer {layer + 1}" for layer in sorted({layer for found in cells.values() for layer in found})}
    text = "Learned by the heads of each layer, at the end of training: \u03c4 in tokens, or a factor of the scores."
    return ["### What heads learned", text, pivot_table(["method", "trained at", "seed"], lines, columns)]


# ---- models that learn to copy, tested beyond their training length --------------------------------------------------


def taught(study: Study) -> str:
    """Return the figure and the tables as Markdown. In the study `taught`, sections have its tests."""
    losses, gains, T = study.by_seed(final_losses), study.by_seed(copy_gains), study.base_length
    if study.item == "taught":
        study.sections = primary_comparisons(study, losses, primary_measures(study), unit="nats")
        for title, (ours, *_, note) in LATER_TESTS.items():
            study.sections += paired_section(f"### {title.capitalize()}", ours, later_rows(study, title), "nats", note)
    draw_reach(study, losses, gains)
    text = "Loss: nats per token on natural text, by sequence length. Copy gain: loss of 32 random tokens minus the "
    text += "loss of their second copy, in nats per token, by tokens between the copies. Mean \u00b1 standard error "
    text += f"over seeds. In brackets: multiples of the training length of {T} tokens."
    copy_rows = [stored.data["copy_rows"] for _, stored in study.finished if stored.data.get("copy_rows")]
    text += f" {copy_rows[0]['share']:.0%} of the training rows are copy rows." if copy_rows else ""
    tables = reach_tables(study, losses, gains, GAP_RATIOS)
    return "\n\n".join([text, study.figure_markdown(), *tables, cost_table(study)])


def cost_table(study: Study) -> str:
    """Return a table of parameters, FLOPs and speed. The speed is the fastest seed's, because other jobs slow runs."""
    costs = {}
    for run, stored in study.finished:
        rate = round(stored.summary["tokens"] / stored.summary["seconds"])
        _, _, other_rate = costs.get(series := series_label(run.config), (0, 0, 0))
        flops = training_flops_per_token(run.config)
        costs[series] = stored.summary["parameters"], flops, max(rate, other_rate)
    rows = [[series_name(series), *(f"{n:,}" for n in costs[series])] for series in study.all_series if series in costs]
    note = "Tokens a second: the fastest seed's. Machines and their load differ between runs by a factor of two, so "
    note += "these rates do not rank methods. `python -m scripts.bench step` times methods side by side."
    head = ["method", "parameters", "FLOPs a training token", "training tokens a second"]
    return f"{markdown_table([head, *rows])}\n\n{note}"


def primary_measures(study: Study, gap: int = 4) -> dict[str, dict]:
    """Return the measures of the study `taught` by label. gap: tokens between two copies / training length."""
    losses, gains, T = study.by_seed(final_losses), study.by_seed(copy_gains), study.base_length
    far, gap_label = at(losses, 16 * T), f"copy gain, {gap * T} tokens ({gap}x)"
    return {f"loss, {16 * T} tokens (16x)": far, gap_label: at(gains, gap * T)}


def later_rows(study: Study, title: str) -> list[dict]:
    """Return the rows of these LATER_TESTS."""
    ours, rivals, gap, left_out, _ = LATER_TESTS[title]
    return paired_rows(ours, rivals, primary_measures(study, gap), left_out)


def reach_tables(study: Study, losses: dict, gains: dict, gap_ratios: tuple) -> list[str]:
    """Return a table of losses by length and a table of copy gains by gap, {(series, tokens): {seed: nats}} each.

    gap_ratios: gaps in training lengths.
    """
    gaps = [round(ratio * study.base_length) for ratio in gap_ratios]
    methods = [series for series in study.all_series if (series, study.base_length) in losses]
    return [
        make_table(study, {"loss": samples(losses)}, study.runs[0].config.val_lengths, best=min, methods=methods),
        make_table(study, {"copy gain": samples(gains)}, gaps, best=max, methods=methods),
    ]


def drawn_styles(study: Study) -> dict[str, dict]:
    """Return plot_styles of the series that the figures show."""
    drawn = ["rope", "logn_p_rope", FITTED[2], SI, FAST] if study.item == "taught" else DRAWN
    return plot_styles([s for s in study.all_series if s in drawn or s.startswith("alibi slope_scale=")])


def draw_reach(study: Study, losses: dict, gains: dict):
    """Draw the loss against the sequence length, and the copy gain against the tokens between the copies."""
    looks, panels = drawn_styles(study), []
    for title, xlabel, values in (
        ("loss on natural text", "sequence length (tokens)", losses),
        ("copy gain on random tokens", "tokens between the two copies", gains),
    ):
        rows = sorted(summarise(samples(values), "series", "tokens"), key=lambda row: row["tokens"])
        lines = row_lines(rows, "series", "tokens", looks)
        panels.append(Panel(title, lines, dict(xlabel=xlabel), study.base_length))
    draw_panels(study.figure_path(), [panels], x="", y="nats a token", log=2)

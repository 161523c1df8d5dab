"""Make the tables of the study `taught`: models learn to copy, and are tested beyond their training length."""

from scripts.reproduce.comparisons import primary_comparisons
from scripts.reproduce.drawing import Panel, draw_panels, row_lines
from scripts.reproduce.study import Study, at, samples
from scripts.reproduce.tables import make_table
from scripts.shared.looks import plot_styles
from scripts.shared.runs import copy_gains, final_losses
from scripts.shared.tables import summarise

GAP_RATIOS = (0.5, 2, 4, 8)  # tokens between two copies / training length
DRAWN = ("rope", "p_rope", "logn_p_rope", "alibi", "scale_invariant_p_rope")  # and ALiBi with other slopes


def taught(study: Study) -> str:
    """Return the figure and the tables as Markdown. In the study `taught`, a section has the primary comparisons."""
    losses, gains, T = study.by_seed(final_losses), study.by_seed(copy_gains), study.base_length
    if study.item == "taught":
        study.sections = primary_comparisons(study, losses, primary_measures(losses, gains, T), unit="nats")
    draw_reach(study, losses, gains)
    text = "Loss: nats per token on natural text, by sequence length. Copy gain: loss of 32 random tokens minus the "
    text += "loss of their second copy, in nats per token, by tokens between the copies. Mean \u00b1 standard error "
    text += f"over seeds. In brackets: multiples of the training length of {T} tokens."
    copy_rows = [stored.data["copy_rows"] for _, stored in study.finished if stored.data.get("copy_rows")]
    text += f" {copy_rows[0]['share']:.0%} of the training rows are copy rows." if copy_rows else ""
    return "\n\n".join([text, study.figure_markdown(), *reach_tables(study, losses, gains, GAP_RATIOS)])


def primary_measures(losses: dict, gains: dict, T: int) -> dict[str, dict]:
    """Return the measures of the primary comparisons by label. T: training length."""
    return {f"loss, {16 * T} tokens (16x)": at(losses, 16 * T), f"copy gain, {4 * T} tokens (4x)": at(gains, 4 * T)}


def reach_tables(study: Study, losses: dict, gains: dict, gap_ratios: tuple) -> list[str]:
    """Return a table of losses by length and a table of copy gains by gap, {(series, tokens): {seed: nats}} each.

    gap_ratios: gaps in training lengths.
    """
    gaps = [round(ratio * study.base_length) for ratio in gap_ratios]
    methods = [series for series in study.all_series if (series, study.base_length) in losses]
    lengths = study.runs[0].config.val_lengths
    return [
        make_table(study, {"loss": samples(losses)}, lengths, best=min, methods=methods),
        make_table(study, {"copy gain": samples(gains)}, gaps, best=max, methods=methods),
    ]


def draw_reach(study: Study, losses: dict, gains: dict):
    """Draw the loss against the sequence length, and the copy gain against the tokens between the copies."""
    shown = [series for series in study.all_series if series in DRAWN or series.startswith("alibi slope_scale=")]
    looks, panels = plot_styles(shown), []
    for title, xlabel, values in (
        ("loss on natural text", "sequence length (tokens)", losses),
        ("copy gain on random tokens", "distance between the two copies (tokens)", gains),
    ):
        rows = sorted(summarise(samples(values), "series", "tokens"), key=lambda row: row["tokens"])
        lines = row_lines(rows, "series", "tokens", looks)
        panels.append(Panel(title, lines, dict(xlabel=xlabel), study.base_length))
    draw_panels(study.figure_path(), [panels], x="", y="nats a token", log=2)

"""Tables and figures of how far models read: the loss by sequence length, and the copy gain by distance."""

from scripts.reproduce.drawing import Panel, draw_panels, row_lines
from scripts.reproduce.study import Study, samples
from scripts.reproduce.tables import make_table
from scripts.shared.runs import copy_gains, final_losses
from scripts.shared.tables import summarise


def reach_tables(study: Study, gaps: list[int]) -> list[str]:
    """Return a table of losses by length, and a table of copy gains by gap. gaps: tokens between two copies."""
    losses = samples(study.by_seed(final_losses))
    gains = samples(study.by_seed(copy_gains))
    methods = [series for series in study.all_series if (series, study.base_length) in losses]
    lengths = study.runs[0].config.val_lengths
    return [
        make_table(study, {"loss": losses}, lengths, best=min, methods=methods),
        make_table(study, {"copy gain": gains}, gaps, best=max, methods=methods),
    ]


def draw_reach(study: Study, looks: dict[str, dict]):
    """Draw the loss against the sequence length, and the copy gain against the tokens between the copies.

    looks: plot_styles of the series to show.
    """
    panels = []
    for title, xlabel, read in (
        ("loss on natural text", "sequence length (tokens)", final_losses),
        ("copy gain on random tokens", "tokens between the two copies", copy_gains),
    ):
        rows = summarise(samples(study.by_seed(read)), "series", "tokens")
        lines = row_lines(sorted(rows, key=lambda row: row["tokens"]), "series", "tokens", looks)
        panels.append(Panel(title, lines, {"xlabel": xlabel}, study.base_length))
    draw_panels(study.figure_path(), [panels], x="", y="nats a token", log=2)

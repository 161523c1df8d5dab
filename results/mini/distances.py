"""Counts the needles found by their distance from the response."""

import collections

import numpy as np

from scripts.reproduce.drawing import Panel, draw_panels, row_lines
from scripts.reproduce.study import Study
from scripts.shared.looks import plot_styles, series_name
from scripts.shared.tables import pivot_table


def needle_distances(study: Study) -> str:
    """Draw the needles found against their distance from the response. Return the figure and the counts as Markdown."""
    # 1. The counts, [needles found, all needles], summed over seeds.
    distances = collections.defaultdict(int)
    for run, stored in study.finished:
        for series, method in study.series(run).items():
            scores = stored.needle if method is None else stored.needle.get("as", {}).get(method, {})
            for length, counts in scores.get("by_distance", {}).items():
                for least, found_and_all in counts.items():
                    distances[series, int(length), int(least)] += np.array(found_and_all)

    # 2. A point of the figure and a cell of the table for each distance.
    rows, cells, order = [], collections.defaultdict(dict), study.all_series.index
    for series, length, least in sorted(distances, key=lambda key: (order(key[0]), *key[1:])):
        found, needles = distances[series, length, least]
        middle = 1.5 * least  # the cell counts distances from `least` to 2 * least - 1
        rows.append({"method": series, "length": length, "middle": middle, "mean": found / needles, "stderr": None})
        cells[series_name(series), str(length)][least] = f"{found}/{needles}"
    if not rows:
        return ""

    # 3. The figure.
    name, panels = study.item.removesuffix("_distances") + "_distances", []
    looks = plot_styles(dict.fromkeys(row["method"] for row in rows))
    for length in sorted({row["length"] for row in rows}):
        lines = row_lines([row for row in rows if row["length"] == length], "method", "middle", looks)
        panels.append(Panel(f"at {study.length_label(length)}", lines, {"ylim": (-0.03, 1.03)}))
    x, y = "tokens back to the needle", "needles found"
    draw_panels(study.figure_path(name), [panels], x=x, y=y, log=2, sharey=True)

    # 4. The table.
    columns = {least: f"{least}-{2 * least - 1}" for least in sorted({least for _, _, least in distances})}
    table = pivot_table(["method", "length"], cells.items(), columns)
    text = (
        "Needles found (greedy decoding) / all needles, over all seeds. Columns: tokens from the start of the needle "
        "to the response. Runs that were scored without their distances are left out."
    )
    return "\n\n".join([text, study.figure_markdown(name), table])

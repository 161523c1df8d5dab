"""Make the tables of the needle task: the share of needles found, also by distance."""

import collections

import numpy as np

from scripts.reproduce.drawing import Panel, draw_panels, row_lines
from scripts.reproduce.study import Study
from scripts.reproduce.tables import make_table
from scripts.shared.looks import plot_styles, series_name
from scripts.shared.tables import pivot_table

METRICS = ("greedy", "teacher forcing")


def table_needle(study: Study) -> str:
    """Return the shares of needles found as Markdown. A section lists them by distance.

    The table has the paper's lengths, and all other lengths at which a run was scored.
    """
    # 1. The shares, and the counts by distance.
    accuracy = {label: collections.defaultdict(list) for label in METRICS}
    distances = collections.defaultdict(int)  # [needles found, all needles], summed over seeds
    for run, stored in study.finished:
        for series, method in study.series(run).items():
            shares = stored.needle if method is None else stored.needle.get("as", {}).get(method, {})
            for label, values in accuracy.items():
                for length, share in shares.get(label.replace(" ", "_"), {}).items():
                    values[series, int(length)].append(share)
            for length, counts in shares.get("by_distance", {}).items():
                for least, found_and_all in counts.items():
                    distances[series, int(length), int(least)] += np.array(found_and_all)

    # 2. The table.
    text = (
        "Share of needles whose city and number are both right: mean \u00b1 standard error over seeds, by greedy "
        "decoding and by teacher forcing. Columns: tokens per prompt (and multiples of the training length). The "
        f"paper's numbers stand beside greedy decoding. Fine-tuned and scored with {study.runs[0].needle}; each prompt "
        "has three needles. The paper used C4 and 300 steps of 64 prompts."
    )
    study.sections = distance_section(study, distances)
    lengths = sorted({*study.lengths, *(length for _, length in accuracy["greedy"])})
    return text + "\n\n" + make_table(study, accuracy, lengths, best=max)


def distance_section(study: Study, distances: dict) -> list[str]:
    """Draw the needles found against their distance from the response. Return a section with the counts.

    distances: {(series, length, least distance): [needles found, all needles]}.
    """
    # 1. A point of the figure and a cell of the table for each distance.
    rows, cells, order = [], collections.defaultdict(dict), study.all_series.index
    for series, length, least in sorted(distances, key=lambda key: (order(key[0]), *key[1:])):
        found, needles = distances[series, length, least]
        middle = 1.5 * least  # the cell counts distances from `least` to 2 * least - 1
        rows.append({"method": series, "length": length, "middle": middle, "mean": found / needles, "stderr": None})
        cells[series_name(series), str(length)][least] = f"{found}/{needles}"
    if not rows:
        return []

    # 2. The figure.
    name, panels = f"{study.item}_distances", []
    looks = plot_styles(dict.fromkeys(row["method"] for row in rows))
    for length in sorted({row["length"] for row in rows}):
        lines = row_lines([row for row in rows if row["length"] == length], "method", "middle", looks)
        panels.append(Panel(f"at {study.length_label(length)}", lines, {"ylim": (-0.03, 1.03)}))
    x, y = "tokens back to the needle", "needles found"
    draw_panels(study.figure_path(name), [panels], x=x, y=y, log=2, sharey=True)

    # 3. The table.
    columns = {least: f"{least}-{2 * least - 1}" for least in sorted({least for _, _, least in distances})}
    table = pivot_table(["method", "length"], cells.items(), columns)
    text = (
        "Needles found (greedy decoding) / all needles, over all seeds. Columns: tokens from the start of the needle "
        "to the response. Runs that were scored without their distances are left out."
    )
    return ["### By distance", text, study.figure_markdown(name), table]

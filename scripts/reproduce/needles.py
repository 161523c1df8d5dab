"""The needle tables: how many needles the fine-tuned runs find, and how far away."""

import collections
import statistics

from configs.config import with_changes
from scripts.reproduce.drawing import draw_lines
from scripts.reproduce.figures import tau_of
from scripts.reproduce.study import Study
from scripts.reproduce.tables import make_table
from scripts.shared.looks import plot_style, series_label, series_name
from scripts.shared.runs import needle_state
from scripts.shared.tables import markdown_table, mean_and_stderr

METRICS = ("greedy", "teacher forcing")


def table_needle(study: Study) -> str:
    """Return the shares of needles found as Markdown, and write them as CSV; a section has those by distance.

    The lengths are those of the paper and all others that a run was scored at.
    """
    distances, oracle = collections.defaultdict(list), collections.defaultdict(list)
    accuracy = {label: collections.defaultdict(list) for label in METRICS}
    for run, stored in list(study.finished):
        state, reason = needle_state(stored, run.needle)
        if stored.needle is None or state in ("other", "running"):
            study.drop(run, "not fine-tuned" if state == "pretrained" else f"fine-tuning {state} ({reason})")
            continue
        for series, method in study.series(run).items():
            shares = stored.needle if method is None else stored.needle["as"][method]
            for label, values in accuracy.items():
                for length, share in by_length(shares[label.replace(" ", "_")]).items():
                    values[series, length].append(share)
            for length, counts in shares.get("by_distance", {}).items():
                distances[series, int(length)].append({int(d): count for d, count in counts.items()})
            if lacking := [n for n in study.lengths if str(n) not in shares["greedy"]]:
                study.missing.append((run.name, f"needle accuracy at {', '.join(map(str, lacking))}"))
        for length, share in by_length(stored.needle.get("oracle", {})).items():
            oracle[length].append(share)
    text = "Share of needles whose city and number are both right, by length in tokens (and in training lengths), by "
    text += "greedy decoding and by teacher forcing: mean \u00b1 standard error over seeds. The paper's numbers stand "
    text += "beside greedy decoding."
    if oracle:
        text += f" Fine-tuned and scored with {study.runs[0].needle}, three needles in each (the paper: C4, 300 steps "
        text += "of 64). Oracle: what a perfect copier of the prompts gets."
    means = {length: statistics.fmean(values) for length, values in oracle.items()}
    study.sections = by_distance(study, distances)
    lengths = sorted({*study.lengths, *(length for _, length in accuracy["greedy"])})
    return text + "\n\n" + make_table(study, accuracy, lengths, best=max, oracle=means)


def by_length(shares: dict) -> dict[int, float]:
    return {int(length): float(share) for length, share in shares.items()}


def needle_tau(study: Study) -> str:
    """Return the tables of table_needle below a figure of the needles found against tau."""
    page = table_needle(study)
    shares = shares_by_tau(study)
    if not shares:
        return page
    forms = list(dict.fromkeys(form for form, _, _ in shares))
    panels = {}
    for length in sorted({length for _, length, _ in shares}):
        lines = panels.setdefault(f"{length} tokens ({length / study.base_length:g}x)", [])
        for form in forms:
            taus = sorted(tau for other, at, tau in shares if (other, at) == (form, length))
            numbers = [mean_and_stderr(shares[form, length, tau]) for tau in taus]
            lines.append((plot_style(form, forms), taus, *([n[i] for n in numbers] for i in (0, 1))))
    draw_lines(study.figure(), panels, x="\u03c4 (tokens)", y="needles found", columns=3, ylim=(-0.03, 1.03))
    text = "Below: needles found (greedy decoding) against the lengthscale \u03c4 in tokens, a panel a length; bars: "
    text += "\u00b1 1 standard error over seeds."
    return "\n\n".join([text, study.picture(), page])


def shares_by_tau(study: Study) -> dict[tuple[str, int, float], list[float]]:
    """Return the shares of needles found by greedy decoding, one a seed, by form of the method, length and tau."""
    shares = collections.defaultdict(list)
    for run, stored in study.finished:
        others = {name: value for name, value in run.config.method_options.items() if name != "tau"}
        form = series_label(with_changes(run.config, dict(method_options=others)))
        for length, share in by_length(stored.needle["greedy"]).items():
            shares[form, length, tau_of(run.config)].append(share)
    return shares


def by_distance(study: Study, distances: dict[tuple[str, int], list[dict]]) -> list[str]:
    """Return a section on the needles found by their distance from the response, of all seeds together.

    distances: {(series, length): {least distance: (found, all)}, one a seed}. The counts are drawn and written as CSV.
    """
    rows = []
    for series, length in sorted(distances, key=lambda key: (study.all_series.index(key[0]), key[1])):
        seeds = distances[series, length]
        for least in sorted({distance for counts in seeds for distance in counts}):
            found, needles = map(sum, zip(*(counts.get(least, (0, 0)) for counts in seeds)))
            rows.append(dict(method=series, length=length, distance=least, found=found, needles=needles))
    if not rows:
        return []
    name = f"{study.item}_distances"
    study.write_csv(rows, "_distances")
    shown, panels = list(dict.fromkeys(row["method"] for row in rows)), collections.defaultdict(list)
    for length in sorted({row["length"] for row in rows}):
        for series in shown:
            points = [row for row in rows if (row["method"], row["length"]) == (series, length)]
            middles = [1.5 * row["distance"] for row in points]  # of d to 2d
            found = [row["found"] / row["needles"] for row in points]
            line = (plot_style(series, shown), middles, found, [None] * len(points))
            panels[f"{length} tokens ({length / study.base_length:g}x)"].append(line)
    axes = dict(x="tokens back to the needle", y="needles found", base=2, ylim=(-0.03, 1.03))
    draw_lines(study.figure(name), panels, columns=4, **axes)
    columns = sorted({row["distance"] for row in rows})
    cells = collections.defaultdict(dict)
    for row in rows:
        cells[row["method"], row["length"]][row["distance"]] = f"{row['found']}/{row['needles']}"
    table = [["method", "length", *(f"{least}-{2 * least - 1}" for least in columns)]]
    for (series, length), counts in cells.items():
        table.append([series_name(series), str(length), *(counts.get(least, "") for least in columns)])
    text = "Needles found (greedy decoding) of those that there are, by how many tokens before the response they "
    text += "start, over all seeds."
    return ["### By distance", text, study.picture(name), markdown_table(table)]

"""The needle tables: how many needles the fine-tuned runs find, and how far away."""

import collections
import statistics
from pathlib import Path

from configs.config import with_changes
from scripts.reproduce.drawing import drawing, legend_below
from scripts.reproduce.figures import picture, tau_of
from scripts.reproduce.study import Study
from scripts.reproduce.tables import make_table
from scripts.shared.looks import plot_style, series_label, series_name
from scripts.shared.runs import needle_state
from scripts.shared.tables import markdown_table, mean_and_stderr, write_csv


def table_needle(study: Study) -> str:
    """Return the shares of needles found as Markdown, and write them as CSV; the page ends with those by distance.

    The lengths are those of the paper and all others that a run was scored at.
    """
    distances = collections.defaultdict(list)
    accuracy = {"greedy": collections.defaultdict(list), "teacher forcing": collections.defaultdict(list)}
    oracle = collections.defaultdict(list)
    for run, stored in list(study.finished):
        command = ["python", "-m", "scripts.needle", str(stored.path), *run.needle.arguments]
        state, reason = needle_state(stored, run.needle)
        if state in ("other", "running"):
            study.drop(run, f"left out, {reason}" if state == "other" else f"is being fine-tuned ({reason})")
            continue
        needle = stored.json("needle/summary.json")
        if needle is None:
            study.drop(run, f"{state} ({reason})", command)
            continue
        found, found_at = {}, {}
        try:
            for series, method in study.series(run).items():
                shares = needle if method == run.config.method else needle["as"][method]
                for label in accuracy:
                    found[series, label] = by_length(shares[label.replace(" ", "_")])
                for length, counts in shares.get("by_distance", {}).items():
                    found_at[series, int(length)] = {int(d): count for d, count in counts.items()}
            copier = by_length(needle["oracle"])
        except (KeyError, TypeError) as error:
            study.drop(run, f"{stored.path}/needle/summary.json is damaged ({error!r}): delete it and repeat", command)
            continue
        for length, share in copier.items():
            oracle[length].append(share)
        for key, counts in found_at.items():
            distances[key].append(counts)
        for (series, label), shares in found.items():
            for length, share in shares.items():
                accuracy[label][series, length].append(share)
        if lacking := [str(n) for n in study.lengths if any(n not in shares for shares in found.values())]:
            study.miss(run, f"no needle accuracy at {', '.join(lacking)}", [*command, "--lengths", *lacking])
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


def needle_tau(study: Study) -> str:
    """Return the tables of table_needle below a figure of the needles found against tau."""
    page = table_needle(study)
    shares = collections.defaultdict(list)
    for run, stored in study.finished:
        form = series_label(with_changes(run.config, dict(method_options=without_tau(run.config.method_options))))
        for length, share in by_length(stored.json("needle/summary.json")["greedy"]).items():
            shares[form, length, tau_of(run.config)].append(share)
    if not shares:
        return page
    draw_against_tau(study.path, shares, study.base_length)
    text = "Below: needles found (greedy decoding) against the lengthscale \u03c4 in tokens, a panel a length; bars: "
    text += "\u00b1 1 standard error over seeds."
    return "\n\n".join([text, picture(study.item), page])


def without_tau(options: dict) -> dict:
    return {name: value for name, value in options.items() if name != "tau"}


def draw_against_tau(path: Path, shares: dict[tuple[str, int, float], list[float]], base_length: int):
    """Draw a panel a length: the share of needles found against tau, a line a form of the method."""
    lengths = sorted({length for _, length, _ in shares})
    forms = list(dict.fromkeys(form for form, _, _ in shares))
    with drawing(path, 1, len(lengths), height=2.0, sharey=True) as (figure, axes):
        for axis, length in zip(axes[0], lengths):
            for form in forms:
                taus = sorted(tau for own, at, tau in shares if (own, at) == (form, length))
                points = [mean_and_stderr(shares[form, length, tau]) for tau in taus]
                means, errors = [mean for mean, _ in points], [stderr or 0 for _, stderr in points]
                axis.errorbar(taus, means, errors, **plot_style(form, forms))
            title = f"{length} tokens ({length / base_length:g}x)"
            axis.set(title=title, xlabel="\u03c4 (tokens)", xscale="log", ylim=(-0.03, 1.03))
        axes[0, 0].set_ylabel("needles found")
        legend_below(figure, axes, 3)


def by_length(shares: dict) -> dict[int, float]:
    return {int(length): float(share) for length, share in shares.items()}


def by_distance(study: Study, distances: dict[tuple[str, int], list[dict]]) -> list[str]:
    """Return a section on the needles found by their distance from the response, of all seeds together, and write it as
    CSV. distances: {(series, length): {least distance: (found, all)}, one a seed}."""
    rows = []
    for series, length in sorted(distances, key=lambda key: (study.all_series.index(key[0]), key[1])):
        seeds = distances[series, length]
        for least in sorted({distance for counts in seeds for distance in counts}):
            found, needles = map(sum, zip(*(counts.get(least, (0, 0)) for counts in seeds)))
            rows.append(dict(method=series, length=length, distance=least, found=found, needles=needles))
    if not rows:
        return []
    name = f"{study.item}_distances"
    write_csv(study.path.with_name(f"{name}.csv"), rows)
    draw_by_distance(study.path.with_name(name), rows, study.base_length)
    columns = sorted({row["distance"] for row in rows})
    cells = collections.defaultdict(dict)
    for row in rows:
        cells[row["method"], row["length"]][row["distance"]] = f"{row['found']}/{row['needles']}"
    table = [["method", "length", *(f"{least}-{2 * least - 1}" for least in columns)]]
    for (series, length), own in cells.items():
        table.append([series_name(series), str(length), *(own.get(least, "") for least in columns)])
    text = "Needles found (greedy decoding) of those that there are, by how many tokens before the response they "
    text += "start, over all seeds."
    return ["## By distance", text, picture(name), markdown_table(table)]


def draw_by_distance(path: Path, rows: list[dict], base_length: int):
    """Draw a panel a length: the share of needles found against their distance, a line a series."""
    lengths, series = sorted({row["length"] for row in rows}), list(dict.fromkeys(row["method"] for row in rows))
    with drawing(path, 1, len(lengths), height=2.0, sharey=True) as (figure, axes):
        for axis, length in zip(axes[0], lengths):
            for one in series:
                mine = [row for row in rows if (row["method"], row["length"]) == (one, length)]
                middle = [1.5 * row["distance"] for row in mine]  # of d to 2d
                axis.plot(middle, [row["found"] / row["needles"] for row in mine], **plot_style(one, series))
            ratio = f"{length / base_length:g}x"
            axis.set_xscale("log", base=2)
            axis.minorticks_off()
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.set(title=f"{length} tokens ({ratio})", xlabel="tokens back to the needle", ylim=(-0.03, 1.03))
        axes[0, 0].set_ylabel("needles found")
        legend_below(figure, axes, 4)

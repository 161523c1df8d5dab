"""Write pages of results/: the texts in templates/, with numbers of the kept runs filled in.

    python -m scripts.reproduce.pages

A template names each number in braces, with its format: {loss mini 4096 rope:.3f}. " - " between two names stands for
their difference, within the seeds that both have. The format "p" is for p-values. Numbers are means over seeds:

    loss PLACE LENGTH SERIES         validation loss in nats per token
    late PLACE LENGTH SERIES         the same at positions from half of the training length on
    copy PLACE GAP SERIES            copy gain of random tokens in nats
    far_gain PLACE CLASS SERIES      far gain in nats of a class of tokens
    time PLACE SERIES                time to copy in millions of training tokens, of the runs that copy
    needle PLACE LENGTH SERIES       share of needles found by greedy decoding
    tokens PLACE SERIES              training tokens; also: parameters, val_tokens
    stderr NAME [- NAME]             standard error over seeds of one of these numbers, or of their difference
    seeds NAME                       its number of seeds
    p loss PLACE LENGTH SERIES       p-value, after Holm's correction, of the difference to scale-invariant p-RoPE
    p copy PLACE GAP SERIES          the same for copy gains
    p time far SERIES                the same for times to copy; p far far SERIES: for far gains of the class far
    p TEST loss SERIES               the same for a title of LATER_TESTS, such as both; also p TEST copy gain
    paper TABLE LENGTH SERIES        a number of the paper

PLACE is a preset, a key of CHANGES, or NAMED. SERIES is a label of scripts.shared.looks.series_label, or in NAMED the
run's name without its seed. LENGTH and GAP are in tokens. The p-values are the ones in PLACE's tables.md.
"""

import collections
import functools
import re
import string
from pathlib import Path

from configs.sweeps import SI
from errors import require
from files import replace_text
from scripts.reproduce.comparisons import differences
from scripts.reproduce.study import Study
from scripts.reproduce.tables import paper_targets, read_losses, trained_methods
from scripts.shared.looks import series_label
from scripts.shared.runs import copy_curve, copy_gains, far_gains, final_losses, late_losses, read_runs, time_to_copy
from scripts.shared.sweeps import studies
from scripts.shared.tables import mean_and_stderr

TEMPLATES, RESULTS = Path(__file__).with_name("templates"), Path(__file__).parents[2] / "results"
NAMED = "calibration"  # the file of single runs for results/calibration.md, which the names of the runs tell apart
CHANGES = dict(prose={"data_dir": "data/books"}, far_books={"data_dir": "data/books_far"})  # folder of results/: fields


class Page(string.Formatter):
    """Fills numbers into the fields of a template."""

    def __init__(self, numbers: dict[str, dict[int, float]]):
        self.numbers = numbers  # by name, then by seed

    def get_field(self, field_name: str, args, kwargs) -> tuple[float, str]:
        names = re.sub(r"^(stderr|seeds) ", "", field_name).split(" - ")
        for name in names:
            require(name in self.numbers, f"No kept run has the number {name!r}. Correct the name in {TEMPLATES}.")
        first, *others = (self.numbers[name] for name in names)
        shared = [seed for seed in first if all(seed in other for other in others)]
        mean, stderr = mean_and_stderr([first[seed] - sum(other[seed] for other in others) for seed in shared])
        return {"stderr": stderr, "seeds": len(shared)}.get(field_name.split(" ")[0], mean), field_name

    def format_field(self, value, format_spec: str) -> str:
        if format_spec == "p":
            return f"{value:.2g}" if value >= 0.001 else "< 0.001"
        return format(value, format_spec)


def kept_numbers() -> dict[str, dict[int, float]]:
    """Return the numbers of all kept runs by name and seed."""
    found = collections.defaultdict(dict)
    for file in [*sorted(RESULTS.glob("*/runs.jsonl")), *(RESULTS / f"{name}.jsonl" for name in ("quickstart", NAMED))]:
        for stored in read_runs(file):
            place = file.parent.name if file.parent.name in CHANGES else stored.line["preset"]
            series, seed, needle = series_label(stored.config), stored.config.seed, stored.needle or {}
            if file.stem == NAMED:
                place, series = NAMED, stored.path.name.removesuffix(f"-s{seed}")
            late = functools.partial(late_losses, first=stored.config.train_length // 2)
            kinds = [("needle", series, needle.get("greedy", {}))]
            for method in (None, *stored.config.validate_as):
                measures = dict(loss=final_losses, copy=copy_gains, far_gain=far_gains, late=late)
                label = series_label(stored.config, method) if method else series
                kinds += [(kind, label, read(stored.summary, method)) for kind, read in measures.items()]
                if (time := time_to_copy(copy_curve(stored))) is not None:
                    found[f"time {place} {label}"][seed] = time
            for kind, label, values in kinds:
                for tokens, value in values.items():
                    found[f"{kind} {place} {tokens} {label}"][seed] = value
            assert seed not in found[f"tokens {place} {series}"], f"{stored.path}: two kept runs have this name"
            for field in ("tokens", "parameters", "val_tokens"):
                found[f"{field} {place} {series}"][seed] = stored.line[field]
    return found


def p_values() -> dict[str, float]:
    """Return the p-values of the comparisons in tables.md, by name."""
    found = {}
    for place in ("mini", "prose"):
        study = open_study("table_losses", "mini", place)
        losses, lengths = read_losses(study)
        for row in differences(losses, SI, lengths, trained_methods(study)):
            found[f"p loss {place} {row['length']} {row['series']}"] = row["p_holm"]
    for module in studies():
        for item, tests in module.TESTS.items():
            for paired in tests(open_study(item, module.SCALE, module.SCALE)):
                title = "" if paired.title.startswith("Primary") else f"{paired.title.lower()} "
                for row in paired.rows():
                    if title:
                        found[f"p {title}{row['measure'].split(',')[0]} {row['rival']}"] = row["p_holm"]
                    else:
                        kind, tokens = re.match(r"(loss|copy|far|time)\D*(\d*)", row["measure"]).groups()
                        found[" ".join(["p", kind, item, *tokens.split(), row["rival"]])] = row["p_holm"]
    return found


def open_study(item: str, scale: str, place: str) -> Study:
    stored = read_runs(RESULTS / place / "runs.jsonl")
    return Study(item, scale, RESULTS / place, stored, changes=CHANGES.get(place, {}))


def make_pages() -> dict[Path, str]:
    """Return the text of each page by its path."""
    whole = p_values()  # numbers that belong to no seed
    for table in ("table_losses", "table_needle", "table_infini"):
        for (series, length), target in paper_targets(table).items():
            whole[f"paper {table} {length} {series}"] = target["mean"]
    page = Page(kept_numbers() | {name: {0: number} for name, number in whole.items()})
    return {
        RESULTS / path.relative_to(TEMPLATES): page.format(path.read_text()) for path in sorted(TEMPLATES.rglob("*.md"))
    }


if __name__ == "__main__":
    for path, text in make_pages().items():
        replace_text(path, text)

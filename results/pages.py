"""Fill the README and the pages of results/ with numbers of the kept runs, in place.

    python -m results.pages

A comment names the number behind it, with its format: `<!--loss mini 4096 rope:.3f-->5.735`. Above a table, a comment
names the numbers of the columns. Then each row needs only what completes the names:

    <!--| | loss mini 256 {}:.3f; stderr loss mini 256 {}:.3f |-->
    | method | loss at 256 |
    |---|---:|
    | RoPE <!--rope--> | 4.401 ± 0.012 |

{0}, {1}, ... stand for the parts of a row's comment, which ";" separates. The numbers of a cell are the names of its
column in turn. A cell without a digit stays, as does a cell with a comment of its own. Numbers are means over seeds:

    loss PLACE LENGTH SERIES         validation loss in nats per token
    orders taught LENGTH SERIES      the same of seed 0, over orders of the data (data_seed)
    late PLACE LENGTH SERIES         loss at positions from half of the training length on
    copy PLACE GAP SERIES            copy gain of random tokens in nats
    recovery PLACE GAP SERIES        copy gain over copy gain within the training length (measure/copy_gain.py)
    far_gain PLACE CLASS SERIES      far gain in nats of a class of tokens, or of all
    elsewhere PLACE TEXT LENGTH SERIES loss on other text (results/far/other_texts.py)
    recall PLACE TASK LENGTH SERIES  share of values recalled (results/far/recall.py)
    riffle PLACE END SERIES          riffle gain in nats, of the octave of positions that ends there
    time PLACE GAP SERIES            time to copy in millions of training tokens, of the runs that copy
    needle PLACE LENGTH SERIES       share of needles found by greedy decoding
    tokens PLACE SERIES              training tokens; also: parameters, val_tokens
    NAME - NAME                      difference within the seeds that both have
    stderr NAME [- NAME]             standard error over seeds of one of these numbers, or of their difference
    seeds NAME [- NAME]              its number of seeds; also: sd (standard deviation), lowest, highest, first (seed)
    text blocks PLACE LENGTH SERIES  error of the loss from the text (results/text_error.py), also of a difference
    p PLACE TITLE MEASURE SERIES     p-value after Holm's correction, of a section of PLACE/tables.md; its format is "p"
    p PLACE all TITLE ...            the same after one correction over all tests of the study
    test PLACE TITLE MEASURE SERIES  the mean difference of this test
    tests PLACE                      the number of all tests of the study
    paper TABLE LENGTH SERIES        a number of the paper
    extended OCTAVE MODEL METHOD     loss of SmolLM2 at these positions, mean over texts (smollm2/extended.jsonl)
    extended copy GAP MODEL METHOD   its copy gain at this distance
    continued LENGTH MODEL           its validation loss after training (smollm2/continued.jsonl)

PLACE is a preset, a key of CHANGES, or NAMED; growth_WIDTH: the runs of growth; far_same: the runs of `far` with the
seeds of growth_128. SERIES is a label of scripts.shared.looks.series_label, with the words of
SHORT, and perhaps "masked" (document_mask) and "order=1" (data_seed). In NAMED, it is the run's name without its seed.
LENGTH and GAP are in tokens.
"""

import collections
import json
import re
import statistics
from pathlib import Path

from configs.sweeps import SI
from errors import exit_on_user_error, require
from files import replace_text
from results.text_error import block_losses, text_error
from scripts.reproduce.comparisons import differences, format_p, holm
from scripts.reproduce.study import Study
from scripts.reproduce.tables import paper_targets, read_losses
from scripts.shared.looks import series_label
from scripts.shared.runs import StoredRun, copy_gains, final_losses, read_runs
from scripts.shared.sweeps import RESULTS, studies
from scripts.shared.tables import mean_and_stderr

NAMED = "calibration"  # the file of single runs for results/calibration.md, which the names of the runs tell apart
SHORT = {"SI": SI, "QUARTER": "form=barbero share=0.25"}
CHANGES = {
    "prose": {"data_dir": "data/books"},
    "far_books": {"data_dir": "data/books_far"},
    "documents": {"data_dir": "data/blocks"},
}  # folder of results/: fields

# ---- the numbers -----------------------------------------------------------------------------------------------------


def all_numbers() -> dict:
    """Return the numbers by name, then by seed. Numbers that belong to no seed have seed 0."""
    numbers = collections.defaultdict(dict)
    for file in [*RESULTS.glob("*/runs.jsonl"), RESULTS / "quickstart.jsonl", RESULTS / f"{NAMED}.jsonl"]:
        runs = read_runs(file)
        for stored in runs:
            require(not stored.problems, "; ".join(stored.problems))
        one_text = file.stem == NAMED or len({stored.text for stored in runs}) <= 1
        require(one_text, f"{file} has runs on several texts. Keep one text in a file.")
        for stored in runs:
            for name, value in numbers_of_run(file, stored).items():
                require(stored.config.seed not in numbers[name], f"{stored.path}: two kept runs have {name!r}.")
                numbers[name][stored.config.seed] = value
    for table in ("table_losses", "table_needle", "table_infini"):
        for (series, length), target in paper_targets(table).items():
            numbers[f"paper {table} {length} {series}"] = {0: target["mean"]}
    for line in map(json.loads, (RESULTS / "smollm2/extended.jsonl").read_text().splitlines()):
        form = f"{line['model']} {line['method']}"
        for octave, loss in line["text_loss"].items():
            numbers[f"extended {octave} {form}"][line["text"]] = loss
        for gap, gain in line["copy_gain"].items():
            numbers[f"extended copy {gap} {form}"][line["text"]] = gain
    for line in map(json.loads, (RESULTS / "smollm2/continued.jsonl").read_text().splitlines()):
        for length, loss in line["after"]["val_loss"].items() if "name" in line else ():
            numbers[f"continued {length} {line['name']}"] = {0: loss}
    for name, by_seed in [*numbers.items()]:
        if " growth_128 " in name:
            shorter = numbers.get(name.replace(" growth_128 ", " far "), {})
            same = {seed: shorter[seed] for seed in by_seed if seed in shorter}
            numbers |= {name.replace(" growth_128 ", " far_same "): same} if same else {}
    return numbers | losses_by_order() | {name: {0: number} for name, number in comparisons().items()}


def losses_by_order() -> dict:
    """Return the losses of seed 0 at `taught` by name, then by order of the data."""
    found = collections.defaultdict(dict)
    for stored in read_runs(RESULTS / "taught/runs.jsonl"):
        if stored.config.seed == 0:
            for length, loss in final_losses(stored.summary).items():
                found[f"orders taught {length} {series_label(stored.config)}"][stored.config.data_seed] = loss
    return found


def numbers_of_run(file: Path, stored: StoredRun) -> dict:
    """Return the numbers of a kept run by name."""
    # 1. The place, and the series of the trained method.
    place = file.parent.name if file.parent.name in CHANGES else stored.line["preset"]
    if file.parent.name == "growth":  # the preset is that of `far`
        place = f"growth_{stored.config.model_dim}"
    form = " masked" if stored.config.masks_documents("train") else ""
    if stored.config.data_seed:
        form += f" order={stored.config.data_seed}"
    series = series_label(stored.config) + form
    if file.stem == NAMED:
        place, series = NAMED, stored.path.name.removesuffix(f"-s{stored.config.seed}")
    numbers = {f"{field} {place} {series}": stored.line[field] for field in ("tokens", "parameters", "val_tokens")}
    for length, share in (stored.needle or {}).get("greedy", {}).items():
        numbers[f"needle {place} {length} {series}"] = share

    # 2. Measures of the trained method, and of the methods with which its weights were validated.
    for kind, read in measures().items():
        for method in (None, *stored.config.validate_as):
            label = series_label(stored.config, method) + form if method else series
            for key, value in read(stored, method).items():
                numbers[f"{kind} {place} {key} {label}"] = value
    return numbers


def measures() -> dict:
    """Return functions from a stored run and a method to {key: number}, by kind of number."""
    found = {
        "loss": lambda stored, method: final_losses(stored.summary, method),
        "copy": lambda stored, method: copy_gains(stored.summary, method),
        "blocks": lambda stored, method: block_losses(stored.summary, method),
    }
    for study in studies():
        found |= getattr(study, "NUMBERS", {})
    return found


def comparisons() -> dict:
    """Return the p-values and the differences of the comparisons in tables.md, by name."""
    found = {}
    for place in ("mini", "prose"):
        losses, lengths = read_losses(open_study("table_losses", "mini", place))
        for row in differences(losses, SI, lengths):
            found[f"p {place} differences loss {row['length']} {row['series']}"] = row["p_holm"]
    for module in studies():
        home, uncorrected = module.__name__.split(".")[1], {}  # of all tests of the study
        for item, tests in module.TESTS.items():
            for paired in tests(open_study(item, module.SCALE, home)):
                for row in paired.rows():
                    measure = re.sub(r", (\d*).*", r" \1", row["measure"]).strip()  # loss 4096, time to copy
                    name = f"{paired.title.lower()} {measure} {row['rival']}"
                    found[f"p {home} {name}"] = row["p_holm"]
                    found[f"test {home} {name}"] = row["difference"]
                    uncorrected[f"p {home} all {name}"] = row["p"]
        found |= zip(uncorrected, holm([*uncorrected.values()]))
        found[f"tests {home}"] = len(uncorrected)
    return found


def open_study(item: str, scale: str, place: str) -> Study:
    stored = read_runs(RESULTS / place / "runs.jsonl")
    return Study(item, scale, RESULTS / place, stored, changes=CHANGES.get(place, {}))


# ---- the pages -------------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"(< )?[+-]?\d+(,\d{3})*(\.\d+)?")
NAMED_NUMBER = re.compile(rf"<!--([^|:>]+):([^|:>]+)-->(?:{NUMBER.pattern})?")
ROW = re.compile(r"<!--([^|:>]+)-->")  # the comment of a row
STATISTICS = {
    "stderr": lambda values: mean_and_stderr(values)[1],
    "seeds": len,
    "sd": statistics.stdev,
    "lowest": min,
    "highest": max,
    "first": lambda values: values[0],
    "text": text_error,
}


class Page:
    """Fills numbers into the text of a page. numbers: by name, then by seed."""

    def __init__(self, numbers: dict):
        self.numbers = numbers

    def value(self, name: str) -> float:
        """Return the mean, or the statistic of STATISTICS, that a name stands for."""
        for short, whole in SHORT.items():
            name = re.sub(rf"\b{short}\b", whole, name)
        kind, _, rest = name.partition(" ")
        names = (rest if kind in STATISTICS else name).split(" - ")
        for each in names:
            require(each in self.numbers, f"No kept run has the number {each!r}. Correct its name on the page.")
        first, *others = (self.numbers[each] for each in names)
        shared = sorted(seed for seed in first if all(seed in other for other in others))
        differences = [first[seed] - sum(other[seed] for other in others) for seed in shared]
        return STATISTICS.get(kind, statistics.fmean)(differences)

    def show(self, name: str, form: str) -> str:
        """Return the number in its format."""
        value = self.value(name)
        return format_p(value) if form == "p" else format(value, form)

    def fill(self, text: str) -> str:
        """Return the text with all its numbers replaced."""
        lines, columns = [], []
        for line in text.split("\n"):
            if line.startswith("<!--|"):
                columns = line.split("|")
            elif not line.startswith("|"):
                columns = []
            elif columns and ROW.search(line):
                line = self.fill_row(line, columns, ROW.search(line)[1].split("; "))
            lines.append(NAMED_NUMBER.sub(lambda m: f"<!--{m[1]}:{m[2]}-->{self.show(m[1], m[2])}", line))
        return "\n".join(lines)

    def fill_row(self, line: str, columns: list[str], parts: list[str]) -> str:
        """Return the row of a table with its numbers replaced. parts: of its comment."""
        cells = line.split("|")
        for i, (cell, names) in enumerate(zip(cells, columns)):
            count = len(NUMBER.findall(cell))
            if names.strip() and count and "<!--" not in cell:
                forms = names.format(*parts).strip().split("; ")
                require(count <= len(forms), f"{cell.strip()!r} has more numbers than its column has names. Add names.")
                cells[i] = NUMBER.sub(lambda _: self.show(*forms.pop(0).rsplit(":", 1)), cell)
        return "|".join(cells)


@exit_on_user_error()
def main():
    page = Page(all_numbers())
    for path in [RESULTS.parent / "README.md", *sorted(RESULTS.rglob("*.md"))]:
        replace_text(path, page.fill(path.read_text()))


if __name__ == "__main__":
    main()

"""How Gaussian attention scores are: the paper's QQ plots, of other people's models and of those trained here.

What the scores are is in logits.py. `python -m scripts.logit_statistics` writes, with Kept, what figure_qq reads.
"""

import collections
import csv
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from errors import require
from scripts.evaluate import load_run, open_own_text
from scripts.reproduce import logits
from scripts.reproduce.drawing import draw_qq
from scripts.reproduce.figures import NO_FIGURE, WINDOWS
from scripts.reproduce.study import Study
from scripts.shared.looks import series_label, series_name
from scripts.shared.tables import markdown_table

FORMS = {False: "without rotation", True: "with rotation"}
MOMENTS = ["mean", "std", "skewness", "excess_kurtosis", "ks"]
HEAD_QUANTILES = 50  # of one head; all heads of a layer have those of logits.qq_points
FOLDER = "logit_statistics"  # in the folder of the runs: a folder a model
# The paper's models: the folder of each, what it is called in titles, and its name on the hub. Its "1B" can only be
# Llama 3.2's, of the herd that it cites; which release of 8B it took is not said.
PAPERS_MODELS = {
    "Llama-3.2-1B": ("Llama 1B", "meta-llama/Llama-3.2-1B"),
    "Llama-3.1-8B": ("Llama 8B", "meta-llama/Llama-3.1-8B"),
    "gemma-2-27b": ("Gemma 2 27B", "google/gemma-2-27b"),
}


@dataclasses.dataclass
class Kept:
    """Holds what is kept of the scores: rows of quantiles, and of the moments of each head and of all ("all")."""

    quantiles: list[dict] = dataclasses.field(default_factory=list)
    statistics: list[dict] = dataclasses.field(default_factory=list)

    def add(self, scores: Tensor, *, by_head: bool, **keys):
        """Add the scores (H, pairs) of a layer, its rows marked with these keys, among them layer (from 0) and rotated.
        by_head: with quantiles of each head too."""
        self.statistics += [keys | row for row in logits.moments_by_head(scores)]
        self.quantiles += [keys | dict(head="all") | point for point in logits.qq_points(scores.flatten())]
        for head, mine in enumerate(scores if by_head else ()):
            self.quantiles += [keys | dict(head=head) | point for point in logits.qq_points(mine, HEAD_QUANTILES)]

    def lines(self, rotated: bool, by_head: bool = False) -> list[list[tuple[list, list]]]:
        """Return the lines of a QQ plot, Gaussian and sample quantiles, as draw_qq takes them: for each layer one, or
        one a head."""
        layers = collections.defaultdict(lambda: collections.defaultdict(lambda: ([], [])))
        for row in self.quantiles:
            if row["rotated"] == rotated and (row["head"] != "all") == by_head:
                for axis, name in zip(layers[row["layer"]][row["head"]], ("gaussian", "sample")):
                    axis.append(row[name])
        return [[*heads.values()] for heads in layers.values()]

    def table(self, name_of: Callable[[dict], str] | None = None, what: str = "") -> str:
        """Return the moments of all heads pooled, a row a layer and form, after a column `what` if there is one."""
        cells = [
            [*([name_of(row)] if name_of else []), str(row["layer"] + 1), FORMS[row["rotated"]]]
            + [f"{row[key]:.3f}" for key in MOMENTS]
            for row in self.statistics
            if row["head"] == "all"
        ]
        head = ["layer", "form", "mean", "std", "skewness", "excess kurtosis", "KS distance"]
        return markdown_table([[what, *head] if name_of else head, *cells])


def read_kept(folder: Path) -> tuple[dict, Kept] | None:
    """Return what logit_statistics has written about a model: how it was made, and the rows. None: nothing.

    Raises ValueError if it is damaged.
    """

    def rows(name: str) -> list[dict]:
        with open(folder / name, newline="") as file:
            return [{key: READERS.get(key, float)(value) for key, value in row.items()} for row in csv.DictReader(file)]

    if not (folder / "about.json").exists():
        return None
    try:
        about, kept = (
            json.loads((folder / "about.json").read_text()),
            Kept(rows("quantiles.csv"), rows("statistics.csv")),
        )
        describe(about), kept.table()  # which look up every field and column
        same = len({len(kept.lines(rotated)) for rotated in FORMS}) == 1
        require(same and kept.quantiles, "not every layer is there with rotation and without")
    except (ValueError, KeyError, TypeError, OSError, csv.Error) as error:
        raise ValueError(f"{folder} is damaged ({str(error).splitlines()[0]}): delete it and run again") from error
    return about, kept


READERS = dict(
    layer=int,
    rotated=lambda text: {"False": False, "True": True}[text],
    head=lambda text: text if text == "all" else int(text),
)


def figure_qq(study: Study) -> str:
    text = "Quantiles of the attention scores of other people's models, all heads of a layer, against those of the "
    text += "Gaussian with their mean and standard deviation (red: equal). Only pairs with t > 0, and without key 0, "
    text += "which attention sinks into. Gemma 2's scores are those before its soft cap. The paper says of its Llama "
    text += "models only their sizes. [figure_qq_ours](#figure_qq_ours) is of the models trained here."
    shown, everything, texts = [], Kept(), set()
    study.models_needed = len(PAPERS_MODELS)
    for folder, (title, hub_name) in PAPERS_MODELS.items():
        try:
            found = read_kept(study.runs_dir / FOLDER / folder)
        except ValueError as error:
            study.missing.append((title, str(error)))
            continue
        if found is None:
            command = f"python -m scripts.logit_statistics {hub_name} --text FILE"
            study.missing.append((title, f"which `{command}` measures on the introduction of Wikipedia's New England"))
            continue
        about, kept = found
        lines = [f"{title}, {describe(about)}:"]
        for rotated, form in FORMS.items():
            name = f"{study.item}_{title} {form}".lower().replace(" ", "_")
            draw_qq(study.figure(name), {form: kept.lines(rotated)})
            lines.append(study.picture(name))
        everything.statistics += [dict(model=folder) | row for row in kept.statistics]
        shown.append("\n\n".join(lines))
        study.models.append(folder)
        texts.add(about["text_sha256"])
    if not shown:
        return f"{text}\n\n**{study.item} needs what the commands below measure.**"
    if len(texts) > 1:
        study.notes.append("These models were not given the same text, so their numbers do not compare.")
    study.write_csv(everything.statistics)
    table = everything.table(lambda row: PAPERS_MODELS[row["model"]][0], "model")
    return "\n\n".join([f"{text} The tables pool the heads of a layer.", *shown, table])


def describe(about: dict) -> str:
    """Return how the scores of a model were measured, for a page."""
    made = f"{about['tokens']} tokens of {about['text']} (sha256 {about['text_sha256'][:12]}), {about['pairs']} pairs "
    made += f"of them a head, {about['dtype']}, {about['scale']}. Measured {about['made']} on {about['device']}, code "
    return made + f"at commit {about['commit']}, by `{about['command']}`"


def figure_qq_ours(study: Study) -> str:
    kept, shown = Kept(), []
    several = len({run.config.seed for run, _ in study.finished}) > 1

    def title(series: str, seed: int) -> str:
        return series_name(series) + (f", seed {seed}" if several else "")

    for run, stored in list(study.finished):
        with study.dropping_unreadable(run):
            config, model = load_run(stored.path, study.device)
            tokens = logits.validation_windows(open_own_text(stored), WINDOWS, config.train_length, study.device)
            of_run, series = Kept(), series_label(config)
            for layer, rotated, scores in logits.layer_scores(model, tokens):
                of_run.add(scores, by_head=False, method=series, seed=config.seed, layer=layer, rotated=rotated)
            name = f"{study.item}_{series}".replace(" ", "_") + (f"_s{config.seed}" if several else "")
            blocks = {form: of_run.lines(rotated) for rotated, form in FORMS.items()}
            draw_qq(study.figure(name), {form: lines for form, lines in blocks.items() if lines})
            kept.statistics += of_run.statistics
            shown.append(f"{title(series, config.seed)}:\n\n{study.picture(name)}")
    text = f"Quantiles of the scores q.k / sqrt(d) of trained models, on {WINDOWS} windows of validation text of the "
    text += "training length, all heads of a layer, against those of the Gaussian with their mean and standard "
    text += "deviation (red: equal). Only pairs with t > 0, and without key 0, which attention sinks into."
    if not shown:
        return f"{text}\n\n{NO_FIGURE}"
    study.write_csv(kept.statistics, "_heads")
    text += f" The table pools the heads of a layer; each head is in csv/{study.item}_heads.csv (layers there from 0)."
    return "\n\n".join([text, *shown, kept.table(lambda row: title(row["method"], row["seed"]), "method")])

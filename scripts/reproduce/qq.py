"""How Gaussian attention scores are: the paper's QQ plots, of other people's models and of those trained here.

What the scores are is in logits.py. `python -m scripts.logit_statistics` writes, with Kept, what figure_qq reads.
"""

import csv
import dataclasses
import json
import re
from pathlib import Path

from torch import Tensor

from scripts.reproduce import logits
from scripts.reproduce.drawing import draw_qq
from scripts.reproduce.figures import NO_FIGURE, WINDOWS
from scripts.reproduce.study import Study
from scripts.shared.looks import series_label, series_name
from scripts.shared.tables import markdown_table

FORMS = {False: "without rotation", True: "with rotation"}
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
    """Holds what is kept of a model's scores: rows of quantiles, and of the moments of each head and of all ("all")."""

    quantiles: list[dict] = dataclasses.field(default_factory=list)
    statistics: list[dict] = dataclasses.field(default_factory=list)

    def add(self, scores: Tensor, *, layer: int, rotated: bool):
        """Add the scores (H, pairs) of a layer, counted from 0."""
        for head, mine in [*enumerate(scores.numpy()), ("all", scores.flatten().numpy())]:
            self.statistics.append(dict(layer=layer, rotated=rotated, head=head) | logits.moments(mine))
        self.quantiles += [dict(layer=layer, rotated=rotated) | point for point in logits.qq_points(mine)]

    def blocks(self) -> dict[str, list[tuple[list, list]]]:
        """Return the Gaussian and the sample quantiles of each layer by form, as draw_qq takes them."""
        blocks = {}
        for rotated, form in FORMS.items():
            for layer in dict.fromkeys(row["layer"] for row in self.quantiles if row["rotated"] == rotated):
                points = [row for row in self.quantiles if (row["layer"], row["rotated"]) == (layer, rotated)]
                pair = [row["gaussian"] for row in points], [row["sample"] for row in points]
                blocks.setdefault(form, []).append(pair)
        return blocks

    @classmethod
    def read(cls, folder: Path) -> "Kept":
        """Return what logit_statistics has written about a model."""
        kept = cls()
        readers = dict(layer=int, rotated="True".__eq__, head=str)
        for name in ("quantiles", "statistics"):
            with open(folder / f"{name}.csv", newline="") as file:
                for row in csv.DictReader(file):
                    getattr(kept, name).append({key: readers.get(key, float)(value) for key, value in row.items()})
        return kept


def moments_table(models: dict[str, Kept]) -> str:
    """Return the moments of all heads pooled: a row a layer and form of each model."""
    table = [["model", "layer", "form", "mean", "std", "skewness", "excess kurtosis", "KS distance"]]
    for name, kept in models.items():
        for row in [row for row in kept.statistics if row["head"] == "all"]:
            moments = [f"{row[key]:.3f}" for key in ("mean", "std", "skewness", "excess_kurtosis", "ks")]
            table.append([name, str(row["layer"] + 1), FORMS[row["rotated"]], *moments])
    return markdown_table(table)


def figure_qq(study: Study) -> str:
    models, captions = {}, {}
    study.models_needed = len(PAPERS_MODELS)
    for name, (title, hub_name) in PAPERS_MODELS.items():
        folder = study.runs_dir / FOLDER / name
        if not (folder / "about.json").exists():
            command = f"python -m scripts.logit_statistics {hub_name} --text FILE"
            study.missing.append((title, f"which `{command}` measures on the introduction of Wikipedia's New England"))
            continue
        about, models[title] = json.loads((folder / "about.json").read_text()), Kept.read(folder)
        captions[title] = f"{title}, {describe(about)}:"
        study.models.append(name)
    text = (
        "Quantiles of the attention scores of other people's models. Gemma 2's scores are those before its soft cap. "
    )
    text += "The paper says of its Llama models only their sizes. [figure_qq_ours](#figure_qq_ours) is of the models "
    return qq_page(study, f"{text}trained here.", models, captions)


def describe(about: dict) -> str:
    """Return how the scores of a model were measured, for a page."""
    made = f"{about['tokens']} tokens of {about['text']} (sha256 {about['text_sha256'][:12]}), {about['pairs']} pairs "
    made += f"of them a head, {about['dtype']}, {about['scale']}. Measured {about['made']} on {about['device']}, code "
    return made + f"at commit {about['commit']}, by `{about['command']}`"


def figure_qq_ours(study: Study) -> str:
    models, length = {}, study.runs[0].config.train_length
    for config, model, windows in logits.trained_models(study, WINDOWS, length):
        kept = models[f"{series_name(series_label(config))}, seed {config.seed}"] = Kept()
        for layer, rotated, scores in logits.layer_scores(model, windows):
            kept.add(scores, layer=layer, rotated=rotated)
    text = f"Quantiles of the scores q.k / sqrt(d) of trained models, on {WINDOWS} windows of {length} tokens of "
    return qq_page(study, f"{text}validation text.", models, {title: f"{title}:" for title in models})


def qq_page(study: Study, text: str, models: dict[str, Kept], captions: dict[str, str]) -> str:
    """Draw a figure a model and form, write the moments as CSV, and return the Markdown. captions: by model."""
    if not models:
        return f"{text}\n\n{NO_FIGURE}"
    shown = []
    for title, kept in models.items():
        shown.append(captions[title])
        for form, layers in kept.blocks().items():
            name = re.sub(r"[^\w.-]+", "_", f"{study.item}_{title}_{form}".lower())
            draw_qq(study.figure(name), {form: layers})
            shown.append(study.picture(name))
    study.write_csv([dict(model=title) | row for title, kept in models.items() for row in kept.statistics])
    text += " All heads of a layer, against the quantiles of the Gaussian with their mean and standard deviation (red: "
    text += (
        "equal). Only pairs with t > 0, and without key 0, which attention sinks into. The table pools the heads of "
    )
    text += f"a layer; each head is in csv/{study.item}.csv (layers there from 0)."
    return "\n\n".join([text, *shown, moments_table(models)])

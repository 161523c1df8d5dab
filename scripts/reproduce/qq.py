"""How Gaussian attention scores are: the paper's QQ plots, of other people's models and of those trained here.

What the scores are is in logits.py. figure_qq reads the statistics that `python -m scripts.logit_statistics` writes.
"""

import json
import re
from pathlib import Path

from torch import Tensor

from scripts.reproduce import logits
from scripts.reproduce.drawing import Line, Panel, draw_panels
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


def describe_scores(scores: Tensor, *, layer: int, rotated: bool) -> dict:
    """Return the moments of each head and of all, and the QQ plot of all, of the scores (H, pairs) of a layer.

    layer: counted from 0.
    """
    heads, pooled = [logits.moments(head) for head in scores.numpy()], scores.flatten().numpy()
    return dict(layer=layer, rotated=rotated, heads=heads, all=logits.moments(pooled), qq=logits.qq_points(pooled))


def moments_table(models: dict[str, list[dict]]) -> str:
    """Return the moments of all heads pooled: a row a layer and form of each model. models: describe_scores by name."""
    table = [["model", "layer", "form", "mean", "std", "skewness", "excess kurtosis", "KS distance"]]
    for name, layers in models.items():
        for row in layers:
            moments = [f"{value:.3f}" for value in row["all"].values()]
            table.append([name, str(row["layer"] + 1), FORMS[row["rotated"]], *moments])
    return markdown_table(table)


def draw_qq(path: Path, layers: list[dict]):
    """Draw the QQ plots of describe_scores: a panel a layer, first without rotation, then with it."""
    grid = []
    for rotated, form in FORMS.items():
        panels = []
        for row in [row for row in layers if row["rotated"] == rotated]:
            gaussian, sample = row["qq"]["gaussian"], row["qq"]["sample"]
            equal = Line(dict(color="#D00000", linewidth=0.8, label="Gaussian"), gaussian, gaussian)
            scores = Line(dict(color="#0072B2", linewidth=1.2, label="scores"), gaussian, sample)
            axes = {} if len(panels) % 6 else dict(ylabel=f"{form}\nscore quantile")
            panels.append(Panel(f"layer {row['layer'] + 1}", [equal, scores], axes))
        grid += [panels[start : start + 6] for start in range(0, len(panels), 6)]
    draw_panels(path, grid, x="Gaussian quantile", y="", height=1.5)


def figure_qq(study: Study) -> str:
    models, captions = {}, {}
    study.models_needed = len(PAPERS_MODELS)
    for name, (title, hub_name) in PAPERS_MODELS.items():
        file = study.runs_dir / FOLDER / name / "statistics.json"
        if not file.exists():
            command = f"python -m scripts.logit_statistics {hub_name} --text FILE"
            study.missing.append((title, f"which `{command}` measures on the introduction of Wikipedia's New England"))
            continue
        measured = json.loads(file.read_text())
        models[title], captions[title] = measured.pop("layers"), f"{title}, {describe(measured)}:"
        study.models.append(name)
    text = "Quantiles of the attention scores of other people's models. Gemma 2's scores are those before its soft "
    text += "cap. The paper says of its Llama models only their sizes. [figure_qq_ours](#figure_qq_ours) is of the "
    return qq_page(study, f"{text}models trained here.", models, captions)


def describe(about: dict) -> str:
    """Return how the scores of a model were measured, for a page."""
    made = f"{about['tokens']} tokens of {about['text']} (sha256 {about['text_sha256'][:12]}), {about['pairs']} pairs "
    made += f"of them a head, {about['dtype']}, {about['scale']}. Measured {about['made']} on {about['device']}, code "
    return made + f"at commit {about['commit']}, by `{about['command']}`"


def figure_qq_ours(study: Study) -> str:
    models, length = {}, study.runs[0].config.train_length
    for config, model, windows in logits.trained_models(study, WINDOWS, length):
        models[f"{series_name(series_label(config))}, seed {config.seed}"] = [
            describe_scores(scores, layer=layer, rotated=rotated)
            for layer, rotated, scores in logits.layer_scores(model, windows)
        ]
    text = f"Quantiles of the scores q.k / sqrt(d) of trained models, on {WINDOWS} windows of {length} tokens of "
    return qq_page(study, f"{text}validation text.", models, {title: f"{title}:" for title in models})


def qq_page(study: Study, text: str, models: dict[str, list[dict]], captions: dict[str, str]) -> str:
    """Draw a figure a model and form, and return the Markdown. models: describe_scores by title."""
    if not models:
        return f"{text}\n\n{NO_FIGURE}"
    shown = []
    for title, layers in models.items():
        shown.append(captions[title])
        for rotated in sorted({row["rotated"] for row in layers}):
            name = re.sub(r"[^\w.-]+", "_", f"{study.item}_{title}_{FORMS[rotated]}".lower())
            draw_qq(study.figure(name), [row for row in layers if row["rotated"] == rotated])
            shown.append(study.picture(name))
    text += " All heads of a layer, against the quantiles of the Gaussian with their mean and standard deviation (red: "
    text += "equal). Only pairs with t > 0, and without key 0, which attention sinks into. The table pools the heads "
    text += "of a layer."
    return "\n\n".join([text, *shown, moments_table(models)])

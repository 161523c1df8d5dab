"""Measure the attention logits of trained models, as the paper does.

    attention_profile    Entropy and local attention in growing contexts, for the bottom row of figure_entropy.
    figure_qq            QQ plots of the paper's appendix on Gaussianity, from the files of scripts.logit_statistics.

scripts.shared.runs.load_run reads a model and its configuration.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from data.shards import TokenStream
from errors import require
from files import parse_object, read_bytes
from model.attention.attend import rotate_and_scale
from model.attention.plan import LayerPlan
from model.gpt import GPT
from model.methods.base import Method
from model.scores import iterate_layers
from scripts.reproduce.drawing import Line, Panel, draw_panels
from scripts.reproduce.study import Study
from scripts.reproduce.theory import attention_statistics
from scripts.shared.runs import load_run, open_validation_text
from scripts.shared.tables import markdown_table

MOMENTS = ("mean", "std", "skewness", "excess_kurtosis", "ks")
FORMS = {False: "without rotation", True: "with rotation"}
TEXTS = "text text_sha256 dtype scale made device commit command".split()  # of statistics.json
FOLDER = "logit_statistics"  # in the folder of the runs; it has one folder per model
# The paper's models, by folder: title, and name on the hub. The paper gives sizes alone; the releases are our choice.
PAPERS_MODELS = {
    "Llama-3.2-1B": ("Llama 1B", "meta-llama/Llama-3.2-1B"),
    "Llama-3.1-8B": ("Llama 8B", "meta-llama/Llama-3.1-8B"),
    "gemma-2-27b": ("Gemma 2 27B", "google/gemma-2-27b"),
}


def validation_windows(stream: TokenStream, count: int, length: int, device="cpu") -> Tensor:
    """Return windows that start at equal distances in the validation text: (count, length) int64."""
    message = f"The validation text has {len(stream)} tokens, too few for {count} windows of {length}. Use more text."
    require(count * length <= len(stream), message)
    distance = len(stream) // count
    windows = np.stack([stream.read(i * distance, length) for i in range(count)])
    return torch.from_numpy(windows.astype("int64")).to(device)


def trained_models(study: Study, count: int, length: int) -> Iterator[tuple]:
    """Yield configuration, model and validation_windows of each finished run. Runs without weights or text are dropped
    from the study."""
    for run, stored in list(study.finished):
        try:
            require(not stored.line, "kept without its weights")
            config, model = load_run(stored.path, study.device)
            windows = validation_windows(open_validation_text(stored), count, length, study.device)
        except (ValueError, OSError) as error:
            study.drop(run, str(error).splitlines()[0])
            continue
        yield config, model, windows


# ---- attention -------------------------------------------------------------------------------------------------------


def last_query_logits(method: Method, plan: LayerPlan, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the logits L_t (paper, eq:def:L) of the last query, by distance t = 0..T-1: (B, H, T)."""
    q, k = rotate_and_scale(method, q, k, x, plan)
    products = q[:, :, -1:] @ k.mT  # (B, H, 1, T)
    scores = products.squeeze(2).flip(-1) / q.shape[-1] ** 0.5
    if method.score_change is None:
        return scores
    distance = torch.arange(k.shape[2], dtype=torch.float64, device=k.device)
    head = torch.arange(method.num_heads, device=k.device).unsqueeze(-1)  # (H, 1)
    scale, bias = method.score_change.coefficients(distance, head)
    return scale * scores + bias


@torch.inference_mode()
def attention_profile(model: GPT, tokens: Tensor, lengths: list[int]) -> dict:
    """Return theory.attention_statistics of a model in contexts of these lengths (tokens).

    tokens (windows, T). The query is the last token of a window. It sees the last `length` tokens, so all lengths have
    the same query. Values are means over layers and heads: {(length, quantity): [one per window]}. Windows pass through
    the model one at a time, which bounds the memory. The method may have a rotation, a scaling of q, and a score change
    without skip_first.
    """
    samples = defaultdict(list)
    for length in lengths:
        plans = model.plan(length, backend="blocks")  # other backends would compile for each length
        for window in tokens[:, -length:].split(1):
            logits = torch.stack([last_query_logits(*layer) for layer in iterate_layers(model, window, plans)])
            for quantity, values in attention_statistics(logits).items():  # (layers, 1, H)
                samples[length, quantity].append(values.mean().item())
    return samples


# ---- scores ----------------------------------------------------------------------------------------------------------


def moments(scores: np.ndarray) -> dict:
    """Return mean, std, skewness, excess kurtosis and Kolmogorov-Smirnov distance (ks) of scores (N,).

    ks compares with the Gaussian of the same mean and std. For Gaussian scores and N -> inf, the last three are 0.
    """
    mean, std = scores.mean(), scores.std()
    ks = stats.kstest(scores, "norm", args=(mean, std), method="asymp").statistic
    numbers = map(float, (mean, std, stats.skew(scores), stats.kurtosis(scores), ks))
    return dict(zip(MOMENTS, numbers))


def qq_points(scores: np.ndarray, n: int = 200) -> dict:
    """Return quantiles at probabilities (i - 1/2)/n, i = 1..n, of scores (N,) and of the Gaussian with equal mean and
    standard deviation."""
    probabilities = (np.arange(n) + 0.5) / n
    gaussian = stats.norm.ppf(probabilities, scores.mean(), scores.std())
    return {"gaussian": gaussian.tolist(), "sample": np.quantile(scores, probabilities).tolist()}


# ---- QQ plots --------------------------------------------------------------------------------------------------------


def describe_scores(scores: Tensor, *, layer: int, rotated: bool) -> dict:
    """Return moments per head, and moments and QQ points over all heads. scores (H, pairs); layer: from 0."""
    heads, pooled = [moments(head) for head in scores.numpy()], scores.flatten().numpy()
    return {"layer": layer, "rotated": rotated, "heads": heads, "all": moments(pooled), "qq": qq_points(pooled)}


def moments_table(models: dict) -> str:
    """Return a table with the moments of each layer, over all heads. models: describe_scores of each layer, by name."""
    table = [["model", "layer", "form", "mean", "std", "skewness", "excess kurtosis", "KS distance"]]
    for name, layers in models.items():
        for row in layers:
            cells = [f"{value:.3f}" for value in row["all"].values()]
            table.append([name, str(row["layer"] + 1), FORMS[row["rotated"]], *cells])
    return markdown_table(table)


def draw_qq(path: Path, layers: list[dict]):
    """Draw QQ plots of describe_scores, one panel per layer: first all without rotation, then all with it."""
    grid = []
    for rotated, form in FORMS.items():
        panels = []
        for row in layers:
            if row["rotated"] != rotated:
                continue
            gaussian, sample = row["qq"]["gaussian"], row["qq"]["sample"]
            equal = Line({"color": "#D00000", "linewidth": 0.8, "label": "Gaussian"}, gaussian, gaussian)
            scores = Line({"color": "#0072B2", "linewidth": 1.2, "label": "scores"}, gaussian, sample)
            axes = {} if len(panels) % 6 else {"ylabel": f"{form}\nscore quantile"}
            panels.append(Panel(f"layer {row['layer'] + 1}", [equal, scores], axes))
        grid += [panels[start : start + 6] for start in range(0, len(panels), 6)]
    draw_panels(path, grid, x="Gaussian quantile", y="", height=1.5)


def figure_qq(study: Study) -> str:
    """Draw the models that scripts.logit_statistics has measured. Return the Markdown: figures, then a table."""
    # 1. The models that are measured.
    folder, models, shown = study.runs_dir / FOLDER, {}, []
    for name in dict.fromkeys([*PAPERS_MODELS, *sorted(path.name for path in folder.glob("*"))]):
        title, hub_name = PAPERS_MODELS.get(name, (name, name))
        file = folder / name / "statistics.json"
        if not file.exists():
            command = f"python -m scripts.logit_statistics {hub_name} --text FILE"
            study.missing.append((title, f"not measured: run `{command}`"))
            continue
        about = parse_object(read_bytes(file), str(file), layers=list[dict], **dict.fromkeys(TEXTS, str))
        models[title] = about["layers"]
        shown.append(f"{title}, {describe(about)}:")
        for rotated in sorted({row["rotated"] for row in models[title]}):
            figure = re.sub(r"[^\w.-]+", "_", f"{study.item}_{title}_{FORMS[rotated]}".lower())
            draw_qq(study.figure_path(figure), [row for row in models[title] if row["rotated"] == rotated])
            shown.append(study.figure_markdown(figure))

    # 2. The section.
    text = (
        "Quantiles of the attention scores of a layer, against quantiles of the Gaussian with the same mean and "
        "standard deviation (red: equal). Pairs have distance t > 0. Key 0 is left out, because it is an attention "
        "sink. The table pools the heads of a layer. Gemma 2's scores are taken before its soft cap. The paper "
        "gives only the sizes of its Llama models. Its text is the start of Wikipedia's article on New England."
    )
    return "\n\n".join([text, *shown, moments_table(models)])


def describe(about: dict) -> str:
    """Return the text, the pairs and the command with which the scores of a model were measured."""
    return (
        f"{about['tokens']} tokens of {about['text']} (sha256 {about['text_sha256'][:12]}), {about['pairs']} pairs "
        f"per head, {about['dtype']}, {about['scale']}. Measured {about['made']} on {about['device']}, code at "
        f"commit {about['commit']}, by `{about['command']}`"
    )

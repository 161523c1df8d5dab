"""Measure when the two heads of the copying circuit form: one row of numbers for each checkpoint of a run.

Copying needs a head that attends to the previous token, and a later head that finds where the present token occurred
before and attends to the token after it (an induction head; Olsson et al. 2022, arXiv 2209.11895). A head's
previous-token score is its mean attention to the token before. Its induction score is its mean attention, on the second
copy of a random span, to the token that followed in the first copy.
"""

import torch
from torch import Tensor

from configs.sweeps import SI
from measure.copy_gain import SPAN, SPANS, copy_sequences
from model.attention.reference import attention_logits, probabilities
from model.gpt import GPT
from model.scores import iterate_layers
from runtime.checkpoint import list_checkpoints, load_checkpoint
from scripts.reproduce.drawing import Line, Panel, draw_panels
from scripts.reproduce.far import MILLION
from scripts.reproduce.study import Study
from scripts.shared.looks import plot_styles, series_label, series_name
from scripts.shared.runs import load_run, open_validation_text
from scripts.shared.tables import markdown_table

METHODS = ("rope", "logn_p_rope", "alibi slope_scale=4", SI)
GAP = 64  # tokens between the copies
FORMED = 0.3  # score at which the table calls a head formed


def far_heads(study: Study) -> str:
    """Return the figure and the table of the first seed of METHODS. Runs without checkpoints are dropped."""
    looks, seed = plot_styles(METHODS), study.runs[0].config.seed
    rows, lines = [["method", "previous-token head, M tokens", "induction head, M tokens"]], [[], []]
    for run, stored in list(study.finished):
        series = series_label(run.config)
        if series not in METHODS or run.config.seed != seed:
            continue
        try:
            _, model = load_run(stored.path, study.device)
            stream = open_validation_text(stored)
        except (ValueError, OSError) as error:
            study.drop(run, str(error).splitlines()[0])
            continue
        spans, _ = copy_sequences(stream, GAP, run.config.vocab_size)  # (48, 2 * 32 + GAP)
        tokens, curve = torch.from_numpy(spans).to(study.device), []
        for checkpoint in reversed(list_checkpoints(stored.path / "checkpoints")):  # the oldest first
            state = load_checkpoint(checkpoint)
            model.load_state_dict(state["model"])
            curve.append((state["progress"]["step"] * run.config.batch_tokens / MILLION, *head_scores(model, tokens)))
        found = [next((f"{x:.1f}" for x, *scores in curve if scores[i] > FORMED), "not") for i in (0, 1)]
        rows.append([series_name(series), *found])
        for panel, scores in zip(lines, zip(*[scores for _, *scores in curve])):
            panel.append(Line(looks[series], [x for x, *_ in curve], scores))
    titles = "best previous-token head", "best induction head"
    panels = [Panel(title, panel, dict(xlabel="M training tokens")) for title, panel in zip(titles, lines)]
    draw_panels(study.figure_path(), [panels], x="", y="mean attention")
    text = f"The largest previous-token score and induction score of all heads, on {SPANS} sequences with two copies "
    text += f"of {SPAN} random tokens, {GAP} tokens apart, of seed {seed}. The table gives the first checkpoint at "
    text += f"which a score is above {FORMED:g}."
    return "\n\n".join([text, study.figure_markdown(), markdown_table(rows)])


@torch.inference_mode()
def head_scores(model: GPT, tokens: Tensor) -> tuple[float, float]:
    """Return the largest previous-token score and the largest induction score of all heads."""
    previous, induction = [], []
    second = torch.arange(SPAN - 1) + SPAN + GAP  # queries; the last token of the span has no successor
    for method, _, x, q, k in iterate_layers(model, tokens, model.plan(tokens.shape[1], backend="blocks")):
        weights = probabilities(method, attention_logits(method, q, k, x=x))  # (B, H, T, T)
        previous.append(weights.diagonal(offset=-1, dim1=2, dim2=3).mean(dim=(0, 2)))
        induction.append(weights[:, :, second, second - SPAN - GAP + 1].mean(dim=(0, 2)))
    return torch.cat(previous).max().item(), torch.cat(induction).max().item()

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
from scripts.reproduce.study import Study
from scripts.shared.looks import plot_styles, series_label, series_name
from scripts.shared.runs import StoredRun, load_run, open_validation_text
from scripts.shared.tables import markdown_table

METHODS = ("rope", "logn_p_rope", "alibi slope_scale=4", SI)
GAP = 64  # tokens between the copies
MILLION = 1e6
FORMED = 0.3  # score at which the table calls a head formed


def far_heads(study: Study) -> str:
    """Return the figure and the table of the first seed of METHODS. Runs without checkpoints are dropped."""
    # 1. Measure each run: a line in both panels, and a row of the table.
    study.computed = True
    seed, looks = study.runs[0].config.seed, plot_styles(METHODS)
    rows = [["method", "previous-token head, M tokens", "induction head, M tokens"]]
    previous_lines, induction_lines = [], []
    for run, stored in list(study.finished):
        series = series_label(run.config)
        if series not in METHODS or run.config.seed != seed:
            continue
        try:
            tokens, previous, induction = head_curves(stored, study.device)
        except (ValueError, OSError) as error:
            study.drop(run, str(error).splitlines()[0])
            continue
        previous_lines.append(Line(looks[series], tokens, previous))
        induction_lines.append(Line(looks[series], tokens, induction))
        rows.append([series_name(series), first_formed(tokens, previous), first_formed(tokens, induction)])

    # 2. Draw the panels.
    axes = dict(xlabel="M training tokens")
    panels = [
        Panel("best previous-token head", previous_lines, axes),
        Panel("best induction head", induction_lines, axes),
    ]
    draw_panels(study.figure_path(), [panels], x="", y="mean attention")
    text = f"The largest previous-token score and induction score of all heads, on {SPANS} sequences with two copies "
    text += f"of {SPAN} random tokens, {GAP} tokens apart, of seed {seed}. The table gives the first checkpoint at "
    text += f"which a score is above {FORMED:g}."
    return "\n\n".join([text, study.figure_markdown(), markdown_table(rows)])


def head_curves(stored: StoredRun, device: torch.device) -> tuple[list[float], list[float], list[float]]:
    """Return the M training tokens of each checkpoint of a run, the oldest first, and both head_scores.

    Raise ValueError or OSError for a run without checkpoints or text.
    """
    config, model = load_run(stored.path, device)
    sequences, _ = copy_sequences(open_validation_text(stored), GAP, config.vocab_size)
    inputs = torch.from_numpy(sequences).to(device)  # (48, 2 * 32 + GAP)
    tokens, previous, induction = [], [], []
    for checkpoint in reversed(list_checkpoints(stored.path / "checkpoints")):
        state = load_checkpoint(checkpoint)
        model.load_state_dict(state["model"])
        scores = head_scores(model, inputs)
        tokens.append(state["progress"]["step"] * config.batch_tokens / MILLION)
        previous.append(scores[0])
        induction.append(scores[1])
    return tokens, previous, induction


def first_formed(tokens: list[float], scores: list[float]) -> str:
    """Return the M training tokens of the first score above FORMED, or "not"."""
    return next((f"{x:.1f}" for x, score in zip(tokens, scores) if score > FORMED), "not")


@torch.inference_mode()
def head_scores(model: GPT, tokens: Tensor) -> tuple[float, float]:
    """Return the largest previous-token score and the largest induction score of all heads. tokens: (B, T)."""
    second = torch.arange(SPAN - 1) + SPAN + GAP  # queries; the last token of the span has no successor
    followed = second - SPAN - GAP + 1
    plans = model.plan(tokens.shape[1], backend="blocks")
    previous, induction = [], []
    for method, _, x, q, k in iterate_layers(model, tokens, plans):
        weights = probabilities(method, attention_logits(method, q, k, x=x))  # (B, H, T, T)
        before = weights.diagonal(offset=-1, dim1=2, dim2=3)  # (B, H, T - 1)
        after = weights[:, :, second, followed]  # (B, H, SPAN - 1)
        previous.append(before.mean(dim=(0, 2)))
        induction.append(after.mean(dim=(0, 2)))
    return torch.cat(previous).max().item(), torch.cat(induction).max().item()

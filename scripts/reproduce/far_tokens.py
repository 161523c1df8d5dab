"""How much the loss rises when far tokens are cut off or are another text's: whether the models use them at all."""

import collections

import torch
from torch import Tensor

from model.gpt import GPT
from scripts.reproduce import logits
from scripts.reproduce.drawing import Panel, draw_panels, row_lines
from scripts.reproduce.figures import NO_FIGURE
from scripts.reproduce.study import Study
from scripts.shared.looks import plot_styles, series_label, series_name
from scripts.shared.tables import mean_and_stderr, pivot_table, summarise

SCORED = 256  # tokens at the end of each window, whose loss is measured
KEPT = (64, 256, 1024)  # tokens before these that stay as they are
WINDOWS = 15  # of 16 training lengths
CHANGES = {"cut": "the tokens before them cut off", "swapped": "the tokens before them another window's"}


def far_tokens(study: Study) -> str:
    """Measure, draw and tabulate how the loss of the last tokens of long windows depends on far tokens."""
    length = 16 * study.base_length
    rises, whole = collections.defaultdict(list), collections.defaultdict(list)
    for config, model, windows in logits.trained_models(study, WINDOWS, length):
        losses = end_losses(model, windows)
        unchanged = losses.pop(("whole", length))
        whole[series_label(config)] += unchanged.tolist()
        for (change, kept), changed in losses.items():
            rises[series_label(config), change, kept] += (changed - unchanged).tolist()
    if not rises:
        return NO_FIGURE
    rows = summarise(rises, "series", "change", "kept", count="windows")
    study.write_csv([row | dict(loss=mean_and_stderr(whole[row["series"]])[0]) for row in rows])
    looks = plot_styles(whole)
    panels, y = [], "rise of the loss (nats a token)"
    for change, title in CHANGES.items():
        mine = [row for row in rows if row["change"] == change]
        panels.append(Panel(title, row_lines(mine, "series", "kept", looks)))
    draw_panels(study.figure(), [panels], x="tokens that stay", y=y, log=2, sharey=True)
    cells = collections.defaultdict(dict)
    for row in rows:
        cells[row["series"]][row["change"], row["kept"]] = f"{row['mean']:+.3f} \u00b1 {row['stderr']:.3f}"
    lines = [([series_name(s), f"{mean_and_stderr(whole[s])[0]:.3f}"], found) for s, found in cells.items()]
    columns = {(row["change"], row["kept"]): f"{row['change']} beyond {row['kept']}" for row in rows}
    text = f"How much the loss of the last {SCORED} tokens of windows of {length} tokens rises (nats a token \u00b1 "
    text += "standard error over windows) when only the nearest tokens before them stay, and the others are cut off, "
    text += "or replaced by another window's. A model that uses far tokens loses by both; a model that far tokens "
    text += "disturb gains when they are cut off."
    return "\n\n".join([text, study.picture(), pivot_table(["method", "loss"], lines, columns)])


@torch.inference_mode()
def end_losses(model: GPT, windows: Tensor) -> dict[tuple[str, int], Tensor]:
    """Return nats a token over the last SCORED tokens of each window (W, T), each (W,) float32 on the CPU.

    Keys: ("whole", T) for the window as it is; (change, kept) with only the last `kept` tokens before them left alone.
    """
    W, T = windows.shape
    others = windows.roll(1, dims=0)
    inputs = {("whole", T): windows}
    for kept in KEPT:
        first = T - SCORED - kept
        inputs["cut", kept] = windows[:, first:]
        inputs["swapped", kept] = torch.cat([others[:, :first], windows[:, first:]], dim=1)
    losses = {}
    for name, tokens in inputs.items():
        plan = model.plan(tokens.shape[1] - 1)
        ends = [model(one[:, :-1], one[:, 1:], plan=plan, per_token=True)[0, -SCORED:] for one in tokens.split(1)]
        losses[name] = torch.stack(ends).mean(dim=1).float().cpu()  # (W,)
    return losses

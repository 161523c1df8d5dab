"""How much the loss rises when far tokens are cut off or are another text's: whether the models use them at all."""

import collections

import torch
from torch import Tensor

from model.gpt import GPT
from scripts.evaluate import load_run, open_own_text
from scripts.reproduce import logits
from scripts.reproduce.drawing import draw_lines
from scripts.reproduce.figures import NO_FIGURE
from scripts.reproduce.study import Study
from scripts.shared.looks import plot_style, series_label, series_name
from scripts.shared.tables import markdown_table, mean_and_stderr

SCORED = 256  # tokens at the end of each window, whose loss far_tokens measures
KEPT = (64, 256, 1024)  # tokens before these that stay as they are
WINDOWS = 15  # of 16 training lengths
CHANGES = {"cut": "the tokens before them cut off", "swapped": "the tokens before them another window's"}


def far_tokens(study: Study) -> str:
    """Measure, draw and tabulate how the loss of the last tokens of long windows depends on far tokens."""
    length = 16 * study.base_length
    rises, whole = collections.defaultdict(list), collections.defaultdict(list)
    for run, stored in list(study.finished):
        with study.dropping_unreadable(run):
            config, model = load_run(stored.path, study.device)
            windows = logits.validation_windows(open_own_text(stored), WINDOWS, length, study.device)
            series = series_label(config)
            losses = end_losses(model, windows)
            unchanged = losses.pop(("whole", length))
            whole[series] += unchanged.tolist()
            for (change, kept), changed in losses.items():
                rises[series, change, kept] += (changed - unchanged).tolist()
    if not rises:
        return NO_FIGURE
    rows = []
    for (series, change, kept), values in rises.items():
        mean, stderr = mean_and_stderr(values)
        row = dict(series=series, change=change, kept=kept, rise=mean, stderr=stderr, windows=len(values))
        rows.append(row | dict(loss=mean_and_stderr(whole[series])[0]))
    study.write_csv(rows)
    text = f"How much the loss of the last {SCORED} tokens of windows of {length} tokens rises (nats a token \u00b1 "
    text += "standard error over windows) when only the nearest tokens before them stay, and the others are cut off, "
    text += "or replaced by another window's. A model that uses far tokens loses by both; a model that far tokens "
    text += "disturb gains when they are cut off."
    return "\n\n".join([text, draw_far_tokens(study, rows), far_tokens_table(rows)])


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


def far_tokens_table(rows: list[dict]) -> str:
    """Return the rows as a table, a line a series, a column a change."""
    cells, columns = collections.defaultdict(dict), dict.fromkeys((row["change"], row["kept"]) for row in rows)
    for row in rows:
        cells[row["series"]][row["change"], row["kept"]] = f"{row['rise']:+.3f} \u00b1 {row['stderr']:.3f}"
        cells[row["series"]]["whole"] = f"{row['loss']:.3f}"
    head = ["method", "loss", *(f"{change} beyond {kept}" for change, kept in columns)]
    lines = [[series_name(series), found["whole"], *map(found.get, columns)] for series, found in cells.items()]
    return markdown_table([head, *lines])


def draw_far_tokens(study: Study, rows: list[dict]) -> str:
    """Draw a panel a change: the rise against how many tokens stay, a line a series. Return the Markdown."""
    shown, panels = list(dict.fromkeys(row["series"] for row in rows)), collections.defaultdict(list)
    for change, title in CHANGES.items():
        for series in shown:
            points = [row for row in rows if (row["series"], row["change"]) == (series, change)]
            line = [[row[key] for row in points] for key in ("kept", "rise", "stderr")]
            panels[title].append((plot_style(series, shown), *line))
    draw_lines(study.figure(), panels, x="tokens that stay", y="rise of the loss (nats a token)", columns=3)
    return study.picture()

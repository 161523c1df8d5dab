"""Draws a validation as one picture: loss by position, copy gain by distance, and the attention of each layer."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw_validation(record: dict) -> np.ndarray:
    """Return the picture of a validation's record in metrics.jsonl, uint8 (height, width, 3)."""
    panels = [draw_positions]
    if record.get("copy_gain"):
        panels.append(draw_copy_gain)
    if record.get("max_logit"):
        panels.append(draw_layers)
    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)  # without pyplot, so nothing is left in memory
    for panel, axes in zip(panels, np.ravel(figure.subplots(1, len(panels)))):
        panel(axes, record)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{record['tokens']:,} tokens")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def draw_positions(axes: Axes, record: dict):
    for length, losses in record["val_loss_by_position"].items():
        last = 2 ** np.arange(len(losses))  # entry k covers positions 2^(k-1) .. 2^k - 1
        axes.plot(last, losses, label=f"{int(length):,}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("loss (nats a token)")
    axes.legend(title="sequence length")


def draw_copy_gain(axes: Axes, record: dict):
    for kind, by_gap in record["copy_gain"].items():
        axes.plot([int(gap) for gap in by_gap], list(by_gap.values()), marker="o", label=kind)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens between the copies")
    axes.set_ylabel("copy gain (nats a token)")
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.legend(title="span")


def draw_layers(axes: Axes, record: dict):
    layers = [int(layer) for layer in record["max_logit"]]
    axes.plot(layers, list(record["max_logit"].values()), marker="o", label="largest logit")
    if entropy := record.get("attention_entropy"):
        axes.plot([int(layer) for layer in entropy], list(entropy.values()), marker="o", label="entropy (nats)")
    axes.set_xlabel("layer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()

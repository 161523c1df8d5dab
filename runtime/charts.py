"""Draws a validation as one picture: loss by position, copy gain by distance, and the attention of each layer."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw_validation(record: dict) -> np.ndarray:
    """Return the picture of a validation's record in metrics.jsonl, uint8 (height, width, 3)."""
    panels = find_panels(record)
    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)  # without pyplot, so nothing is left in memory
    grid = np.ravel(figure.subplots(1, len(panels)))
    for axes, (xlabel, lines) in zip(grid, panels.items()):
        for label, points in lines.items():
            axes.plot(list(points), list(points.values()), marker="o", label=label)
        if xlabel == "layer":
            axes.xaxis.get_major_locator().set_params(integer=True)
        else:
            axes.set_xscale("log", base=2)
        axes.set(xlabel=xlabel, ylabel="nats")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{record['tokens']:,} tokens")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def find_panels(record: dict) -> dict:
    """Return {label of the x axis: {label of a line: {x: y}}} of the measures that the record has."""
    losses = {}
    for length, by_octave in record["val_loss_by_position"].items():
        # Octave k covers positions 2^(k-1) .. 2^k - 1.
        losses[f"loss at length {int(length):,}"] = {2**k: loss for k, loss in enumerate(by_octave)}
    panels = {"position (tokens)": losses, "tokens between the copies": {}, "layer": {}}
    for kind, by_gap in record.get("copy_gain", {}).items():
        panels["tokens between the copies"][f"copy gain, {kind}"] = with_numbers(by_gap)
    for name in ("max_logit", "attention_entropy"):
        if record.get(name):
            panels["layer"][name] = with_numbers(record[name])
    return {xlabel: lines for xlabel, lines in panels.items() if lines}


def with_numbers(values: dict) -> dict:
    return {int(key): value for key, value in values.items()}

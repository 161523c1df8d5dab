"""The chart that is there without JavaScript, and the looks of all charts in SVG."""

import html
import math

from scripts.report.reading import by_number, mean

DASHES = {"-": "", "--": "7 4", ":": "2 3", "-.": "8 3 2 3"}  # matplotlib's line styles in SVG
MARKERS = {  # and its markers, as SVG paths about (0, 0)
    "o": "M-3.5,0a3.5,3.5 0 1 0 7,0a3.5,3.5 0 1 0 -7,0z",
    "s": "M-3,-3h6v6h-6z",
    "x": "M-3,-3l6,6M3,-3l-6,6",
    "^": "M0,-4l4,7h-8z",
    "v": "M0,4l4,-7h-8z",
    "D": "M0,-4.5l4.5,4.5l-4.5,4.5l-4.5,-4.5z",
    "*": "M0,-5l1.3,3.2l3.5,.2l-2.7,2.2l.9,3.4l-3,-1.9l-3,1.9l.9,-3.4l-2.7,-2.2l3.5,-.2z",
    "P": "M-1.5,-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    ".": "M-2,0a2,2 0 1 0 4,0a2,2 0 1 0 -4,0z",
}


def style(g: dict) -> dict:
    """Return what page.js reads of a group."""
    _, dash, marker = g["look"]
    shown = {key: g[key] for key in ("label", "class", "opacity")}
    return shown | dict(dash=DASHES[dash], marker=MARKERS[marker], runs=len(g["runs"]))


def swatch(g: dict) -> str:
    """Return the line and marker of a group, as in a legend."""
    look = style(g)
    return (
        f'<svg class="swatch {g["class"]}" viewBox="-14 -6 28 12" width="28" height="12" aria-hidden="true" '
        f'opacity="{g["opacity"]}"><path d="M-14,0H14" class="line" stroke-dasharray="{look["dash"]}"/>'
        f'<path d="{look["marker"]}" class="mark"/></svg>'
    )


def static_chart(groups: list[dict]) -> str:
    """Return last validation loss against length as SVG, of each group the mean over its finished runs; before any run
    is finished, over those that came furthest."""
    width, height, left, top, below = 720, 320, 60, 10, 50
    lines = last_losses(groups)
    if not lines:
        return "<p>No validation yet.</p>"
    lengths = sorted({length for _, points in lines for length in points})
    losses = [loss for _, points in lines for loss in points.values()]
    low, high = min(losses), max(losses)
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)
    span = math.log2(lengths[-1] / lengths[0]) or 1

    def x(length: int) -> float:
        return round(left + (width - left - 20) * math.log2(length / lengths[0]) / span, 1)

    def y(loss: float) -> float:
        return round(top + (height - top - below) * (high - loss) / (high - low), 1)

    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= (high - low) / 6)
    marks = [f'<text x="{x(n)}" y="{height - below + 18}" text-anchor="middle">{n}</text>' for n in lengths]
    for k in range(math.ceil(low / step), math.floor(high / step) + 1):
        at = y(k * step)
        marks.append(f'<path class="grid" d="M{left},{at}H{width - 20}"/>')
        marks.append(f'<text x="{left - 6}" y="{at + 4}" text-anchor="end">{k * step:.5g}</text>')
    for g, points in lines:
        look = style(g)
        path = "L".join(f"{x(n)},{y(loss)}" for n, loss in points.items())
        dots = "".join(
            f'<path class="mark" d="{look["marker"]}" transform="translate({x(n)} {y(loss)})"/>'
            for n, loss in points.items()
        )
        marks.append(
            f'<g class="{g["class"]}" opacity="{g["opacity"]}"><title>{html.escape(g["label"])}</title>'
            f'<path class="line" stroke-dasharray="{look["dash"]}" d="M{path}"/>{dots}</g>'
        )
    marks.append(
        f'<text x="{(left + width) / 2}" y="{height - 8}" text-anchor="middle">validation length (tokens)</text>'
    )
    across = f"translate(14 {(height - below) / 2}) rotate(-90)"
    marks.append(f'<text transform="{across}" text-anchor="middle">loss (nats a token)</text>')
    legend = "".join(f"<li>{swatch(g)} {html.escape(g['label'])}</li>" for g, _ in lines)
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="last validation loss against validation length">'
        f'{"".join(marks)}</svg><ul class="legend">{legend}</ul>'
    )


def last_losses(groups: list[dict]) -> list[tuple[dict, dict[int, float]]]:
    """Return the groups that have losses, each with the mean loss by length that static_chart shows."""
    any_finished = any(run["state"] == "finished" for g in groups for run in g["runs"])
    lines = []
    for g in groups:
        ends = [r["final"] for r in g["runs"] if r["final"] and (r["state"] == "finished" or not any_finished)]
        furthest = max((end["step"] for end in ends), default=None)
        losses = [end["val_loss"] for end in ends if end["step"] == furthest]
        means = {int(n): mean(loss.get(n) for loss in losses) for n in by_number({n for loss in losses for n in loss})}
        if points := {length: loss for length, loss in means.items() if loss is not None}:
            lines.append((g, points))
    return lines

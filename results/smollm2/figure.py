"""Draws figures/copy_gain.png from copy_gain.jsonl, with a panel for each length of text."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.reproduce.drawing import Line, Panel, draw_panels

HERE = Path(__file__).resolve().parent
LOOKS = {
    "RoPE": dict(color="black", marker="o"),
    "YaRN": dict(color="#009e73", marker="x"),
    "NTK": dict(color="#009e73", marker="+", linestyle="--"),
    "a_t, m_t": dict(color="#d55e00", marker="s"),
    "a_t, m_t, not for key 0": dict(color="#e69f00", marker="^", linestyle="--"),
    "calibrated a_t, m_t": dict(color="#0072b2", marker="D"),
    "a_t, m_t on S / sigma": dict(color="#56b4e9", marker="v", linestyle="--"),
    "scale-invariant p-RoPE": dict(color="#cc79a7", marker="P"),
    "p-RoPE": dict(color="#cc79a7", marker="h", linestyle="--"),
    "LogN + RoPE": dict(color="0.6", marker="d"),
}

rows = [json.loads(line) for line in (HERE / "copy_gain.jsonl").read_text().splitlines()]
panels = []
for tokens in sorted({row["tokens"] for row in rows}):
    found = {row["attention"]: row for row in rows if row["tokens"] == tokens}
    lines = []
    for name in LOOKS.keys() & found.keys():
        gains, errors = found[name]["copy_gain"], found[name]["copy_gain_error"]
        distances = sorted(gains, key=int)
        values = [[numbers[distance] for distance in distances] for numbers in (gains, errors)]
        lines.append(Line(LOOKS[name] | {"label": name}, [*map(int, distances)], *values))
    lines.sort(key=lambda line: [*LOOKS].index(line.look["label"]))
    panels.append(Panel(f"text of {tokens:,} tokens", lines))
grid = [panels[:2], panels[2:]]
axes = dict(x="tokens between the copies", y="copy gain (nats)", log=2, sharey=True)
draw_panels(HERE / "figures" / "copy_gain", grid, **axes)

"""Standard errors of loss differences over the validation text, by a bootstrap over its blocks."""

from collections.abc import Iterable

import numpy as np
from scipy import stats

from scripts.reproduce.study import BySeed, Study
from scripts.shared.looks import series_name
from scripts.shared.runs import measured
from scripts.shared.tables import markdown_table

BLOCKS = 16  # equal parts of the validation text; a run stores the losses of 16 blocks or a multiple


def block_losses(summary: dict, method: str | None = None) -> dict[int, np.ndarray]:
    """Return the losses of the blocks, (BLOCKS,), by sequence length; {} for runs without them."""
    found = {}
    for length, losses in measured(summary, "val_loss_by_block", method).items():
        if len(losses) % BLOCKS == 0:
            found[int(length)] = np.reshape(losses, (BLOCKS, -1)).mean(axis=1)
    return found


def text_error(differences: Iterable[np.ndarray]) -> float:
    """Return the standard error over blocks of the mean of differences. differences: one of (BLOCKS,) for each seed."""
    by_block = np.mean([*differences], axis=0)
    return float(stats.bootstrap((by_block,), np.mean, method="basic", rng=0).standard_error)


def text_errors(study: Study, ours: str, rivals: Iterable[str], runs: dict[str, BySeed] | None = None) -> list[str]:
    """Return a paragraph and a table of the loss of ours minus each rival's, with errors from the text, or [].

    Lengths: the training length, and 16 times it. Seeds: those that both have. runs: keep only these, by series.
    """
    # 1. A row for each length and rival.
    losses, rows = study.by_seed(block_losses), [["minus", "tokens", "difference", "seeds"]]
    for length in (study.base_length, 16 * study.base_length):
        for rival in rivals:
            first, second = losses.get((ours, length), {}), losses.get((rival, length), {})
            seeds = first.keys() & second.keys()
            if runs is not None:
                seeds &= runs.get(ours, {}).keys() & runs.get(rival, {}).keys()
            if not seeds or rival == ours:
                continue
            differences = [first[seed] - second[seed] for seed in sorted(seeds)]
            cell = f"{np.mean(differences):+.3f} \u00b1 {text_error(differences):.3f}"
            rows.append([series_name(rival), str(length), cell, str(len(seeds))])
    if len(rows) == 1:
        return []

    # 2. The paragraph.
    text = f"Error from the text: {series_name(ours)} minus each method, mean over seeds \u00b1 bootstrap error over "
    text += f"{BLOCKS} blocks of the validation text"
    text += ", of runs that copy." if runs is not None else "."
    return [text, markdown_table(rows)]

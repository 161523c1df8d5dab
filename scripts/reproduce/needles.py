"""Make the table of the needle task: the share of needles found."""

import collections

from scripts.reproduce.study import Study
from scripts.reproduce.tables import make_table

METRICS = ("greedy", "teacher forcing")


def table_needle(study: Study) -> str:
    """Return the shares of needles found as Markdown.

    The table has the paper's lengths, and all other lengths at which a run was scored.
    """
    # 1. The shares.
    accuracy = {label: collections.defaultdict(list) for label in METRICS}
    for run, stored in study.finished:
        for series, method in study.series(run).items():
            shares = stored.needle if method is None else stored.needle.get("as", {}).get(method, {})
            for label, values in accuracy.items():
                for length, share in shares.get(label.replace(" ", "_"), {}).items():
                    values[series, int(length)].append(share)

    # 2. The table.
    text = (
        "Share of needles whose city and number are both right: mean \u00b1 standard error over seeds, by greedy "
        "decoding and by teacher forcing. Columns: tokens per prompt (and multiples of the training length). The "
        f"paper's numbers stand beside greedy decoding. Fine-tuned and scored with {study.runs[0].needle}; each prompt "
        "has three needles. The paper used C4 and 300 steps of 64 prompts."
    )
    lengths = sorted({*study.lengths, *(length for _, length in accuracy["greedy"])})
    return f"{text}\n\n{make_table(study, accuracy, lengths, best=max)}"

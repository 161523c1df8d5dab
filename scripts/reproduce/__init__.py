"""Make the paper's tables and figures from finished runs.

    __main__.py   The command, the table of items, and the page OUT/tables.md.
    pages.py      The numbers on the pages of results/, filled in place.
    study.py      The runs of an item: finished ones and missing ones.
    tables.py     Tables of losses beside the paper's numbers (paper_targets.csv). needles.py: tables of needles.
    figures.py    The paper's figures. drawing.py: matplotlib.
    theory.py     Attention over Gaussian scores. logits.py: logits of trained models, QQ plots.
    reach.py      Tables and figures of how far models read. comparisons.py: tests of significance.

Our studies are in results/NAME/study.py (scripts/shared/sweeps.py).
"""

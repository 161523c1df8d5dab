"""Make the paper's tables and figures from finished runs.

    __main__.py   The command, the table of items, and the page OUT/tables.md.
    study.py      The runs of an item: finished ones and missing ones.
    tables.py     Tables of losses beside the paper's numbers (paper_targets.csv). needles.py: tables of needles.
    figures.py    The paper's figures. drawing.py: matplotlib.
    theory.py     Attention over Gaussian scores. logits.py: logits of trained models, QQ plots.
    comparisons.py   Tests of significance.

Our studies are in results/NAME/study.py (scripts/shared/sweeps.py), and what they share in results/: paired.py (tests),
reach.py (how far models read), pages.py (numbers on their pages).
"""

"""The paper's tables and figures, from the runs that there are.

    __main__.py   the command, the items by name, and the page OUT/tables.md
    study.py      the runs that an item needs, those that there are, and what is missing
    tables.py     the tables of losses, with the paper's numbers (paper_targets.csv) beside ours; needles.py
    figures.py    the figures; drawing.py: matplotlib
    theory.py     attention over Gaussian scores; logits.py: the logits of trained models, QQ plots
    beyond.py     studies beyond the paper; taught.py; comparisons.py: what is more than chance

A new item is a function, its name in ITEMS, and its runs in configs/sweeps.py.
"""

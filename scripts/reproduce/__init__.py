"""The paper's tables and figures, from the runs that there are.

    study.py      the runs that an item needs, those that there are, and what is missing
    tables.py     the tables, with the paper's numbers (paper_targets.csv) beside ours; rivals.py: the newer methods;
                  needles.py: the needle task
    figures.py    the figures; qq.py: those of how Gaussian scores are; drawing.py: matplotlib
    theory.py     attention over Gaussian scores; logits.py: the logits of trained models
    pages.py      the items by name, and the page of each

A new one is a function in tables.py or figures.py, its name in pages.ITEMS, and its runs in configs/sweeps.py.
"""

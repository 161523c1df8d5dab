"""Makes the paper's tables and figures from the runs that there are. `python -m scripts.reproduce --help`"""

"""Writes one HTML page over any set of runs. `python -m scripts.report --help`"""

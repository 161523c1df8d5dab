"""Trains the runs of a sweep. `python -m scripts.sweep --help`"""

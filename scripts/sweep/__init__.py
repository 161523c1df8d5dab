"""Trains the runs of a sweep on this machine."""

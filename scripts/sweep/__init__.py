"""Trains the runs of a sweep, on this machine (local.py) or on a cluster (cluster.py)."""

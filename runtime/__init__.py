"""Processes, run folder, checkpoints, signals, log, metrics, validation and FLOP counts of a run."""

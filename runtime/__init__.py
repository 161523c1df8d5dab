"""What keeps a run alive: processes, run folder, checkpoints, signals, log and metrics."""

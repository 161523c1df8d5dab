"""What keeps a run alive: processes, run folder and lock, checkpoints, metrics and their mirror, the device's peak."""

"""What to run: the fields of a run (config.py) and the named presets (presets.py)."""

"""The fields of a run (config.py), presets, sweeps and their runs, and the command line of train_gpt.py."""

"""Commands beside train_gpt.py: sweeps, evaluation, tables, figures, benchmarks."""

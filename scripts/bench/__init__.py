"""Benchmarks of attention and of training steps: python -m scripts.bench."""

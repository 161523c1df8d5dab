"""Optimisers: Muon, parameter groups and learning-rate schedules. Knows tensors, not models."""

"""Attention as fast as the machine allows: the formula of model/reference.py, tile by tile."""

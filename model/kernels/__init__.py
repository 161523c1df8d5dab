"""Attention as fast as the machine allows: the same formula as model/attention.py's plain form, tile by tile."""

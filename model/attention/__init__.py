"""Causal attention by any method. attend.py is the whole of it, read from top to bottom.

plan.py       what a forward pass at one length needs; made once
choose.py     the table of backends, and the choice
backend.py    what a backend is: `unsupported`, `prepare`, `run`; then blocks.py, cpu.py, flex.py, sdpa.py
reference.py  the formula in float64: the specification of every backend
check.py      the comparison of a backend with reference.py, on CUDA before its first use
"""

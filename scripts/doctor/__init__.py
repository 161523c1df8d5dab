"""Says what this machine is and what to expect of it: python -m scripts.doctor (its command is in __main__.py)."""

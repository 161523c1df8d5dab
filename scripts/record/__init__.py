"""The records of length generalisation: `python -m scripts.record`. results/records/README.md has the rules."""

"""Everything that measures speed and what it depends on: python -m scripts.bench (its commands are in __main__.py)."""

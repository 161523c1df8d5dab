"""What several commands share: stored runs (runs.py), the options that choose runs (arguments.py), tables
(tables.py), and how methods are named and drawn (looks.py)."""

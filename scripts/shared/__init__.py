"""Code that several commands share: stored runs (runs.py), their states in a sweep (states.py), options that choose
runs (arguments.py), tables (tables.py), names and colours of the methods (looks.py)."""

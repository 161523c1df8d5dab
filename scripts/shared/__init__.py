"""What several commands share: runs on disk (runs.py, run_files.py), the words that choose runs (arguments.py), tables
(tables.py), and how methods are named and drawn (looks.py)."""

#!/usr/bin/env bash
# From nothing to a table: which attention method reads far beyond its training length. About 6 minutes on 2 cores.
#   bash scripts/quickstart.sh                         on the source of Python and PyTorch, which is there
#   bash scripts/quickstart.sh --text FOLDER           on your own text, the .txt files of a folder
#   --runs-dir FOLDER    where the run folders, the table and its figure go (runs; with --text runs/TEXT)
#   --FIELD VALUE        any field of train_gpt.py, for all runs: --steps 100, --device cpu, --data_dir FOLDER, ...
# The first time, it makes .venv and installs requirements.txt into it (gigabytes, most of them PyTorch).
# LOCKED=1 in front: the versions of requirements.lock, and only files with its checksums (docs/train.md).
source "$(dirname "$0")/setup.sh"
exec "$python" -m scripts.quickstart "$@"

#!/usr/bin/env bash
# Installs, trains four models, and prints their losses beyond the training length. 5 to 9 minutes on 2 cores.
#   bash scripts/quickstart.sh                         trains on this machine's source code of Python and PyTorch
#   --runs-dir FOLDER    folder of the runs, the table and the figure (default: runs)
#   --FIELD VALUE        any field of train_gpt.py, for all runs: --steps 100, --device cpu, --data_dir FOLDER, ...
# The first call makes .venv and installs requirements.txt into it (gigabytes, most of them PyTorch).
# LOCKED=1 before the command installs the versions of requirements.lock and checks their checksums (docs/train.md).
source "$(dirname "$0")/setup.sh"
exec "$python" -m scripts.quickstart "$@"

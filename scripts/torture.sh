#!/usr/bin/env bash
# Breaks the program in every way that docs/reliability.md promises it to survive: bash scripts/torture.sh
# Prints a table of promises, faults injected, survived and lost. Takes about 20 to 30 minutes on 2 cores.
# bash scripts/torture.sh chaos --minutes 60 --seed 0: faults at random in runs on two machines (as root, on Linux).
source "$(dirname "$0")/setup.sh"
if [ "${1:-}" = chaos ]; then
    exec env OMP_NUM_THREADS=1 PYTHONPATH=. "$python" tests/chaos.py "${@:2}"
fi
exec "$python" -m pytest tests -q -m promise --long "$@"

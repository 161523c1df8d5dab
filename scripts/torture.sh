#!/usr/bin/env bash
# Breaks the program in every way that docs/reliability.md promises it to survive: bash scripts/torture.sh
# Prints a table of promises, faults injected, survived and lost. Takes about 20 to 30 minutes on 2 cores.
source "$(dirname "$0")/setup.sh"
exec "$python" -m pytest tests -q -m promise --long "$@"

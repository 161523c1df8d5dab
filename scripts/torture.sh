#!/usr/bin/env bash
# Injects every fault that docs/reliability.md promises to survive: bash scripts/torture.sh
# Prints a table with the number of injected, survived and lost faults of each promise. 20 to 30 minutes on 2 cores.
source "$(dirname "$0")/setup.sh"
exec "$python" -m pytest tests -q -m promise --long "$@"

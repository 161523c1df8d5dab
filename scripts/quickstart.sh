#!/usr/bin/env bash
# From nothing to a table: which attention method holds up at 16 times its training length. About 6 minutes on 2 cores.
source "$(dirname "$0")/setup.sh"
exec "$python" -m scripts.quickstart "$@"

#!/usr/bin/env bash
# Runs the tests. Other arguments go to pytest, like -x or -k shards. LOCKED=1 takes the versions of requirements.lock.
#   bash scripts/test.sh                               all tests
#   bash scripts/test.sh quick                         all but the slow tests
# If the packages of requirements-extras.txt cannot be installed, their tests are skipped.
source "$(dirname "$0")/setup.sh"
if [ "${1:-}" = quick ]; then set -- -m "not slow" "${@:2}"
elif ! bring requirements-extras.txt extras.txt; then [ -z "${LOCKED:-}" ] || exit 1; fi
cores=$(env -u OMP_NUM_THREADS nproc) && export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # nproc would obey it
exec "$python" -m pytest tests -q -n $((cores < 4 ? cores + 1 : 4)) --dist loadfile --no-loadscope-reorder "$@"

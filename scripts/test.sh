#!/usr/bin/env bash
# The tests. What else is given goes to pytest, like -x or -k shards.
#
#   bash scripts/test.sh                               all, in 10 minutes on 2 cores
#   bash scripts/test.sh quick                         without the slow ones, in 2 to 3
#
# The first time, it makes .venv and installs requirements.txt into it (gigabytes, most of them PyTorch), and all tests
# but the quick ones bring requirements-extras.txt; where that cannot be had, the tests of those packages are skipped.
# LOCKED=1 in front: the versions of requirements.lock, and only files with its checksums (docs/train.md).
source "$(dirname "$0")/setup.sh"
arguments=("$@")
if [ "${1:-}" = quick ]; then
    arguments=(-m "not slow" "${@:2}")
elif ! bring requirements-extras.txt extras.txt; then
    if [ -n "${LOCKED:-}" ]; then exit 1; fi # a file that is not the one of the lock is nothing to pass over
    echo "not installed: the tests of these packages are skipped" >&2
fi
cores=$(env -u OMP_NUM_THREADS nproc) # which would take that variable for the number of cores
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the files of tests share the cores, each test has one
exec "$python" -m pytest tests -q -n $((cores < 4 ? cores + 1 : 4)) --dist loadfile --no-loadscope-reorder "${arguments[@]}"
